"""A site's audit log: every request, reply, refusal and approval.

``audit.jsonl`` in the site's folder has one entry per line. Each names the SHA-256 of the line
before, so a line that is changed, removed or inserted is found. A log that was cut off or rewritten
as a whole shows only in its last hash: keep that elsewhere (``deploy audit`` prints it).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.errors import ProtofedError
from protofed.files import writing
from protofed.shape import mismatch
from protofed.tree import Tree

AUDIT_FILE = "audit.jsonl"
START = "0" * 64
"""What the first entry has in place of a hash."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class AuditLog:
    """The audit log in a site's folder."""

    def __init__(self, site: Path) -> None:
        self.path = site / AUDIT_FILE

    def append(self, event: str, **about: Any) -> None:
        """Add an entry; it is on disk when this returns."""
        with writing(self.path):
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                end, last = file.seek(0, os.SEEK_END), _last_line(file)
                entry = {"time": now(), "event": event, **about, "before": _hash(last)}
                # a line that was cut short by a crash stays as it is, for ``entries`` to find
                missing = b"" if last is None or last.endswith(b"\n") else b"\n"
                text = json.dumps(entry, ensure_ascii=False)
                # half a character, which JSON can carry and UTF-8 cannot, stays an escape
                line = missing + text.encode(errors="backslashreplace") + b"\n"
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(handle)
                except OSError:  # of what a full disk took, nothing may look like an alteration
                    os.ftruncate(handle, end)
                    raise

    def entries(self) -> Iterator[dict[str, Any]]:
        """The entries in order; an error names the first line that was altered."""
        before: bytes | None = None
        for number, line in enumerate(self._lines(), start=1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if mismatch(entry, {"time": str, "event": str}) or not line.endswith(b"\n"):
                raise self._altered(number, "is not an entry")
            if entry.get("before") != _hash(before):
                raise self._altered(number, f"does not follow line {number - 1}")
            before = line
            yield entry

    @property
    def head(self) -> str:
        """The hash of the last line."""
        lines = self._lines()
        return _hash(lines[-1] if lines else None)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []

    def _altered(self, number: int, how: str) -> ProtofedError:
        return ProtofedError(
            f"'{self.path}' has been altered, or a crash cut it short: line {number} {how}",
            "keep the file for whoever investigates; if you move it, the site starts a new one",
        )


def contents(sent: Tree) -> dict[str, Any]:
    """What is noted of a message: for each slot its bytes, its norm, and its entries' shapes."""
    return {
        slot: {
            "bytes": tree.nbytes({slot: entries}),
            "norm": sum(float(t.double().square().sum()) for t in entries.values()) ** 0.5,
            "shapes": {name: list(t.shape) for name, t in entries.items()},
        }
        for slot, entries in sent.items()
        if entries
    }


def _hash(line: bytes | None) -> str:
    return START if line is None else hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def _last_line(file: FileIO) -> bytes | None:
    """The last line of a file that may be long."""
    end, part = file.seek(0, os.SEEK_END), 1 << 14
    while end:
        file.seek(max(0, end - part))
        found = file.read()
        first = found.rstrip(b"\n").rfind(b"\n")
        if first >= 0 or part >= end:
            return found[first + 1 :]
        part *= 2
    return None
