"""The command line; ``protofed`` calls ``main``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def main() -> None:
    """The entry point. Ctrl-C is quiet from here on: nothing large is imported before."""
    try:
        with quiet_interrupt():
            from protofed.cli.app import main as call
        call()
    except KeyboardInterrupt:  # typer sees those inside of a command
        sys.exit(INTERRUPTED)
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # libraries clean up at exit, in Python


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once: for imports, in which nothing has to be cleaned up.

    A KeyboardInterrupt would pass through the C++ of PyTorch's import, which aborts.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # it may be ignored
    if raises:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
