"""The pool of runs: a folder of run folders, or the one file in which a study's runs are packed.

Comparisons, sweeps and studies plan configs and look for the runs that answer them. A run answers
a config if it was asked for with the same config: then it has the same hash, in ``facts.json``.
Device and precision are facts of the run; they have to match where the config asks for them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from protofed.config import (
    AUTO,
    Config,
    check_settings,
    short_option,
    shown_task,
    without_paths,
)
from protofed.errors import ProtofedError
from protofed.federation.facts import DIGESTS, FACTS_SHAPE, NUMERICS, Facts
from protofed.files import Damaged, sealed, unsealed, write_atomic
from protofed.runs.folder import RunFolder, plain_settings, stored_config
from protofed.runs.records import BY_CLIENT, RECORD, Records, require_records
from protofed.runs.result import Result, load_run
from protofed.runs.summary import SUMMARY_SHAPE
from protofed.shape import require_shape

PACKED = "runs.jsonl.gz"
"""The file in which a study keeps its runs: a line for each, with config, facts and rounds."""
KIND = ("numerics", "device", "precision", *DIGESTS)
"""The facts that the runs of one table should share."""

PACKED_SHAPE = {
    "name": str,
    "config": {
        **dict.fromkeys(("task", "method", "protocol"), str),
        **dict.fromkeys(("seed", "rounds"), int),
        "model": object,
        "options?": {},
    },
    "facts": FACTS_SHAPE,
    "summary": SUMMARY_SHAPE,
    "rounds": [RECORD],
}
"""A line of a packed study."""


class StoredRun:
    """A run in a pool: in a folder of its own, or as a line of a packed study.

    What it holds is read when it is asked for.
    """

    def __init__(
        self,
        name: str,
        facts: Mapping[str, Any],
        folder: RunFolder | None = None,
        line: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.facts, self.folder = name, facts, folder
        self._line = line or {}

    @property
    def hash(self) -> str:
        """A hash of the run: its config and the facts that can change its numbers."""
        return str(self.facts.get("run"))

    @property
    def kind(self) -> tuple[str, ...]:
        return tuple(str(self.facts.get(name)) for name in KIND)

    @property
    def finished(self) -> bool:
        """Whether all rounds are there. A damaged summary is an error: the run may be complete."""
        if self.folder is None:
            return True
        return self.folder.is_finished() and bool(self.summary["hash"] == self.hash)

    @property
    def diverged(self) -> str:
        return "" if self.folder is None else self.folder.diverged()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's config as plain data, as ``stored_config`` takes it."""
        return self._line["config"] if self.folder is None else self.folder.settings()

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self._line["summary"] if self.folder is None else self.folder.summary()

    @property
    def settings(self) -> dict[str, Any]:
        """The config with the clients and samples of every domain."""
        return plain_settings(self.config, self.summary)

    @cached_property
    def records(self) -> Records:
        return Records(self._line["rounds"]) if self.folder is None else self.folder.records()

    @property
    def analysis(self) -> Mapping[str, Any] | None:
        """What a report shows of the run's model, if that was analyzed before packing."""
        return self._line.get("analysis") if self.folder is None else self.folder.analysis()

    def result(self) -> Result:
        """The run as a result without its model."""
        if self.folder is not None:
            return load_run(self.folder.path, model=False)
        config, facts = stored_config(self.config, self.summary["method"]), self.facts
        return Result(config, self.records, self.summary, facts=facts, analysis=self.analysis)

    def line(self, analysis: Mapping[str, Any] | None = None) -> str:
        # without the paths of files
        config = {k: without_paths(k, v) for k, v in self.config.items() if k != "data"}
        if "options" in config:
            config["options"] = {n: short_option(v) for n, v in config["options"].items()}
        shown = {"task": shown_task(config["task"]), "skipped": []}
        parts = {
            "name": self.name,
            "config": config | {"task": shown["task"]},
            "facts": self.facts,
            "summary": {k: shown.get(k, v) for k, v in self.summary.items()},
            # what each client did is three quarters of a run, and no table needs it
            "rounds": [{k: v for k, v in r.items() if k != BY_CLIENT} for r in self.records],
            "analysis": analysis or self.analysis,
        }
        return json.dumps(sealed(parts), ensure_ascii=False, separators=(",", ":")) + "\n"


class Pool:
    """The runs of a folder, by the hash of what they were asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packed = (path / PACKED).is_file()
        self.damaged: list[str] = []
        """What is wrong with the runs that had to be left out, once ``runs`` is read."""

    @cached_property
    def runs(self) -> list[StoredRun]:
        """Every run that has been started here; read once."""
        if self.packed:
            return read_packed(self.path / PACKED)
        found: list[StoredRun] = []
        for file in sorted(self.path.glob("*/facts.json")):
            folder = RunFolder(file.parent)
            try:
                found.append(StoredRun(file.parent.name, folder.facts(), folder))
            except ProtofedError as error:
                self.damaged.append(error.message)
        return found

    @cached_property
    def _by_config(self) -> dict[str, list[StoredRun]]:
        found: dict[str, list[StoredRun]] = {}
        for run in self.runs:
            found.setdefault(str(run.facts.get("config")), []).append(run)
        return found

    def candidates(self, config: Config, digests: Collection[str] = ()) -> list[StoredRun]:
        """The runs asked for with this config; if there are ``digests``, only on those images."""
        asked = {n: getattr(config, n) for n in ("device", "precision")}
        return [
            run
            for run in self._by_config.get(config.hash, ())
            if all(run.facts.get(n) == v for n, v in asked.items() if v != AUTO)
            and (not digests or run.facts.get("digest") in digests)
        ]

    def select(self, asked: Sequence[tuple[Config, Collection[str]]]) -> list[StoredRun | None]:
        """A finished run for each config and its images (see ``candidates``), or None.

        If several answer a config, they differ in their facts; then those runs are taken whose
        facts most of the others share.
        """
        found = [[r for r in self.candidates(*one) if r.finished] for one in asked]
        kinds = Counter(kind for runs in found for kind in {run.kind for run in runs})
        return [
            max(runs, key=lambda run: (kinds[run.kind], run.kind), default=None) for runs in found
        ]


def shorter_run(pool: Path, config: Config, facts: Facts) -> RunFolder | None:
    """The longest finished run in the pool that is the config's except for having fewer rounds."""
    kind = facts.run_name(config).removesuffix(facts.run_hash(config))
    found: dict[int, RunFolder] = {}
    for path in pool.glob(f"{escape(kind)}*"):
        with suppress(Damaged):
            rounds = len(RunFolder(path).records()) if RunFolder(path).is_finished() else 0
            if rounds and path.name == facts.run_name(replace(config, rounds=rounds)):
                found[rounds] = RunFolder(path)
    shorter = [rounds for rounds in found if rounds < config.rounds]
    return found[max(shorter)] if shorter else None


def read_packed(file: Path) -> list[StoredRun]:
    found = []
    try:
        for text in gzip.decompress(file.read_bytes()).decode().splitlines():
            line = unsealed(file, json.loads(text))
            require_shape(file, line, PACKED_SHAPE)
            if not line["rounds"]:
                raise ValueError(f"{line['name']} has no rounds")
            require_records(file, line["rounds"])
            check_settings(line["config"])
            found.append(StoredRun(line["name"], line["facts"], line=line))
    except (OSError, EOFError, zlib.error) as error:  # not a whole gzip file
        raise Damaged(file, str(error)) from None
    except (ValueError, TypeError, RecursionError) as error:  # not lines of runs
        raise Damaged(file, str(error)) from None
    return found


@dataclass(frozen=True)
class Unpacked:
    """How many runs of a packed study went into a pool, and how many did not."""

    taken: int
    known: int
    """The pool already had them."""
    other: int
    """They have other numerics: a table should not mix them with runs of this version."""


def unpack(source: Path, pool: Path) -> Unpacked:
    """Put the runs of a packed study into a pool, as folders without models."""
    taken = known = other = 0
    for run in read_packed(source / PACKED):
        if Path(run.name).name != run.name or run.name in ("", ".", ".."):
            raise Damaged(source / PACKED, f"'{run.name:.100}' is not the name of a run's folder")
        folder = RunFolder(pool / run.name)
        if run.facts.get("numerics") != NUMERICS:
            other += 1
        elif folder.is_finished():
            known += 1
        else:
            config = stored_config(run.config, run.summary["method"])
            folder.restore(config, run.facts, run.records, run.summary, run.analysis)
            taken += 1
    return Unpacked(taken, known, other)


def write_packed(file: Path, lines: Iterable[str]) -> None:
    """Write the runs of a study into one file: the same runs give the same bytes."""
    write_atomic(file, gzip.compress("".join(sorted(lines)).encode(), mtime=0))
