"""A run and its folder: records, checkpoints, artifacts, result; and the pool of all runs."""

from __future__ import annotations

from protofed.runs.folder import RunFolder
from protofed.runs.result import Result, load_run
from protofed.runs.run import run

__all__ = ["Result", "RunFolder", "load_run", "run"]
