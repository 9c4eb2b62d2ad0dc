"""What a client sends is bounded by what the others send, and by what a client can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.config import make_config
from protofed.errors import Diverged, ProtofedError
from protofed.federation import dry_run
from protofed.federation.bounds import Bounds, OutOfBounds, recorded, shortened, size, sizes
from protofed.federation.client_round import Reply
from protofed.federation.simulation import Federation
from protofed.method import Method
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedccrl import FedCCRL
from protofed.methods.fedmd import FedMD
from protofed.methods.ga import FedAvgGA
from protofed.runs.records import to_line, without_times
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")


def reply(message: Tree, samples: int = 10, steps: int = 3) -> Reply:
    return Reply(message, {}, samples, steps, 0.1)


def prototypes(*rows: float, count: Any = None) -> Tree:
    mean = torch.tensor(rows)[:, None] * torch.tensor([[0.6, 0.8]])
    count = torch.ones(len(rows)) if count is None else torch.tensor(count)
    return {"prototypes": {"mean": mean, "count": count}}


def test_the_size_of_a_slot() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)}
    model = {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9)}
    assert size("model", model, start) == pytest.approx(5)  # of the change, and of floats
    assert size("change", model, start) == pytest.approx(41**0.5)
    # of prototypes the longest
    assert sizes(prototypes(2.0, 7.0, 0.0, count=[1.0, 2.0, 0.0]), {})["prototypes"] == (
        pytest.approx(7)
    )
    assert sizes(prototypes(0.0, count=[0.0]), {}) == {}
    table = {"mean": torch.ones(2, 3, 4), "mask": torch.tensor([[1.0, 0, 0], [0, 0, 0]])}
    assert size("prototypes", table, {}) == pytest.approx(2)


def test_a_slot_with_a_row_for_each_image_has_the_size_of_its_rows() -> None:
    one = {"x": torch.tensor([[3.0, 4.0]])}
    many = {"x": torch.tensor([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0], [-3.0, 4.0]])}
    assert size("colors", one, {}, {"colors"}) == size("colors", many, {}, {"colors"}) == 5
    assert size("colors", many, {}) == 10
    assert size("colors", {"x": torch.zeros(0, 2)}, {}, {"colors"}) == 0
    short = shortened("colors", many, {}, 2.5, {"colors"})
    assert torch.allclose(short["x"], many["x"] / 2)


def test_shortened_slots_have_the_size_of_the_limit() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "v": torch.tensor([2.0])}
    model = {"w": torch.tensor([4.0, 5.0]), "v": torch.tensor([2.0]), "n": torch.tensor(9)}
    short = shortened("model", model, start, 1.0)
    assert size("model", short, start) == pytest.approx(1)
    assert torch.allclose(short["w"], torch.tensor([1.6, 1.8])) and short["n"] == 9
    (slot,) = prototypes(2.0, 7.0).values()
    assert torch.allclose(
        shortened("prototypes", slot, {}, 3.0)["mean"].norm(dim=1), torch.tensor([2.0, 3.0])
    )
    assert shortened("model", model, start, 99.0) is model


def rounds(bounds: Bounds, *each: dict[str, float]) -> list[set[str]]:
    """Whose prototypes of these lengths are out of bounds, round by round."""
    found = []
    for lengths in each:
        for name, length in lengths.items():
            bounds.admit(name, reply(prototypes(length)), {})
        outside = bounds.outside()
        found.append(set(outside))
        for name in outside:
            bounds.settle(name, None)
        bounds.close()
    return found


def four(a: float, b: float = 1.0, c: float = 1.0, d: float = 1.0) -> dict[str, float]:
    return dict(zip("abcd", (a, b, c, d), strict=True))


def test_the_bound_is_ten_times_the_median() -> None:
    bounds = Bounds(lambda: {"prototypes": 1.0}, clients=4)
    found = rounds(
        bounds,
        four(9.9),
        four(10.1),
        {"a": 9.0, "b": 11.0},  # two replies: the median of the rounds before counts
        four(50, 50, 50, 50),  # all of them: nobody stands out
        four(600, 50, 50, 50),
    )
    assert found == [set(), {"a"}, {"b"}, set(), {"a"}]


def test_the_median_is_that_of_the_last_five_rounds() -> None:
    bounds = Bounds(dict, clients=4)
    bounds.restore([{"prototypes": size} for size in (1.0, 50.0, 50.0, 50.0, 1.0, 1.0)])
    assert rounds(bounds, {"a": 499.0, "b": 501.0}) == [{"b"}]


def test_the_first_round_is_held_against_the_dry_run() -> None:
    asked = []

    def dry() -> dict[str, float]:
        asked.append(1)
        return {"prototypes": 2.0}

    assert rounds(Bounds(dry, clients=9), {"a": 21.0, "b": 19.0}, {"a": 12.0}) == [{"a"}, set()]
    assert asked == [1]


def test_few_clients_have_an_absolute_bound() -> None:
    """Of three, two can make a median: one that grows tenfold a round would follow itself."""
    bounds = Bounds(lambda: {"prototypes": 1.0}, clients=3)
    lie = {"a": 9.0, "b": 9.0, "c": 1.0}
    found = rounds(bounds, lie, {**lie, "a": 90.0, "b": 90.0}, {**lie, "a": 101.0, "b": 99.0})
    assert found == [set(), set(), {"a"}]


def test_a_slot_that_the_dry_run_leaves_empty_is_held_against_the_others() -> None:
    """GA's scores: no image of noise is classified correctly."""
    assert rounds(Bounds(dict, clients=4), four(10.1), four(9.9)) == [{"a"}, set()]
    bounds = Bounds(dict, clients=4)
    for name, length in four(10.1).items():
        bounds.admit(name, reply(prototypes(length)), {})
    assert "10 times the median of this round" in bounds.outside()["a"]["prototypes"][1]


def test_where_most_send_nothing_or_few_reply_an_empty_slot_has_no_bound() -> None:
    """Ten times 0 would refuse the first honest client; of two replies, a lie the other one."""
    assert rounds(Bounds(dict, clients=4), four(0, 0, 0, 0), four(7)) == [set(), set()]
    assert rounds(Bounds(dict, clients=4), {"a": 7.0, "b": 1e-6}) == [set()]
    assert rounds(Bounds(dict, clients=2), {"a": 7.0, "b": 1e-6}) == [set()]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (prototypes(1.0, 1.0, count=[5.0, 6.0]), "sum to at most 10 samples"),
        (prototypes(1.0, 1.0, count=[0.5, 6.0]), "whole numbers from 0 to 10"),
        (prototypes(1.0, 1.0, count=[-1.0, 6.0]), "whole numbers"),
        ({"p": {"mean": torch.ones(1, 2, 3), "mask": torch.tensor([[1.0, 2.0]])}}, "from 0 to 1"),
        ({"model": {"bn.running_var": torch.tensor([1.0, -0.1])}}, "is a variance"),
        ({"model": {"bn.num_batches_tracked": torch.tensor(2**62)}}, "in 3 steps"),
        ({"model": {"bn.num_batches_tracked": torch.tensor(3)}}, "moved by -1"),
    ],
)
def test_numbers_that_no_client_can_have(message: Tree, words: str) -> None:
    start = {"bn.num_batches_tracked": torch.tensor(4)}
    with pytest.raises(OutOfBounds, match=words):
        Bounds(dict, clients=4).admit("a", reply(message), start)


def test_numbers_that_a_client_can_have() -> None:
    start = {"bn.num_batches_tracked": torch.tensor(4)}
    fine: Tree = {
        **prototypes(1.0, 1.0, count=[4.0, 6.0]),
        "model": {
            "bn.num_batches_tracked": torch.tensor(7),
            "bn.running_var": torch.tensor([1.0, 0.0]),  # a channel that is dead long enough
        },
    }
    Bounds(dict, clients=4).admit("a", reply(fine), start)
    noised = Bounds(dict, clients=4, count_noise=2.0)  # ten standard deviations are allowed
    noised.admit("a", reply(prototypes(1.0, 1.0, count=[0.0, 29.9])), start)
    for counts in ([0.0, 30.1], [-0.5, 1.0], [19.3, 19.3]):
        with pytest.raises(OutOfBounds, match=r"numbers from 0 to 30 that sum to at most 38\.28"):
            noised.admit("a", reply(prototypes(1.0, 1.0, count=counts)), start)


# ---- in a run ------------------------------------------------------------------------------------


def lying(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, str, Tree], Tree]) -> None:
    """Let clients of the simulator send something else than they computed."""
    from protofed.federation import simulation

    attacked = simulation.attacked

    def lie(kind: str, message: Tree, start: Any, key: Any) -> Tree:
        _, round, name = key
        assert attacked
        return change(round, name, message)

    monkeypatch.setattr(simulation, "attacked", lie)


def config(**settings: Any) -> Any:
    values = {**TINY, "rounds": 3, "attack": "noise", "attackers": 0.25, **settings}
    return make_config(tiny_task(), "fpl", **values)


def huge(round: int, name: str, message: Tree) -> Tree:
    if round != 1:
        return message
    slot = message["prototypes"]
    return {**message, "prototypes": {**slot, "mean": torch.full_like(slot["mean"], 1e5)}}


def test_a_lie_is_refused_by_name_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1e5 in every prototype, once: it used to end a run for good."""
    lying(monkeypatch, huge)
    found = run(tiny_task(), config=config(), out=tmp_path / "run")
    (liar,) = Federation(config(), tiny_task()).attackers
    problems = [record.get("problems") for record in found.rounds]
    assert problems[0] is None and problems[2] is None
    assert list(problems[1]) == [liar]
    assert "'prototypes' has the norm" in problems[1][liar]
    assert [r["clients"] for r in found.rounds] == [4, 3, 4]
    assert all(r["norms"]["prototypes"] < 1e3 for r in found.rounds)


@pytest.mark.parametrize("setting", ["min_class_count", "proto_epsilon"])
def test_prototypes_that_a_dry_run_would_not_send_are_bounded_too(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Of two clients, whose bound is that of the dry run alone."""
    if setting == "proto_epsilon":
        pytest.importorskip("dp_accounting")

    def claims(round: int, name: str, message: Tree) -> Tree:
        slot = {n: torch.ones_like(t) for n, t in message["prototypes"].items()}
        return {**message, "prototypes": {**slot, "mean": slot["mean"] * 1e5}}

    lying(monkeypatch, claims)
    task = tiny_task(clients=1)
    values = {**TINY, "rounds": 1, "attack": "noise", "attackers": 0.5, setting: 5}
    found = run(task, "fpl", **values)
    (why,) = found.rounds[0]["problems"].values()
    assert "'prototypes' has the norm" in why
    if setting == "proto_epsilon":  # a hundred times the longest feature that counts in full
        assert "more than 1000" in why


def test_honest_clients_may_have_very_different_numbers_of_images() -> None:
    """Of FedCCRL, whose message has a row for each; as one norm, it grew with their root."""
    task = tiny_task(samples=480, classes_of={"left": [0, 1, 2, 3], "right": [0, 1, 2, 3]})
    samples = {"left": 1.0, "right": 4}
    clients = {"left": 1, "right": 3}
    settings = {**TINY, "rounds": 2, "epochs": 1, "samples": samples, "clients": clients}
    found = run(task, FedCCRL(ratio=1.0), **{**settings, "batch": 64})
    for record in found.rounds:
        assert "problems" not in record and record["norms"]["styles"] < 10


def test_fedmds_first_logits_may_be_far_larger_than_the_dry_runs() -> None:
    """They are of more images, and of networks that have been trained."""
    task = tiny_task(spare=1000)
    settings = {**TINY, "rounds": 1, "epochs": 40, "participation": 0.5}
    found = run(task, FedMD(), **settings)
    assert "problems" not in found.rounds[0]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedAvgGA(holdout=0.05), {}),  # of twelve images, none would be held out
        # twelve are a batch and one image, too small for the BatchNorm of maps of one pixel
        (FedAvg(), {"model": "resnet10", "batch": 11}),
    ],
)
def test_a_dry_run_has_as_many_images_as_it_needs(method: Method, settings: Any) -> None:
    found = run(tiny_task(), method, **{**TINY, "rounds": 1, "epochs": 1, **settings})
    assert found.rounds[0]["clients"] == 4


def test_a_dry_run_is_not_as_large_as_an_absurd_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for a client, which has no more images than it has."""
    real, seen = dry_run.noise_message, []

    def counted(setup: Any, network: Any, server: Any, images: int, *rest: Any, **more: Any) -> Any:
        seen.append(images)
        return real(setup, network, server, images, *rest, **more)

    monkeypatch.setattr(dry_run, "noise_message", counted)
    for batch in (100, 10**6):
        run(tiny_task(), FedAvg(), **{**TINY, "rounds": 1, "epochs": 1, "batch": batch})
    assert seen == [100, 256]


def test_clipping_and_letting_it_count_are_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, huge)
    clipped = run(tiny_task(), config=config(bounds="clip"))
    (why,) = clipped.rounds[1]["problems"].values()
    assert why.endswith("; clipped") and clipped.rounds[1]["clients"] == 4
    open_ = run(tiny_task(), config=config(bounds="off", rounds=2))
    assert "problems" not in open_.rounds[1] and open_.rounds[1]["clients"] == 4


def test_a_run_whose_replies_are_all_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def negative(round: int, name: str, message: Tree) -> Tree:
        slot = message["prototypes"]
        return {**message, "prototypes": {**slot, "count": -slot["count"] - 1}}

    lying(monkeypatch, negative)
    with pytest.raises(Diverged, match=r"round 1: every reply was refused; .*whole numbers"):
        run(tiny_task(), config=config(attackers=0.99))


@pytest.mark.parametrize("clients", [2, 1])
def test_a_resumed_run_refuses_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clients: int
) -> None:
    """The medians of the rounds before are in the records; few clients have the dry run's."""
    lying(monkeypatch, lambda round, *rest: huge(1 if round == 2 else 0, *rest))
    three, two = (config(rounds=n, attackers=0.5, clients=clients) for n in (3, 2))
    whole = run(tiny_task(), config=three, out=tmp_path / "whole")
    run(tiny_task(), config=two, out=tmp_path / "parts")
    parts = run(tiny_task(), config=three, out=tmp_path / "parts", resume=True)
    assert parts.rounds[2]["problems"] == whole.rounds[2]["problems"]
    assert parts.rounds["norms.model"] == whole.rounds["norms.model"]


def test_a_resumed_run_looks_back_on_rounds_without_prototypes() -> None:
    """They count: or it would look further back than a run that was not interrupted."""
    whole, resumed = (Bounds(lambda: {"prototypes": 1.0}, clients=4) for _ in range(2))
    rounds(whole, four(50, 50, 50, 50), *[{}] * 5)
    norms = [{"prototypes": 50.0}, *[{}] * 5]
    resumed.restore(recorded({"norms": n} if n else {} for n in norms))
    assert rounds(whole, four(11)) == rounds(resumed, four(11)) == [{"a"}]


def test_records_do_not_depend_on_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    def partly(round: int, name: str, message: Tree) -> Tree:
        if name.startswith("left"):  # both are refused
            slot = message["prototypes"]
            return {**message, "prototypes": {**slot, "count": -slot["count"] - 1}}
        return message if name == "right-0" else dict(reversed(message.items()))

    lying(monkeypatch, partly)
    lines = []
    for step in (1, -1):
        fed = Federation(config(attackers=0.99), tiny_task())
        train = fed.engine.train

        def in_order(*given: Any, train: Any = train, step: int = step) -> Iterator[Any]:
            yield from [*train(*given)][::step]

        fed.engine.train = in_order  # type: ignore[method-assign, assignment]
        lines += map(to_line, without_times([fed.run_round()]))
    assert lines[0] == lines[1] and lines[0].count("out of bounds") == 2


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_method_cannot_switch_the_bounds_off(factor: float) -> None:
    with pytest.raises(ProtofedError, match="size_limit must be a finite number"):
        Bounds(dict, clients=4, factor=factor)


def test_a_norm_that_overflows_is_out_of_bounds_where_nothing_is_known() -> None:
    bounds = Bounds(dict, clients=4)
    large = torch.full((2,), 1.7e308, dtype=torch.float64)
    bounds.admit("a", reply({"scores": {"own": large}}), {})
    assert set(bounds.outside()) == {"a"}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("slot", ["model", "prototypes"])
@pytest.mark.parametrize("setting", ["refuse", "clip"])
def test_a_reply_that_is_not_finite_does_not_count(
    monkeypatch: pytest.MonkeyPatch, setting: str, slot: str, value: float
) -> None:
    """NaN is not larger than any limit, and nothing clips an infinity to one."""

    def broken(round: int, name: str, message: Tree) -> Tree:
        entry = {"model": "head.weight", "prototypes": "mean"}[slot]
        t = message[slot][entry].clone()
        t[0] = value
        return {**message, slot: {**message[slot], entry: t}}

    lying(monkeypatch, broken)
    found = run(tiny_task(), config=config(rounds=1, bounds=setting)).rounds[0]
    (why,) = found["problems"].values()
    assert found["clients"] == 3 and why.startswith("out of bounds: ") and "clipped" not in why
    assert ("nan: not finite" in why) == math.isnan(value)
    hidden = {"mean": torch.tensor([[value]]), "count": torch.tensor([0.0])}
    with pytest.raises(OutOfBounds):
        Bounds(dict, clients=4).admit("a", reply({"prototypes": hidden}), {})


def test_prototypes_that_are_not_there_are_bounded_too() -> None:
    """Whatever a method's server computes of them before it looks at the mask."""
    hidden = {"mean": torch.tensor([[1.0], [3e38]]), "count": torch.tensor([1.0, 0.0])}
    assert size("prototypes", hidden, {}) == pytest.approx(3e38)
    assert size("p", {"mean": torch.ones(1, 1), "count": torch.zeros(1)}, {}) == 1
    assert size("p", {"mean": torch.zeros(1, 1), "count": torch.zeros(1)}, {}) is None
    assert shortened("p", hidden, {}, 2.0)["mean"].flatten().tolist() == [1.0, 2.0]


def test_a_method_may_allow_more() -> None:
    four_clients = Bounds(dict, clients=4, factor=50.0)
    assert rounds(four_clients, four(1), four(49.0), four(51.0)) == [set(), set(), {"a"}]
    few = Bounds(lambda: {"prototypes": 1.0}, clients=3, factor=50.0)
    assert rounds(few, {"a": 499.0, "b": 501.0}) == [{"b"}]
