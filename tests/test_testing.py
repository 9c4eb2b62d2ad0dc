"""The checks for methods: they pass the package's own and catch broken ones, in words."""

import inspect
import math
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation
from protofed.method import Method, Slots, hyper
from protofed.methods import METHODS, FedAvg, FedProto
from protofed.runs.run import run
from protofed.testing import CHECKS, check, run_checks
from protofed.testing.checks import SHORT, TINY, tiny_task
from tests.some_methods import SOME, made

HERE = min(__file__, os.path.relpath(__file__), key=len)


@dataclass(frozen=True)
class Base(Method):
    """FedAvg with one more term, to be broken in one place."""

    name: ClassVar[str] = "broken"

    def loss(self, client, batch):
        z, logits = client.forward(batch.x)
        return {"ce": F.cross_entropy(logits, batch.y), "extra": self.extra(client, batch, z)}

    def extra(self, client, batch, z):
        return 0.01 * (z * z).mean()


def result_of(method, title):
    """The result of one check on a method."""
    (result,) = run_checks(method, only=[title])
    return result


def fails(result, *words):
    assert result.failed, f"not caught: {result.line()}"
    assert result.line().startswith("✗")
    for word in words:
        assert word in result.detail, result.detail


# ---- what is right passes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_every_method_of_the_package_passes(name):
    results = check(made(name))
    assert [r.check for r in results] == list(CHECKS)
    weighs = any(h.weight for h in METHODS[name].hypers().values())
    comparable = weighs and METHODS[name]().evaluates != "everyone"
    sends_models = bool(METHODS[name]().for_mixed_models().slots.model) and name != "fedgh"
    skipped = ["weights 0 = FedAvg"] * (not comparable) + ["different models"] * sends_models
    assert [r.check for r in results if r.status == "skipped"] == skipped


def test_the_base_of_the_broken_methods_is_not_broken():
    assert not any(v.failed for v in run_checks(Base))


def test_check_raises_with_all_findings_and_takes_objects():
    @dataclass(frozen=True)
    class Nameless(Base):
        name: ClassVar[str] = ""

        def aggregate(self, server, mean, updates):
            raise ValueError("no luck")

    told = []
    results = run_checks(Nameless(), told.append)
    assert [r.check for r in results] == list(CHECKS)
    assert told == [r for r in results if not r.same_as]
    with pytest.raises(AssertionError) as error:
        check(Nameless())
    text = str(error.value)
    assert text.splitlines() == [r.line() for r in told]
    class_line = inspect.getsourcelines(Nameless)[1]
    assert f"✗ declared: {HERE}:{class_line}: it has no name" in text
    # a fault is said once, with its line; the other checks that it fails refer to the first
    assert f"✗ gradients: {HERE}:{class_line + 5}: ValueError: no luck" in text
    assert text.count("no luck") == 1
    assert {r.same_as for r in results if r.failed} == {"", "gradients"}


def test_a_check_that_does_not_exist():
    with pytest.raises(ProtofedError, match=r"unknown check 'gradient' .*gradients"):
        run_checks(Base(), only=["gradient"])


def test_other_faults_of_a_line_and_the_same_fault_elsewhere_are_told():
    @dataclass(frozen=True)
    class Several(Base):
        name: ClassVar[str] = ""

        def aggregate(self, server, mean, updates):
            raise (KeyError if len(updates) == 1 else ValueError)(len(updates))

    faults = [r for r in run_checks(Several) if r.failed and not r.same_as]
    assert [r.check for r in faults] == ["declared", "gradients", "one client"]
    assert [r.detail for r in faults[1:]] == ["ValueError: 4", "KeyError: 1"]


def test_a_finding_names_the_file_and_the_line():
    """The line that raises, else the hook, else the class."""

    @dataclass(frozen=True)
    class Odd(FedProto):
        name: ClassVar[str] = "odd"

        def loss(self, client, batch):
            z, logits = client.forward(batch.x)
            proto = float("nan") * z.mean() if client.received["prototypes"]["mask"].max() else 0
            return {"ce": F.cross_entropy(logits, batch.y), "proto": z.mean() * 0 + proto}

        def upload(self, client):
            return {"note": {"x": torch.ones(1)}}, {}

        def aggregate(self, server, mean, updates):
            return {**server.state, "model": mean}

    def place(source):
        return f"{HERE}:{inspect.getsourcelines(source)[1]}"

    assert (
        result_of(Odd, "capture-safety").place
        == f"{HERE}:{inspect.getsourcelines(Odd.loss)[1] + 2}"
    )
    assert result_of(Odd, "serialization").place == place(Odd.upload)
    assert result_of(Silent, "declared").place == place(Silent)


def test_a_method_that_cannot_be_built_is_a_finding():
    @dataclass(frozen=True)
    class Refusing(Base):
        def __post_init__(self):
            raise ValueError("never")

    fails(result_of(Refusing, "declared"), "ValueError: never")


# ---- declared -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silent(Base):
    strength: float = 1.0


def test_a_hyper_parameter_without_meaning():
    fails(result_of(Silent, "declared"), "strength", "no meaning", "hyper(")


def test_a_hyper_parameter_with_the_name_of_a_setting():
    @dataclass(frozen=True)
    class Clashing(Base):
        epochs: int = hyper(1, "E", "epochs of its own")

    fails(result_of(Clashing, "declared"), "epochs", "name of a setting")


def test_a_hyper_parameter_that_nothing_reads():
    @dataclass(frozen=True)
    class Idle(Base):
        forgotten_weight: float = hyper(1.0, "w", "a weight")

    fails(result_of(Idle, "declared"), "forgotten_weight is never read")


def test_a_hook_that_does_not_exist():
    @dataclass(frozen=True)
    class Function(Base):
        def compute_objective(self, client, batch):
            return {}

    result = result_of(Function, "declared")
    fails(
        result, "unknown hook 'compute_objective' (valid: aggregate,", "call it _compute_objective"
    )
    assert result.place == f"{HERE}:{inspect.getsourcelines(Function)[1] + 2}"

    @dataclass(frozen=True)
    class Constant(Base):
        evaluate: ClassVar[str] = "everyone"

    fails(result_of(Constant, "declared"), "unknown hook 'evaluate' (did you mean evaluates?)")

    @dataclass(frozen=True)
    class Helper(Base):
        def _compute_objective(self, client, batch):
            return {}

    assert not result_of(Helper, "declared").failed


def test_a_hook_that_must_be_a_property():
    @dataclass(frozen=True)
    class Function(Base):
        def weighting(self):
            return "uniform"

    fails(result_of(Function, "declared"), "weighting must be a property: write @property")


# ---- gradients ----------------------------------------------------------------------------------


def test_a_term_that_trains_nothing():
    @dataclass(frozen=True)
    class Detached(Base):
        def extra(self, client, batch, z):
            return (z.detach() ** 2).mean()

    fails(result_of(Detached, "gradients"), "'extra'", "no gradient", "trains nothing")


class WrongSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return (z * z).mean()

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        return -grad * 2 * z / z.numel()


def test_a_wrong_gradient():
    @dataclass(frozen=True)
    class Wrong(Base):
        def extra(self, client, batch, z):
            return WrongSign.apply(z)

    fails(result_of(Wrong, "gradients"), "'extra'", "autograd says", "finite differences say")


def test_a_term_that_is_not_the_same_when_computed_again():
    @dataclass(frozen=True)
    class Noisy(Base):
        def extra(self, client, batch, z):
            return F.dropout(z, 0.5).square().mean()

    found = result_of(Noisy, "gradients")
    fails(found, "'extra' was", "computed again", "F.dropout", "client.uniform")
    assert "detached_terms" not in found.detail


def test_a_part_held_constant_must_be_declared():
    @dataclass(frozen=True)
    class Half(Base):
        def extra(self, client, batch, z):
            return (z * z.detach()).mean()  # half of its gradient is missing

    fails(result_of(Half, "gradients"), "detached_terms")

    @dataclass(frozen=True)
    class Declared(Half):
        @property
        def detached_terms(self):
            return ("extra",)

    assert not result_of(Declared, "gradients").failed


def test_a_gradient_that_is_not_finite():
    @dataclass(frozen=True)
    class Infinite(Base):
        def extra(self, client, batch, z):
            return (z - z).abs().sqrt().sum()

    fails(result_of(Infinite, "gradients"), "nan")


# ---- weights 0 = FedAvg -------------------------------------------------------------------------


def test_a_weight_that_does_not_switch_its_term_off():
    @dataclass(frozen=True)
    class Sticky(Base):
        weight: float = hyper(1.0, "w", "weight of the term", least=0, weight=True)

        def extra(self, client, batch, z):
            return (self.weight + 0.01) * (z * z).mean()

    fails(result_of(Sticky, "weights 0 = FedAvg"), "weight = 0", "not FedAvg", "weight=True")

    @dataclass(frozen=True)
    class Right(Sticky):
        def extra(self, client, batch, z):
            return self.weight * (z * z).mean()

    assert result_of(Right, "weights 0 = FedAvg").status == "passed"
    assert result_of(Base, "weights 0 = FedAvg").status == "skipped"


def test_a_module_that_the_method_adds_is_not_compared_with_fedavg():
    @dataclass(frozen=True)
    class Added(Base):
        weight: float = hyper(1.0, "w", "weight of the term", least=0, weight=True)

        def network(self, backbone, sizes):
            backbone.temperature = nn.Parameter(torch.ones(()))
            return backbone

        def extra(self, client, batch, z):
            return self.weight * (z * client.network.temperature).square().mean()

    result = result_of(Added, "weights 0 = FedAvg")
    assert result.status == "passed", result.line()


# ---- missing class, one client ------------------------------------------------------------------


def test_a_missing_class_that_gives_nan():
    @dataclass(frozen=True)
    class Dividing(FedProto):
        name: ClassVar[str] = "dividing"

        def loss(self, client, batch):
            z, logits = client.forward(batch.x)
            pull = ((z.mean(0) - client.received["prototypes"]["mean"]) ** 2).mean()
            return {"ce": F.cross_entropy(logits, batch.y), "proto": 0.01 * pull}

        def aggregate(self, server, mean, updates):
            sums = sum(u["prototypes"]["mean"] for u in updates)
            owners = sum((u["prototypes"]["count"] > 0).float() for u in updates)
            table = {"mean": sums / owners[:, None], "mask": (owners > 0).float()}
            return {"model": mean, "prototypes": table}

    fails(result_of(Dividing, "missing class"), "mean of slot prototypes in the server's state")
    assert not result_of(Dividing, "one client").failed  # it is the class, not the clients


def test_a_class_that_is_missing_from_a_round_alone():
    @dataclass(frozen=True)
    class Fading(FedProto):
        name: ClassVar[str] = "fading"

        def aggregate(self, server, mean, updates):
            sums = sum(u["prototypes"]["mean"] for u in updates)
            owners = sum((u["prototypes"]["count"] > 0).float() for u in updates)
            known = (owners > 0) | (server.state["prototypes"]["mask"] > 0)
            means = torch.where(known[:, None], sums / owners[:, None], 0)
            return {"model": mean, "prototypes": {"mean": means, "mask": known.float()}}

    assert not result_of(Fading, "missing class").failed  # a class that nobody ever had is masked
    fails(result_of(Fading, "participation"), "mean of slot prototypes", "not finite")

    @dataclass(frozen=True)
    class Trusting(Fading):
        """Its prototypes are finite, its loss is not."""

        def aggregate(self, server, mean, updates):
            state = super().aggregate(server, mean, updates)
            return {
                **state,
                "prototypes": {n: t.nan_to_num(0) for n, t in state["prototypes"].items()},
            }

        def loss(self, client, batch):
            z, logits = client.forward(batch.x)
            C = client.received["prototypes"]
            lengths = torch.where(C["mask"] > 0, C["mean"].norm(dim=1), 1)[batch.y]
            return {"ce": F.cross_entropy(logits, batch.y), "proto": (z / lengths[:, None]).mean()}

    result = result_of(Trusting, "participation")
    fails(result, "loss term", "'proto' is")
    assert result.place == f"{HERE}:{inspect.getsourcelines(Trusting.loss)[1]}"


def test_participation_leaves_a_known_class_out_of_a_round():
    task = tiny_task()
    config = make_config(task, FedAvg(), **SHORT, participation=0.5, seed=1)
    federation = Federation(config, task)
    domains = []
    for _ in range(3):
        domains.append([name.partition("-")[0] for name in federation.server.sample()])
        federation.server.finish()
    assert domains == [["left", "left"], ["right", "right"], ["left", "right"]]


def test_a_missing_class_that_raises():
    @dataclass(frozen=True)
    class Asking(FedProto):
        name: ClassVar[str] = "asking"

        def upload(self, client):
            mean, count = client.class_means()
            return {"prototypes": {"mean": mean, "count": count * (1 // int(count.min()))}}, {}

    fails(result_of(Asking, "missing class"), "division")


def test_a_small_holdout_is_no_fault():
    @dataclass(frozen=True)
    class Careful(Base):
        holdout: ClassVar[float] = 0.03

    assert not result_of(Careful(), "one client").failed


def test_a_method_that_needs_two_clients():
    @dataclass(frozen=True)
    class Pairs(Base):
        def aggregate(self, server, mean, updates):
            return {"model": {n: (t + updates[1]["model"][n]) / 2 for n, t in mean.items()}}

    fails(result_of(Pairs, "one client"), "IndexError")


# ---- a round without replies, different models --------------------------------------------------


def test_a_broadcast_that_lives_from_replies():
    @dataclass(frozen=True)
    class Hasty(Base):
        def broadcast(self, server):
            seen = torch.tensor(float(server.round))
            return {**server.state, "seen": {"rate": 1 / (1 - seen / 3)}}

        def aggregate(self, server, mean, updates):
            rate = self.broadcast(server)["seen"]["rate"]
            return {"model": {n: t * rate if "weight" in n else t for n, t in mean.items()}}

    fails(result_of(Hasty, "empty round"), "not finite")
    assert result_of(Base, "empty round").status == "passed"


def test_a_broadcast_that_is_made_of_replies_alone():
    @dataclass(frozen=True)
    class Remembering(Base):
        def loss(self, client, batch):
            known = client.received["last"]["mean"] if client.progress > 0 else 0
            return {"ce": super().loss(client, batch)["ce"] + 0 * known}

        def aggregate(self, server, mean, updates):
            return {"model": mean, "last": {"mean": torch.ones(())}}

    fails(result_of(Remembering, "empty round"), "KeyError", "'last'")


def test_different_models_need_a_method_that_sends_none():
    result = result_of(Base, "different models")
    assert result.status == "skipped"
    assert "sends models" in result.detail

    @dataclass(frozen=True)
    class Alone(Base):
        def shared(self, entry):
            return "no"

        @property
        def evaluates(self):
            return "everyone"

    assert result_of(Alone, "different models").status == "passed"

    @dataclass(frozen=True)
    class Assuming(Alone):
        def init_client(self, model, sizes):
            return {"kept": {"x": model["encoder.7.weight"][:4]}}  # only cnn2 has it in this shape

        def upload(self, client):
            return {}, {"kept": {"x": client.parameters["encoder.9.weight"][:4]}}

    fails(result_of(Assuming, "different models"), "KeyError")


# ---- state and chance ---------------------------------------------------------------------------

REMEMBERED = {}


@dataclass(frozen=True)
class Forgetful(Base):
    """Keeps a number that counts in a module's global: fresh runs agree, resumed ones do not."""

    name: ClassVar[str] = "forgetful"

    def init_server(self, model, sizes):
        REMEMBERED["rounds"] = 0
        return {}

    def aggregate(self, server, mean, updates):
        REMEMBERED["rounds"] += 1
        return {"model": {n: t * (1 + 0.01 * REMEMBERED["rounds"]) for n, t in mean.items()}}


def test_state_outside_the_slots_is_lost_on_resume():
    assert not result_of(Forgetful, "participation").failed  # two fresh runs are the same
    fails(result_of(Forgetful, "resume"), "resumed run differs")


def fading(client):
    return 1 - client.progress


def test_a_dependence_on_the_number_of_rounds_that_is_not_declared():
    @dataclass(frozen=True)
    class Undeclared(Base):
        def extra(self, client, batch, z):
            return fading(client) * z.square().mean()

    @dataclass(frozen=True)
    class Declared(Undeclared):
        uses_rounds = True

    fails(result_of(Undeclared(), "resume"), "uses_rounds = True")
    assert not result_of(Declared(), "resume").failed


def test_state_in_an_attribute_is_caught():
    @dataclass(frozen=True)
    class Attribute(Base):
        def upload(self, client):
            object.__setattr__(self, "_last", client.name)
            return {}, {}

        def extra(self, client, batch, z):
            return (0.5 if getattr(self, "_last", "") == "left-1" else 0.01) * (z * z).mean()

    fails(result_of(Attribute(), "resume"), "differs")


@dataclass(frozen=True)
class Chance(Base):
    name: ClassVar[str] = "chance"

    def extra(self, client, batch, z):
        return (z * torch.rand(z.shape, dtype=z.dtype)).mean()


def test_random_numbers_that_are_not_keyed():
    fails(result_of(Chance, "participation"), "two runs with the same seed differ")
    fails(result_of(Chance, "capture-safety"), "random number", "client view")


def test_random_numbers_of_the_host_are_frozen():
    rng = np.random.default_rng(0)

    @dataclass(frozen=True)
    class Host(Base):
        def extra(self, client, batch, z):
            return (z * float(rng.random())).mean()

    fails(result_of(Host, "capture-safety"), "Python number")


def test_keyed_random_numbers_pass():
    @dataclass(frozen=True)
    class Keyed(Base):
        def extra(self, client, batch, z):
            return (z * client.uniform(*z.shape)).mean()

    for title in ("participation", "capture-safety", "gradients"):
        assert not result_of(Keyed, title).failed


def test_a_counter_is_not_deterministic():
    calls = []

    @dataclass(frozen=True)
    class Counting(Base):
        def extra(self, client, batch, z):
            calls.append(1)
            return (z * z).mean() * (len(calls) * 1e-4)

    fails(result_of(Counting, "participation"), "two runs with the same seed differ")


# ---- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message", [{"note": {"number": 3}}, {"note": torch.ones(2)}, {"note": {"text": "hello"}}]
)
def test_a_message_that_is_not_slots_of_tensors(message):
    @dataclass(frozen=True)
    class Talking(Base):
        def upload(self, client):
            return message, {}

    fails(result_of(Talking, "serialization"), "note")  # it says which slot


def test_a_server_state_that_is_not_slots_of_tensors():
    @dataclass(frozen=True)
    class Counting(Base):
        def aggregate(self, server, mean, updates):
            return {"model": mean, "clients": {"seen": len(updates)}}

    fails(result_of(Counting, "serialization"), "clients")


def test_a_broadcast_that_is_not_slots_of_tensors():
    @dataclass(frozen=True)
    class Telling(Base):
        def broadcast(self, server):
            return {**server.state, "extra": {"round": server.round}}

    fails(result_of(Telling, "serialization"), "extra")


def test_slots_that_are_declared_must_be_there():
    @dataclass(frozen=True)
    class Declaring(Base):
        @property
        def slots(self):
            return Slots(up={"note": "a note"})

    fails(result_of(Declaring, "serialization"), "the upload", "declares ['note']")


# ---- what hooks get and return ------------------------------------------------------------------


def test_forward_that_returns_a_pair():
    @dataclass(frozen=True)
    class Pair(Base):
        def forward(self, client, x):
            return tuple(super().forward(client, x))

    fails(result_of(Pair, "gradients"), "forward of broken returns (a tensor of", "return Output(")


def test_a_slot_that_is_not_there_is_named_with_those_that_are():
    @dataclass(frozen=True)
    class Misspelled(Base):
        def loss(self, client, batch):
            return super().loss(client, batch) | {"v": client.received["protos"]["mean"].sum()}

    fails(result_of(Misspelled, "gradients"), "KeyError: 'protos'", "client.received has model;")


def test_a_slot_that_no_client_sends_is_named():
    @dataclass(frozen=True)
    class Misspelled(Base):
        def aggregate(self, server, mean, updates):
            return {"model": mean, "v": {"v": updates[0]["protos"]["mean"]}}

    fails(result_of(Misspelled, "gradients"), "left-0 sent no slot 'protos'")


@pytest.mark.parametrize("keep", [list, lambda layer: {"a": (layer,)}], ids=["list", "dict"])
def test_a_module_that_pytorch_does_not_see(keep):
    @dataclass(frozen=True)
    class Hidden(Base):
        def network(self, backbone, sizes):
            layer = nn.Linear(sizes.features, 2)
            backbone.extra = [layer] if keep is list else keep(layer)
            return backbone

    fails(result_of(Hidden, "one client"), "extra of the network holds a Linear", "nn.ModuleList")


def test_a_list_of_modules_that_pytorch_sees_is_fine():
    @dataclass(frozen=True)
    class Listed(Base):
        def network(self, backbone, sizes):
            backbone.parts = [backbone.encoder, backbone.head]
            backbone.rows = [nn.Sequential(backbone.encoder, backbone.head), nn.ReLU()]
            backbone.cycle = {}
            backbone.cycle["itself"] = backbone.cycle
            return backbone

    assert not result_of(Listed, "one client").failed


def test_a_float32_tensor_of_a_loss_is_told_from_an_error_of_shape():
    @dataclass(frozen=True)
    class Single(Base):
        def extra(self, client, batch, z):
            return (z @ torch.ones(z.shape[1], 2)).mean()

    fails(result_of(Single, "gradients"), "computes in float64")


# ---- hot hooks ----------------------------------------------------------------------------------


def test_item_in_the_loss():
    @dataclass(frozen=True)
    class Item(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() / (1 + z.abs().max().item())

    fails(result_of(Item, "capture-safety"), "cannot be recorded", ".item()")


def test_an_if_on_a_tensor():
    @dataclass(frozen=True)
    class If(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() if z.mean() > 0 else z.mean()

    fails(result_of(If, "capture-safety"), "cannot be recorded", "`if` on a tensor")


def test_a_shape_from_a_mask():
    @dataclass(frozen=True)
    class Masked(Base):
        def extra(self, client, batch, z):
            return z[batch.y == 1].square().sum()

    fails(result_of(Masked, "capture-safety"))


def test_the_round_as_a_python_number():
    @dataclass(frozen=True)
    class Frozen(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() * (0.01 * int(client.round))

    fails(result_of(Frozen, "capture-safety"), "cannot be recorded")

    @dataclass(frozen=True)
    class Right(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() * (0.01 * client.round)

    assert not result_of(Right, "capture-safety").failed


def test_the_clients_id_as_a_python_number():
    @dataclass(frozen=True)
    class Frozen(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() * (int(client.id) % 7)

    fails(result_of(Frozen, "capture-safety"), "cannot be recorded")

    @dataclass(frozen=True)
    class Right(Base):
        def extra(self, client, batch, z):
            return (z * z).mean() * (client.id % 7)

    assert not result_of(Right, "capture-safety").failed


def test_the_round_remembered_by_a_cold_hook():
    @dataclass(frozen=True)
    class Told(Base):
        def phases(self, round, epochs):
            object.__setattr__(self, "_round", round)
            return super().phases(round, epochs)

        def extra(self, client, batch, z):
            return (z * z).mean() * (0.01 * self._round)

    fails(result_of(Told(), "capture-safety"))


# ---- half precision -----------------------------------------------------------------------------


def test_a_term_that_overflows_in_half_precision():
    @dataclass(frozen=True)
    class Fine(Base):
        def extra(self, client, batch, z):
            scores = F.linear(z, z) / z.shape[1]
            gap = 1 / (scores.new_tensor(1.001) - 1)  # bfloat16 has no 1.001
            return 1e-6 * gap * scores.mean()

    fails(result_of(Fine, "half precision"), "'extra'", "bfloat16")
    assert not result_of(Fine, "gradients").failed


# ---- the tiny task ------------------------------------------------------------------------------


def test_the_tiny_task_is_what_the_checks_need():
    task = tiny_task({"left": [0, 1, 2], "right": [0, 1]}, samples=10, clients=3)
    assert set(task.domains["left"].train.y.tolist()) == {0, 1, 2}
    assert set(task.domains["right"].train.y.tolist()) == {0, 1}
    assert set(task.domains["right"].test.y.tolist()) == {0, 1, 2, 3}
    assert len(task.domains["left"].train) == 30
    again = tiny_task({"left": [0, 1, 2], "right": [0, 1]}, samples=10, clients=3)
    assert torch.equal(task.domains["left"].train.x, again.domains["left"].train.x)
    result = run(task, FedAvg(), **TINY)
    assert all(math.isfinite(v) for v in result.rounds["loss.ce"])
    assert result.rounds[-1]["loss"]["ce"] < result.rounds[0]["loss"]["ce"]
