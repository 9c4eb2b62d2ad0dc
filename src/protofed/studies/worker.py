"""One run of a study in a process of its own: claimed, run, released.

``python -m protofed.studies.worker --config FILE --out FOLDER``. The claim belongs to the process
that writes the folder: if the process that started it is killed, the run goes on, and nobody else
starts it a second time. Exit codes are those of ``protofed run``, and ``BUSY``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

BUSY = 75
"""Somebody else has the run (EX_TEMPFAIL)."""


def claim_file(folder: Path) -> Path:
    """Where a run's claim lies: beside its folder."""
    return folder.with_name(f"{folder.name}.claim")


def failed_file(folder: Path) -> Path:
    """Where it is written down that a run diverged: the same numbers would diverge again."""
    return folder.with_name(f"{folder.name}.diverged")


def work(config_file: Path, folder: Path, workers: int | None, tensorboard: bool = False) -> int:
    """Claim and run; returns the exit code."""
    from protofed.config import merged_config
    from protofed.errors import Diverged
    from protofed.files import write_atomic
    from protofed.runs.folder import RunFolder
    from protofed.runs.run import Observer, run
    from protofed.studies.claims import Claim

    claim = Claim.acquire(claim_file(folder))
    if claim is None:
        return BUSY
    # whoever took over writes the folder now: not even a checkpoint may be written from here
    claim.keep(lost=lambda: os._exit(BUSY))
    try:
        config = merged_config(config_file, None, None, None, {"workers": workers})
        if not RunFolder(folder).is_finished(config.hash):  # somebody may have, before the claim
            observers: list[Observer] = []
            if tensorboard:
                from protofed.observers.tensorboard import TensorBoard

                observers.append(TensorBoard(folder))
            run(config=config, out=folder, resume=True, observers=observers)
    except Diverged as error:
        write_atomic(failed_file(folder), f"{error}\n")
        raise
    finally:
        claim.release()
    return 0


_STOPS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, frame: FrameType | None) -> None:
    """Stop once: Ctrl-C comes from the terminal and from the study, and a checkpoint is written."""
    for other in _STOPS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    from protofed.errors import ProtofedError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--tensorboard", action="store_true")
    given = parser.parse_args()
    for number in _STOPS:
        signal.signal(number, _stop)
    try:
        return work(given.config, given.out, given.workers, given.tensorboard)
    except ProtofedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
