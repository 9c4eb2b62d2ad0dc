"""The points of a search."""

from __future__ import annotations

import math

import pytest

from protofed.errors import ProtofedError
from protofed.studies.search import search_points


def test_a_small_grid_is_tried_whole() -> None:
    points = search_points({"tau": [0.02, 0.05, 0.02], "lr": [1, 2]}, 4, seed=0)
    assert points == [
        {"tau": 0.02, "lr": 1}, {"tau": 0.02, "lr": 2}, {"tau": 0.05, "lr": 1},
        {"tau": 0.05, "lr": 2},
    ]  # fmt: skip


def test_of_a_large_grid_some_points_are_drawn() -> None:
    over = {"a": list(range(5)), "b": ["x", "y"]}
    points = search_points(over, 7, seed=3)
    assert len(points) == 7
    assert all(p["a"] in over["a"] and p["b"] in over["b"] for p in points)
    assert len({(p["a"], p["b"]) for p in points}) == 7, "none twice"


def test_points_are_keyed_by_seed_and_number() -> None:
    over = {"lr": "log:0.001..0.1", "tau": [0.02, 0.05, 0.1]}
    few = search_points(over, 5, seed=1)
    assert search_points(over, 12, seed=1)[:5] == few, "a larger budget adds to the points"
    assert search_points(over, 5, seed=2) != few


def test_ranges() -> None:
    points = search_points({"lr": ["log:0.001..0.1"], "tau": "0.5..2"}, 200, seed=0)
    lr, tau = [p["lr"] for p in points], [p["tau"] for p in points]
    assert len(points) == 200 and min(lr) >= 0.001 and max(lr) <= 0.1
    assert all(float(f"{v:.3g}") == v for v in (*lr, *tau))
    below = sum(v < 0.01 for v in lr)
    assert 70 < below < 130, "as many of each power of ten"
    assert 0.5 <= min(tau) < 0.6 and 1.9 < max(tau) <= 2
    assert 60 < sum(v < 1.25 for v in tau) < 140


def test_whole_numbers() -> None:
    assert search_points({"epochs": "2..4"}, 9, 0, whole={"epochs"}) == [
        {"epochs": 2}, {"epochs": 3}, {"epochs": 4},
    ]  # fmt: skip
    logs = search_points({"epochs": "log:1..4"}, 9, 0, whole={"epochs"})
    assert sorted(p["epochs"] for p in logs) == [1, 2, 3, 4], "no more than there are"
    assert all(type(p["epochs"]) is int for p in logs)
    assert not math.isclose(search_points({"mu": "1..4"}, 1, 0)[0]["mu"] % 1, 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("0.1..", "cannot read the values of tau"),
        ("a..b", "cannot read the values of tau"),
        (["0.1..1", 2], "cannot read the values of tau"),
        ("1..0.1", "must rise"),
        ("log:0..1", "above 0"),
        ("0..inf", "must rise"),
    ],
)
def test_what_cannot_be_searched(values: str, said: str) -> None:
    with pytest.raises(ProtofedError, match=said):
        search_points({"tau": values}, 3, seed=0)
    with pytest.raises(ProtofedError, match="nothing to search over"):
        search_points({}, 3, seed=0)
