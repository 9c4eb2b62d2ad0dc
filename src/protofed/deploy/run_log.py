"""The log of a deployed run: ``<run>.log`` next to the run's folder.

The server's process writes it; the operator's commands follow it until its last line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("protofed.deploy")

COMPLETE = "the run is complete"
ENDED = "the run ended"
"""What the last line of a run's log says: after the last round, or if the run ended early."""


def one_line(text: str, most: int = 1000) -> str:
    """Text from another machine, for a log: it must not look like the log's own lines."""
    return "".join(c if c.isprintable() else " " for c in text[:most])


def log_path(run: Path) -> Path:
    """The log of the run in this folder. Not inside it: a new run needs an empty folder."""
    return run.with_name(f"{run.name}.log")


def says_run_is_over(line: str) -> bool:
    return COMPLETE in line or ENDED in line


def last_line(runs: Path) -> str:
    """The last line of the most recently written log in a folder of runs."""
    logs = sorted(runs.glob("*.log"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text("utf-8", errors="replace").splitlines() if logs else []
    return lines[-1] if lines else ""


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """During this block, log to the terminal and to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers = (logging.StreamHandler(sys.stdout), logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
