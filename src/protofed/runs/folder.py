"""A run's folder. The simulator and the deployment write it, and everything else reads it, here.

    config.toml              the settings, complete; its format is that of the whole folder
    facts.json               what was found when the run started: images, device, versions
    clients.json             who holds what
    rounds.jsonl             one record per round
    checkpoint.safetensors   the state after a complete round; checkpoint.previous.safetensors is
                             the one before, from which a run resumes if the last is damaged; a
                             deployment, which can return to them, keeps more (.previous.2, ...)
    clients/                 the clients' private states that the two checkpoints name
    prototypes/, snapshots/  messages and models of single rounds (``runs.artifacts``)
    model.safetensors        the trained model
    analysis.json            of a run from a packed study: what a report shows of its model
    summary.json             written last: a folder that has it is finished
    diverged.txt             what diverged, if the run did

Every file is replaced atomically, and a record is on disk before the checkpoint that counts it, so
a run that is killed at any moment resumes from its last checkpoint. Every file has a checksum that
is verified when it is read. Nothing in a folder is executed by reading it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from protofed import tree
from protofed.config import (
    CHOSEN,
    Config,
    is_hashed,
    make_config,
    read_config,
    short_task,
    without_paths,
)
from protofed.data.info import FOLDER, TASKS, TaskInfo
from protofed.errors import Busy, ProtofedError, unknown
from protofed.federation.client_state import read_state
from protofed.federation.facts import DIGESTS, FACTS_SHAPE
from protofed.files import (
    CannotWrite,
    Damaged,
    check_format,
    checksum,
    is_temporary,
    make_folder,
    read_json,
    sync_folder,
    temporary_file,
    write_atomic,
    write_json,
    writing,
)
from protofed.methods import RecordedMethod, known_class
from protofed.runs.model_file import StoredModel, read_model
from protofed.runs.records import Record, Records, digest, read_records, to_line
from protofed.runs.summary import SUMMARY_SHAPE
from protofed.shape import require_shape
from protofed.toml import parse_toml
from protofed.tree import Tree

CONFIG = "config.toml"
FACTS = "facts.json"
CLIENTS = "clients.json"
ROUNDS = "rounds.jsonl"
CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
MODEL = "model.safetensors"
ANALYSIS = "analysis.json"
SUMMARY = "summary.json"
DIVERGED = "diverged.txt"
LOCK = ".lock"

FILES = (
    *(CONFIG, FACTS, CLIENTS, ROUNDS, PREVIOUS, CHECKPOINT, DIVERGED, MODEL, ANALYSIS, SUMMARY),
    *("curves.png", "trace.json.gz"),
)
"""All files that a run leaves in its folder, in the order in which they are written."""
ARTIFACTS = {
    "prototypes": {
        "round": int,
        "classes": [str],
        "clients": [{"client": str, "domain": str}],
    },
    "snapshots": {"round": int},
}
"""The folders of single rounds' files, and what these files say about themselves."""
FOLDERS = ("clients", *ARTIFACTS)

REQUIRED_SETTINGS = ("task", "method", "seed", "rounds", "protocol", "model")
BINDING_FACTS = ("numerics", *DIGESTS, "precision", "device")
"""Facts that change numbers: a run resumes only where they are the same as before."""

_CHECKSUM, _OF_RUN = "# checksum ", " of run "
"""The first line of a run's ``config.toml``: its checksum, and the run's hash."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@dataclass(frozen=True)
class Checkpoint:
    """What a run resumes from: everything as it was after a complete round."""

    hash: str
    round: int
    state: Tree
    clients: Mapping[str, str] = field(default_factory=dict)
    """The file in ``clients/`` that has each client's private state."""
    pending: Record | None = None
    """In a deployment: the last round's record, whose accuracy comes with the next replies."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What only a deployment has to remember; a simulation's is empty."""
    rounds: int = 0
    """How many rounds the run was asked for; 0 if that was not recorded."""
    digest: str = field(default="", compare=False)
    """That of the records it counts on; empty if it was not recorded."""

    @property
    def records(self) -> int:
        """How many complete records the checkpoint counts on."""
        return self.round - (self.pending is not None)


class RunFolder:
    """Reads, writes and locks the folder of one run."""

    def __init__(self, path: str | Path, checkpoints: int = 2) -> None:
        """``checkpoints`` is how many of them are kept: the last one, and those before it."""
        self.path = Path(path)
        older = [f"checkpoint.previous.{i}.safetensors" for i in range(2, checkpoints)]
        self._checkpoints = (CHECKPOINT, PREVIOUS, *older)
        self.config_file = self.path / CONFIG
        self.rounds_file = self.path / ROUNDS
        self.client_states = self.path / "clients"

    # ---- opening -----------------------------------------------------------------------------

    @contextmanager
    def open(
        self,
        config: Config,
        hash: str,
        facts: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        deployed: bool = False,
        hash_of: Callable[[int], str] | None = None,
    ) -> Iterator[Checkpoint | None]:
        """Make the folder this run's alone, ready for its next round.

        Yields the checkpoint to resume from, or None for a run that starts from the beginning.
        If the run may not use the folder, that is an error, and nothing in it has changed.
        ``hash_of`` gives the hash of the same run with another number of rounds: then the run in
        the folder may be one of other rounds, which this one extends.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ProtofedError(
                f"'{self.path}' is a file, not a run's folder", "choose another --out"
            )
        if resume and overwrite:
            raise ProtofedError(
                "--resume continues a run, --overwrite starts over", "give only one of them"
            )
        config.method.require_plain_hypers()
        with writing(self.path):
            make_folder(self.path)
        with self._locked():
            checkpoint, damage, records = None, None, Records()
            if self._is_used():
                self._require_free(resume, overwrite)
                if resume:
                    checkpoint, damage = self._newest_whole()
                    self._require_same(checkpoint, config, hash, facts, deployed, hash_of)
            self._sweep()
            if checkpoint is None:
                self._clear()
            else:
                records = read_records(self.rounds_file, checkpoint.records)
                if damage is not None:
                    warnings.warn(
                        f"{damage.message}; resuming from the checkpoint before it, of round "
                        f"{checkpoint.round}",
                        stacklevel=4,
                    )
                    write_atomic(self.path / CHECKPOINT, (self.path / PREVIOUS).read_bytes())
                if checkpoint.round < config.rounds:
                    self._remove(SUMMARY, MODEL)
            self.save_config(config, hash)
            if facts is not None:
                write_json(self.path / FACTS, facts)
            write_atomic(self.rounds_file, "".join(map(to_line, records)))
            yield checkpoint

    def starts_over(self, config: Config, facts: Mapping[str, Any] | None = None) -> bool:
        """Whether resuming this run starts over: it stopped before its first checkpoint."""
        kept = self.has_checkpoint or self.is_finished()
        return not kept and self.exists and not self.differences(config, facts)

    def differences(self, config: Config, facts: Mapping[str, Any] | None = None) -> list[str]:
        """What would change a number and differs from the folder, e.g. ``lr 0.1 → 0.01``."""
        before, now = self._binding_facts(facts)
        try:
            text = self.config_file.read_text("utf-8")
            found, asked = _numeric_settings(text), _numeric_settings(config.toml())
        except (OSError, ValueError):
            return [f"{CONFIG} cannot be read"]
        check_format(self.config_file, found.pop("format", None))
        del asked["format"]
        for name in CHOSEN:  # by the images, which are compared by their digest
            if name not in asked:
                found.pop(name, None)
        return _changes(found | before, asked | now)  # what was found counts, not what was asked

    def _binding_facts(
        self, facts: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The facts that change numbers, as the folder has them and as they are now."""
        before, now = self.facts(), facts or {}
        names = [name for name in BINDING_FACTS if name in before and name in now]
        return {name: before[name] for name in names}, {name: now[name] for name in names}

    def _require_free(self, resume: bool, overwrite: bool) -> None:
        if not self.exists:
            raise ProtofedError(f"'{self.path}' is not a run's folder", "choose another --out")
        if not (resume or overwrite):
            raise ProtofedError(
                f"'{self.path}' already holds a run",
                "--resume continues it, --overwrite starts over, --out uses another folder",
            )

    def _newest_whole(self) -> tuple[Checkpoint | None, Damaged | None]:
        """The newest checkpoint that is whole, and what is wrong with a newer one."""
        damage = None
        for file in (CHECKPOINT, PREVIOUS):
            try:
                if (found := self._generation(file)) is not None:
                    return found, damage
            except Damaged as error:
                damage = damage or error
        if damage is not None:
            raise damage
        return None, None

    def _generation(self, file: str) -> Checkpoint | None:
        """A checkpoint whose records and clients' states are known to be as they were written."""
        found = self.checkpoint(file)
        if found is not None:
            records = read_records(self.rounds_file, found.records)
            if found.digest not in ("", digest(records)):
                raise Damaged(self.rounds_file, f"its rounds do not match {file}")
            for state in found.clients.values():
                self.client_state(state)
        return found

    def _require_same(
        self,
        checkpoint: Checkpoint | None,
        config: Config,
        hash: str,
        facts: Mapping[str, Any] | None,
        deployed: bool,
        hash_of: Callable[[int], str] | None,
    ) -> None:
        """Raise an error if the run in the folder is another one."""
        different = ", ".join(self.differences(config, facts))
        if checkpoint is None:
            if different:
                raise ProtofedError(
                    f"'{self.path}' holds a run of another configuration that was never "
                    f"checkpointed: {different}",
                    "choose another --out, or start over with --overwrite",
                )
            if self.is_finished():
                raise ProtofedError(
                    f"'{self.path}' holds a finished run without its checkpoint",
                    "there is nothing to resume; --overwrite runs it again",
                )
            return
        before, now = self._binding_facts(facts)
        asked, same = checkpoint.rounds, checkpoint.hash == hash
        if hash_of is not None and not same and checkpoint.hash == hash_of(asked):
            self.require_extendable(config, asked)
            same = True
        if not same or before != now:
            raise ProtofedError(
                f"'{self.path}' holds a checkpoint of another configuration: "
                f"{different or 'the code of the method'}",
                "choose another --out, or start over with --overwrite",
            )
        if checkpoint.round > config.rounds:
            raise ProtofedError(
                f"'{self.path}' already has {checkpoint.round} rounds, but only {config.rounds} "
                "are asked for",
                "choose another --out, or start over with --overwrite",
            )
        if bool(checkpoint.extra) != deployed:
            kinds = ("the simulator", "a deployment")
            raise ProtofedError(
                f"'{self.path}' holds a run of {kinds[not deployed]}, not of {kinds[deployed]}",
                "choose another folder, or start over with --overwrite",
            )

    def require_extendable(self, config: Config, rounds: int) -> None:
        """Raise an error if the config's run cannot continue the one here, of that many rounds."""
        private = config.proto_epsilon is not None or config.update_epsilon is not None
        if config.method.uses_rounds or private or config.schedule == "cosine":
            what = "a privacy budget" if private else "a cosine schedule"
            what = config.method.name if config.method.uses_rounds else what
            raise ProtofedError(
                f"'{self.path}' cannot be extended, rounds {rounds} → {config.rounds}: every "
                f"round of {what} depends on the total number of rounds",
                "without --resume and in another folder, it runs from the beginning",
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process, however the process ends.

        Two runs in one folder would mix their rounds and remove each other's states.
        """
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise Busy(
                f"another process has a run under way in '{self.path}'",
                "wait for it or stop it, or choose another --out",
            ) from None
        except NotImplementedError:  # a file system without locks
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CannotWrite(self.path / LOCK, error) from error
        try:
            yield
        finally:
            with suppress(OSError):  # while it is held; Windows removes it on release
                (self.path / LOCK).unlink()
            lock.release()

    def _is_used(self) -> bool:
        """Whether there is anything but our lock and what a kill left of unfinished writes."""
        return any(path.name != LOCK and not is_temporary(path) for path in self.path.iterdir())

    def _sweep(self) -> None:
        """Remove what a kill left of unfinished writes."""
        for folder in (self.path, *(self.path / name for name in FOLDERS)):
            for path in filter(is_temporary, folder.glob(".*")):
                path.unlink()

    def _clear(self) -> None:
        """Remove a run's files and nothing else; ``config.toml`` marks the folder as a run's.

        Last written, first removed: if killed in between, the folder neither says that it is
        finished nor has a checkpoint without its records.
        """
        self._remove(*(path.name for path in self.path.glob("checkpoint.previous.*.safetensors")))
        for name in reversed(FILES):
            if name != CONFIG:
                self._remove(name)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _remove(self, *names: str) -> None:
        """Remove files; they are gone from the disk, in this order, when this returns."""
        for name in names:
            if (self.path / name).is_file():
                (self.path / name).unlink()
                sync_folder(self.path)

    # ---- writing -----------------------------------------------------------------------------

    def save_config(self, config: Config, hash: str) -> None:
        text = config.toml()
        write_atomic(self.config_file, f"{_CHECKSUM}{checksum(text)}{_OF_RUN}{hash}\n{text}")

    def save_clients(self, table: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.path / CLIENTS, {"clients": table})

    def append_record(self, record: Record) -> None:
        """Add a round's record; it is on disk when this returns."""
        with writing(self.rounds_file), self.rounds_file.open("a", encoding="utf-8") as file:
            file.write(to_line(record))
            file.flush()
            os.fsync(file.fileno())

    def save_checkpoint(self, checkpoint: Checkpoint, again: bool = False) -> None:
        """Write a checkpoint; from this one write on, the clients' states that it names count.

        The last one becomes the one before, unless this is the same round ``again``.
        """
        metadata = {
            "round": checkpoint.round,
            "rounds": checkpoint.rounds,
            "hash": checkpoint.hash,
            "clients": dict(checkpoint.clients),
            "pending": checkpoint.pending,
            "records": digest(read_records(self.rounds_file, checkpoint.records)),
            **checkpoint.extra,
        }
        last, link = self.path / CHECKPOINT, temporary_file(self.path / PREVIOUS)
        with writing(self.path / PREVIOUS):
            for newer, older in reversed([*pairwise(self._checkpoints[1:])]):
                if not again and (self.path / newer).is_file():
                    (self.path / newer).replace(self.path / older)
            if not again and last.is_file():
                try:  # a second name, so that there is a checkpoint at every moment
                    os.link(last, link)
                except OSError:  # a file system that has no links
                    last.replace(self.path / PREVIOUS)
                else:
                    link.replace(self.path / PREVIOUS)
                    link.unlink(missing_ok=True)  # if it already had that name
        tree.save(checkpoint.state, last, metadata)

    def roll_back(self, most: int, **extra: Any) -> Checkpoint:
        """Return to the newest checkpoint of at most that many rounds; later files are removed.

        ``extra`` is what a deployment has to remember from now on.
        """
        kept = self.kept_checkpoints()
        found = next(((file, c) for file, c in kept.items() if c.round <= most), None)
        if found is None:
            rounds = ", ".join(str(c.round) for c in kept.values()) or "none"
            raise ProtofedError(
                f"'{self.path}' has no checkpoint of round {most} or before; it has: {rounds}",
                "go back fewer rounds; checkpoints in federation.toml says how many are kept",
            )
        file, checkpoint = found
        checkpoint = replace(checkpoint, extra={**checkpoint.extra, **extra})
        records = read_records(self.rounds_file, checkpoint.records)
        self.save_checkpoint(checkpoint, again=True)
        at = self._checkpoints.index(file)
        self._remove(*self._checkpoints[1 : at + 1])
        for newer, older in zip(self._checkpoints[1:], self._checkpoints[at + 1 :], strict=False):
            if (self.path / older).is_file():
                (self.path / older).replace(self.path / newer)
        write_atomic(self.rounds_file, "".join(map(to_line, records)))
        self._remove(SUMMARY, MODEL)
        return checkpoint

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder while something in it changes; ``Busy`` if a run is under way."""
        with self._locked():
            yield

    def copy_progress(self, other: RunFolder) -> None:
        """Make this folder a copy of another run's, as if that run had not been finished.

        Private files stay private: modes are copied, those of folders before anything is in them.
        """
        first = [other.path / name for name in (CONFIG, FACTS, CLIENTS, ROUNDS)]
        inner = [path for name in FOLDERS for path in sorted((other.path / name).glob("*"))]
        last = [other.path / name for name in (PREVIOUS, CHECKPOINT)]
        for path in filter(Path.is_file, (*first, *inner, *last)):
            target = self.path / path.relative_to(other.path)
            make_folder(target.parent)
            shutil.copymode(path.parent, target.parent)
            write_atomic(target, path.read_bytes())
            shutil.copymode(path, target)

    def contents(self) -> dict[str, bytes]:
        """Every file of the folder by its name below it, for ``receive``."""
        found = (p for p in self.path.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {str(p.relative_to(self.path)): p.read_bytes() for p in found}

    def receive(self, changed: Mapping[str, bytes | str], names: Collection[str]) -> None:
        """Make this folder what a run's folder on another machine was at one moment.

        ``changed`` has the files that are new there; a name instead of a content is the file here
        that has it. ``names`` are all files there. The order is that of a run's own writes, so that
        the run can be resumed whenever this is killed.
        """
        self._remove(*(name for name in reversed(FILES) if name not in names))
        for name in sorted(changed, key=lambda n: FILES.index(n) if n in FILES else -1):
            found = changed[name]
            content = found if isinstance(found, bytes) else (self.path / found).read_bytes()
            write_atomic(self.path / name, content, private=name.startswith("clients/"))
        for path in (path for name in FOLDERS for path in (self.path / name).glob("*")):
            if str(path.relative_to(self.path)) not in names:
                path.unlink()

    def save_artifact(
        self, kind: str, round: int, content: Tree, metadata: Mapping[str, Any]
    ) -> None:
        """Write what is kept from a single round; rounds count from 1."""
        tree.save(content, self._artifact(kind, round), {"round": round, **metadata})

    def save_model(self, model: StoredModel) -> None:
        model.save(self.path / MODEL)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which makes the run a finished one."""
        write_json(self.path / SUMMARY, summary)

    def restore(
        self,
        config: Config,
        facts: Mapping[str, Any],
        records: Records,
        summary: Mapping[str, Any],
        analysis: Mapping[str, Any] | None,
    ) -> None:
        """Write a finished run whose model is gone."""
        with writing(self.path):
            make_folder(self.path)
        with self._locked():
            self.save_config(config, summary["hash"])
            write_json(self.path / FACTS, facts)
            write_atomic(self.rounds_file, "".join(map(to_line, records)))
            if analysis is not None:
                write_json(self.path / ANALYSIS, analysis)
            # the records may lack what single clients did, so their digest differs
            own = {"records": digest(records)} if "records" in summary else {}
            self.finish({**summary, **own})

    def mark_diverged(self, message: str) -> None:
        """Note that the run diverged: the same numbers would diverge again."""
        write_atomic(self.path / DIVERGED, f"{message}\n")

    def save_file(self, name: str, content: bytes) -> None:
        """Write another file, such as a figure."""
        write_atomic(self.path / name, content)

    # ---- reading -----------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the folder is a run's."""
        return self.config_file.is_file()

    @property
    def has_checkpoint(self) -> bool:
        return any((self.path / name).is_file() for name in (CHECKPOINT, PREVIOUS))

    @property
    def has_model(self) -> bool:
        """Whether the model is there; a packed run has none."""
        return (self.path / MODEL).is_file()

    def is_finished(self, hash: str | None = None) -> bool:
        """Whether a run is complete here; with ``hash``, whether it is that very run."""
        if hash is None:
            return (self.path / SUMMARY).is_file()
        try:
            return bool(self.summary()["hash"] == hash)
        except ProtofedError:  # there is none, or it is damaged
            return False

    def diverged(self) -> str:
        """What diverged, if the run did and has not been run again; otherwise empty."""
        try:
            return (self.path / DIVERGED).read_text("utf-8").strip()
        except OSError:
            return ""

    def is_locked(self) -> bool:
        """Whether another process has the run under way."""
        if not (self.path / LOCK).exists():
            return False
        try:
            with self._locked():
                return False
        except Busy:
            return True

    def rounds_written(self) -> int:
        """When rounds were last written, in nanoseconds; -1 if never."""
        try:
            return self.rounds_file.stat().st_mtime_ns
        except OSError:
            return -1

    def settings(self) -> dict[str, Any]:
        """The complete settings, as ``make_config`` takes them."""
        if not self.exists:
            raise Damaged(self.config_file, "it is missing")
        head, _, text = self.config_file.read_text("utf-8", errors="replace").partition("\n")
        given, _, run = head.partition(_OF_RUN)
        if head.startswith(_CHECKSUM) and given != f"{_CHECKSUM}{checksum(text)}":
            raise Damaged(self.config_file, "its content does not match its checksum")
        if run and self.is_finished() and run != self.summary()["hash"]:
            raise Damaged(self.config_file, f"it is from another run than {SUMMARY}")
        found = read_config(self.config_file)
        if not head.startswith(_CHECKSUM) and parse_toml(f"{head}\n{text}").get("format", 1) > 1:
            raise Damaged(self.config_file, "its checksum is missing")
        if missing := [name for name in REQUIRED_SETTINGS if name not in found]:
            raise Damaged(self.config_file, f"it lacks {', '.join(missing)}")
        return found

    def facts(self) -> dict[str, Any]:
        """What was found when the run started; empty if that was not recorded."""
        path = self.path / FACTS
        return require_shape(path, read_json(path), FACTS_SHAPE) if path.is_file() else {}

    def records(self) -> Records:
        """The rounds that are complete by now; a finished run has at least one."""
        if not (self.rounds_file.is_file() or self.is_finished()):
            return Records()
        found = read_records(self.rounds_file)
        summary = self.summary() if self.is_finished() else {}
        if summary and not 0 < len(found) == summary.get("rounds", len(found)):
            raise Damaged(
                self.rounds_file, f"it has {len(found)} rounds, not all of a finished run"
            )
        if "records" in summary and summary["records"] != digest(found):
            raise Damaged(self.rounds_file, f"its rounds do not match {SUMMARY}")
        return found

    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY
        found = require_shape(path, read_json(path), SUMMARY_SHAPE)
        if self.facts().get("run", found["hash"]) != found["hash"]:
            raise Damaged(path, f"it is from another run than {FACTS}")
        return found

    def analysis(self) -> dict[str, Any] | None:
        """What a report shows of the model, if the run comes from a packed study."""
        path = self.path / ANALYSIS
        return read_json(path) if path.is_file() else None

    def checkpoint(self, file: str = CHECKPOINT) -> Checkpoint | None:
        path = self.path / file
        if not path.is_file():
            return None
        state, extra = tree.load(path)
        try:
            hash, round, clients = (extra.pop(name) for name in ("hash", "round", "clients"))
        except KeyError as error:
            raise Damaged(path, f"it lacks {error.args[0]}") from None
        pending, rounds = extra.pop("pending", None), extra.pop("rounds", 0)
        if isinstance(pending, dict):
            pending["round"] = round  # earlier versions counted from 0
        records = extra.pop("records", "")
        kinds = (
            *((hash, str), (round, int), (clients, dict)),
            *((pending, dict | None), (rounds, int), (records, str)),
        )
        right = all(isinstance(value, kind) for value, kind in kinds)
        if not right or not all(isinstance(f, str) and Path(f).name == f for f in clients.values()):
            raise Damaged(path, "its metadata is not that of a checkpoint")
        return Checkpoint(hash, round, state, clients, pending, extra, rounds, records)

    def kept_checkpoints(self) -> dict[str, Checkpoint]:
        """All whole checkpoints by file, newest first."""
        found = {}
        for file in self._checkpoints:
            with suppress(Damaged):
                if (checkpoint := self._generation(file)) is not None:
                    found[file] = checkpoint
        return found

    def older_checkpoint(self) -> Checkpoint | None:
        """The checkpoint before the last one, if it is there and whole."""
        with suppress(Damaged):
            return self.checkpoint(PREVIOUS)
        return None

    def client_state(self, file: str) -> Tree:
        """The private state in a file that the checkpoint names."""
        return read_state(self.client_states / file)

    def model(self) -> StoredModel:
        found = read_model(self.path / MODEL)
        if self.is_finished() and found.card.hash != self.summary()["hash"]:
            raise Damaged(self.path / MODEL, "it is the model of another run")
        return found

    def artifact_rounds(self, kind: str) -> list[int]:
        """The rounds, from 1, for which there is an artifact of this kind."""
        found = (path.stem for path in (self.path / kind).glob("*.safetensors"))
        return sorted(int(name) for name in found if re.fullmatch("[1-9][0-9]*", name))

    def artifact(self, kind: str, round: int) -> tuple[Tree, dict[str, Any]]:
        """What was kept from a single round, and its metadata."""
        path = self._artifact(kind, round)
        content, metadata = tree.load(path)
        require_shape(path, metadata, ARTIFACTS[kind])
        if metadata["round"] != round:
            raise Damaged(path, f"it is from round {metadata['round']}")
        return content, metadata

    def _artifact(self, kind: str, round: int) -> Path:
        return self.path / kind / f"{round}.safetensors"

    # ---- verifying ---------------------------------------------------------------------------

    @property
    def has_checksums(self) -> bool:
        """Whether the folder has a format whose files carry checksums."""
        try:
            return self.config_file.read_bytes().startswith(_CHECKSUM.encode())
        except OSError:
            return True

    def damage(self) -> dict[str, str]:
        """What is wrong with the folder's files, by their names; all of them are read."""
        found: dict[str, str] = {}

        def read(name: str, reader: Callable[..., object], *given: object) -> None:
            try:
                reader(*given)
            except Damaged as error:
                found[os.path.relpath(error.path, self.path)] = error.why
            except ProtofedError as error:
                found[name] = error.message

        read(CONFIG, self.settings)
        read(FACTS, self.facts)
        if (self.path / CLIENTS).is_file():
            read(CLIENTS, read_json, self.path / CLIENTS)
        read(ROUNDS, self.records)
        for path in sorted(self.path.rglob("*.safetensors")):
            read(path.name, tree.load, path)
        for kind in ARTIFACTS:
            for round in self.artifact_rounds(kind):
                read(f"{kind}/{round}", self.artifact, kind, round)
        for file in (CHECKPOINT, PREVIOUS):
            read(ROUNDS, self._generation, file)
        if self.is_finished():
            read(SUMMARY, self.summary)
            read(MODEL, self.model)
            if not (self.path / CHECKPOINT).is_file():
                found[CHECKPOINT] = "it is missing"
        return found


def started_runs(root: Path) -> list[RunFolder]:
    """Every run in or below a folder that has written anything, whatever it has lost since."""
    files = (file for name in (FACTS, ROUNDS, SUMMARY) for file in root.rglob(name))
    return [RunFolder(path) for path in sorted({file.parent for file in files})]


def find_runs(root: Path) -> list[RunFolder]:
    """The run in a folder, or else all runs below it, finished or not."""
    if RunFolder(root).exists:
        return [RunFolder(root)]
    return [RunFolder(path.parent) for path in sorted(root.rglob(CONFIG))]


def stored_config(settings: Mapping[str, Any], method: str) -> Config:
    """The config of a run, from the settings in its folder; ``method`` is its method's name.

    No code is executed for it. Its task may be one that a program made, which cannot be described
    by its name.
    """
    settings, name = dict(settings), settings["task"]
    if known_class(settings["method"]) is None:
        options = settings.pop("options", {})
        settings["method"] = RecordedMethod(method, settings["method"], options)
    if name in TASKS or name.startswith(FOLDER):
        return make_config(**settings)
    split, clients, samples = (settings.get(key) for key in ("test_split", "clients", "samples"))
    if not (isinstance(clients, Mapping) and isinstance(samples, Mapping)):
        raise unknown("task", name, (*TASKS, f"{FOLDER}PATH"))  # nothing names its domains
    domains = tuple(dict.fromkeys((*clients, *samples)))
    splits = () if split is None else (split,)
    info = TaskInfo(name, domains, None, clients, samples, test_splits=splits)
    return make_config(**{**settings, "task": info})


def plain_settings(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings with what its summary says was found: clients, samples, device, precision.

    A config has only what was asked for, and one for a folder of images does not name its domains.
    """
    found = {name: summary[name] for name in ("device", "precision") if name in summary}
    named = {"method": summary["method"]} if "method" in summary else {}
    return {"leave_out": None, **settings, **summary["split"], **found, **named}


def _numeric_settings(toml: str) -> dict[str, Any]:
    """The settings of a configuration's text that can change a number, by dotted name."""
    found = parse_toml(toml)
    found["task"] = short_task(str(found.get("task")))
    flat: dict[str, Any] = {}
    for name, value in ((n, without_paths(n, v)) for n, v in found.items()):
        if isinstance(value, dict):
            flat |= {f"{name}.{k}": v for k, v in value.items()}
        elif is_hashed(name):
            flat[name] = value
    return flat


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys((*before, *now))
    return [
        f"{name} {before.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
