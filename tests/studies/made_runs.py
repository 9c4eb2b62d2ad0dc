"""Studies, and runs of theirs that were never trained: folders with made-up numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.data.conftest import Pictures

from protofed.federation.facts import NUMERICS, Facts
from protofed.runs.folder import RunFolder
from protofed.studies.definition import Study, parse
from protofed.studies.folder import StudyFolder
from protofed.studies.plan import PlannedRun, plan

DOMAINS = ("scan", "print", "photo", "inverse")
TINY = {"rounds": 1, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu", "model": "cnn2",
        "width": 4}  # fmt: skip
FACTS = Facts(
    NUMERICS, "cpu", "fp32", "loop", "made up", None, None, "made up", {"protofed": "made up"}
)
PAPER = {"columns": [*DOMAINS, "average"],
         "FedAvg": [40.0, 40.0, 40.0, 40.0, 40.0],
         "FPL": {"values": [50.0, 50.0, 50.0, 50.0, 50.0], "std": 0.5}}  # fmt: skip
"""What a paper might print for the study."""


def raw(**more: Any) -> dict[str, Any]:
    """A small study as its TOML would be read."""
    return {
        "title": "Two methods",
        "seeds": [0, 1],
        "settings": dict(TINY),
        "tasks": {"glyphs": {}},
        "rows": {"FedAvg": "fedavg", "FPL": "fpl"},
        **more,
    }


def study(**more: Any) -> Study:
    """A small study of FedAvg and FPL on glyphs."""
    return parse(raw(**more), "mine")


def flat(run: PlannedRun) -> dict[str, float]:
    """40 for FedAvg, 45 for all others, one more with each seed; the same in every domain."""
    value = (40.0 if run.line.row.method == "fedavg" else 45.0) + run.seed
    return dict.fromkeys(DOMAINS, value)


def rising(run: PlannedRun) -> dict[str, float]:
    """10, 20, 30, 40 in the domains, whatever the run."""
    return {d: 10.0 * (1 + i) for i, d in enumerate(DOMAINS)}


def make_runs(
    study: Study,
    pool: Path,
    accuracy: Callable[[PlannedRun], Mapping[str, float]] = flat,
    skip: Collection[tuple[str, int]] = (),
    rounds: int = 3,
    validation: Callable[[PlannedRun], float] | None = None,
    **facts: Any,
) -> dict[tuple[str, int], Path]:
    """Write the runs of a study as if they had been done; returns folders by label and seed.

    ``skip`` has the (label, seed) that are left out. ``validation`` gives the accuracy on the
    validation images, the same in every domain. ``facts`` change what the runs found.
    """
    found = replace(FACTS, **facts)
    folders = {}
    for run in plan(study):
        if (run.line.label, run.seed) in skip:
            continue
        hash = found.run_hash(run.config)
        folder = pool / found.run_name(run.config)
        folders[run.line.label, run.seed] = folder
        RunFolder(folder).save_config(run.config, hash)
        known = {**found.to_dict(), "run": hash, "config": run.config.hash}
        (folder / "facts.json").write_text(json.dumps(known))
        values = dict(accuracy(run))
        average = sum(values.values()) / len(values)
        record = {
            "accuracy": values, "average": average, "loss": {"ce": 1.0}, "bytes_up": 1_000_000,
            "bytes_down": 2_000_000, "seconds": {"train": 1.0, "evaluate": 0.5},
        }  # fmt: skip
        if validation is not None:
            seen = [d for d, n in run.config.domain_clients.items() if n]
            record["beside"] = {"validation": dict.fromkeys(seen, validation(run))}
        lines = [json.dumps({"round": t, **record}) + "\n" for t in range(rounds)]
        (folder / "rounds.jsonl").write_text("".join(lines))
        held = run.config.domain_clients
        clients = [{"client": f"{d}-0", "domain": d, "samples": 10} for d, n in held.items() if n]
        summary = {
            "method": run.config.method.name, "hash": hash, "seed": run.seed,
            "accuracy": {**values, "average": average}, "bytes_up": 3_000_000,
            "bytes_down": 6_000_000, "seconds": 4.5, "data": "made up", "batchnorm": "averaged",
            "clients": clients, "engine": "loop (made up)", "tested": dict.fromkeys(values, 200),
            "device": found.device, "precision": found.precision,
            "split": {"clients": dict(held), "samples": dict(run.config.domain_samples)},
        }  # fmt: skip
        if validation is not None:
            seen = [d for d, n in held.items() if n]
            summary["validated"] = dict.fromkeys(seen, 30)
            summary["beside"] = {"validation": dict.fromkeys((*seen, "average"), validation(run))}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folders


def make_study(study: Study, folder: Path, *args: Any, **more: Any) -> StudyFolder:
    """The study in a folder of its own, with made-up runs (see ``make_runs``) beside it."""
    make_runs(study, folder.parent, *args, **more)
    return StudyFolder.create(folder, study, folder.parent)


def image_folder(path: Path, domains: Sequence[str] = ("day", "night"), start: int = 0) -> Path:
    """A tree domain/class/image of 24 images a domain; other ones with another ``start``."""
    names = [f"{d}/{c}/{i:02}.png" for d in domains for c in ("cat", "dog") for i in range(12)]
    return Pictures().tree(path, names, start)
