"""Files that are there whole or not at all, and what is said where they cannot be written."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protofed.errors import ProtofedError


class CannotWrite(ProtofedError, OSError):
    """A full disk, a place where one may not write; an ``OSError`` to those who expect one."""

    def __init__(self, path: Path, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "make room; a run goes on with --resume" if full else "choose another place"
        super().__init__(f"cannot write '{path}': {error.strerror or error}", hint)
        self.errno, self.strerror, self.filename = error.errno, error.strerror, str(path)

    def __str__(self) -> str:  # an OSError's own begins with a number
        return f"{self.message} ({self.hint})"


class Damaged(ProtofedError):
    """A file of ours that does not hold what it should."""

    def __init__(self, path: Path, why: str) -> None:
        what = "the run's folder" if path.parent.joinpath("config.toml").exists() else "it"
        super().__init__(f"'{path}' is damaged: {why}", f"delete {what} and run it again")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is done to write ``path``: an error of the file system names it."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(path, error) from error


def read_json(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON file that must hold an object with these keys; an error says that it is damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # also what is no text at all
        raise Damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise Damaged(path, f"it holds {type(found).__name__}, not an object")
    if lacking := [key for key in keys if key not in found]:
        raise Damaged(path, f"it lacks {', '.join(lacking)}")
    return found


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new, never a part.

    Also after a power cut: the content is on the disk before its name is. The temporary file has
    a name of its own, so that two processes may write at once.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp's 0600 would lock out the other users of a shared folder
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
