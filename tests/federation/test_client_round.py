"""One client's round against hand-written steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.federation.one_client import (
    CLASSES,
    FEATURES,
    SIZES,
    Recorder,
    all_of,
    client_data,
    network,
    setup,
    start,
    train,
)
from torch import Tensor, nn

from protofed import keys, tree
from protofed.data.task import Augment
from protofed.errors import Diverged, ProtofedError
from protofed.federation.client_round import train_client
from protofed.federation.model_state import load_model
from protofed.federation.setup import Schedule
from protofed.method import Batch, Client, Method, Phase, Terms
from protofed.methods import FedAvg
from protofed.tree import Slot, Tree

pytestmark = pytest.mark.usefixtures("single_thread")


class Hand:
    """SGD as in its definition: v ← μ v + (g + λ θ), θ ← θ − η v."""

    def __init__(self, model: Slot, lr: float, momentum: float, decay: float) -> None:
        self.theta = {n: t.clone().requires_grad_() for n, t in model.items()}
        self.velocity = {n: torch.zeros_like(t) for n, t in model.items()}
        self.lr, self.momentum, self.decay = lr, momentum, decay

    def step(self, x: Tensor, y: Tensor, moves: Callable[[str], bool] = lambda _: True) -> float:
        p = self.theta
        z = torch.relu(x.flatten(1) @ p["encoder.1.weight"].T + p["encoder.1.bias"])
        loss = F.cross_entropy(z @ p["head.weight"].T + p["head.bias"], y)
        grads = dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))
        with torch.no_grad():
            for n in filter(moves, p):
                v = self.momentum * self.velocity[n] + grads[n] + self.decay * p[n]
                self.velocity[n] = v
                p[n] -= self.lr * v
        return float(loss.detach())


def same(model: Slot, hand: Hand) -> None:
    for name, t in hand.theta.items():
        torch.testing.assert_close(model[name], t.detach(), rtol=1e-11, atol=1e-13, msg=name)


# ---- one step, several, and the optimizer --------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.0), (0.5, 0.2)])
def test_steps_by_hand(epochs: int, momentum: float, decay: float) -> None:
    data, net = client_data(), network()
    hand = Hand(start(net)["model"], 0.1, momentum, decay)
    s = setup(epochs=epochs, momentum=momentum, weight_decay=decay)
    reply = train(s, data, net)
    losses = [hand.step(*all_of(data)) for _ in range(epochs)]
    same(reply.message["model"], hand)
    total, steps = reply.losses["ce"]
    assert (total, steps) == (pytest.approx(sum(losses), rel=1e-12), epochs)
    assert (reply.samples, reply.steps, reply.lr) == (10, epochs, 0.1)
    assert reply.mine == {}


def test_momentum_starts_over_every_round() -> None:
    data, net = client_data(), network()
    first = train(setup(epochs=2), data, net)
    second = train_client(setup(epochs=2), net, data, first.message, {}, 1)
    hand = Hand(first.message["model"], 0.1, 0.9, 0.01)
    for _ in range(2):
        hand.step(*all_of(data))
    same(second.message["model"], hand)


def test_the_network_is_only_a_place_to_compute_in() -> None:
    data = client_data()
    received = start(network())
    clean = train_client(setup(), network(), data, received, {}, 0)
    used = network()
    with torch.no_grad():
        for p in used.parameters():
            p.fill_(math.nan)
    used.eval()
    again = train_client(setup(), used, data, received, {}, 0)
    assert tree.equal(clean.message, again.message)
    assert tree.equal(received, start(network())), "what was received is not written to"
    load_model(used, received["model"])
    assert not tree.equal(again.message, received), "nor does the reply share memory"


def test_received_entries_win_over_the_clients_own() -> None:
    net = network()
    received = start(net)
    mine = {"model": {"head.bias": torch.full((CLASSES,), 9.0, dtype=torch.float64)}}
    a = train_client(setup(), net, client_data(), received, mine, 0)
    b = train_client(setup(), net, client_data(), received, {}, 0)
    assert tree.equal(a.message, b.message)


# ---- phases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoPhases(Method):
    """First the head, then the encoder."""

    name: ClassVar[str] = "two-phases"
    second: ClassVar[dict[str, Any]] = {}
    states: ClassVar[list[Slot]] = []

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        return (
            Phase(self.loss, epochs=2, trainable=lambda n: n.startswith("head")),
            Phase(self.loss, trainable=lambda n: n.startswith("encoder"), **self.second),
        )

    def loss(self, client: Client, batch: Batch) -> Terms:
        self.states.append({n: p.detach().clone() for n, p in client.parameters.items()})
        return super().loss(client, batch)


@pytest.fixture
def two() -> TwoPhases:
    TwoPhases.states.clear()
    TwoPhases.second.clear()
    return TwoPhases()


def head(name: str) -> bool:
    return name.startswith("head")


def encoder(name: str) -> bool:
    return name.startswith("encoder")


def test_each_phase_changes_only_its_trainable_parameters(two: TwoPhases) -> None:
    data, net = client_data(), network()
    reply = train(setup(two, epochs=2), data, net)
    states = [*two.states, reply.message["model"]]
    assert len(states) == 5
    for step, (before, after) in enumerate(itertools.pairwise(states)):
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == {n for n in before if (head if step < 2 else encoder)(n)}
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert reply.steps == 4


def test_phases_by_hand_with_fresh_momentum(two: TwoPhases) -> None:
    data, net = client_data(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(two, epochs=2), data, net)
    for moves in (head, head, encoder, encoder):
        hand.step(*all_of(data), moves=moves)
    same(reply.message["model"], hand)


def test_every_phase_starts_with_a_fresh_optimizer() -> None:
    @dataclass(frozen=True)
    class Twice(Method):
        name: ClassVar[str] = "twice"

        def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
            return (Phase(self.loss), Phase(self.loss))

    data, net = client_data(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(Twice()), data, net)
    for _ in range(2):
        hand.velocity = {n: torch.zeros_like(t) for n, t in hand.velocity.items()}
        hand.step(*all_of(data))
    same(reply.message["model"], hand)


def test_phase_lr_and_momentum(two: TwoPhases) -> None:
    two.second.update(lr=0.03, momentum=0.2, epochs=3)
    data, net = client_data(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(two), data, net)
    for _ in range(2):
        hand.step(*all_of(data), moves=head)
    hand.lr, hand.momentum = 0.03, 0.2
    for _ in range(3):
        hand.step(*all_of(data), moves=encoder)
    same(reply.message["model"], hand)
    assert reply.lr == 0.03


def test_phase_lr_of_zero_is_zero(two: TwoPhases) -> None:
    two.second.update(lr=0.0)
    net = network()
    reply = train(setup(two), client_data(), net)
    before = start(network())["model"]
    assert torch.equal(reply.message["model"]["encoder.1.weight"], before["encoder.1.weight"])


def test_phase_batch(two: TwoPhases) -> None:
    two.second.update(batch=3)
    assert train(setup(two), client_data(10)).steps == 2 + 4


def test_phase_clip(two: TwoPhases) -> None:
    limit = 1e-3
    two.second.update(clip=limit, momentum=0.0)
    reply = train(setup(two, weight_decay=0.0), client_data())
    before, after = two.states[2], reply.message["model"]
    length = math.sqrt(sum(float((after[n] - t).square().sum()) for n, t in before.items()))
    assert length == pytest.approx(0.1 * limit, rel=1e-3)


@pytest.mark.parametrize(("run", "phase"), [(1e-3, None), (1e-3, 1.0), (1.0, 1e-3)])
def test_a_runs_clip_and_a_phases_hold_both(
    two: TwoPhases, run: float, phase: float | None
) -> None:
    two.second.update(clip=phase, momentum=0.0)
    reply = train(setup(two, weight_decay=0.0, clip=run), client_data())
    before, after = two.states[2], reply.message["model"]
    length = math.sqrt(sum(float((after[n] - t).square().sum()) for n, t in before.items()))
    assert length == pytest.approx(0.1 * 1e-3, rel=1e-3)


SCHEDULES = [
    (Schedule(), [1, 1, 1]),
    (Schedule(warmup=2), [1 / 3, 2 / 3, 1, 1]),
    (Schedule("cosine", 4), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    (Schedule("cosine", 4, warmup=2), [1 / 3, 2 / 3, 1, 0.5]),
    (Schedule("step", 6, step_every=2, step_factor=0.5), [1, 1, 0.5, 0.5, 0.25, 0.25]),
    (Schedule("step", 4, warmup=1, step_every=1, step_factor=0.1), [0.5, 1, 0.1, 0.01]),
]


@pytest.mark.parametrize(("schedule", "factors"), SCHEDULES)
def test_schedules(schedule: Schedule, factors: list[float]) -> None:
    assert [schedule.factor(t) for t in range(len(factors))] == pytest.approx(factors)
    assert schedule.varies == (len(set(factors)) > 1)


def test_a_schedule_holds_for_phases_with_a_learning_rate_of_their_own(two: TwoPhases) -> None:
    two.second.update(lr=0.04)
    s = setup(two, schedule=Schedule("step", step_every=1, step_factor=0.5))
    data, net = client_data(), network()
    hand = Hand(start(net)["model"], 0.1 / 4, 0.9, 0.01)
    reply = train(s, data, net, round=2)
    for _ in range(2):
        hand.step(*all_of(data), moves=head)
    hand.lr = 0.01
    hand.step(*all_of(data), moves=encoder)
    same(reply.message["model"], hand)
    assert reply.lr == 0.01


def test_label_smoothing_that_has_no_effect_is_refused() -> None:
    """The method calls PyTorch's own cross-entropy."""
    assert train(setup(FedAvg(), label_smoothing=0.1), client_data()).steps
    with pytest.raises(ProtofedError, match=r"no effect on recorder: .* client\.cross"):
        train(setup(Recorder(), label_smoothing=0.1), client_data())


@pytest.mark.parametrize("by", ["phase", "training"])
def test_adam(two: TwoPhases, by: str) -> None:
    data, net = client_data(), network()
    if by == "phase":
        two.second.update(optimizer="adam", lr=0.01)
        reply = train(setup(two, weight_decay=0.0), data, net)
        before, names = two.states[2], [n for n in two.states[2] if encoder(n)]
    else:
        before = start(net)["model"]
        reply = train(setup(optimizer="adam", lr=0.01, weight_decay=0.0), data, net)
        names = list(before)
    hand = Hand(before, 1.0, 0.0, 0.0)
    hand.step(*all_of(data))
    for n in names:  # Adam's first step: η g / (|g| + ε)
        g = before[n] - hand.theta[n].detach()
        expected = before[n] - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(reply.message["model"][n], expected, rtol=1e-9, atol=1e-12)


# ---- prototypes ----------------------------------------------------------------------------------


def means_by_hand(z: Tensor, y: Tensor) -> tuple[Tensor, list[int]]:
    rows = [z[y == k].mean(0) if (y == k).any() else torch.zeros_like(z[0]) for k in range(CLASSES)]
    return torch.stack(rows), [int((y == k).sum()) for k in range(CLASSES)]


@pytest.mark.parametrize("classes", [4, 3])
def test_class_means_of_the_last_epoch(classes: int) -> None:
    s = setup(Recorder(passes="last_epoch"), Augment(padding=2), batch=4, epochs=3)
    reply = train(s, client_data(10, classes), network(norm=True))
    last = Recorder.seen[-3:]  # three batches an epoch
    z, y = torch.cat([z for _, z in last]), torch.cat([b.y for b, _ in last])
    mean, count = means_by_hand(z, y)
    sent = reply.message["prototypes"]
    torch.testing.assert_close(sent["mean"], mean, rtol=1e-12, atol=1e-12)
    assert sent["count"].tolist() == count
    if classes == 3:
        assert count[3] == 0
        assert sent["mean"][3].tolist() == [0] * FEATURES


@pytest.mark.parametrize("classes", [4, 3])
def test_class_means_after_training(classes: int) -> None:
    data, net = client_data(10, classes), network(norm=True)
    s = setup(Recorder(passes="post", kept=0.2), Augment(padding=2), batch=4, epochs=2)
    reply = train(s, data, net)
    load_model(net, reply.message["model"])
    rows = torch.cat([b.rows for b, _ in Recorder.seen]).unique()
    assert len(rows) == 8, "not over the holdout samples"
    with torch.no_grad():
        x, y = all_of(data)
        z = net.eval()(x[rows]).feature
    mean, count = means_by_hand(z, y[rows])
    sent = reply.message["prototypes"]
    torch.testing.assert_close(sent["mean"], mean, rtol=1e-12, atol=1e-12)
    assert sent["count"].tolist() == count
    assert net.training is False
    # the pass itself moved nothing: 3 batches of 2 epochs... of 8 samples, 2 a pass
    assert int(reply.message["model"]["encoder.0.num_batches_tracked"]) == reply.steps == 4


def test_only_the_last_phase_is_collected() -> None:
    @dataclass(frozen=True)
    class Last(Recorder):
        name: ClassVar[str] = "last"

        def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
            return (Phase(self.loss), Phase(self.loss, epochs=2))

    reply = train(setup(Last(passes="last_epoch")), client_data(10))
    assert reply.message["prototypes"]["count"].sum() == 10
    z, y = Recorder.seen[-1][1], Recorder.seen[-1][0].y
    torch.testing.assert_close(reply.message["prototypes"]["mean"], means_by_hand(z, y)[0])


def test_asking_for_means_that_are_not_collected_says_what_to_do() -> None:
    @dataclass(frozen=True)
    class Forgets(Method):
        name: ClassVar[str] = "forgets"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            client.class_means()
            return {}, {}

    with pytest.raises(RuntimeError, match=r"Forgets.*proto_pass"):
        train(setup(Forgets()), client_data())


def test_features_are_a_clean_pass_over_the_training_samples() -> None:
    got: list[tuple[Tensor, Tensor]] = []

    @dataclass(frozen=True)
    class Features(Recorder):
        name: ClassVar[str] = "features"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            got.append(client.features())
            assert client.network.training
            return {}, {}

    data, net = client_data(10), network(norm=True)
    reply = train(setup(Features(kept=0.3), Augment(padding=2)), data, net)
    rows = Recorder.seen[0][0].rows.sort().values
    load_model(net, reply.message["model"])
    x, y = all_of(data)
    with torch.no_grad():
        torch.testing.assert_close(got[0][0], net.eval()(x[rows]).feature)
    assert torch.equal(got[0][1], y[rows])
    assert not got[0][0].requires_grad


# ---- further passes, probe, holdout --------------------------------------------------------------


@dataclass(frozen=True)
class Extra(Recorder):
    """Further forward passes, with weight 0 in the loss."""

    name: ClassVar[str] = "extra"
    times: int = 2

    def loss(self, client: Client, batch: Batch) -> Terms:
        terms = super().loss(client, batch)
        for i in range(self.times):
            out = client.forward(batch.x * (i + 2) + 1)
            assert out.logits.requires_grad
            terms[f"extra{i}"] = 0 * out.logits.sum()
        return terms


def test_further_passes_move_no_statistics_and_make_no_prototypes() -> None:
    replies = []
    for times in (0, 3):
        s = setup(Extra(passes="last_epoch", times=times), batch=4)
        replies.append(train(s, client_data(10), network(norm=True)))
    assert tree.equal(replies[0].message, replies[1].message)
    model = replies[1].message["model"]
    assert int(model["encoder.0.num_batches_tracked"]) == 3
    assert float(model["encoder.0.running_mean"].abs().sum()) > 0, "the main pass moves them"
    assert replies[1].message["prototypes"]["count"].sum() == 10


def test_further_passes_normalize_with_their_own_batch() -> None:
    net = network(norm=True).train()
    client = Client(FedAvg(), net, SIZES, received=start(net), mine={})
    x = all_of(client_data(6))[0]
    client.begin_step(1)
    main, further = client.forward(x), client.forward(3 * x)
    torch.testing.assert_close(further.feature, main.feature, rtol=1e-3, atol=1e-3)
    assert all(m.track_running_stats for m in net.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("training", [True, False])
def test_probe_uses_other_weights_and_changes_nothing(training: bool) -> None:
    net = network(norm=True).train(training)
    x, _ = all_of(client_data(6))
    torch.manual_seed(5)
    other = {
        n: torch.rand_like(t) + 0.5 if t.is_floating_point() else t + 3
        for n, t in start(net)["model"].items()
    }
    before = start(net)
    client = Client(FedAvg(), net, SIZES, received=before, mine={})
    client.begin_step(1)
    out = client.forward_with(other, x)
    reference = network(norm=True)
    reference.load_state_dict(other)
    with torch.no_grad():
        expected = reference.eval()(x)
    torch.testing.assert_close(out.feature, expected.feature)
    torch.testing.assert_close(out.logits, expected.logits)
    assert not out.logits.requires_grad
    assert tree.equal(start(net), before)
    assert all(m.training == training for m in net.modules())
    assert all(p.requires_grad for p in net.parameters())
    # a probe is not the step's main pass: the next forward still moves the statistics
    net.train()
    client.forward(x)
    assert int(net.state_dict()["encoder.0.num_batches_tracked"]) == 1


@pytest.mark.parametrize("part", ["holdout", "train"])
def test_evaluate_by_hand(part: str) -> None:
    got: list[dict[str, float]] = []

    @dataclass(frozen=True)
    class Evaluates(Recorder):
        name: ClassVar[str] = "evaluates"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            got.append(client.evaluate(client.received["model"], part))
            return {}, {}

    data, net = client_data(40), network(norm=True)
    received = start(net)
    train(setup(Evaluates(kept=0.25), batch=8, epochs=2), data, net)
    trained = set(torch.cat([b.rows for b, _ in Recorder.seen]).tolist())
    held = set(range(40)) - trained
    assert len(held) == 10, "holdout rows are in no training batch"
    rows = torch.tensor(sorted(held if part == "holdout" else trained))
    x, y = all_of(data)
    load_model(net, received["model"])
    with torch.no_grad():
        logits = net.eval()(x[rows]).logits
    expected = {
        "accuracy": float((logits.argmax(1) == y[rows]).double().mean()),
        "loss": float(F.cross_entropy(logits, y[rows])),
    }
    assert got[0] == pytest.approx(expected, rel=1e-12)


# ---- what a client sees --------------------------------------------------------------------------


def test_round_progress_and_draws() -> None:
    seen: list[Any] = []

    @dataclass(frozen=True)
    class Looks(Method):
        name: ClassVar[str] = "looks"

        def loss(self, client: Client, batch: Batch) -> Terms:
            first, second = client.uniform(5), client.uniform(5)
            assert not torch.equal(first, second)
            assert client.normal(2, 3).shape == (2, 3)
            seen.append((int(client.round), float(client.progress), tuple(first.tolist())))
            return super().loss(client, batch)

    net = network()
    for round in range(3):
        train_client(setup(Looks(), batch=5), net, client_data(10), start(net), {}, round)
    assert [s[:2] for s in seen] == [(0, 0), (0, 0), (1, 0.5), (1, 0.5), (2, 1), (2, 1)]
    assert len({s[2] for s in seen}) == 6, "each step draws other numbers"
    first = seen[0]
    train_client(setup(Looks(), batch=5), net, client_data(10), start(net), {}, 0)
    assert seen[6] == first, "and the same ones when it is run again"
    key = torch.tensor(keys.key(0, 0, "left-0", 0, 0, "step"))
    assert first[2] == tuple(keys.uniform(key, 1, (5,)).tolist())


def test_an_error_in_a_loss_says_whose_it_is() -> None:
    @dataclass(frozen=True)
    class Breaks(Method):
        name: ClassVar[str] = "breaks"

        def loss(self, client: Client, batch: Batch) -> Terms:
            return {"ce": batch.x @ batch.y}

    with pytest.raises(RuntimeError) as error:
        train(setup(Breaks()), client_data(10))
    note = "in the loss of breaks, client left-0, batch x [10, 3, 8, 8]"
    assert error.value.__notes__ == [note]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda ce: ce, r"the loss of wrong returns a tensor of shape \[\] .*named terms"),
        (lambda ce: {}, r"the loss of wrong returns \{\}"),
        (lambda ce: {"ce": ce, "none": 0.0}, r"\{'ce': a tensor of shape \[\], 'none': 0.0\}"),
        (lambda ce: {"ce": ce.expand(3)}, r"\{'ce': a tensor of shape \[3\]\}"),
        (lambda ce: {"ce": ce.detach()}, "does not depend on what the phase trains"),
    ],
)
def test_a_loss_that_is_not_terms_says_what_to_return(loss: Any, words: str) -> None:
    @dataclass(frozen=True)
    class Wrong(Method):
        name: ClassVar[str] = "wrong"

        def loss(self, client: Client, batch: Batch) -> Terms:
            found: Terms = loss(super().loss(client, batch)["ce"])
            return found

    with pytest.raises(ProtofedError, match=words):
        train(setup(Wrong()), client_data(10))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"a": {"x": torch.zeros(2)}, "b": {}}, r"returns \{'a': .*return two trees"),
        ((None, {}), r"returns \(None, \{\}\) .*return two trees"),
        # it would be replaced without a word by the trained model
        (({"model": {"head.bias": torch.zeros(4)}}, {}), "returns a slot 'model', .*another name"),
        (({}, {"model": {}}), "returns a slot 'model'"),
    ],
)
def test_an_upload_that_is_not_what_it_must_be(sent: Any, words: str) -> None:
    @dataclass(frozen=True)
    class Wrong(Method):
        name: ClassVar[str] = "wrong"

        def upload(self, client: Client) -> Any:
            return sent

    with pytest.raises(ProtofedError, match=f"upload of wrong {words}"):
        train(setup(Wrong()), client_data(10))


@pytest.mark.parametrize("hook", ["loss", "upload"])
@pytest.mark.parametrize("given", ["received", "mine"])
def test_what_a_client_is_given_cannot_be_changed(hook: str, given: str) -> None:
    """Other clients would get it, or a resumed run would repeat the round from it."""

    @dataclass(frozen=True)
    class InPlace(Method):
        name: ClassVar[str] = "in_place"

        def loss(self, client: Client, batch: Batch) -> Terms:
            if hook == "loss":
                getattr(client, given)["h"]["x"].add_(1)
            return super().loss(client, batch)

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            x = getattr(client, given)["h"]["x"]
            if hook == "upload":
                x.mul_(2)
            return {}, {"h": {"x": x + 1}}

    net, slot = network(), {"h": {"x": torch.zeros(2)}}
    received, mine = {**start(net), **tree.copy(slot)}, tree.copy(slot)
    with pytest.raises(ProtofedError, match=f"in_place changes h/x of client.{given} in place"):
        train_client(setup(InPlace()), net, client_data(10), received, mine, 0)


def test_prototypes_of_a_loss_without_a_forward_pass() -> None:
    @dataclass(frozen=True)
    class Around(Recorder):
        name: ClassVar[str] = "around"

        def loss(self, client: Client, batch: Batch) -> Terms:
            return {"ce": F.cross_entropy(client.network(batch.x).logits, batch.y)}

    with pytest.raises(RuntimeError, match=r"loss of Around never calls client\.forward"):
        train(setup(Around(passes="last_epoch")), client_data(10))


def test_a_phase_that_trains_nothing_says_so() -> None:
    @dataclass(frozen=True)
    class Typo(Method):
        name: ClassVar[str] = "typo"

        def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
            return (Phase(self.loss, trainable=lambda name: name.startswith("haed.")),)

    with pytest.raises(ProtofedError, match=r"trains nothing .*names are encoder\.1\.weight, "):
        train(setup(Typo()), client_data(10))


def test_losses_are_sums_over_the_steps_and_the_objective_their_sum() -> None:
    @dataclass(frozen=True)
    class Halves(Method):
        name: ClassVar[str] = "halves"

        def loss(self, client: Client, batch: Batch) -> Terms:
            ce = super().loss(client, batch)["ce"]
            return {"a": 0.25 * ce, "b": 0.75 * ce, "rows": batch.rows.double().mean() + 0 * ce}

    data = client_data(10)
    reply, plain = train(setup(Halves(), batch=5), data), train(setup(batch=5), data)
    for name, t in plain.message["model"].items():
        torch.testing.assert_close(reply.message["model"][name], t, rtol=1e-12, atol=1e-14)
    (ce, steps) = plain.losses["ce"]
    assert reply.losses["a"] == (pytest.approx(ce / 4), steps)
    assert reply.losses["b"] == (pytest.approx(ce * 3 / 4), steps)
    assert reply.losses["rows"] == (pytest.approx(4.5 * steps), steps)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_divergence_says_where(value: float) -> None:
    @dataclass(frozen=True)
    class Bad(Method):
        name: ClassVar[str] = "bad"

        def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
            return (Phase(self.loss), Phase(self.broken))

        def broken(self, client: Client, batch: Batch) -> Terms:
            ce = super().loss(client, batch)["ce"]
            return {"ce": ce, "bad": 0 * ce + value}

    with pytest.raises(Diverged) as error:
        train(setup(Bad()), client_data(name="right-3"), round=2)
    text = str(error.value)
    for part in ("client right-3", "round 3", "phase 1", "'bad'", str(value), "--lr"):
        assert part in text
    assert error.value.exit_code == 3
