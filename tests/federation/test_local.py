from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed import keys, tree
from protofed.data.augment import normalized
from protofed.data.task import Augment, Images
from protofed.errors import Diverged, ProtofedError
from protofed.federation import client_round as module
from protofed.federation.client_round import Reply, Setup, Site, Training, load, local
from protofed.method import Batch, Client, Method, Phase, Sizes, Terms
from protofed.methods import FedAvg
from protofed.models import Network
from protofed.tree import Slot, Tree

pytestmark = pytest.mark.usefixtures("single_thread")

PLAIN = Augment(padding=0, flip=False)
CLASSES, FEATURES, SIDE = 4, 5, 8
SIZES = Sizes(CLASSES, FEATURES, SIDE)


def network(norm: bool = False) -> Network:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.BatchNorm2d(3)] if norm else []
    layers += [nn.Flatten(), nn.Linear(3 * SIDE * SIDE, FEATURES), nn.ReLU()]
    return Network(nn.Sequential(*layers), FEATURES, CLASSES).double()


def site(n: int = 10, classes: int = CLASSES, name: str = "left-0") -> Site:
    rng = keys.generator("site", n)
    x = torch.from_numpy(rng.integers(0, 256, (n, 3, SIDE, SIDE))).to(torch.uint8)
    return Site(name, "left", Images(x, torch.arange(n) % classes))


def setup(method: Method | None = None, augment: Augment = PLAIN, **training: Any) -> Setup:
    given = {
        "batch": 100,
        "epochs": 1,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.01,
        **training,
    }
    return Setup(
        method or FedAvg(), SIZES, augment, Training(**given), rounds=3, seed=0, dtype=torch.float64
    )


def start(net: Network) -> Tree:
    return tree.copy({"model": net.state_dict()})


def train(s: Setup, at: Site, net: Network | None = None, round: int = 0) -> Reply:
    net = net or network()
    return local(s, net, at, start(net), {}, round)


def all_of(at: Site) -> tuple[Tensor, Tensor]:
    return normalized(at.images.x, PLAIN, torch.float64), at.images.y


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
    at, net = site(), network()
    hand = Hand(start(net)["model"], 0.1, momentum, decay)
    s = setup(epochs=epochs, momentum=momentum, weight_decay=decay)
    reply = train(s, at, net)
    losses = [hand.step(*all_of(at)) for _ in range(epochs)]
    same(reply.message["model"], hand)
    total, steps = reply.losses["ce"]
    assert (total, steps) == (pytest.approx(sum(losses), rel=1e-12), epochs)
    assert (reply.samples, reply.steps, reply.lr) == (10, epochs, 0.1)
    assert reply.mine == {}


def test_momentum_starts_anew_every_round() -> None:
    at, net = site(), network()
    first = train(setup(epochs=2), at, net)
    second = local(setup(epochs=2), net, at, first.message, {}, 1)
    hand = Hand(first.message["model"], 0.1, 0.9, 0.01)
    for _ in range(2):
        hand.step(*all_of(at))
    same(second.message["model"], hand)


def test_the_network_is_only_a_place_to_compute_in() -> None:
    at = site()
    received = start(network())
    clean = local(setup(), network(), at, received, {}, 0)
    used = network()
    with torch.no_grad():
        for p in used.parameters():
            p.fill_(math.nan)
    used.eval()
    again = local(setup(), used, at, received, {}, 0)
    assert tree.equal(clean.message, again.message)
    assert tree.equal(received, start(network())), "what was received is not written to"
    load(used, received["model"])
    assert not tree.equal(again.message, received), "nor does the reply share memory"


def test_received_entries_win_over_the_clients_own() -> None:
    net = network()
    received = start(net)
    mine = {"model": {"head.bias": torch.full((CLASSES,), 9.0, dtype=torch.float64)}}
    a = local(setup(), net, site(), received, mine, 0)
    b = local(setup(), net, site(), received, {}, 0)
    assert tree.equal(a.message, b.message)


@dataclass(frozen=True)
class Recorder(Method):
    """Notes every batch and what the main forward pass gave."""

    name: ClassVar[str] = "recorder"
    seen: ClassVar[list[tuple[Batch, Tensor]]] = []
    kept: float = 0.0
    passes: str = "none"

    @property
    def holdout(self) -> float:
        return self.kept

    @property
    def proto_pass(self) -> str:
        return self.passes

    def loss(self, client: Client, batch: Batch) -> Terms:
        z, logits = client.forward(batch.x)
        self.seen.append((batch, z.detach().clone()))
        return {"ce": F.cross_entropy(logits, batch.y)}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        if self.passes == "none":
            return {}, {}
        mean, count = client.class_means()
        return {"prototypes": {"mean": mean, "count": count}}, {}


@pytest.fixture(autouse=True)
def _empty() -> None:
    Recorder.seen.clear()


@pytest.mark.parametrize(
    ("n", "batch", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (5, 1, [1] * 5)]
)
def test_the_last_batch_may_be_small_and_is_not_dropped(
    n: int, batch: int, sizes: list[int]
) -> None:
    reply = train(setup(Recorder(), batch=batch, epochs=2), site(n))
    assert [len(b.y) for b, _ in Recorder.seen] == sizes * 2
    assert reply.steps == 2 * len(sizes)


def test_an_epoch_is_every_sample_once_in_another_order() -> None:
    at = site(30)
    train(setup(Recorder(), batch=7, epochs=2), at)
    rows = torch.cat([b.rows for b, _ in Recorder.seen]).reshape(2, 30)
    for order in rows:
        assert sorted(order.tolist()) == list(range(30))
        assert order.tolist() != list(range(30))
    assert not torch.equal(rows[0], rows[1])
    x, y = all_of(at)
    for b, _ in Recorder.seen:
        assert torch.equal(b.x, x[b.rows])
        assert torch.equal(b.y, y[b.rows])


def test_order_depends_on_round_client_and_seed_only() -> None:
    def order(name: str = "left-0", round: int = 0, seed: int = 0) -> list[int]:
        Recorder.seen.clear()
        train(replace(setup(Recorder(), batch=7), seed=seed), site(30, name=name), round=round)
        return torch.cat([b.rows for b, _ in Recorder.seen]).tolist()

    first = order()
    assert first == order()
    assert first != order(name="left-1")
    assert first != order(round=1)
    assert first != order(seed=1)


@pytest.mark.parametrize("limit", [1, 20_000, 100_000])
def test_batches_do_not_depend_on_how_much_is_prepared_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    s, at = setup(Recorder(), Augment(padding=2), batch=7), site(30)
    train(s, at)
    whole = list(Recorder.seen)
    Recorder.seen.clear()
    monkeypatch.setattr(module, "_CHUNK_BYTES", limit)
    train(s, at)
    for (a, _), (b, _) in zip(whole, Recorder.seen, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_augmentation_changes_with_the_epoch_and_not_the_clean_pass() -> None:
    at = site(12)
    train(setup(Recorder(passes="post"), Augment(padding=2), batch=12, epochs=2), at)
    first, second = (b.x[b.rows.argsort()] for b, _ in Recorder.seen)
    assert not torch.equal(first, second)
    assert not torch.equal(first, all_of(at)[0])


# ---- phases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoPhases(Method):
    """First the head, then the encoder, each in its own way."""

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


def test_each_phase_moves_only_what_it_may(two: TwoPhases) -> None:
    at, net = site(), network()
    reply = train(setup(two, epochs=2), at, net)
    states = [*two.states, reply.message["model"]]
    assert len(states) == 5
    for step, (before, after) in enumerate(itertools.pairwise(states)):
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == {n for n in before if (head if step < 2 else encoder)(n)}
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert reply.steps == 4


def test_phases_by_hand_with_fresh_momentum(two: TwoPhases) -> None:
    at, net = site(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(two, epochs=2), at, net)
    for moves in (head, head, encoder, encoder):
        hand.step(*all_of(at), moves=moves)
    same(reply.message["model"], hand)


def test_same_phase_twice_starts_the_optimizer_anew() -> None:
    @dataclass(frozen=True)
    class Twice(Method):
        name: ClassVar[str] = "twice"

        def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
            return (Phase(self.loss), Phase(self.loss))

    at, net = site(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(Twice()), at, net)
    for _ in range(2):
        hand.velocity = {n: torch.zeros_like(t) for n, t in hand.velocity.items()}
        hand.step(*all_of(at))
    same(reply.message["model"], hand)


def test_phase_lr_and_momentum(two: TwoPhases) -> None:
    two.second.update(lr=0.03, momentum=0.2, epochs=3)
    at, net = site(), network()
    hand = Hand(start(net)["model"], 0.1, 0.9, 0.01)
    reply = train(setup(two), at, net)
    for _ in range(2):
        hand.step(*all_of(at), moves=head)
    hand.lr, hand.momentum = 0.03, 0.2
    for _ in range(3):
        hand.step(*all_of(at), moves=encoder)
    same(reply.message["model"], hand)
    assert reply.lr == 0.03


def test_phase_lr_of_zero_is_zero(two: TwoPhases) -> None:
    two.second.update(lr=0.0)
    net = network()
    reply = train(setup(two), site(), net)
    before = start(network())["model"]
    assert torch.equal(reply.message["model"]["encoder.1.weight"], before["encoder.1.weight"])


def test_phase_batch(two: TwoPhases) -> None:
    two.second.update(batch=3)
    assert train(setup(two), site(10)).steps == 2 + 4


def test_phase_clip(two: TwoPhases) -> None:
    limit = 1e-3
    two.second.update(clip=limit, momentum=0.0)
    reply = train(setup(two, weight_decay=0.0), site())
    before, after = two.states[2], reply.message["model"]
    length = math.sqrt(sum(float((after[n] - t).square().sum()) for n, t in before.items()))
    assert length == pytest.approx(0.1 * limit, rel=1e-3)


@pytest.mark.parametrize("by", ["phase", "training"])
def test_adam(two: TwoPhases, by: str) -> None:
    at, net = site(), network()
    if by == "phase":
        two.second.update(optimizer="adam", lr=0.01)
        reply = train(setup(two, weight_decay=0.0), at, net)
        before, names = two.states[2], [n for n in two.states[2] if encoder(n)]
    else:
        before = start(net)["model"]
        reply = train(setup(optimizer="adam", lr=0.01, weight_decay=0.0), at, net)
        names = list(before)
    hand = Hand(before, 1.0, 0.0, 0.0)
    hand.step(*all_of(at))
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
    reply = train(s, site(10, classes), network(norm=True))
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
    at, net = site(10, classes), network(norm=True)
    s = setup(Recorder(passes="post", kept=0.2), Augment(padding=2), batch=4, epochs=2)
    reply = train(s, at, net)
    load(net, reply.message["model"])
    rows = torch.cat([b.rows for b, _ in Recorder.seen]).unique()
    assert len(rows) == 8, "not over the holdout samples"
    with torch.no_grad():
        x, y = all_of(at)
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

    reply = train(setup(Last(passes="last_epoch")), site(10))
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
        train(setup(Forgets()), site())


def test_features_are_a_clean_pass_over_the_training_samples() -> None:
    got: list[tuple[Tensor, Tensor]] = []

    @dataclass(frozen=True)
    class Features(Recorder):
        name: ClassVar[str] = "features"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            got.append(client.features())
            assert client.network.training
            return {}, {}

    at, net = site(10), network(norm=True)
    reply = train(setup(Features(kept=0.3), Augment(padding=2)), at, net)
    rows = Recorder.seen[0][0].rows.sort().values
    load(net, reply.message["model"])
    x, y = all_of(at)
    with torch.no_grad():
        torch.testing.assert_close(got[0][0], net.eval()(x[rows]).feature)
    assert torch.equal(got[0][1], y[rows])
    assert not got[0][0].requires_grad


# ---- further passes, probe, holdout --------------------------------------------------------------


@dataclass(frozen=True)
class Extra(Recorder):
    """Further forward passes, whose value does not matter."""

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
    replies = [
        train(setup(Extra(passes="last_epoch", times=t), batch=4), site(10), network(norm=True))
        for t in (0, 3)
    ]
    assert tree.equal(replies[0].message, replies[1].message)
    model = replies[1].message["model"]
    assert int(model["encoder.0.num_batches_tracked"]) == 3
    assert float(model["encoder.0.running_mean"].abs().sum()) > 0, "the main pass moves them"
    assert replies[1].message["prototypes"]["count"].sum() == 10


def test_further_passes_normalize_with_their_own_batch() -> None:
    net = network(norm=True).train()
    client = Client(FedAvg(), net, SIZES, received=start(net), mine={})
    x = all_of(site(6))[0]
    client.begin_step(1)
    main, further = client.forward(x), client.forward(3 * x)
    torch.testing.assert_close(further.feature, main.feature, rtol=1e-3, atol=1e-3)
    assert all(m.track_running_stats for m in net.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("training", [True, False])
def test_probe_uses_other_weights_and_changes_nothing(training: bool) -> None:
    net = network(norm=True).train(training)
    x, _ = all_of(site(6))
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

    at, net = site(40), network(norm=True)
    received = start(net)
    train(setup(Evaluates(kept=0.25), batch=8, epochs=2), at, net)
    trained = set(torch.cat([b.rows for b, _ in Recorder.seen]).tolist())
    held = set(range(40)) - trained
    assert len(held) == 10, "holdout rows are in no training batch"
    rows = torch.tensor(sorted(held if part == "holdout" else trained))
    x, y = all_of(at)
    load(net, received["model"])
    with torch.no_grad():
        logits = net.eval()(x[rows]).logits
    expected = {
        "accuracy": float((logits.argmax(1) == y[rows]).double().mean()),
        "loss": float(F.cross_entropy(logits, y[rows])),
    }
    assert got[0] == pytest.approx(expected, rel=1e-12)


def test_holdout_is_the_same_in_every_round_and_counts_out() -> None:
    seen = []
    for round in range(2):
        Recorder.seen.clear()
        reply = train(setup(Recorder(kept=0.3)), site(20), round=round)
        assert reply.samples == 14
        seen.append(set(Recorder.seen[0][0].rows.tolist()))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14


def test_too_few_samples_to_hold_out_and_nothing_to_evaluate() -> None:
    with pytest.raises(ProtofedError, match=r"left-0 has 4 samples.*10%"):
        train(setup(Recorder(kept=0.1)), site(4))

    @dataclass(frozen=True)
    class Asks(Method):
        name: ClassVar[str] = "asks"

        def upload(self, client: Client) -> tuple[Tree, Tree]:
            client.evaluate(client.start)
            return {}, {}

    with pytest.raises(RuntimeError, match="left-0 has no samples in its holdout"):
        train(setup(Asks()), site())
    net = network()
    with pytest.raises(RuntimeError, match="server"):
        Client(FedAvg(), net, SIZES, received={}, mine={}).features()


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
        local(setup(Looks(), batch=5), net, site(10), start(net), {}, round)
    assert [s[:2] for s in seen] == [(0, 0), (0, 0), (1, 0.5), (1, 0.5), (2, 1), (2, 1)]
    assert len({s[2] for s in seen}) == 6, "each step draws other numbers"
    first = seen[0]
    local(setup(Looks(), batch=5), net, site(10), start(net), {}, 0)
    assert seen[6] == first, "and the same ones when it is run again"
    key = torch.tensor(keys.key(0, 0, "left-0", 0, 0, "step"))
    assert first[2] == tuple(keys.uniform(key, 1, (5,)).tolist())


def test_an_error_in_a_loss_tells_whose_it_was() -> None:
    @dataclass(frozen=True)
    class Breaks(Method):
        name: ClassVar[str] = "breaks"

        def loss(self, client: Client, batch: Batch) -> Terms:
            return {"ce": batch.x @ batch.y}

    with pytest.raises(RuntimeError) as error:
        train(setup(Breaks()), site(10))
    note = "in the loss of breaks, client left-0, batch x [10, 3, 8, 8]"
    assert error.value.__notes__ == [note]


def test_scores_that_are_no_numbers_are_an_error() -> None:
    """``argmax`` would take them for the largest, and count their images as of that class."""

    @dataclass(frozen=True)
    class Undecided(Method):
        name: ClassVar[str] = "undecided"

        def predict(self, client: Client, x: Tensor) -> Tensor:
            scores = client.forward(x).logits.clone()
            scores[0, 1] = math.nan
            return scores

    net, images = network(), site(10).images
    tests = {"left": images}
    words = "undecided gives scores that are no numbers for test images of left.*predict"
    with pytest.raises(Diverged, match=words):
        module.evaluate(setup(Undecided()), net, start(net), {}, tests, batch=3)
    huge = {"model": {n: t * 1e306 for n, t in start(net)["model"].items()}}
    with pytest.raises(Diverged, match=r"no numbers.*too large.*smaller --lr"):
        module.evaluate(setup(), net, huge, {}, tests)
    broken = {"model": {n: t * math.nan for n, t in start(net)["model"].items()}}
    with pytest.raises(Diverged, match="the model is not finite"):
        module.evaluate(setup(), net, broken, {}, tests)


@pytest.mark.parametrize("score", [-math.inf, math.inf])
def test_a_class_may_be_ruled_out_but_not_be_beyond_all_numbers(score: float) -> None:
    @dataclass(frozen=True)
    class Sure(Method):
        name: ClassVar[str] = "sure"

        def predict(self, client: Client, x: Tensor) -> Tensor:
            return client.forward(x).logits.index_fill(1, torch.tensor([1]), score)

    net, images = network(), site(10).images
    given = (setup(Sure()), net, start(net), {}, {"left": images})
    if score < 0:
        assert module.evaluate(*given)["accuracy"].keys() == {"left"}
    else:
        with pytest.raises(Diverged, match="no numbers"):
            module.evaluate(*given)


def test_losses_are_sums_over_the_steps_and_the_objective_their_sum() -> None:
    @dataclass(frozen=True)
    class Halves(Method):
        name: ClassVar[str] = "halves"

        def loss(self, client: Client, batch: Batch) -> Terms:
            ce = super().loss(client, batch)["ce"]
            return {"a": 0.25 * ce, "b": 0.75 * ce, "rows": batch.rows.double().mean() + 0 * ce}

    at = site(10)
    reply, plain = train(setup(Halves(), batch=5), at), train(setup(batch=5), at)
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
        train(setup(Bad()), site(name="right-3"), round=2)
    text = str(error.value)
    for part in ("client right-3", "round 3", "phase 1", "'bad'", str(value), "--lr"):
        assert part in text
    assert error.value.exit_code == 3


def test_load_wants_exactly_the_networks_entries() -> None:
    net = network()
    whole = start(net)["model"]
    short = {n: t for n, t in whole.items() if n != "head.bias"}
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        load(net, short)
    with pytest.raises(ProtofedError, match="stranger"):
        load(net, {**whole, "stranger": torch.ones(1)})
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        local(setup(), net, site(), {"model": short}, {}, 0)


@pytest.mark.parametrize("shape", [(1,), (), (CLASSES + 1,)])
def test_load_refuses_another_shape(shape: tuple[int, ...]) -> None:
    net = network()
    with pytest.raises(ProtofedError, match=r"head\.bias"):
        load(net, {**start(net)["model"], "head.bias": torch.ones(shape)})


def test_load_copies() -> None:
    net = network()
    model = {n: t + 1 for n, t in start(net)["model"].items()}
    addresses = [p.data_ptr() for p in net.parameters()]
    load(net, model)
    assert tree.equal(start(net), {"model": model})
    assert addresses == [p.data_ptr() for p in net.parameters()]
    model["head.bias"].add_(1)
    assert not tree.equal(start(net), {"model": model})
