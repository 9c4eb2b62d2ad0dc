"""Files that are complete or absent, the format they carry, and errors that name them."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protofed.errors import ProtofedError

FORMAT = 1
"""Carried by every file that is written; raised when the meaning of one changes."""


class CannotWrite(ProtofedError, OSError):
    """A full disk or a place without write permission; also an ``OSError``."""

    def __init__(self, path: Path, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space; a run continues with --resume" if full else "choose another place"
        super().__init__(f"cannot write '{path}': {error.strerror or error}", hint)
        self.errno, self.strerror, self.filename = error.errno, error.strerror, str(path)

    def __str__(self) -> str:  # an OSError's own starts with a number
        return f"{self.message} ({self.hint})"


class Damaged(ProtofedError):
    """A file of ours that does not hold what it should."""

    def __init__(self, path: Path, why: str) -> None:
        hint = "delete it, or the whole folder if it is a run's, and run again"
        super().__init__(f"'{path}' is damaged: {why}", hint)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one that names ``path``."""
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(path, error) from error


def check_format(path: Path, found: object) -> None:
    """An error if a file is of a newer format; None is a file from before there were formats."""
    if found is None:
        return
    if isinstance(found, bool) or not isinstance(found, int):
        raise Damaged(path, f"its format is {found!r}, not a number")
    if found > FORMAT:
        raise ProtofedError(
            f"'{path}' was written by a newer version of protofed (format {found}; this version "
            f"reads formats up to {FORMAT})",
            "upgrade protofed",
        )


def read_json(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """The object in a JSON file, which must have these keys; its format is checked and removed."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:  # also bytes that are not text
        raise Damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise Damaged(path, f"it holds {type(found).__name__}, not an object")
    check_format(path, found.pop("format", None))
    if missing := [key for key in keys if key not in found]:
        raise Damaged(path, f"it lacks {', '.join(missing)}")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object and the format as JSON, atomically."""
    text = json.dumps({"format": FORMAT, **content}, indent=2, ensure_ascii=False)
    write_atomic(path, text + "\n")


def write_atomic(path: Path, content: bytes | str, private: bool = False) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new, never a part.

    This holds after a power cut, too: the content is on disk before its name is, and the name is
    when this returns. The temporary file has a name of its own, so two processes may write at once.
    Only its owner can read a ``private`` file, or enter its folder if that is made here; other
    files follow the umask.
    """
    with writing(path):
        path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            handle = os.open(temporary, flags, 0o600 if private else 0o666)
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto disk, where the system can do that."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)
