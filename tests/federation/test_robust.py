"""Robust aggregation against hand-made numbers, and in runs with attackers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation import robust
from protofed.federation.attacks import STRENGTH, attacked, choose_attackers, flipped
from protofed.federation.robust import outlyingness, robust_updates, trimmed_mean
from protofed.federation.simulation import Federation
from protofed.federation.spool import Spool
from protofed.method import Update, weighted_mean
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task
from protofed.tree import Slot, Tree

pytestmark = pytest.mark.usefixtures("single_thread")

START: Slot = {"w": torch.zeros(2), "n": torch.tensor(0)}


def updates(*messages: Tree) -> list[Update]:
    spool = Spool()
    for i, message in enumerate(messages):
        spool.put(str(i), message)
    return [Update(str(i), 10, 1, 0.1, spool) for i in range(len(messages))]


def models(*values: tuple[float, float]) -> list[Update]:
    return updates(*({"model": {"w": torch.tensor(v), "n": torch.tensor(4)}} for v in values))


def table(*rows: tuple[float, float] | None) -> Tree:
    mean = torch.tensor([row or (9.0, 9.0) for row in rows])
    return {
        "prototypes": {"mean": mean, "count": torch.tensor([float(r is not None) for r in rows])}
    }


def joined(kind: str, given: list[Update], fraction: float = 0.2) -> list[Update]:
    return robust_updates(kind, fraction, given, {"model", "prototypes"}, START)


def test_the_trimmed_mean_and_the_median() -> None:
    column = torch.tensor([7.0, 1.0, 100.0, 2.0, 3.0])[:, None]
    assert trimmed_mean(column, 0.2) == (7 + 2 + 3) / 3
    assert trimmed_mean(column, 0.21) == 3 == trimmed_mean(column, 1.0)
    assert trimmed_mean(column[:4], 1.0) == (7 + 2) / 2
    assert trimmed_mean(column[:2], 0.4) == 4
    assert trimmed_mean(column[:1], 0.4) == 7


def test_a_fraction_that_floats_round_up_leaves_out_no_more() -> None:
    column = torch.arange(50.0)[:, None]
    column[-8:] = torch.tensor([100.0, *[1e6] * 7])[:, None]
    assert trimmed_mean(column, 0.14) == (sum(range(7, 42)) + 100) / 36
    given = models(*((1.0 + i % 5, 2.0) for i in range(50)))
    assert [len(joined("krum", given, f)) for f in (0.14, 0.1401, 0.15)] == [43, 42, 42]


@pytest.mark.parametrize(("kind", "w"), [("trimmed", [2.0, 3.0]), ("median", [2.0, 2.0])])
def test_of_each_coordinate_of_the_weights(kind: str, w: list[float]) -> None:
    given = models((1.0, 2.0), (2.0, 1e9), (3.0, 2.0), (-1e9, 5.0), (2.0, -7.0))
    found = joined(kind, given)
    mean = weighted_mean(found, "model", [1.0, 2.0, 3.0, 4.0, 5.0])  # whatever the weights
    assert mean["w"].tolist() == pytest.approx(w if kind == "median" else [5 / 3, 3.0])
    assert mean["n"] == 4


def test_of_each_class_s_prototypes() -> None:
    given = updates(
        table((1.0, 1.0), None), table((2.0, 3.0), (4.0, 4.0)), table((900.0, 2.0), None)
    )
    found = [u["prototypes"] for u in joined("median", given)]
    assert all(slot["mean"][0].tolist() == [2.0, 2.0] for slot in found)
    assert [slot["mean"][1].tolist() for slot in found] == [[9.0, 9.0], [4.0, 4.0], [9.0, 9.0]]
    assert [slot["count"].tolist() for slot in found] == [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    assert given[2]["prototypes"]["mean"][0, 0] == 900  # what was sent does not change


def test_of_a_table_with_several_prototypes_a_class() -> None:
    def several(*rows: float, mask: list[float]) -> Tree:
        return {
            "prototypes": {"mean": torch.tensor([rows])[..., None], "mask": torch.tensor([mask])}
        }

    given = updates(
        several(1.0, 2.0, 99.0, mask=[1.0, 1.0, 0.0]), several(3.0, mask=[1.0]),
        several(500.0, 4.0, mask=[1.0, 1.0]),
    )  # fmt: skip
    found = [u["prototypes"]["mean"].flatten().tolist() for u in joined("median", given)]
    assert found == [[3.0, 3.0, 99.0], [3.0], [3.0, 3.0]]


@pytest.mark.parametrize("kind", ["median", "trimmed"])
def test_a_client_with_many_prototypes_of_a_class_has_one_vote(kind: str) -> None:
    def of_class(value: float, many: int) -> Tree:
        mask = torch.tensor([[1.0] * many])
        return {"prototypes": {"mean": torch.full((1, many, 2), value), "mask": mask}}

    given = updates(of_class(100.0, 16), *(of_class(1.0, 2) for _ in range(4)))
    for update in joined(kind, given):
        assert bool((update["prototypes"]["mean"] == 1).all())


@pytest.mark.parametrize("other", [{"x": torch.ones(3)}, {"y": torch.ones(2)}, {}])
@pytest.mark.parametrize("first", [True, False])
def test_a_slot_without_common_coordinates(other: Slot, first: bool) -> None:
    """A first client without it would let through what the others send."""
    messages: list[Tree] = [{"model": {"x": torch.ones(2)}}, {"model": other}]
    given = updates(*messages[:: -1 if first else 1])
    with pytest.raises(ProtofedError, match="slot 'model' has other entries, or entries of an"):
        joined("median", given)[0]["model"]
    assert len(joined("krum", given)) == 1


def test_clip_shortens_to_the_median_norm() -> None:
    given = models((3.0, 4.0), (0.6, 0.8), (-300.0, 400.0))
    found = joined("clip", given)
    assert [u["model"]["w"].norm().item() for u in found] == pytest.approx([5, 1, 5])
    assert found[2]["model"]["w"].tolist() == pytest.approx([-3, 4])
    given = updates(table((3.0, 4.0)), table((6.0, 8.0)), table((0.0, 900.0)))
    norms = [u["prototypes"]["mean"].norm().item() for u in joined("clip", given)]
    assert norms == pytest.approx([5, 10, 10])


def test_krum_drops_what_is_far_from_the_others_in_any_slot() -> None:
    near = [(1.0, 1.0), (1.1, 1.0), (1.0, 1.1), (0.9, 1.0)]
    kept = joined("krum", models(*near, (9.0, 9.0)))
    assert [u.name for u in kept] == ["0", "1", "2", "3"]
    messages = [{"model": {"w": torch.tensor(w)}} | table(w) for w in near]
    messages.insert(1, {"model": {"w": torch.tensor(near[0])}} | table((1.0, -9.0)))
    kept = joined("krum", updates(*messages))
    assert [u.name for u in kept] == ["0", "2", "3", "4"]


@pytest.mark.parametrize("slot", ["model", "prototypes"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_krum_drops_what_is_not_finite(slot: str, value: float) -> None:
    """With ``--bounds off``, nothing has refused it before."""
    near = [(1.0, 1.0), (1.1, 1.0), (1.0, 1.1), (0.9, 1.0), (1.0, 0.8), (1.2, 1.2)]
    for liar in range(len(near)):
        rows = [(value, 1.0) if i == liar else row for i, row in enumerate(near)]
        tables = [table(row, (1.0, 1.0) if i % 2 else None) for i, row in enumerate(rows)]
        given = models(*rows) if slot == "model" else updates(*tables)
        kept = {u.name for u in robust_updates("krum", 0.1, given, {slot}, START)}
        assert kept == {str(i) for i in range(len(near)) if i != liar}


def test_distances_are_the_same_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    given = updates(*({"model": {"w": torch.randn(7, 3), "b": torch.randn(5)}} for _ in range(6)))
    whole, sizes = outlyingness(given, {"model"}, 1), list[torch.Size]()
    monkeypatch.setattr(robust, "BLOCK", 4)
    squared = robust._squared
    monkeypatch.setattr(robust, "_squared", lambda x: sizes.append(x.shape) or squared(x))
    assert outlyingness(given, {"model"}, 1) == pytest.approx(whole, rel=1e-12)
    assert max(columns for _, columns in sizes) == 4


def test_clients_without_a_class_in_common_are_not_outliers() -> None:
    near = [table((1.0, 1.0), None), table((1.0, 1.1), None), table((1.0, 0.9), (2.0, 2.0))]
    given = updates(*near, table(None, (2.0, 2.1)), table((50.0, 50.0), None))
    score = outlyingness(given, {"prototypes"}, 1)
    assert max(score, key=lambda name: score[name]) == "4"
    assert score["3"] < 5 < score["4"]
    # nor are they nearest to everybody: who sends a class that nobody else has is as far as usual
    alone = updates(*near, table((1.1, 1.0), None), table(None, (50.0, 50.0)))
    assert outlyingness(alone, {"prototypes"}, 1)["4"] > 0.5


def test_without_attackers_or_with_one_client_there_is_nothing_to_do() -> None:
    given = models((1.0, 1.0), (5.0, 5.0))
    assert joined("none", given) == given
    assert joined("median", given[:1]) == given[:1]


# ---- attackers -----------------------------------------------------------------------------------


def test_lies() -> None:
    start = {"w": torch.ones(4), "bn.running_var": torch.ones(2), "n": torch.tensor(1)}
    message: Tree = {
        "model": {"w": torch.full((4,), 3.0), "bn.running_var": torch.full((2,), 5.0),
                  "n": torch.tensor(2)},
        **table((1.0, 0.0), (0.0, 1.0), (2.0, 2.0)),
    }  # fmt: skip
    scaled = attacked("scale", message, start, (0,))
    assert scaled["model"]["w"].tolist() == [1 - STRENGTH * 2] * 4
    assert scaled["model"]["bn.running_var"].tolist() == [5.0, 5.0] and scaled["model"]["n"] == 2
    noise = attacked("noise", message, start, (0,))["model"]["w"] - 1
    assert 0 < noise.norm() < 3 * STRENGTH * 4 and noise.std() > 0
    swapped = attacked("prototypes", message, start, (0,))["prototypes"]["mean"]
    assert swapped.tolist() == [[10.0, 10.0], [5.0, 0.0], [0.0, 5.0]]
    assert message["model"]["w"][0] == 3  # as it was
    images = tiny_task().domains["left"].train
    assert torch.equal(flipped(images, 4).y, 3 - images.y)


def test_attackers_are_a_fraction_of_the_clients() -> None:
    names = [str(i) for i in range(10)]
    chosen = [choose_attackers(names, f, seed=1) for f in (0.0, 0.2, 0.4)]
    assert [len(c) for c in chosen] == [0, 2, 4] and chosen[1] < chosen[2]


def test_a_fraction_that_is_no_client_is_refused() -> None:
    """An attack in name only would make any method look robust."""
    with pytest.raises(ProtofedError, match=r"attackers = 0.2 of 2 clients is none: .*to 0.5 for"):
        run(tiny_task(), **{**TINY, "clients": 1, "attack": "flip"})
    with pytest.raises(ProtofedError, match=r"none: .*to 0.99 for one client"):  # 1 is too many
        choose_attackers(["left-0"], 0.2, seed=0)


@pytest.mark.parametrize(
    ("method", "attack", "lacks"),
    [
        ("fedavg", "prototypes", "prototypes"),
        ("fedtgp", "scale", "model"),
        ("local", "noise", "model"),
        ("fpl", "prototypes", ""),
        ("fedtgp", "prototypes", ""),
        ("fedtgp", "flip", ""),
        ("fedavg", "noise", ""),
    ],
)
def test_an_attack_that_changes_nothing_is_told(
    method: str, attack: str, lacks: str, recwarn: pytest.WarningsRecorder
) -> None:
    """A warning: in a study it may be the control."""
    given = {**TINY, "attack": attack, "attackers": 0.5}
    Federation(make_config(tiny_task(), method, **given), tiny_task())
    told = [f"attack = {attack} changes nothing: {method} sends no {lacks}"] if lacks else []
    assert [str(w.message) for w in recwarn] == told


def settings(**more: Any) -> dict[str, Any]:
    return {**TINY, "rounds": 2, "clients": 3, "samples": 12, "attackers": 0.3, **more}


@pytest.mark.parametrize("attack", ["flip", "scale", "noise", "prototypes"])
def test_an_attack_changes_what_attackers_do_and_nothing_else(attack: str) -> None:
    task = tiny_task(samples=12, clients=3)
    fed = Federation(make_config(task, "fpl", **settings(attack=attack)), task)
    honest = Federation(make_config(task, "fpl", **settings()), task)
    assert len(fed.attackers) == 2 and not honest.attackers
    sent: dict[str, list[Tree]] = {}

    class Watch:
        def reply(self, round: int, name: str, message: Tree) -> None:
            sent.setdefault(name, []).append(message)

        def client(self, *args: Any) -> None: ...

        tested = client

    for federation in (fed, honest):
        federation.run_round([Watch()])  # type: ignore[list-item]
    for name, (lie, truth) in sent.items():
        assert tree.equal(lie, truth) == (name not in fed.attackers), name


@pytest.mark.parametrize("robust", ["clip", "trimmed", "median", "krum"])
def test_robust_runs_are_the_same_in_every_engine(robust: str) -> None:
    task = tiny_task(samples=12, clients=3)
    given = settings(robust=robust, attack="noise")
    models = [
        {"model": dict(run(task, "i2pfl", **{**given, **more}).model)}
        for more in ({"engine": "loop"}, {"engine": "workers", "workers": 2}, {"robust": "none"})
    ]
    assert tree.equal(models[0], models[1]) and not tree.equal(models[0], models[2])


def test_the_median_withstands_what_the_mean_does_not() -> None:
    """A third of the clients sends noise; the distance is to the model without them."""
    task = tiny_task(samples=12, clients=3)
    runs = {
        robust: run(task, "fedavg", **settings(attack=attack, robust=robust, rounds=1)).model
        for robust, attack in (("none", "noise"), ("median", "noise"), ("krum", "noise"))
    }
    honest = run(task, "fedavg", **settings(rounds=1)).model

    def far(model: Any) -> float:
        floats = [n for n, t in honest.items() if t.is_floating_point()]
        return sum(float((model[n] - honest[n]).square().sum()) for n in floats) ** 0.5

    assert far(runs["median"]) < far(runs["none"]) / 2
    assert far(runs["krum"]) < far(runs["none"]) / 2
