"""Mistakes that would pass for results: said in words, before or instead of a number."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import protofed
from protofed.config import make_config
from protofed.data.task import Task
from protofed.errors import Diverged, ProtofedError
from protofed.method import Phase
from protofed.methods import FPL, FedAvg
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

ONE = {**TINY, "rounds": 1}


def test_a_last_round_that_diverged_is_no_result() -> None:
    """Its losses are those from before the last step: one step, and they are finite."""
    task = tiny_task()
    with pytest.raises(Diverged, match="round 1: the averaged model is not finite"):
        run(task, "fedavg", **{**ONE, "lr": 1e40, "batch": 64, "epochs": 1})


def test_an_average_that_is_none_names_the_round() -> None:
    class Nan(FedAvg):
        def weights(self, server: Any, updates: Any) -> Any:
            return [float("nan")] * len(updates)

    with pytest.raises(Diverged, match="weights or aggregate"):
        run(tiny_task(), Nan(), **ONE)


@pytest.mark.parametrize("name", ["average", "seen average"])
def test_a_domain_cannot_have_the_name_of_a_column(name: str) -> None:
    task = tiny_task()
    domains = {name: task.domains["left"], "right": task.domains["right"]}
    with pytest.raises(ProtofedError, match="cannot be called"):
        Task(task.name, task.classes, domains, task.augment, task.clients, task.samples)


def with_value(**values: Any) -> FedAvg:
    return type("Mine", (FedAvg,), {"name": "mine", **values})()


@pytest.mark.parametrize(("method", "words"), [
    (with_value(evaluates="foo"), "unknown evaluates of method mine 'foo'"),
    (with_value(proto_pass="foo"), "unknown proto_pass"),
    (with_value(holdout=2.0), "holdout of method mine"),
    (with_value(shared=lambda self, entry: "maybe"), "unknown answer of mine's shared"),
    (with_value(phases=lambda self, r, e: (Phase(self.loss, optimizer="adamw"),)), "optimizer"),
])  # fmt: skip
def test_misspelt_values_of_a_method(method: FedAvg, words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        run(tiny_task(), method, **ONE)


def test_numbers_of_numpy_are_numbers() -> None:
    tau = FPL(tau=np.float64(0.05)).tau  # type: ignore[arg-type]
    assert (tau, type(tau)) == (0.05, float)


def test_a_class_is_not_a_method() -> None:
    with pytest.raises(ProtofedError, match=r"write FPL\(\)"):
        run(tiny_task(), FPL, **ONE)  # type: ignore[arg-type]


def test_a_ready_config_takes_no_task_by_name() -> None:
    with pytest.raises(ProtofedError, match="no further settings"):
        protofed.run("glyphs", config=make_config(tiny_task(), "fedavg", **ONE))


def test_names_are_names_in_figures_and_pages() -> None:
    task = tiny_task()
    names = ("$\\frac$", "<b>a")
    odd = dataclasses.replace(
        task,
        domains=dict(zip(names, task.domains.values(), strict=True)),
        clients=dict.fromkeys(names, 1),
        samples=dict.fromkeys(names, 22),
    )
    result = run(odd, "fedavg", **{**ONE, "clients": dict.fromkeys(names, 1)})
    assert result.plot().startswith(b"\x89PNG")
    assert "&lt;b&gt;a" in result._repr_html_() and "<b>a" not in result._repr_html_()
    assert "<b>a" not in result.rounds._repr_html_()
