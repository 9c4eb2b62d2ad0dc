"""What a finished run's folder says of itself, read without its images or its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protofed.config import read_config
from protofed.files import Damaged, read_json
from protofed.runs.records import Records, read_records

SUMMARY = ("hash", "method", "accuracy", "bytes_up", "bytes_down", "seconds")
SETTINGS = ("task", "method", "seed", "rounds", "clients", "samples", "protocol", "model")


def read_summary(folder: Path) -> dict[str, Any]:
    """The run's ``summary.json``."""
    return read_json(folder / "summary.json", SUMMARY)


def read_settings(folder: Path) -> dict[str, Any]:
    """The run's ``config.toml``, which is complete."""
    found = read_config(folder / "config.toml")
    if lacking := [name for name in SETTINGS if name not in found]:
        raise Damaged(folder / "config.toml", f"it lacks {', '.join(lacking)}")
    return found


def read_finished(folder: Path) -> Records:
    """The run's rounds, of which there is at least one."""
    found = read_records(folder / "rounds.jsonl")
    if not found:
        raise Damaged(folder / "rounds.jsonl", "a finished run has rounds, and it has none")
    return found
