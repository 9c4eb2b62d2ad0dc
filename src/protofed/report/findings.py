"""What a report needs of the models and prototypes of a group of runs, and why some is not there.

Of each method one run is looked at, with the first seed that has its model: its features, its
mistakes, its clusters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from threadpoolctl import threadpool_limits

from protofed import analysis
from protofed.analysis import Ints, Outputs
from protofed.config import config_task
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.report import kept
from protofed.report.figures import Embedding, prototypes_apart
from protofed.report.gather import Group
from protofed.report.kept import Findings
from protofed.runs.result import Result, has_model, load_run
from protofed.studies.definition import Study

Tell = Callable[[str], None]
SPREAD = 1200
"""Images in a t-SNE, all domains together."""


def find(group: Group, images: int, tell: Tell, task: Task | None = None) -> Findings:
    """Look into a group's runs with at most so many test images of each domain; 0: with none."""
    found = Findings()
    todo: dict[str, Result] = {}
    swept = _swept(group)
    for label, runs in group.methods.items():
        run = looked_at(runs)
        if label in swept:  # dozens of them, and what they are for is their table and its picture
            for part in ("confusion", "features", "clusters"):
                found.miss(part, "Not shown for a sweep's points: make a report of single runs.")
            continue
        with _noted(found, label, "confusion", "features", "clusters"):
            if not has_model(run.folder) and kept.load(found, label, run.folder):
                _say_absent(found, label)
                continue
            _prototypes(found, label, run, tell)
            todo[label] = run
    if not images and todo:
        for part in ("confusion", "features"):
            found.miss(part, "Not asked for (--images 0).")
        return found
    looked = {label: run for label, run in todo.items() if _has_model(found, label, run)}
    if not looked:
        return found
    try:
        tell(f"loading {group.title}")
        task = task or config_task(next(iter(looked.values())).config)
    except ProtofedError as error:
        for part in ("confusion", "features"):
            found.miss(part, f"This needs the task's images, and they are not here: {error}.")
        return found
    found.classes = task.classes

    def look(label: str) -> Findings:
        own, run = Findings(), looked[label]
        with _noted(own, label, "confusion", "features"):
            whole = load_run(run.folder) if run.lean and run.folder is not None else run
            _images(own, label, whole, task, images, group.study, tell)
        return own

    # a method on each core, one thread each; limits set from here hold for all of them
    with one_thread(), threadpool_limits(1), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for own in pool.map(look, looked):
            found.add(own)
    return found


def looked_at(runs: Sequence[Result]) -> Result:
    """Of a method's runs the first that has its model or what was kept of it; else the first."""
    for run in runs:
        if not run.lean or has_model(run.folder) or kept.there(run.folder):
            return run
    return runs[0]


def _swept(group: Group) -> set[str]:
    lines = group.study.lines if group.study is not None else ()
    return {line.label for line in lines if line.sweep is not None}


@contextmanager
def _noted(found: Findings, label: str, *parts: str) -> Iterator[None]:
    try:
        yield
    except ProtofedError as error:
        for part in parts:
            found.miss(part, f"{error}.", label)


def _has_model(found: Findings, label: str, run: Result) -> bool:
    if run.lean and not has_model(run.folder):
        for part in ("confusion", "features"):
            found.miss(part, "the run's folder has no model to look into.", label)
        return False
    return True


NO_PROTOTYPES = "clients sent no prototypes, or none were kept."


def _say_absent(found: Findings, label: str) -> None:
    """Of a run whose analyses were kept: what these did not have."""
    why = "the study was packed without it (its models are not here)."
    for part, there in (("confusion", found.confusions), ("features", found.embeddings)):
        if label not in there:
            found.miss(part, why, label)
    if label not in found.clusters:
        found.miss("clusters", NO_PROTOTYPES, label)


def _prototypes(found: Findings, label: str, run: Result, tell: Tell) -> None:
    if not analysis.prototype_rounds(run):
        found.miss("clusters", NO_PROTOTYPES, label)
        return
    tell(f"{label}: clusters of its prototypes")
    with _noted(found, label, "clusters"):
        found.clusters[label] = analysis.clusters(run)
        found.distances[label] = analysis.prototype_distances(run)


def _images(
    found: Findings,
    label: str,
    run: Result,
    task: Task,
    images: int,
    study: Study | None,
    tell: Tell,
) -> None:
    """Confusions, the gap, and t-SNE: of the domains and rounds that the study asks for, if any."""
    asked = study.tsne if study is not None else {}
    domains, rounds = asked.get("domains", ()), bool(asked.get("rounds"))
    first: dict[str, Outputs] = {}
    confusion: dict[str, Ints] = {}
    for domain in task.domains:
        tell(f"{label}: test images of {domain}")
        every = list(analysis.outputs(run, domain, task=task, limit=images))
        first[domain] = every[0]
        confusion[domain] = np.sum([analysis.counts(o, len(task.classes)) for o in every], axis=0)
    found.confusions[label] = confusion
    sizes = run.summary.get("tested", {})
    found.tested = {d: (len(o.labels), sizes.get(d, len(o.labels))) for d, o in first.items()}
    tell(f"{label}: gap between the domains")
    found.gaps[label] = analysis.gap({d: (o.features, o.labels) for d, o in first.items()})
    tell(f"{label}: t-SNE")
    drawn = {d: o for d, o in first.items() if d in domains} or first
    found.embeddings[label] = []
    there = {*analysis.model_rounds(run), run.config.rounds}
    if lost := [
        str(r) for r in asked.get("rounds", ()) if r < run.config.rounds and r not in there
    ]:
        text = f"no model of round {', '.join(lost)} was kept (delete the run to do it again)."
        found.miss("features", text, label)
    if beyond := [str(r) for r in asked.get("rounds", ()) if r > run.config.rounds]:
        text = f"round {', '.join(beyond)}: the run has {run.config.rounds}."
        found.miss("features", text, label)
    for round in analysis.model_rounds(run) if rounds else ():
        if round != run.config.rounds:
            then = {
                d: next(analysis.outputs(run, d, round=round, task=task, limit=images))
                for d in drawn
            }
            found.embeddings[label].append(_embedding(run, then, round))
    found.embeddings[label].append(_embedding(run, drawn, run.config.rounds if rounds else None))


def _embedding(run: Result, first: Mapping[str, Outputs], round: int | None = None) -> Embedding:
    """t-SNE of unit-length features together with the prototypes of that or the last kept round."""
    each = max(1, SPREAD // len(first))
    parts = []
    for domain, out in first.items():
        step = np.arange(len(out.labels))[:: -(-len(out.labels) // each)]
        parts.append(("image", out.features[step], out.labels[step], domain))
    there = analysis.prototype_rounds(run)
    if there and (round is None or round in there):
        size = parts[0][1].shape[1]
        of_run = prototypes_apart(analysis.prototypes(run, round))
        shown = {"", *first}  # the server's, and those of clients of these domains
        parts += [p for p in of_run if p[3] in shown and p[1].ndim == 2 and p[1].shape[1] == size]
    rows = np.concatenate([z for _, z, _, _ in parts]).astype(np.float64)
    unit = rows / np.maximum(1e-12, np.linalg.norm(rows, axis=1, keepdims=True))
    return Embedding(
        analysis.tsne(unit, run.config.seed),
        np.concatenate([y for _, _, y, _ in parts]),
        tuple(d for _, z, _, d in parts for _ in z),
        tuple(kind for kind, z, _, _ in parts for _ in z),
        f"round {round}" if round is not None else "",
    )
