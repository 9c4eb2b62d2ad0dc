"""A run's folder: opened without harm, and written so that a crash leaves it usable."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.config import SETTINGS, Config, short_task
UNHASHED = [n for n, s in SETTINGS.items() if not s.numbers]
from protofed.errors import ProtofedError
from protofed.federation.client_state import ClientStore, Index
from protofed.files import writing
from protofed.runs.artifacts import FOLDERS as KEPT
from protofed.runs.records import Record, Records, line, read_records
from protofed.tree import Tree

RUN_FILES = (
    "config.toml",
    "clients.json",
    "rounds.jsonl",
    "checkpoint.safetensors",
    "model.safetensors",
    "summary.json",
    "curves.png",
    "trace.json.gz",
)
"""The files of a run's folder, beside the folders ``clients``, ``prototypes``, ``snapshots``."""


@contextmanager
def opened_folder(
    config: Config, folder: Path, resume: bool, overwrite: bool
) -> Iterator[tuple[Tree, dict[str, Any]] | None]:
    """While it lasts the folder is this run's alone; gives what ``open_folder`` returns."""
    with ExitStack() as held:
        there = folder.is_dir()
        if there:
            held.enter_context(_alone(folder))
        checkpoint = open_folder(config, folder, resume, overwrite)
        if not there:
            held.enter_context(_alone(folder))
        yield checkpoint


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """An error if another run writes the folder: two would mix their rounds.

    The lock is on the folder itself, leaves nothing behind and ends with the process.
    """
    try:
        import fcntl
    except ImportError:  # Windows has none; there it is the user's care
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ProtofedError(
            f"another process has a run under way in '{folder}'",
            "wait for it or stop it, or choose another --out",
        ) from None
    except OSError:  # a file system that has no locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def open_folder(
    config: Config, folder: Path, resume: bool, overwrite: bool
) -> tuple[Tree, dict[str, Any]] | None:
    """Make the folder ready; returns the checkpoint to go on from. Touches nothing on error."""
    if folder.exists() and not folder.is_dir():
        raise ProtofedError(f"'{folder}' is a file, not a run's folder", "choose another --out")
    if resume and overwrite:
        raise ProtofedError("--resume goes on and --overwrite starts anew", "give one of them")
    used = folder.is_dir() and any(not _torn(path) for path in folder.iterdir())
    if used and not overwrite:
        if not (folder / "config.toml").is_file():
            raise ProtofedError(f"'{folder}' is not a run's folder", "choose another --out")
        if not resume:
            raise ProtofedError(
                f"'{folder}' already holds a run",
                "--resume goes on with it, --overwrite starts anew, --out takes another folder",
            )
        checkpoint = folder / "checkpoint.safetensors"
        if checkpoint.is_file():
            state, metadata = tree.load(checkpoint)
            if metadata.get("hash") != config.hash:
                raise ProtofedError(
                    f"'{folder}' holds a checkpoint of another configuration "
                    f"({metadata.get('hash')}, not {config.hash})",
                    f"compare with {folder / 'config.toml'}, or choose another --out",
                )
            return state, metadata
        if not _is_of(folder, config):
            raise ProtofedError(
                f"'{folder}' holds a run of another configuration that was never checkpointed",
                f"compare with {folder / 'config.toml'}, or start anew with --overwrite",
            )
        if (folder / "summary.json").is_file():
            raise ProtofedError(
                f"'{folder}' holds a finished run without its checkpoint",
                "there is nothing to go on from; --overwrite does it again",
            )
    if used:
        if not (folder / "config.toml").is_file():
            raise ProtofedError(
                f"'{folder}' is not a run's folder: it is not overwritten", "choose another --out"
            )
        _clear(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return None


def begins_anew(folder: Path, config: Config) -> bool:
    """Whether this run stopped in the folder before its first checkpoint: nothing to go on from."""
    kept = any((folder / name).is_file() for name in ("checkpoint.safetensors", "summary.json"))
    return not kept and (folder / "config.toml").is_file() and _is_of(folder, config)


def _is_of(folder: Path, config: Config) -> bool:
    """Whether the folder's configuration differs from this one in nothing that changes numbers."""
    return _asked((folder / "config.toml").read_text("utf-8")) == _asked(config.toml())


def _asked(toml: str) -> dict[str, Any]:
    """What a configuration's text asks for, without what cannot change a number (``UNHASHED``)."""
    try:
        found = tomllib.loads(toml)
    except tomllib.TOMLDecodeError:
        return {"damaged": toml}
    found["task"] = short_task(str(found.get("task")))
    return {k: v for k, v in found.items() if k not in UNHASHED}


def _torn(path: Path) -> bool:
    """Whether this is what a kill left of a file while it was written (``write_atomic``)."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _clear(folder: Path) -> None:
    """Remove a run's files and nothing else; by ``config.toml`` it stays a run's folder.

    Backwards: killed in between, it says neither that it is finished nor that it can go on.
    """
    for name in reversed(RUN_FILES):
        if name != "config.toml":
            (folder / name).unlink(missing_ok=True)
    for name in ("clients", *KEPT):
        shutil.rmtree(folder / name, ignore_errors=True)


def complete_records(folder: Path, rounds: int, checkpoint: int) -> Records:
    """The records of as many rounds as the checkpoint, of round ``checkpoint``, counts on."""
    records = Records(read_records(folder / "rounds.jsonl")[:rounds])
    if len(records) != rounds:
        raise ProtofedError(
            f"'{folder}' has a checkpoint of round {checkpoint} but records of "
            f"{len(records)} rounds",
            "start anew with --overwrite",
        )
    return records


def append_record(folder: Path, record: Record) -> None:
    """Write a round's record, on disk before a checkpoint that counts on it."""
    path = folder / "rounds.jsonl"
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line(record))
        file.flush()
        os.fsync(file.fileno())


def save_checkpoint(
    folder: Path, config: Config, store: ClientStore, done: tuple[int, Tree, Index]
) -> None:
    """Write state after a complete round; the clients' files take effect with this one file."""
    round, state, index = done
    files = store.save(index, round)
    metadata = {"round": round, "hash": config.hash, "clients": files}
    tree.save(state, folder / "checkpoint.safetensors", metadata)
    store.clean(files)
