"""A run as figures draw it: the accuracies of its rounds, and the row they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from protofed.config import EACH
from protofed.methods import METHODS
from protofed.runs.records import Records, joined

if TYPE_CHECKING:
    from protofed.runs.result import Result


@dataclass(frozen=True)
class RunHistory:
    """The rounds of a run. It needs neither the run's model nor the task's images."""

    label: str
    """The row of the table that the run belongs to."""
    method: str
    """The method's name, which decides the color."""
    variant: bool
    """Whether hyper-parameters differ from the method's defaults."""
    seed: int
    unseen: str | None
    """The domain that no client trained on; ``each`` for runs joined by ``join_left_out``."""
    rounds: Records
    """The records of the rounds; of joined runs, only their accuracies."""

    @classmethod
    def of(cls, label: str, settings: Mapping[str, Any], rounds: Records) -> RunHistory:
        """From a run's settings as its ``config.toml`` has them."""
        return cls(
            label,
            settings["method"],
            is_variant(settings),
            settings["seed"],
            settings.get("leave_out"),
            rounds,
        )

    @classmethod
    def of_result(cls, result: Result) -> RunHistory:
        config = result.config
        settings = {
            "task": config.task, "method": config.method.name, "options": config.method.options(),
            "seed": config.seed, "leave_out": config.leave_out,
        }  # fmt: skip
        return cls.of(str(result.summary["method"]), settings, result.rounds)


def changed_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's hyper-parameters that differ from its method's defaults on its task."""
    method = METHODS.get(settings["method"])
    if method is None:  # a user's own method: its defaults are not known here
        return {}
    defaults = method.defaults(settings.get("task", ""))
    return {k: v for k, v in settings.get("options", {}).items() if defaults.get(k) != v}


def is_variant(settings: Mapping[str, Any]) -> bool:
    """Whether a run's hyper-parameters differ from its method's defaults on its task."""
    return bool(changed_options(settings))


def join_left_out(runs: Iterable[RunHistory]) -> list[RunHistory]:
    """Join runs that each left out one domain into one run per label and seed.

    If the run for any domain is missing, there is none for that label and seed.
    """
    by_label_and_seed: dict[tuple[str, int], dict[str, RunHistory]] = {}
    for run in runs:
        by_label_and_seed.setdefault((run.label, run.seed), {})[str(run.unseen)] = run
    complete = []
    for parts in by_label_and_seed.values():
        first = next(iter(parts.values()))
        domains = list(first.rounds[0]["accuracy"])
        if set(parts) == set(domains):
            rounds = joined({domain: parts[domain].rounds for domain in domains})
            complete.append(replace(first, unseen=EACH, rounds=rounds))
    return complete
