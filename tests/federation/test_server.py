from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

from protofed import tree
from protofed.config import make_config
from protofed.data.augment import normalized
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply, train_client
from protofed.federation.model_state import load_model
from protofed.federation.server import Server
from protofed.federation.simulation import Federation
from protofed.method import Entry, Method, ServerView, Sizes, Update
from protofed.methods import FedAvg
from protofed.models import Network, build, entries
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot, Tree

pytestmark = pytest.mark.usefixtures("single_thread")

CLIENTS = ("a", "b", "c", "d")
SIZES = Sizes(classes=4, features=512, image=8)
COUNTER = "encoder.1.num_batches_tracked"


def network() -> Network:
    torch.manual_seed(0)
    return build("cnn2", 4, 8, width=2, norm="batch")


def server(method: Method | None = None, **settings: object) -> Server:
    values: dict[str, object] = {"rounds": 5, "seed": 0, **settings}
    clients = values.pop("clients", CLIENTS)
    return Server(method or FedAvg(), network(), SIZES, clients, **values)  # type: ignore[arg-type]


def message(seed: int, dtype: torch.dtype = torch.float32) -> Tree:
    """A model as a client might send it, its counters included."""
    generator = torch.Generator().manual_seed(seed)
    state = network().state_dict()
    return {
        "model": {
            n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype)
            if t.is_floating_point()
            else torch.tensor(10 * seed + 1)
            for n, t in state.items()
        }
    }


def reply(content: Tree, samples: int = 1) -> Reply:
    return Reply(tree.copy(content), {}, samples, steps=1, lr=0.1)


def finish(s: Server, replies: dict[str, Reply]) -> Tree:
    for name, r in replies.items():
        s.accept(name, r)
    s.finish()
    return s.state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: {},
            r"lacks entries: encoder.0.weight, encoder.1.bias, \S+ \.\.\. .*aggregate",
        ),
        (lambda model: model | {"more": torch.zeros(1)}, "has entries that do not travel: more"),
    ],
)
def test_a_broadcast_without_the_model_is_the_methods_fault(change: Any, words: str) -> None:
    """The clients could only say that what they got does not fit their network."""

    @dataclass(frozen=True)
    class Wrong(Method):
        name: ClassVar[str] = "wrong"

        def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
            return {"model": change(mean)}

    s = server(Wrong())
    finish(s, {"a": reply(message(1))})
    with pytest.raises(ProtofedError, match=f"the model that wrong broadcasts {words}"):
        s.broadcast()


# ---- the mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_weighted_mean_against_numpy(average: str) -> None:
    samples = {"a": 7, "b": 100, "c": 1, "d": 33}
    messages = {name: message(i) for i, name in enumerate(CLIENTS)}
    state = finish(server(average=average), {n: reply(messages[n], samples[n]) for n in CLIENTS})
    weights = np.array([samples[n] if average == "samples" else 1 for n in CLIENTS], float)
    for name, averaged in state["model"].items():
        if not averaged.is_floating_point():
            continue
        stack = np.stack([messages[n]["model"][name].double().numpy() for n in CLIENTS])
        expected = np.tensordot(weights / weights.sum(), stack, 1)
        assert averaged.dtype == torch.float32
        # float64 inside: what is left is one rounding to float32
        np.testing.assert_allclose(averaged.numpy(), expected, rtol=6.1e-8, atol=1e-12)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_order_of_arrival_changes_no_bit(limit: int) -> None:
    replies = {name: reply(message(i), i + 1) for i, name in enumerate(CLIENTS)}
    states = [
        finish(server(memory_limit=limit), {n: replies[n] for n in order})
        for order in itertools.islice(itertools.permutations(CLIENTS), 0, 24, 5)
    ]
    for state in states[1:]:
        for name, t in state["model"].items():
            assert torch.equal(t, states[0]["model"][name]), name


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 10])
def test_mean_of_equal_models_is_that_model(clients: int) -> None:
    names = [f"c{i}" for i in range(clients)]
    content, double = message(1), message(1, torch.float64)
    for sizes in ([1] * clients, range(3, 3 + clients)):
        replies = {n: reply(content, s) for n, s in zip(names, sizes, strict=True)}
        assert tree.equal(finish(server(clients=names), replies), content)
        # float64 models have no wider type to be summed in: a last bit may differ
        replies = {n: reply(double, s) for n, s in zip(names, sizes, strict=True)}
        for name, t in finish(server(clients=names), replies)["model"].items():
            torch.testing.assert_close(t, double["model"][name], rtol=1e-15, atol=0)


def test_integers_are_never_averaged() -> None:
    counts = {"a": 3, "b": 2**53 + 1, "c": 5}  # beyond what a float64 can count
    replies = {}
    for i, (name, count) in enumerate(counts.items()):
        content = message(i)
        content["model"][COUNTER] = torch.tensor(count)
        replies[name] = reply(content)
    counter = finish(server(), replies)["model"][COUNTER]
    assert counter.dtype == torch.int64
    assert int(counter) == 2**53 + 1


def test_mean_of_half_precision_is_not_summed_in_half_precision() -> None:
    names = [f"c{i}" for i in range(50)]
    content = {"model": {"w": torch.full((3,), 0.1, dtype=torch.float16)}}
    assert tree.equal(
        finish(server(clients=names), {n: reply(content, 3) for n in names})
        | {"model": {"w": content["model"]["w"]}},
        content,
    )


def test_the_mean_leaves_the_messages_as_they_are() -> None:
    seen: list[Tree] = []

    @dataclass(frozen=True)
    class Looks(Method):
        name: ClassVar[str] = "looks"

        def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
            seen.extend({"model": u["model"]} for u in updates)
            return {"model": mean}

    messages = [message(i) for i in range(3)]
    finish(server(Looks()), {n: reply(m) for n, m in zip("abc", messages, strict=True)})
    assert all(tree.equal(a, b) for a, b in zip(seen, messages, strict=True))


@pytest.mark.parametrize("who", ["b", "a"])
def test_different_entries_name_the_client(who: str) -> None:
    odd = message(1)
    del odd["model"]["head.bias"]
    replies = {n: reply(odd if n == who else message(0)) for n in ("a", "b", "c")}
    with pytest.raises(ProtofedError, match=r"a.*'model'.*head\.bias|b.*'model'.*head\.bias"):
        finish(server(), replies)


def test_the_client_that_differs_is_named_first() -> None:
    odd = message(1)
    odd["model"]["extra"] = torch.ones(1)
    with pytest.raises(ProtofedError, match=r"^c and a sent different entries.*extra"):
        finish(server(), {"a": reply(message(0)), "b": reply(message(0)), "c": reply(odd)})


@pytest.mark.parametrize("who", ["a", "c"])
def test_a_client_that_sends_no_model_among_others_that_do(who: str) -> None:
    replies = {n: reply({} if n == who else message(0)) for n in ("a", "b", "c")}
    with pytest.raises(ProtofedError, match="different entries"):
        finish(server(), replies)


def test_entries_of_another_shape_are_refused() -> None:
    odd = message(1)
    odd["model"]["head.bias"] = odd["model"]["head.bias"][:1]  # would broadcast
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        finish(server(), {"a": reply(message(0)), "b": reply(odd)})


def test_weights_hook_is_honored() -> None:
    seen: list[tuple[str, int, int, float]] = []

    @dataclass(frozen=True)
    class OnlyB(Method):
        name: ClassVar[str] = "only-b"

        def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float]:
            seen.extend((u.name, u.samples, u.steps, u.lr) for u in updates)
            assert server.clients == CLIENTS
            assert (server.round, server.rounds) == (0, 5)
            return [2.0 if u.name == "b" else 0.0 for u in updates]

    replies = {n: reply(message(i), i + 1) for i, n in enumerate(CLIENTS)}
    s = server(OnlyB())
    state = finish(s, dict(reversed(replies.items())))
    floats = {n: t for n, t in message(1)["model"].items() if t.is_floating_point()}
    assert tree.equal({"m": {n: state["model"][n] for n in floats}}, {"m": floats})
    assert seen == [(n, i + 1, 1, 0.1) for i, n in enumerate(CLIENTS)]


@pytest.mark.parametrize("given", [[0.0, 0.0], [1.0]])
def test_weights_that_nothing_can_be_averaged_by(given: list[float]) -> None:
    @dataclass(frozen=True)
    class Wrong(Method):
        name: ClassVar[str] = "wrong"

        def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float]:
            return given

    with pytest.raises(ProtofedError, match=r"weights of wrong are \[.*\] for 2 updates"):
        finish(server(Wrong()), {n: reply(message(i)) for i, n in enumerate(CLIENTS[:2])})


# ---- messages on disk ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 3000, 1 << 30])
def test_spool_on_disk_equals_memory_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_memory = finish(server(), {n: reply(message(i), i + 1) for i, n in enumerate(CLIENTS)})
    assert not list(tmp_path.iterdir())
    s = server(memory_limit=limit)
    for i, name in enumerate(CLIENTS):
        s.accept(name, reply(message(i) | {"extra": {"x": torch.ones(3)}}, i + 1))
    assert len(list(tmp_path.iterdir())) == (limit < 1 << 30), "messages wait on disk"
    s.finish()
    assert not list(tmp_path.iterdir())
    assert tree.equal(s.state, in_memory)
    for name in CLIENTS:  # the next round works as well
        s.accept(name, reply(message(0)))
    s.finish()
    floats = [n for n, t in message(0)["model"].items() if t.is_floating_point()]
    assert all(torch.equal(s.state["model"][n], message(0)["model"][n]) for n in floats)
    assert not list(tmp_path.iterdir())


def test_abandon_forgets_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    s = server(memory_limit=0)
    before = tree.copy(s.state)
    s.accept("a", reply(message(3)))
    s.abandon()
    assert not list(tmp_path.iterdir())
    s.finish()
    assert tree.equal(s.state, before)


# ---- rounds and participants ---------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 3, 10, 30])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.3, 0.34, 0.5, 0.7, 1.0])
def test_participants(clients: int, ratio: float) -> None:
    names = [f"c{i}" for i in range(clients)]
    s = server(clients=names, participation=ratio)
    chosen = s.sample()
    # exact arithmetic: 0.1 · 30 is 3, not 3.0000000000000004
    thousandths = round(ratio * 1000)
    assert len(chosen) == max(1, -(-thousandths * clients // 1000))
    assert chosen == [n for n in names if n in chosen], "in the federation's order"
    assert len(set(chosen)) == len(chosen)


def test_participants_differ_by_round_and_seed_only() -> None:
    names = [f"c{i}" for i in range(20)]

    def rounds(seed: int) -> list[list[str]]:
        s = server(clients=names, participation=0.3, seed=seed)
        out = []
        for _ in range(8):
            out.append(s.sample())
            assert s.sample() == out[-1], "asking twice changes nothing"
            s.finish()
        return out

    first = rounds(0)
    assert first == rounds(0)
    assert first != rounds(1)
    assert len({tuple(r) for r in first}) == 8
    seen = {n for r in first for n in r}
    assert len(seen) > 14, "everybody's turn comes"


def test_a_round_without_replies_keeps_the_state() -> None:
    s = server()
    before = tree.copy(s.state)
    s.finish()
    assert s.round == 1
    assert tree.equal(s.state, before)


def test_replies_of_some_clients_are_enough() -> None:
    s = server()
    state = finish(s, {"c": reply(message(2), 9)})
    assert tree.equal(state, message(2))
    assert s.round == 1


# ---- what travels --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadDown(Method):
    """The head is the server's own: it goes down and is never averaged."""

    name: ClassVar[str] = "head-down"

    def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
        return "down" if entry.name.startswith("head") else "both"


def test_entries_that_only_go_down_keep_the_servers_value() -> None:
    federation = Federation(make_config(tiny_task(), HeadDown(), **TINY), tiny_task())
    before = tree.copy(federation.server.state)["model"]
    received = federation.server.broadcast()
    assert received["model"].keys() == before.keys()
    site = next(iter(federation.clients.values()))
    sent = train_client(federation.setup, federation.engine.networks["cnn2"], site, received, {}, 0)
    heads = {"head.weight", "head.bias"}
    assert sent.message["model"].keys() == before.keys() - heads
    assert not sent.mine.get("model"), "the client does not keep it either"
    federation.run_round()
    after = federation.server.state["model"]
    assert after.keys() == before.keys()
    for name in before:
        assert torch.equal(after[name], before[name]) == (name in heads), name


@dataclass(frozen=True)
class LocalNorm(Method):
    """As FedBN: BatchNorm stays with the client."""

    name: ClassVar[str] = "local-norm"

    @property
    def evaluates(self) -> str:
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
        return "no" if entry.kind == "bn" else "both"


@pytest.fixture
def norms() -> Federation:
    return Federation(make_config(tiny_task(), LocalNorm(), **TINY), tiny_task())


def test_local_batchnorm_is_in_no_message_and_in_the_private_state(norms: Federation) -> None:
    kinds = entries(norms.engine.networks["cnn2"])
    bn = {n for n, kind in kinds.items() if kind == "bn"}
    assert len(bn) == 10
    assert norms.server.broadcast()["model"].keys() == kinds.keys() - bn
    site = norms.clients["left-0"]
    first = norms.store.get("left-0")
    assert first["model"].keys() == bn
    sent = train_client(
        norms.setup, norms.engine.networks["cnn2"], site, norms.server.broadcast(), first, 0
    )
    assert sent.message["model"].keys() == kinds.keys() - bn
    assert sent.mine["model"].keys() == bn
    assert int(sent.mine["model"][COUNTER]) == sent.steps == 6
    assert not tree.equal({"m": sent.mine["model"]}, {"m": first["model"]})


def test_local_batchnorm_is_restored_in_the_next_round(norms: Federation) -> None:
    initial = norms.store.get("left-0")["model"]
    norms.run_round()
    kept = {name: tree.copy(norms.store.get(name)) for name in norms.clients}
    assert not tree.equal(kept["left-0"], kept["right-0"]), "each client has its own"
    assert COUNTER not in norms.server.state["model"]
    norms.run_round()
    for name in norms.clients:
        counters = int(norms.store.get(name)["model"][COUNTER]), int(kept[name]["model"][COUNTER])
        assert counters == (12, 6), "counted on from the last round"
    # by hand: the second round of a client starts from its own norms and the server's weights
    again = Federation(norms.config, norms.task)
    again.run_round()
    start = {**kept["right-1"]["model"], **again.server.broadcast()["model"]}
    for mine in ({"model": kept["right-1"]["model"]}, {"model": initial}):
        sent = train_client(
            again.setup,
            again.engine.networks["cnn2"],
            again.clients["right-1"],
            again.server.broadcast(),
            mine,
            1,
        )
        same = tree.equal(sent.mine, norms.store.get("right-1"))
        assert same == (mine["model"] is not initial)
    assert start.keys() == again.engine.networks["cnn2"].state_dict().keys()


def test_evaluation_uses_the_clients_own_batchnorm(norms: Federation) -> None:
    norms.run_round()
    record = norms.run_round()
    net = norms.engine.networks["cnn2"]
    expected: dict[str, list[float]] = {}
    for name, site in norms.clients.items():
        load_model(net, {**norms.server.state["model"], **norms.store.get(name)["model"]})
        net.eval()
        test = norms.task.domains[site.domain].test
        with torch.no_grad():
            guess = net(normalized(test.x, norms.task.augment, torch.float32)).logits.argmax(1)
        expected.setdefault(site.domain, []).append(100 * float((guess == test.y).double().mean()))
    by_hand = {d: sum(a) / len(a) for d, a in expected.items()}
    assert record["accuracy"] == {d: round(a, 4) for d, a in by_hand.items()}
    assert record["average"] == round(sum(by_hand.values()) / 2, 4)
    # and not the initial norms
    initial = norms.server.initial_client(dict(net.state_dict()))
    assert not tree.equal(initial, {"model": norms.store.get("left-0")["model"]})


def test_server_state_starts_with_the_network_and_the_methods_slots() -> None:
    @dataclass(frozen=True)
    class Slots(Method):
        name: ClassVar[str] = "slots"

        def init_server(self, model: Slot, sizes: Sizes) -> Tree:
            assert sizes == SIZES
            return {"momentum": {n: torch.zeros_like(t) for n, t in model.items()}, "none": {}}

    net = network()
    s = Server(Slots(), net, SIZES, CLIENTS, rounds=1, seed=0)
    assert tree.equal({"model": s.state["model"]}, {"model": dict(net.state_dict())})
    assert s.state.keys() == {"model", "momentum"}
    with torch.no_grad():
        nn.utils.parameters_to_vector(net.parameters())
        next(net.parameters()).add_(1)
    assert not tree.equal({"model": s.state["model"]}, {"model": dict(net.state_dict())})
    assert math.isfinite(sum(float(t.sum()) for t in s.state["momentum"].values()))


def test_a_method_that_shares_nothing() -> None:
    @dataclass(frozen=True)
    class Alone(Method):
        name: ClassVar[str] = "alone"

        @property
        def evaluates(self) -> str:
            return "clients"

        def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
            return "no"

    federation = Federation(make_config(tiny_task(), Alone(), **TINY), tiny_task())
    record = federation.run_round()
    assert (record["bytes_up"], record["bytes_down"]) == (0, 0)
    assert federation.model == {}
    assert len(federation.store.get("left-0")["model"]) == len(
        federation.engine.networks["cnn2"].state_dict()
    )


@dataclass(frozen=True)
class InPlace(Method):
    """Changes its inputs in place; ``where`` says which."""

    name: ClassVar[str] = "in_place"
    where: str = "state"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"velocity": {"v": torch.zeros(3)}}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float] | None:
        if self.where == "weights":
            updates[1]["model"]["head.weight"].zero_()
        return None

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        v = server.state["velocity"]["v"]
        if self.where == "state":
            v.mul_(0.9).add_(1)
        if self.where == "message":
            updates[0]["model"]["head.bias"].add_(1)
        if self.where == "replaced":
            server.state["velocity"]["v"] = v + 1
        if self.where == "added":
            server.state["velocity"]["w"] = v + 1
        if self.where == "memory ends":
            v.add_(1)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        mean["head.bias"].add_(1)  # its own: no one else has it
        return {"model": mean, "velocity": {"v": v}}


@pytest.mark.parametrize(
    ("where", "entry"),
    [
        ("state", "velocity/v of the server's state"),
        ("memory ends", "velocity/v of the server's state"),
        ("replaced", "velocity/v of the server's state"),
        ("added", "velocity/w of the server's state"),
        ("message", "model/head.bias of a's message"),
        ("weights", "model/head.weight of b's message"),
        ("nowhere", None),
    ],
)
def test_a_method_must_not_change_its_inputs(where: str, entry: str | None) -> None:
    """Otherwise a round that fails afterwards could not be repeated."""
    ours = server(InPlace(where=where))
    for i, name in enumerate("ab"):
        ours.accept(name, Reply(message(i), {}, 3, 1, 0.1))
    if entry is None:
        ours.finish()
        assert ours.round == 1
    else:
        with pytest.raises(ProtofedError, match=f"in_place changes {entry} in place"):
            ours.finish()
        assert ours.round == 0


@dataclass(frozen=True)
class Answers(Method):
    """Hooks that return what they must not."""

    name: ClassVar[str] = "answers"
    hook: str = ""
    found: ClassVar[Any] = None

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return self.found if self.hook == "init_server" else {}  # type: ignore[no-any-return]

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return self.found if self.hook == "init_client" else {}  # type: ignore[no-any-return]

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        return self.found if self.hook == "aggregate" else {"model": mean}  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("hook", "found", "words"),
    [
        ("init_server", {"model": {"head.bias": torch.ones(3)}}, "returns a slot 'model'"),
        ("init_server", None, "returns None"),
        ("init_client", {"model": {}}, "returns a slot 'model'"),
        ("aggregate", None, "returns None .*the server's next state"),
        (
            "aggregate",
            {"head.bias": torch.ones(3)},
            r"returns {'head.bias': a tensor of shape \[3\]}",
        ),
    ],
)
def test_a_hook_that_returns_something_else_is_named(
    hook: str, found: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "found", found)
    with pytest.raises(ProtofedError, match=f"{hook} of answers {words}"):
        ours = server(Answers(hook=hook))
        ours.initial_client(network().state_dict())
        ours.accept("a", Reply(message(0), {}, 3, 1, 0.1))
        ours.finish()
