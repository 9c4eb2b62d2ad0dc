"""One process at a time changes a file that several programs of a deployment write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Read, change and write files of this folder alone.

    The folder is locked, not a file in it: that might belong to root, and not to the server's user.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system that cannot lock folders
            fcntl.flock(handle, fcntl.LOCK_EX)  # until it is closed
        yield
    finally:
        os.close(handle)
