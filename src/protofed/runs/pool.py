"""The pool of runs: a folder of run folders, or the one file in which a study's runs are packed.

Comparisons, sweeps and studies plan configs and look for the runs that answer them. A run answers
a config if it was asked for with the same config: then their hashes are equal, which ``facts.json``
holds. Device and precision are facts of the run; they have to match where the config asks for them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from protofed.config import AUTO, FORMAT, Config, check_format, make_config
from protofed.errors import ProtofedError
from protofed.files import Damaged, write_atomic
from protofed.runs.folder import RunFolder, plain_settings
from protofed.runs.records import Records
from protofed.runs.result import Result

PACKED = "runs.jsonl.gz"
"""The file in which a study keeps its runs: a line for each, with config, facts and rounds."""


class StoredRun:
    """A run in a pool. What it holds is read when it is asked for."""

    def __init__(self, name: str, facts: Mapping[str, Any]) -> None:
        self.name, self.facts = name, facts

    @property
    def hash(self) -> str:
        """Stands for the run: its config and the facts that can change its numbers."""
        return str(self.facts.get("run"))

    @property
    def kind(self) -> tuple[Any, ...]:
        """The facts that runs in one row of a table should share."""
        names = ("numerics", "device", "precision", "digest", "public_digest")
        return tuple(str(self.facts.get(name)) for name in names)

    @property
    def finished(self) -> bool:
        """Whether all rounds are there."""
        raise NotImplementedError

    @property
    def diverged(self) -> str:
        """What diverged, if the run did; else empty."""
        return ""

    @property
    def settings(self) -> dict[str, Any]:
        """The run's config as plain data, clients and samples of every domain included."""
        raise NotImplementedError

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary."""
        raise NotImplementedError

    def result(self) -> Result:
        """The run without its model."""
        raise NotImplementedError


class FolderRun(StoredRun):
    """A run in a folder of its own."""

    def __init__(self, folder: RunFolder, facts: Mapping[str, Any]) -> None:
        super().__init__(folder.path.name, facts)
        self.folder = folder

    @property
    def finished(self) -> bool:  # noqa: D102
        return self.folder.is_finished(self.hash)

    @property
    def diverged(self) -> str:  # noqa: D102
        return self.folder.diverged()

    @cached_property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: D102
        return plain_settings(self.folder.settings(), self.summary)

    @cached_property
    def summary(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: D102
        return self.folder.summary()

    def result(self) -> Result:  # noqa: D102
        from protofed.runs.result import load_run

        return load_run(self.folder.path, model=False)


@dataclass
class PackedRun(StoredRun):
    """A run as a line of a packed study."""

    name: str
    facts: Mapping[str, Any]
    config: dict[str, Any]
    summary: dict[str, Any]  # type: ignore[assignment]
    rounds: Records
    analysis: dict[str, Any] | None = field(default=None, repr=False)
    """What a report shows of the run's model, where that was looked at before packing."""

    @property
    def finished(self) -> bool:  # noqa: D102
        return True

    @cached_property
    def settings(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: D102
        return plain_settings(dict(self.config), self.summary)

    def result(self) -> Result:  # noqa: D102
        config = make_config(**self.config)
        return Result(config, self.rounds, {}, self.summary, lean=True, facts=self.facts)

    def line(self) -> str:
        """The run as a line of the file."""
        parts = {"format": FORMAT, "name": self.name, "config": self.config, "facts": self.facts,
                 "summary": self.summary, "rounds": self.rounds, "analysis": self.analysis}  # fmt: skip
        return json.dumps(parts, ensure_ascii=False, separators=(",", ":")) + "\n"


class Pool:
    """The runs of a folder, by the hash of what they were asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packed = (path / PACKED).is_file()

    @cached_property
    def runs(self) -> list[StoredRun]:
        """Every run that has been started here; read once."""
        if self.packed:
            return list(read_packed(self.path / PACKED))
        found: list[StoredRun] = []
        for file in sorted(self.path.glob("*/facts.json")):
            folder = RunFolder(file.parent)
            try:
                found.append(FolderRun(folder, folder.facts()))
            except ProtofedError:  # damaged: `protofed run` says so when it is run again
                continue
        return found

    @cached_property
    def _by_config(self) -> dict[str, list[StoredRun]]:
        found: dict[str, list[StoredRun]] = {}
        for run in self.runs:
            found.setdefault(str(run.facts.get("config")), []).append(run)
        return found

    def candidates(self, config: Config) -> list[StoredRun]:
        """The runs that were asked for with this config."""
        asked = {n: getattr(config, n) for n in ("device", "precision")}
        return [
            run
            for run in self._by_config.get(config.hash, ())
            if all(run.facts.get(n) == v for n, v in asked.items() if v != AUTO)
        ]

    def select(self, configs: Sequence[Config]) -> list[StoredRun | None]:
        """A finished run for each config, or None.

        Where several answer a config, they differ in their facts: then the runs are taken whose
        facts most of the others share.
        """
        found = [[r for r in self.candidates(c) if r.finished] for c in configs]
        kinds = Counter(kind for runs in found for kind in {run.kind for run in runs})
        return [
            max(runs, key=lambda run: (kinds[run.kind], run.kind), default=None) for runs in found
        ]


def read_packed(file: Path) -> Iterable[PackedRun]:
    """The runs of a packed study."""
    try:
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        for line in lines:
            parts = json.loads(line)
            check_format(parts.pop("format"), file)
            yield PackedRun(**{**parts, "rounds": Records(parts["rounds"])})
    except (OSError, ValueError, EOFError, zlib.error, KeyError, TypeError) as error:
        raise Damaged(file, str(error)) from None


def write_packed(file: Path, runs: Iterable[PackedRun]) -> None:
    """Write the runs of a study into one file: the same runs give the same bytes."""
    text = "".join(run.line() for run in sorted(runs, key=lambda run: run.name))
    write_atomic(file, gzip.compress(text.encode(), mtime=0))
