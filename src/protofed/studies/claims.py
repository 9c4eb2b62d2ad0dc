"""Claims: several processes, on several machines, share a folder and no run is done twice.

A run is claimed by a file beside its folder, created with ``O_EXCL``: of all who try, one
succeeds. The file says who holds it; its modification time is the heartbeat. A claim is *stale*
when its process is dead (asked where that can be known: on the same machine) or has not beaten for
ten minutes. A stale claim is not deleted, which two could do at once, but followed: who takes over
``x.claim`` creates ``x.claim.2`` with ``O_EXCL`` again, and the highest number holds.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_SECONDS = 30.0
STALE_SECONDS = 600.0


@dataclass(frozen=True)
class Holder:
    """Who holds a claim."""

    host: str
    machine: str
    pid: int
    started: str
    token: str

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}" if self.pid else "another process"


def me() -> Holder:
    """This process, told apart from every other that was or will be."""
    pid = os.getpid()
    return Holder(platform.node(), _machine(), pid, _started(pid), secrets.token_hex(8))


def holder(path: Path) -> Holder | None:
    """Who holds the claim and is alive; None if it is free or stale."""
    number = _highest(path)
    if not number:
        return None
    found = _read(_file(path, number))
    return found if found is not None and _alive(_file(path, number), found) else None


class Claim:
    """A claim that this process holds."""

    def __init__(self, path: Path, number: int, own: Holder) -> None:
        self.path, self.number, self.own = path, number, own
        self._stop = threading.Event()

    @classmethod
    def acquire(cls, path: Path) -> Claim | None:
        """The claim, or None if somebody else holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        last = _highest(path)
        before = _read(_file(path, last)) if last else None
        if last and (before is None or _alive(_file(path, last), before)):
            return None
        claim = cls(path, last + 1, me())
        try:
            handle = os.open(claim.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(vars(claim.own), file)
            file.flush()
            os.fsync(file.fileno())
        # between looking and creating the stale claim may have gone and another come
        still = _read(_file(path, last)) if last else None
        if still != before or _highest(path) != claim.number:
            claim.file.unlink(missing_ok=True)
            return None
        return claim

    @property
    def file(self) -> Path:
        """The claim's own file."""
        return _file(self.path, self.number)

    def held(self) -> bool:
        """Beat, and say whether the claim is still ours: who slept too long has lost it."""
        try:
            os.utime(self.file)
        except OSError:
            return False
        return _highest(self.path) == self.number and _read(self.file) == self.own

    def keep(self, lost: Callable[[], Any], every: float | None = None) -> None:
        """Beat in the background until released; call ``lost`` if another took over."""

        def beat() -> None:
            while not self._stop.wait(BEAT_SECONDS if every is None else every):
                if not self.held() and not self._stop.is_set():
                    lost()
                    return

        threading.Thread(target=beat, name="claim", daemon=True).start()

    def release(self) -> None:
        """Give the claim up, with the stale ones it followed."""
        self._stop.set()
        if _read(self.file) != self.own:
            return
        for number in range(1, self.number + 1):
            _file(self.path, number).unlink(missing_ok=True)


def _file(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}.{number}")


def _highest(path: Path) -> int:
    """The number of the claim that counts; 0: there is none."""
    number = 1 if path.exists() else 0
    for file in path.parent.glob(f"{_escaped(path.name)}.*"):
        suffix = file.name.removeprefix(f"{path.name}.")
        if suffix.isdigit():
            number = max(number, int(suffix))
    return number


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _read(file: Path) -> Holder | None:
    """The holder; an unknown one where the file is not yet written, None where there is none."""
    try:
        return Holder(**json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return Holder("", "", 0, "", "")


def _alive(file: Path, found: Holder) -> bool:
    if found.machine and found.machine == _machine():
        return _started(found.pid) == found.started != ""
    try:
        return _now(file.parent) - file.stat().st_mtime < STALE_SECONDS
    except OSError:
        return False


def _now(folder: Path) -> float:
    """The time on the folder's file system: the clocks of two machines may differ."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock.") as probe:
        return os.fstat(probe.fileno()).st_mtime


def _machine() -> str:
    """A name within which process ids mean something; empty where there is none (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started; empty if there is none (or a zombie): a pid may be used again."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state[0] in "ZX" else state[19]
