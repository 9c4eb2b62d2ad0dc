"""What a report shows of models and prototypes, and how it is kept where these are not.

A packed study has no models. ``analysis.json.gz`` in a run's folder has in their place: confusions,
the places of the t-SNE, the gap between domains, clusters and distances of prototypes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from protofed.analysis import Clusters, Distances, DomainGap, Ints
from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.report.figures import Embedding

NAME = "analysis.json.gz"


@dataclass
class Findings:
    """By method's label; ``absent`` says of each part why something is not there."""

    classes: tuple[str, ...] = ()
    tested: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of each domain: test images looked at, and how many it has."""
    confusions: dict[str, dict[str, Ints]] = field(default_factory=dict)
    embeddings: dict[str, list[Embedding]] = field(default_factory=dict)
    gaps: dict[str, DomainGap] = field(default_factory=dict)
    clusters: dict[str, list[Clusters]] = field(default_factory=dict)
    distances: dict[str, Distances] = field(default_factory=dict)
    absent: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Part → reason → the methods that it holds for; none: for the whole part."""

    def miss(self, part: str, why: str, label: str | None = None) -> None:
        """Note why something is missing."""
        labels = self.absent.setdefault(part, {}).setdefault(why, [])
        if label is not None and label not in labels:
            labels.append(label)

    def add(self, other: Findings) -> None:
        """Take what was found of other methods."""
        self.tested = other.tested or self.tested
        for name in ("confusions", "embeddings", "gaps", "clusters", "distances"):
            getattr(self, name).update(getattr(other, name))
        for part, reasons in other.absent.items():
            for why, labels in reasons.items():
                self.miss(part, why)
                for label in labels:
                    self.miss(part, why, label)

    def reasons(self, part: str, methods: Collection[str]) -> list[str]:
        """Why something of a part is missing, each reason once; ``methods``: all there are."""
        said = []
        for why, labels in self.absent.get(part, {}).items():
            who = "All methods" if set(labels) == set(methods) else ", ".join(labels)
            said.append(f"{who}: {why}" if labels else why)
        return said


def save(found: Findings, label: str, folder: Path) -> None:
    """Write what was found of a method into the folder of its run; nothing if that is nothing."""
    parts: dict[str, Any] = {}
    if label in found.confusions:
        parts["classes"] = list(found.classes)
        parts["tested"] = {d: list(n) for d, n in found.tested.items()}
        parts["confusion"] = {d: c.tolist() for d, c in found.confusions[label].items()}
    if label in found.embeddings:
        parts["tsne"] = [_embedding(e) for e in found.embeddings[label]]
    if label in found.gaps:
        parts["gap"] = vars(found.gaps[label])
    if label in found.clusters:
        parts["clusters"] = [vars(c) for c in found.clusters[label]]
        apart = found.distances[label]
        parts["distances"] = {**vars(apart), "cosine": _rounded(apart.cosine, 4)}
    if parts:
        text = json.dumps(parts, separators=(",", ":"), ensure_ascii=False)
        write_atomic(folder / NAME, gzip.compress(text.encode(), mtime=0))


def there(folder: Path | None) -> bool:
    """Whether something was kept of the run in this folder."""
    return folder is not None and (folder / NAME).is_file()


def load(found: Findings, label: str, folder: Path | None) -> bool:
    """Add what was kept of a method's run to what was found; False if there is no such file."""
    if folder is None or not there(folder):
        return False
    file = folder / NAME
    try:
        parts = json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ProtofedError(f"'{file}' is damaged: {error}") from None
    try:
        _add(found, label, parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtofedError(f"'{file}' is damaged: {error!r}") from None
    return True


def _add(found: Findings, label: str, parts: dict[str, Any]) -> None:
    if "confusion" in parts:
        found.classes = tuple(parts["classes"])
        found.tested = {d: (n, of) for d, (n, of) in parts["tested"].items()}
        found.confusions[label] = {d: np.array(c) for d, c in parts["confusion"].items()}
    if "tsne" in parts:
        found.embeddings[label] = [
            Embedding(
                np.array(e["places"]), np.array(e["labels"]), tuple(e["domains"]), tuple(e["kind"]),
                e["title"],
            )
            for e in parts["tsne"]
        ]  # fmt: skip
    if "gap" in parts:
        found.gaps[label] = DomainGap(**parts["gap"])
    if "clusters" in parts:
        found.clusters[label] = [
            Clusters(
                c["round"],
                {k: tuple(map(tuple, own)) for k, own in c["members"].items()},
                c["domains"],
            )
            for c in parts["clusters"]
        ]
        apart = parts["distances"]
        found.distances[label] = Distances(
            tuple(apart["classes"]),
            tuple(apart["clients"]),
            np.array(apart["cosine"], dtype=float),  # null is nan
        )


def _embedding(found: Embedding) -> dict[str, Any]:
    return {**vars(found), "places": _rounded(found.places, 2), "labels": found.labels.tolist()}


def _rounded(values: Any, digits: int) -> Any:
    """As nested lists; nan, which JSON does not have, is null."""
    whole = np.round(np.asarray(values, dtype=float), digits).astype(object)
    whole[whole != whole] = None
    return whole.tolist()
