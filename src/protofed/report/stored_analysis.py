"""What a report shows of models and prototypes, stored for when they are gone.

A packed study has no models. Instead, the lines of its runs have confusions, the points of the
t-SNE, the gap between domains, clusters and distances of prototypes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protofed.analysis import Clusters, Distances, DomainGap, Ints
from protofed.errors import ProtofedError
from protofed.report.figures import Embedding

PARTS = ("confusion", "features", "clusters")
"""The parts of a page that need models or prototypes."""


@dataclass
class GroupAnalysis:
    """The analyses of a group of runs, by label."""

    classes: tuple[str, ...] = ()
    tested: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each domain: the test images looked at, and all it has."""
    confusions: dict[str, dict[str, Ints]] = field(default_factory=dict)
    embeddings: dict[str, list[Embedding]] = field(default_factory=dict)
    gaps: dict[str, DomainGap] = field(default_factory=dict)
    clusters: dict[str, list[Clusters]] = field(default_factory=dict)
    distances: dict[str, Distances] = field(default_factory=dict)
    missing: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """What could not be made: part → reason → labels; no labels: the whole part."""

    def miss(self, parts: Iterable[str], reason: str, *labels: str) -> None:
        """Record why these parts are missing for the labels; without labels: for all."""
        for part in parts:
            known = self.missing.setdefault(part, {}).setdefault(reason, [])
            known += [label for label in labels if label not in known]

    def add(self, other: GroupAnalysis) -> None:
        """Take over the analyses of other labels."""
        self.tested = other.tested or self.tested
        for name in ("confusions", "embeddings", "gaps", "clusters", "distances"):
            getattr(self, name).update(getattr(other, name))
        for part, reasons in other.missing.items():
            for reason, labels in reasons.items():
                self.miss([part], reason, *labels)

    def reasons(self, part: str, labels: Collection[str]) -> list[str]:
        """Why something of a part is missing, each reason once; ``labels``: all of the group."""
        said = []
        for reason, concerned in self.missing.get(part, {}).items():
            who = "All methods" if set(concerned) == set(labels) else ", ".join(concerned)
            said.append(f"{who}: {reason}" if concerned else reason)
        return said


def to_plain(found: GroupAnalysis, label: str) -> dict[str, Any]:
    """The analyses of a label as plain data; empty if there are none."""
    parts: dict[str, Any] = {}
    if label in found.confusions:
        parts["classes"] = list(found.classes)
        parts["tested"] = {d: list(n) for d, n in found.tested.items()}
        parts["confusion"] = {d: c.tolist() for d, c in found.confusions[label].items()}
    if label in found.embeddings:
        parts["tsne"] = [
            {**vars(e), "places": _rounded(e.places, 2), "labels": e.labels.tolist()}
            for e in found.embeddings[label]
        ]
    if label in found.gaps:
        parts["gap"] = vars(found.gaps[label])
    if label in found.clusters:
        parts["clusters"] = [vars(c) for c in found.clusters[label]]
        apart = found.distances[label]
        parts["distances"] = {**vars(apart), "cosine": _rounded(apart.cosine, 4)}
    return parts


def add_stored(found: GroupAnalysis, label: str, parts: Mapping[str, Any]) -> None:
    """Add the stored analyses of a label's run."""
    try:
        if "confusion" in parts:
            found.classes = tuple(parts["classes"])
            found.tested = {d: (n, of) for d, (n, of) in parts["tested"].items()}
            found.confusions[label] = {d: np.array(c) for d, c in parts["confusion"].items()}
        if "tsne" in parts:
            found.embeddings[label] = [_embedding(**e) for e in parts["tsne"]]
        if "gap" in parts:
            found.gaps[label] = DomainGap(**parts["gap"])
        if "clusters" in parts:
            found.clusters[label] = [_clusters(**c) for c in parts["clusters"]]
            found.distances[label] = _distances(**parts["distances"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtofedError(f"the stored analysis of {label} is damaged: {error!r}") from None


def _embedding(places: Any, labels: Any, domains: Any, kind: Any, title: str) -> Embedding:
    return Embedding(np.array(places), np.array(labels), tuple(domains), tuple(kind), title)


def _clusters(round: int, members: Any, domains: Any) -> Clusters:
    return Clusters(round, {k: tuple(map(tuple, own)) for k, own in members.items()}, domains)


def _distances(classes: Any, clients: Any, cosine: Any) -> Distances:
    return Distances(tuple(classes), tuple(clients), np.array(cosine, dtype=float))  # null is NaN


def _rounded(values: Any, digits: int) -> Any:
    """As nested lists; NaN, which JSON lacks, is null."""
    whole = np.round(np.asarray(values, dtype=float), digits).astype(object)
    whole[whole != whole] = None
    return whole.tolist()
