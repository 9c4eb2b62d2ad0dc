"""A run's folder. The simulator and the deployment write it, and everything else reads it, here.

    config.toml              the settings, complete; its format is that of the whole folder
    facts.json               what was found when the run started: images, device, versions
    clients.json             who holds what
    rounds.jsonl             one record per round
    checkpoint.safetensors   the state after a complete round
    clients/                 the clients' private states that the checkpoint names
    prototypes/, snapshots/  messages and models of single rounds (``runs.artifacts``)
    model.safetensors        the trained model
    summary.json             written last: a folder that has it is finished
    diverged.txt             what diverged, if the run did

Every file is replaced atomically, and a record is on disk before the checkpoint that counts it, so
a run that is killed at any moment resumes from its last checkpoint. Nothing in a folder is executed
by reading it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from protofed import tree
from protofed.config import Config, changes_numbers, make_config, read_config, short_task
from protofed.data.info import FOLDER, TASKS, TaskInfo
from protofed.errors import Busy, ProtofedError
from protofed.federation.facts import FACTS_SHAPE
from protofed.files import (
    CannotWrite,
    Damaged,
    check_format,
    read_json,
    write_atomic,
    write_json,
    writing,
)
from protofed.methods import RecordedMethod, known_class
from protofed.runs.records import Record, Records, read_records, to_line
from protofed.runs.summary import SUMMARY_SHAPE
from protofed.shape import require_shape
from protofed.toml import parse_toml
from protofed.tree import Slot, Tree

CONFIG = "config.toml"
FACTS = "facts.json"
CLIENTS = "clients.json"
ROUNDS = "rounds.jsonl"
CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"
SUMMARY = "summary.json"
DIVERGED = "diverged.txt"
LOCK = ".lock"

FILES = (
    *(CONFIG, FACTS, CLIENTS, ROUNDS, CHECKPOINT, DIVERGED, MODEL, SUMMARY),
    *("curves.png", "trace.json.gz"),
)
"""All files that a run leaves in its folder, in the order in which they are written."""
ARTIFACTS = ("prototypes", "snapshots")
"""The folders of single rounds' files."""
FOLDERS = ("clients", *ARTIFACTS)

REQUIRED_SETTINGS = ("task", "method", "seed", "rounds", "protocol", "model")
BINDING_FACTS = ("numerics", "digest", "public_digest", "precision", "device")
"""Facts that change numbers: a run resumes only where they are what they were."""

CLIENT_SLOT = "client"
"""The slot of a model file that has the clients' own entries, as ``NAME/ENTRY``."""

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

    @property
    def records(self) -> int:
        """How many complete records the checkpoint counts on."""
        return self.round - (self.pending is not None)


class RunFolder:
    """Reads, writes and locks the folder of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
    ) -> Iterator[Checkpoint | None]:
        """Make the folder this run's alone, ready for its next round.

        Yields the checkpoint to resume from, or None for a run that starts from the beginning.
        If the run may not use the folder, that is an error, and nothing in it has changed.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ProtofedError(
                f"'{self.path}' is a file, not a run's folder", "choose another --out"
            )
        if resume and overwrite:
            raise ProtofedError(
                "--resume continues a run, --overwrite starts over", "give one of them"
            )
        text = config.toml()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            checkpoint = None
            if self._is_used():
                checkpoint = self._claim(config, hash, facts, resume, overwrite, deployed)
            records = self._counted_records(checkpoint)
            if checkpoint is None:
                self._clear()
            write_atomic(self.config_file, text)
            if facts is not None:
                write_json(self.path / FACTS, facts)
            write_atomic(self.rounds_file, "".join(map(to_line, records)))
            yield checkpoint

    def starts_over(self, config: Config, facts: Mapping[str, Any] | None = None) -> bool:
        """Whether resuming this run starts over: it stopped before its first checkpoint."""
        kept = any((self.path / name).is_file() for name in (CHECKPOINT, SUMMARY))
        return not kept and self.exists and not self.differences(config, facts)

    def differences(self, config: Config, facts: Mapping[str, Any] | None = None) -> list[str]:
        """What would change a number and is not as in the folder, e.g. ``lr 0.1 → 0.01``."""
        before, now = self._binding_facts(facts)
        try:
            text = self.config_file.read_text("utf-8")
            found, asked = _numeric_settings(text), _numeric_settings(config.toml())
        except (OSError, ValueError):
            return [f"{CONFIG} cannot be read"]
        check_format(self.config_file, found.pop("format", None))
        del asked["format"]
        return _changes(found | before, asked | now)  # found out counts, not asked for

    def _binding_facts(
        self, facts: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The facts that change numbers, as the folder has them and as they are now."""
        before, now = self.facts(), facts or {}
        names = [name for name in BINDING_FACTS if name in before and name in now]
        return {name: before[name] for name in names}, {name: now[name] for name in names}

    def _claim(
        self,
        config: Config,
        hash: str,
        facts: Mapping[str, Any] | None,
        resume: bool,
        overwrite: bool,
        deployed: bool,
    ) -> Checkpoint | None:
        """The checkpoint of a folder in use; an error if the run may not use it."""
        if not self.exists:
            raise ProtofedError(f"'{self.path}' is not a run's folder", "choose another --out")
        if overwrite:
            return None
        if not resume:
            raise ProtofedError(
                f"'{self.path}' already holds a run",
                "--resume continues it, --overwrite starts over, --out takes another folder",
            )
        checkpoint = self.checkpoint()
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
            return None
        before, now = self._binding_facts(facts)
        if checkpoint.hash != hash or before != now:
            raise ProtofedError(
                f"'{self.path}' holds a checkpoint of another configuration ({checkpoint.hash}, "
                f"not {hash}): {different or 'the code of the method'}",
                "choose another --out, or start over with --overwrite",
            )
        if bool(checkpoint.extra) != deployed:
            kinds = ("the simulator", "a deployment")
            raise ProtofedError(
                f"'{self.path}' holds a run of {kinds[not deployed]}, not of {kinds[deployed]}",
                "choose another folder, or start over with --overwrite",
            )
        return checkpoint

    def _counted_records(self, checkpoint: Checkpoint | None) -> Records:
        """The records of the rounds that the checkpoint has, and not of later ones."""
        if checkpoint is None:
            return Records()
        found = Records(read_records(self.rounds_file)[: checkpoint.records])
        if len(found) != checkpoint.records:
            raise ProtofedError(
                f"'{self.path}' has a checkpoint of round {checkpoint.round} but records of "
                f"{len(found)} rounds",
                "start over with --overwrite",
            )
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process however that ends.

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
        """Whether there is anything but our lock and what a kill left of an unfinished write."""
        return any(
            path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".tmp"))
            for path in self.path.iterdir()
        )

    def _clear(self) -> None:
        """Remove a run's files and nothing else; ``config.toml`` marks the folder as a run's.

        Last written, first removed: killed in between, the folder neither says that it is finished
        nor has a checkpoint without its records.
        """
        for name in reversed(FILES):
            if name != CONFIG:
                (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    # ---- writing -----------------------------------------------------------------------------

    def save_clients(self, table: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.path / CLIENTS, {"clients": table})

    def append_record(self, record: Record) -> None:
        """Add a round's record; it is on disk when this returns."""
        with writing(self.rounds_file), self.rounds_file.open("a", encoding="utf-8") as file:
            file.write(to_line(record))
            file.flush()
            os.fsync(file.fileno())

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint: with this one write the clients' states that it names count."""
        metadata = {
            "round": checkpoint.round,
            "hash": checkpoint.hash,
            "clients": dict(checkpoint.clients),
            "pending": checkpoint.pending,
            **checkpoint.extra,
        }
        tree.save(checkpoint.state, self.path / CHECKPOINT, metadata)

    def save_artifact(
        self, kind: str, round: int, content: Tree, metadata: Mapping[str, Any]
    ) -> None:
        """Write what is kept of a single round; rounds count from 1."""
        tree.save(content, self._artifact(kind, round), {"round": round, **metadata})

    def save_model(
        self, hash: str, holds: str, model: Slot, clients: Mapping[str, Slot] | None = None
    ) -> None:
        """Write the model, and what clients with models of their own have of theirs.

        ``holds`` says in words which entries the file has.
        """
        own = {f"{c}/{name}": t for c, slot in (clients or {}).items() for name, t in slot.items()}
        content = {"model": model, CLIENT_SLOT: own}
        tree.save(content, self.path / MODEL, {"hash": hash, "holds": holds})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which makes the run a finished one."""
        write_json(self.path / SUMMARY, summary)

    def mark_diverged(self, message: str) -> None:
        """Note that the run diverged: the same numbers would diverge again."""
        write_atomic(self.path / DIVERGED, f"{message}\n")

    def save_file(self, name: str, content: bytes) -> None:
        """Write a further file, such as a figure."""
        write_atomic(self.path / name, content)

    # ---- reading -----------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the folder is a run's."""
        return self.config_file.is_file()

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
        """What diverged, if the run did and has not been run again; else empty."""
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
        found = read_config(self.config_file)
        if missing := [name for name in REQUIRED_SETTINGS if name not in found]:
            raise Damaged(self.config_file, f"it lacks {', '.join(missing)}")
        return found

    def facts(self) -> dict[str, Any]:
        """What was found when the run started; empty where none were written down."""
        path = self.path / FACTS
        return require_shape(path, read_json(path), FACTS_SHAPE) if path.is_file() else {}

    def records(self) -> Records:
        """The rounds that are complete by now; a finished run has at least one."""
        if not (self.rounds_file.is_file() or self.is_finished()):
            return Records()
        found = read_records(self.rounds_file)
        if not found and self.is_finished():
            raise Damaged(self.rounds_file, "it has no rounds, though the run is finished")
        return found

    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY
        return require_shape(path, read_json(path), SUMMARY_SHAPE)

    def checkpoint(self) -> Checkpoint | None:
        path = self.path / CHECKPOINT
        if not path.is_file():
            return None
        state, extra = tree.load(path)
        try:
            hash, round, clients = (extra.pop(name) for name in ("hash", "round", "clients"))
        except KeyError as error:
            raise Damaged(path, f"it lacks {error.args[0]}") from None
        return Checkpoint(hash, round, state, clients, extra.pop("pending", None), extra)

    def client_state(self, file: str) -> Tree:
        """The private state in a file that the checkpoint names."""
        return tree.load(self.client_states / file)[0]

    def model(self) -> tuple[Slot, dict[str, Slot]]:
        """The global model, and what each client with a model of its own has of it."""
        slots, _ = tree.load(self.path / MODEL)
        clients: dict[str, Slot] = {}
        for name, t in slots.get(CLIENT_SLOT, {}).items():
            client, _, entry = name.rpartition("/")
            clients.setdefault(client, {})[entry] = t
        return slots.get("model", {}), clients

    def artifact_rounds(self, kind: str) -> list[int]:
        """The rounds, from 1, of which there is an artifact of this kind."""
        found = (path.stem for path in (self.path / kind).glob("*.safetensors"))
        return sorted(int(name) for name in found if name.isdigit())

    def artifact(self, kind: str, round: int) -> tuple[Tree, dict[str, Any]]:
        """What was kept of a single round, and its metadata."""
        return tree.load(self._artifact(kind, round))

    def _artifact(self, kind: str, round: int) -> Path:
        return self.path / kind / f"{round}.safetensors"


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
    domains = tuple(dict.fromkeys((*(clients or ()), *(samples or ()))))
    splits = () if split is None else (split,)
    info = TaskInfo(name, domains, None, clients, samples, test_splits=splits)
    return make_config(**{**settings, "task": info})


def plain_settings(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings with what its summary says was found: clients, samples, device, precision.

    A config has only what was asked for, and that of a folder of images does not name its domains.
    """
    found = {name: summary[name] for name in ("device", "precision") if name in summary}
    named = {"method": summary["method"]} if "method" in summary else {}
    return {"leave_out": None, **settings, **summary.get("split", {}), **found, **named}


def _numeric_settings(toml: str) -> dict[str, Any]:
    """The settings of a configuration's text that can change a number, by dotted name."""
    found = parse_toml(toml)
    found["task"] = short_task(str(found.get("task")))
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{k}": v for k, v in value.items()}
        elif changes_numbers(name):
            flat[name] = value
    return flat


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys((*before, *now))
    return [
        f"{name} {before.get(name, 'not set')} → {now.get(name, 'not set')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
