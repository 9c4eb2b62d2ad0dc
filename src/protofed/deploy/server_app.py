"""What the server does with a run; its ``executor`` forks a process for each.

The server's folder comes from ``PROTOFED_SERVER``, which ``protofed deploy server`` sets: a
submitted run cannot choose another one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flwr.app import Context
from flwr.serverapp import Grid

from protofed.deploy.coordinator import ON_POISON, Coordinator
from protofed.deploy.counts import Counts
from protofed.deploy.members import read_members
from protofed.deploy.operator import run_folder, with_weights
from protofed.deploy.programs import FOLDER_VARIABLE
from protofed.deploy.run_log import ENDED, log, log_path, logging_to
from protofed.deploy.spec import FILES, unpack, with_own_files
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.runs.run import tf32


def main(grid: Grid, context: Context) -> None:
    """Run all rounds of the run that Flower's run configuration describes."""
    place = os.environ.get(FOLDER_VARIABLE)
    if not place:
        raise ProtofedError(
            f"{FOLDER_VARIABLE} is not set", "start the server with: protofed deploy server"
        )
    folder, asked = Path(place), context.run_config
    members = read_members(folder)
    spec = unpack(str(asked["spec"]), members.methods)
    members.require_own(spec.task)
    config, out = spec.config, run_folder(folder, spec)
    with one_thread(), tf32(config.precision == "tf32"), logging_to(log_path(out)), log_signals():
        log.info("%s on %s: %s", config.method.name, config.task, out)
        try:
            home = None if asked.get("confirm") else folder
            counts = Counts(home, spec.counts, members.max_samples)
            on_poison = str(asked.get("on-poison", ON_POISON[0]))
            whole = with_own_files(with_weights(folder, spec), folder / FILES, "the server")
            coordinator = Coordinator(grid, members, whole, out, counts=counts, on_poison=on_poison)
            coordinator.run(bool(asked.get("resume")), bool(asked.get("overwrite")))
        except ProtofedError as error:
            log.error("%s: %s", ENDED, error)
            raise
        except Exception:
            log.exception(ENDED)
            raise


app = main
"""What the submitted app names. Flower looks for an assignment, and nothing imports it."""


@contextmanager
def log_signals() -> Iterator[None]:
    """``deploy stop`` and the end of the server are signals: log them before the process ends."""
    if threading.current_thread() is not threading.main_thread():  # as in a test
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stopped(number: int, frame: FrameType | None) -> None:
        log.warning("%s: stopped; protofed deploy start ... --resume continues it", ENDED)
        before = handlers[signal.Signals(number)]
        if not callable(before):
            raise SystemExit(128 + number)
        before(number, frame)

    for number in handlers:
        signal.signal(number, stopped)
    try:
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
