"""Analyze the models and prototypes of a group of runs: features, confusions, clusters.

For each label one run is analyzed: the first seed that has its model. What cannot be made is
recorded with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from protofed import analysis
from protofed.analysis import Ints, Outputs
from protofed.cores import core_count
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.report import stored_analysis
from protofed.report.collect import Group, Progress
from protofed.report.figures import Embedding
from protofed.report.stored_analysis import PARTS, GroupAnalysis
from protofed.runs.result import Result, has_model, load_run
from protofed.studies.definition import Study

TSNE_IMAGES = 1200
"""Images in a t-SNE, all domains together."""
OF_IMAGES = ("confusion", "features")
NO_PROTOTYPES = "clients sent no prototypes, or none were kept."


def analyze(group: Group, images: int, progress: Progress) -> GroupAnalysis:
    """Analyze a group's runs with at most ``images`` test images per domain; 0: none."""
    found = GroupAnalysis()
    todo: dict[str, Result] = {}
    lines = group.study.lines if group.study is not None else ()
    swept = {line.label for line in lines if line.sweep is not None}
    for label, runs in group.methods.items():
        run = analyzed_run(runs)
        if label in swept:  # dozens of runs, whose point is the sweep's table and figure
            found.miss(PARTS, "Not shown for the points of a sweep: make a report of single runs.")
            continue
        with _noted(found, PARTS, label):
            if not has_model(run.folder) and run.analysis:
                stored_analysis.add_stored(found, label, run.analysis)
                _note_missing(found, label)
                continue
            _prototypes(found, label, run, progress)
            todo[label] = run
    if not images and todo:
        found.miss(OF_IMAGES, "Not asked for (--images 0).")
        return found
    with_model = {k: run for k, run in todo.items() if not run.lean or has_model(run.folder)}
    without = [label for label in todo if label not in with_model]
    if without:
        found.miss(OF_IMAGES, "the run's folder has no model.", *without)
    if not with_model:
        return found
    try:
        progress(f"loading {group.title}")
        task = next(iter(with_model.values())).task()
    except ProtofedError as error:
        found.miss(OF_IMAGES, f"This needs the task's images, which are not available: {error}.")
        return found
    found.classes = task.classes

    def analyze_label(label: str) -> GroupAnalysis:
        own, run = GroupAnalysis(), with_model[label]
        with _noted(own, OF_IMAGES, label):
            whole = load_run(run.folder) if run.lean and run.folder is not None else run
            _images(own, label, whole, task, images, group.study, progress)
        return own

    # a label on each core, one thread each; limits set here hold for all threads
    with one_thread(), threadpool_limits(1), ThreadPoolExecutor(core_count()) as pool:
        for own in pool.map(analyze_label, with_model):
            found.add(own)
    return found


def analyzed_run(runs: Sequence[Result]) -> Result:
    """The first of a label's runs that has its model or stored analyses; else the first."""
    usable = (run for run in runs if not run.lean or has_model(run.folder) or run.analysis)
    return next(usable, runs[0])


@contextmanager
def _noted(found: GroupAnalysis, parts: Sequence[str], label: str) -> Iterator[None]:
    try:
        yield
    except ProtofedError as error:
        found.miss(parts, f"{error}.", label)


def _note_missing(found: GroupAnalysis, label: str) -> None:
    """Record what the stored analyses of a run lack."""
    reason = "the study was packed without it, and its models are gone."
    if label not in found.confusions:
        found.miss(["confusion"], reason, label)
    if label not in found.embeddings:
        found.miss(["features"], reason, label)
    if label not in found.clusters:
        found.miss(["clusters"], NO_PROTOTYPES, label)


def _prototypes(found: GroupAnalysis, label: str, run: Result, progress: Progress) -> None:
    if not analysis.prototype_rounds(run):
        found.miss(["clusters"], NO_PROTOTYPES, label)
        return
    progress(f"{label}: clusters of its prototypes")
    with _noted(found, ["clusters"], label):
        found.clusters[label] = analysis.clusters(run)
        found.distances[label] = analysis.prototype_distances(run)


def _images(
    found: GroupAnalysis,
    label: str,
    run: Result,
    task: Task,
    images: int,
    study: Study | None,
    progress: Progress,
) -> None:
    """Confusions, domain gap, and t-SNE of the domains and rounds that the study asks for."""
    asked = study.tsne if study is not None else {}
    rounds, last = asked.get("rounds", ()), len(run.rounds)
    first: dict[str, Outputs] = {}
    confusion: dict[str, Ints] = {}
    for domain in task.domains:
        progress(f"{label}: test images of {domain}")
        every = list(analysis.outputs(run, domain, task=task, limit=images))
        first[domain] = every[0]
        confusion[domain] = np.sum([analysis.counts(o, len(task.classes)) for o in every], axis=0)
    found.confusions[label] = confusion
    sizes = run.summary.get("tested", {})
    found.tested = {d: (len(o.labels), sizes.get(d, len(o.labels))) for d, o in first.items()}
    progress(f"{label}: gap between the domains")
    found.gaps[label] = analysis.gap({d: (o.features, o.labels) for d, o in first.items()})
    progress(f"{label}: t-SNE")
    drawn = {d: o for d, o in first.items() if d in asked.get("domains", ())} or first
    found.embeddings[label] = []
    there = [r for r in analysis.model_rounds(run) if r != last]
    if lost := [str(r) for r in rounds if r < last and r not in there]:
        text = f"no model of round {', '.join(lost)} was kept (delete the run to repeat it)."
        found.miss(["features"], text, label)
    if beyond := [str(r) for r in rounds if r > last]:
        found.miss(["features"], f"round {', '.join(beyond)}: the run has {last}.", label)
    for round in there if rounds else ():
        outputs = partial(analysis.outputs, run, round=round, task=task, limit=images)
        then = {domain: next(outputs(domain=domain)) for domain in drawn}
        found.embeddings[label].append(_embedding(run, then, round))
    found.embeddings[label].append(_embedding(run, drawn, last if rounds else None))


def _embedding(run: Result, first: Mapping[str, Outputs], round: int | None = None) -> Embedding:
    """t-SNE of unit-length features with the prototypes of that round, or of the last one kept."""
    each = max(1, TSNE_IMAGES // len(first))
    parts = []
    for domain, out in first.items():
        step = np.arange(len(out.labels))[:: -(-len(out.labels) // each)]
        parts.append(("image", out.features[step], out.labels[step], domain))
    there = analysis.prototype_rounds(run)
    if there and (round is None or round in there):
        size = parts[0][1].shape[1]
        shown = {"", *first}  # the server's, and those of clients in these domains
        found = analysis.prototypes(run, round)
        every = [("sent", z, y, found.domains[client]) for client, (z, y) in found.sent.items()]
        every += [("made", z, y, "") for z, y in found.made.values()]
        parts += [p for p in every if p[3] in shown and p[1].ndim == 2 and p[1].shape[1] == size]
    rows = np.concatenate([z for _, z, _, _ in parts]).astype(np.float64)
    unit = rows / np.maximum(1e-12, np.linalg.norm(rows, axis=1, keepdims=True))
    return Embedding(
        analysis.tsne(unit, run.config.seed),
        np.concatenate([y for _, _, y, _ in parts]),
        tuple(d for _, z, _, d in parts for _ in z),
        tuple(kind for kind, z, _, _ in parts for _ in z),
        f"round {round}" if round is not None else "",
    )
