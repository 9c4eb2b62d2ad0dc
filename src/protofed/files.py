"""Files that are complete or absent, the format and checksum they carry, errors that name them."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protofed.errors import ProtofedError

FORMAT = 2
"""The number in every file that is written; it is raised when the meaning of a file changes.

From format 2 on, every file of a run carries a checksum.
"""


FILE = "file:"
"""What the value of a hyper-parameter starts with that names a file."""


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
        self.path, self.why = path, why


def expand_user(path: str | Path) -> Path:
    """The path with a ``~`` in front replaced by the user's home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ProtofedError(f"'{path}': the home folder is unknown", "write it out") from None


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
    """Raise an error if a file has a newer format; None: it is from before there were formats."""
    if found is None:
        return
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise Damaged(path, f"its format is {found!r}")
    if found > FORMAT:
        raise ProtofedError(
            f"'{path}' was written by a newer version of protofed (format {found}; this version "
            f"reads formats up to {FORMAT})",
            "upgrade protofed",
        )


def checksum(text: str, data: Iterable[Any] = ()) -> str:
    """CRC-32 of a text and of buffers that follow it: it finds damage, not forgery."""
    found = zlib.crc32(text.encode())
    for part in data:
        found = zlib.crc32(part, found)
    return f"{found:08x}"


def sealed(content: Mapping[str, Any], data: Iterable[Any] = ()) -> dict[str, Any]:
    """Plain content with its format and a checksum over it and the ``data`` that it describes."""
    whole = {"format": FORMAT, **content}
    return {"format": FORMAT, "checksum": checksum(json.dumps(whole), data), **content}


def unsealed(path: Path, found: Mapping[str, Any], data: Iterable[Any] = ()) -> dict[str, Any]:
    """The content that ``sealed`` was given; files of earlier formats carry no checksum."""
    content = dict(found)
    expected, format = content.pop("checksum", None), content.get("format")
    check_format(path, format)
    if expected is None and (format or 1) > 1:
        raise Damaged(path, "its checksum is missing")
    if expected is not None and expected != checksum(json.dumps(content), data):
        raise Damaged(path, "its content does not match its checksum")
    content.pop("format", None)
    return content


def read_json(path: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """The object in a JSON file, which must have these keys; its checksum is verified."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not text
        raise Damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise Damaged(path, f"it holds {type(found).__name__}, not an object")
    found = unsealed(path, found)
    if missing := [key for key in keys if key not in found]:
        raise Damaged(path, f"it lacks {', '.join(missing)}")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, its format and its checksum as JSON, atomically."""
    text = json.dumps(sealed(content), indent=2, ensure_ascii=False)
    write_atomic(path, text + "\n")


def write_atomic(path: Path, content: bytes | str, private: bool = False) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new, never a part.

    This holds after a power cut, too: the content is on disk before its name is, and the name is on
    disk when this returns. Temporary files have unique names, so two processes may write at once.
    Only its owner can read a ``private`` file, or enter its folder if that is made here; other
    files follow the umask.
    """
    with writing(path):
        if not path.name:  # "." or "/"
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        make_folder(path.parent, private)
        temporary = temporary_file(path)
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
        sync_folder(path.parent)


def temporary_file(path: Path) -> Path:
    """Where to write what will replace a file: a new name next to it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a file is such a temporary one; if nobody is writing, a killed process left it."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name) is not None


def make_folder(path: Path, private: bool = False) -> None:
    """Make a folder and those above it; they are on disk when this returns.

    Only its owner can enter a ``private`` one.
    """
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the system can do that."""
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
