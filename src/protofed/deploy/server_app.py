"""Flower's ServerApp: a process of its own for each run, started by the SuperLink.

Where the server's folder is, it knows from ``PROTOFED_SERVER``, which ``protofed deploy server``
sets: a run that someone submits cannot choose another.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofed.deploy.coordinator import Coordinator
from protofed.deploy.members import FILE, read_members
from protofed.deploy.spec import unpack
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.runs.run import tf32

app = ServerApp()
VARIABLE = "PROTOFED_SERVER"
log = logging.getLogger("protofed.deploy")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds of the run that the run's configuration describes."""
    place = os.environ.get(VARIABLE)
    if not place:
        raise ProtofedError(f"{VARIABLE} is not set", "start it with: protofed deploy server")
    folder, asked = Path(place), context.run_config
    config, task, public = unpack(str(asked["spec"]))
    members = read_members(folder / FILE)
    if foreign := members.foreign(task):
        raise ProtofedError(foreign, "start it with: protofed deploy start")
    out = folder / "runs" / config.label
    with one_thread(), tf32(config.precision == "tf32"), _logging(out), _told_when_stopped():
        log.info("%s on %s: %s", config.method.name, config.task, out)
        try:
            coordinator = Coordinator(grid, members, config, task, out, public=public)
            coordinator.run(bool(asked.get("resume")), bool(asked.get("overwrite")))
        except ProtofedError as error:
            log.error("the run ends: %s", error)
            raise
        except Exception:
            log.exception("the run ends")
            raise


@contextmanager
def _told_when_stopped() -> Iterator[None]:
    """After ``deploy stop`` Flower ends this process by a signal: log it first.

    Flower's own farewell may take the five seconds after which it ends the process for good.
    """
    if threading.current_thread() is not threading.main_thread():  # as in tests
        yield
        return
    flowers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stopped(number: int, frame: FrameType | None) -> None:
        log.warning("the run ends: stopped; protofed deploy start ... --resume goes on with it")
        before = flowers[signal.Signals(number)]
        if not callable(before):
            raise SystemExit(128 + number)
        before(number, frame)

    for number in flowers:
        signal.signal(number, stopped)
    try:
        yield
    finally:
        for number, before in flowers.items():
            signal.signal(number, before)


class _logging:
    """While it lasts, the log goes to the screen and beside the run."""

    def __init__(self, out: Path) -> None:
        # not in the folder before it is opened: a folder with a file in it is not empty
        self.path = out.parent / f"{out.name}.log"

    def __enter__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.handlers: list[logging.Handler] = [
            logging.StreamHandler(sys.stdout),
            logging.FileHandler(self.path, encoding="utf-8"),
        ]
        for handler in self.handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False

    def __exit__(self, *_: object) -> None:
        for handler in self.handlers:
            log.removeHandler(handler)
            handler.close()
