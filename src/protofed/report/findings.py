"""What a report needs of the models and prototypes of a group of runs, and why some is not there.

Of each method the run with the first seed is looked at: its features, its mistakes, its clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from protofed import analysis
from protofed.analysis import Clusters, Distances, DomainGap, Ints, Outputs
from protofed.config import config_task
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation.run import Result
from protofed.report.figures import Embedding, prototypes_apart
from protofed.report.gather import Group

Tell = Callable[[str], None]
SPREAD = 1200
"""Images in a t-SNE, all domains together."""


@dataclass
class Findings:
    """By method's label; ``absent`` says of each part why it is not there."""

    classes: tuple[str, ...] = ()
    tested: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of each domain: test images looked at, and how many it has."""
    confusions: dict[str, dict[str, Ints]] = field(default_factory=dict)
    embeddings: dict[str, Embedding] = field(default_factory=dict)
    gaps: dict[str, DomainGap] = field(default_factory=dict)
    clusters: dict[str, list[Clusters]] = field(default_factory=dict)
    distances: dict[str, Distances] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)

    def miss(self, part: str, why: str) -> None:
        """Note why something is missing, once."""
        reasons = self.absent.setdefault(part, [])
        if why not in reasons:
            reasons.append(why)


def find(group: Group, images: int, tell: Tell, task: Task | None = None) -> Findings:
    """Look into a group's runs with at most so many test images of each domain; 0: with none."""
    found = Findings()
    for label, runs in group.methods.items():
        _prototypes(found, label, runs[0], tell)
    if not images:
        for part in ("confusion", "features"):
            found.miss(part, "Not asked for (--images 0).")
        return found
    try:
        tell(f"loading {group.title}")
        task = task or config_task(group.results[0].config)
    except ProtofedError as error:
        for part in ("confusion", "features"):
            found.miss(part, f"This needs the task's images, and they are not here: {error}.")
        return found
    found.classes = task.classes
    for label, runs in group.methods.items():
        with _noted(found, label, "confusion", "features"):
            _images(found, label, runs[0], task, images, tell)
    return found


@contextmanager
def _noted(found: Findings, label: str, *parts: str) -> Iterator[None]:
    try:
        yield
    except ProtofedError as error:
        for part in parts:
            found.miss(part, f"{label}: {error}.")


def _prototypes(found: Findings, label: str, run: Result, tell: Tell) -> None:
    if not analysis.prototype_rounds(run):
        found.miss("clusters", f"{label}: its clients sent no prototypes, or none were kept.")
        return
    tell(f"{label}: clusters of its prototypes")
    with _noted(found, label, "clusters"):
        found.clusters[label] = analysis.clusters(run)
        found.distances[label] = analysis.prototype_distances(run)


def _images(found: Findings, label: str, run: Result, task: Task, images: int, tell: Tell) -> None:
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
    found.embeddings[label] = _embedding(run, first)


def _embedding(run: Result, first: Mapping[str, Outputs]) -> Embedding:
    """t-SNE of unit-length features together with the prototypes of the last kept round."""
    each = max(1, SPREAD // len(first))
    parts = []
    for domain, out in first.items():
        step = np.arange(len(out.labels))[:: -(-len(out.labels) // each)]
        parts.append(("image", out.features[step], out.labels[step], domain))
    if analysis.prototype_rounds(run):
        size = parts[0][1].shape[1]
        of_run = prototypes_apart(analysis.prototypes(run))
        parts += [part for part in of_run if part[1].ndim == 2 and part[1].shape[1] == size]
    rows = np.concatenate([z for _, z, _, _ in parts]).astype(np.float64)
    unit = rows / np.maximum(1e-12, np.linalg.norm(rows, axis=1, keepdims=True))
    return Embedding(
        analysis.tsne(unit, run.config.seed),
        np.concatenate([y for _, _, y, _ in parts]),
        tuple(d for _, z, _, d in parts for _ in z),
        tuple(kind for kind, z, _, _ in parts for _ in z),
    )
