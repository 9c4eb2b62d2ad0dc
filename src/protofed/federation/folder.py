"""A run's folder: opened without harm, and written so that a crash leaves it usable."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from protofed.config import Config
from protofed.errors import ProtofedError
from protofed.federation import tree
from protofed.federation.keep import FOLDERS as KEPT
from protofed.federation.records import Record, Records, line, read_records
from protofed.federation.store import ClientStore, Index
from protofed.federation.tree import Tree

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


def open_folder(
    config: Config, folder: Path, resume: bool, overwrite: bool
) -> tuple[Tree, dict[str, Any]] | None:
    """Make the folder ready; returns the checkpoint to go on from. Touches nothing on error."""
    if folder.exists() and not folder.is_dir():
        raise ProtofedError(f"'{folder}' is a file, not a run's folder", "choose another --out")
    if resume and overwrite:
        raise ProtofedError("--resume goes on and --overwrite starts anew", "give one of them")
    used = folder.is_dir() and any(folder.iterdir())
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
        if (folder / "config.toml").read_text("utf-8") != config.toml():
            raise ProtofedError(
                f"'{folder}' holds a run of another configuration that was never checkpointed",
                f"compare with {folder / 'config.toml'}, or start anew with --overwrite",
            )
    if used and overwrite:
        if not (folder / "config.toml").is_file():
            raise ProtofedError(
                f"'{folder}' is not a run's folder: it is not overwritten", "choose another --out"
            )
        for name in RUN_FILES:  # nothing else that may lie there
            (folder / name).unlink(missing_ok=True)
        for name in ("clients", *KEPT):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return None


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
    with (folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
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
