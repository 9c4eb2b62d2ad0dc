"""Effects of switches: what made-up accuracies were made of is found again."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from tests.studies.made_runs import DOMAINS, make_study, study

from protofed.studies.definition import load
from protofed.studies.effects import aliases, resolution
from protofed.studies.folder import TaskTable, to_text
from protofed.studies.plan import PlannedRun, Selection, plan

OVER = {"average": ["samples", "uniform"], "flip": [True, False], "lr": [0.01, 0.02],
        "tau": [0.02, 0.05], "batch": [8, 4]}  # fmt: skip
HALF = {"batch": ["average", "flip", "lr", "tau"]}
SHARED = {name: OVER[name] for name in ("average", "flip", "lr")}
SWEEPS = [
    {"rows": ["FedAvg"], "over": SHARED},
    {"rows": ["FPL"], "over": OVER, "generators": HALF},
]


def accuracy(run: PlannedRun) -> dict[str, float]:
    """+3 and +5 for averaging uniformly, −2 + seed for no flips, 4 for both: an interaction."""
    point, fpl = run.line.point, run.line.row.method == "fpl"
    uniform, plain = point["average"] == "uniform", not point["flip"]
    value = 40.0 + 10 * run.seed + (5 if fpl else 3) * uniform - (2 - run.seed) * plain
    return dict.fromkeys(DOMAINS, value + 4 * (uniform and plain) - 6 * (point.get("tau") == 0.05))


def table_of(path: Path, **more: Any) -> TaskTable:
    made = study(kind="sweep", sweep=SWEEPS, seeds=2)
    return make_study(made, path / "s", accuracy, **more).tables()[0]


def test_an_effect_is_the_mean_over_all_other_settings(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    fedavg, fpl, difference = table.effects
    means = {name: round(s.mean, 6) for name, s in fpl.of.items()}
    assert means == {
        "average: samples → uniform": 7, "flip: True → False": 0.5, "lr: 0.01 → 0.02": 0,
        "tau: 0.02 → 0.05": -6, "batch: 8 → 4": 0,
    }  # fmt: skip
    # a value for each seed: that is what the interval is of
    assert fpl.of["flip: True → False"].values == pytest.approx([0, 1])
    assert fpl.of["flip: True → False"].noise and not fpl.of["tau: 0.02 → 0.05"].noise
    assert fedavg.of["average: samples → uniform"].mean == pytest.approx(5)
    assert difference.label == "FPL − FedAvg"
    assert list(difference.of) == list(fedavg.of)
    assert difference.of["average: samples → uniform"].values == pytest.approx([2, 2])


def test_effects_are_in_every_format(tmp_path: Path) -> None:
    made = study(kind="sweep", sweep=SWEEPS, seeds=2)
    table = table_of(tmp_path)
    for form, minus in (("markdown", "-"), ("html", "-"), ("latex", "$-$")):
        text = to_text(made, [table], form)
        assert f"{minus}6.0" in text and "resolution V" in text
    text = to_text(made, [table], "markdown")
    assert "| effect | FedAvg | FPL | FPL − FedAvg |" in text
    assert "FedAvg: 8 of 8 settings; FPL: 16 of 32 settings (resolution V)." in text


def test_settings_without_all_seeds_do_not_count(tmp_path: Path) -> None:
    lines = study(kind="sweep", sweep=SWEEPS).lines
    skip = {(line.label, 1) for line in lines if line.point.get("tau") == 0.05}
    _, fpl, _ = table_of(tmp_path, skip=skip).effects
    assert "tau: 0.02 → 0.05" not in fpl.of
    assert fpl.of["average: samples → uniform"].mean == pytest.approx(7)
    assert fpl.scope == (
        "8 of 32 settings (16 planned, none with tau=0.05; interactions may show as effects)"
    )
    few = {(line.label, 0) for line in lines if line.row.method == "fpl"}
    few -= {(line.label, 0) for line in lines[8:11]}  # three settings, five unknowns
    (fedavg,) = table_of(tmp_path / "few", skip=few).effects
    assert fedavg.label == "FedAvg"


def test_a_sweep_of_two_or_of_more_values_has_no_effects(tmp_path: Path) -> None:
    for over in ({"tau": [0.1, 0.2], "lr": [0.1, 0.2]}, {**SHARED, "lr": [0.1, 0.2, 0.3]}):
        made = study(kind="sweep", sweep=[{"rows": ["FPL"], "over": over}], seeds=1)
        assert not make_study(made, tmp_path / made.hash / "s").tables()[0].effects


# ---- the study of the papers' switches -----------------------------------------------------------


def test_no_switch_is_aliased_with_two_others() -> None:
    made = load("switches")
    assert [len(sweep.points()) for sweep in made.sweeps] == [8, 16, 16]
    assert [resolution(sweep) for sweep in made.sweeps] == [None, 4, 5]
    for sweep in made.sweeps:
        points = sweep.points()
        signs = {n: [sweep.sign(p, n) for p in points] for n in sweep.over}
        columns = {frozenset({n}): column for n, column in signs.items()}
        columns |= {
            frozenset(pair): [prod(both) for both in zip(*(signs[n] for n in pair), strict=True)]
            for pair in combinations(sweep.over, 2)
        }
        for name in sweep.over:
            own = columns[frozenset({name})]
            assert sum(own) == 0  # as many settings with one value as with the other
            for other, column in columns.items():
                if other != {name}:
                    assert sum(a * b for a, b in zip(own, column, strict=True)) == 0, (name, other)
    switches = {name for sweep in made.sweeps for name in sweep.over}
    assert switches == {
        "average", "finch_level", "upcr", "ema", "proto_pass", "flip", "batch",
    }  # fmt: skip
    assert len(made.seeds) == 5
    (alone,) = [line.row.options for line in made.lines if line.sweep is None]
    assert alone == {"upcr_reduction": "sum"}


def test_the_first_setting_of_every_method_is_its_default() -> None:
    first: dict[str, str] = {}
    for run in plan(load("switches"), Selection(seeds=(0,))):
        if run.line.sweep is not None:
            first.setdefault(run.config.method.name, run.config.hash)
    default = plan(load("readings"), Selection(seeds=(0,)))
    hashes = {run.config.hash for run in default if "printed" not in run.line.label}
    assert {*first} == {"fedavg", "fpl", "i2pfl"} and {*first.values()} <= hashes


def test_effects_agree_with_least_squares_worked_out_elsewhere(tmp_path: Path) -> None:
    """Noise on everything: normal equations by hand, and the interval by scipy's t-test."""
    made = study(kind="sweep", sweep=SWEEPS, seeds=5)
    drawn: dict[tuple[str, int], float] = {}

    def noisy(run: PlannedRun) -> dict[str, float]:
        key = (run.line.label, run.seed)
        drawn[key] = 40 + random.Random(str(key)).gauss(0, 3)
        return dict.fromkeys(DOMAINS, drawn[key])

    (table,) = make_study(made, tmp_path / "s", noisy).tables()
    fedavg, fpl, difference = table.effects
    of_seed: dict[str, dict[str, list[float]]] = {}
    for row in ("FedAvg", "FPL"):
        lines = [line for line in made.lines if line.row.label == row]
        names = list(lines[0].point)
        x = np.array([
            [1.0, *(float(line.point[n] == OVER[n][1]) for n in names)] for line in lines
        ])  # fmt: skip
        for seed in range(5):
            y = np.array([drawn[line.label, seed] for line in lines])
            beta = np.linalg.solve(x.T @ x, x.T @ y)
            for name, value in zip(names, beta[1:], strict=True):
                of_seed.setdefault(row, {}).setdefault(name, []).append(float(value))
    for effects, row in ((fedavg, "FedAvg"), (fpl, "FPL")):
        for name, found in effects.of.items():
            expected = of_seed[row][name.partition(":")[0]]
            assert found.values == pytest.approx(expected, abs=1e-6)
            assert found.half is not None
            test = ttest_1samp(expected, 0).confidence_interval(0.95)
            assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
                (test.low, test.high), abs=1e-6
            )
    for name, found in difference.of.items():
        key = name.partition(":")[0]
        both = zip(of_seed["FPL"][key], of_seed["FedAvg"][key], strict=True)
        assert found.values == pytest.approx([a - b for a, b in both], abs=1e-6)


def test_what_a_fraction_cannot_tell_apart_is_said(tmp_path: Path) -> None:
    fedavg, fpl, i2pfl = load("switches").sweeps
    assert not aliases(fedavg) and not aliases(i2pfl)
    # flip = average·finch_level·upcr and batch = finch_level·upcr·proto_pass
    assert [sorted(same) for same in aliases(fpl)] == [
        ["average×finch_level", "upcr×flip"],
        ["average×upcr", "finch_level×flip"],
        ["average×proto_pass", "flip×batch"],
        ["average×flip", "finch_level×upcr", "proto_pass×batch"],
        ["average×batch", "proto_pass×flip"],
        ["finch_level×proto_pass", "upcr×batch"],
        ["finch_level×batch", "upcr×proto_pass"],
    ]
    third = [{"rows": ["FPL"], "over": SHARED, "generators": {"lr": ["average", "flip"]}}]
    made = study(kind="sweep", sweep=third, seeds=1)
    (table,) = make_study(made, tmp_path / "s", lambda run: dict.fromkeys(DOMAINS, 40.0)).tables()
    assert "average = flip×lr" in table.effect_caption
