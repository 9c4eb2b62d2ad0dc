"""What a fuzzer is, how its inputs are drawn and judged, and what counts as a fault.

Hypothesis draws bytes; ``Choices`` reads them as decisions, from which a fuzzer makes inputs until
they are used up: a draw costs a millisecond, and so gives many inputs. Hypothesis shortens the
bytes of a fault. What is not accepted has to be refused with a ``ProtofedError``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import protofed
from protofed.errors import ProtofedError

PATIENCE_SECONDS = 20
"""Inputs of a draw that take longer than this are a fault."""
LONGEST_MESSAGE = 100_000
SHRINK_SECONDS = 3.0
"""How long the bytes of one fault are shortened."""
EXAMPLES = 40
"""Draws of a batch."""
MOST_SLOW = 2
"""Inputs of a batch that may take too long; then it ends."""
CURRENT = "current"
"""The file with the bytes that a worker is trying, in case it does not survive them."""

SOURCE = Path(protofed.__file__).parent
T = TypeVar("T")


class Wrong(Exception):
    """Nothing was raised, and what came out is not what it should be."""


class TookTooLong(BaseException):
    """Raised by the alarm."""


class Choices:
    """Bytes as decisions. Zero is the plainest; when the bytes are used up, all are zero."""

    def __init__(self, blob: bytes) -> None:
        self.blob, self.at = blob.rstrip(b"\0"), 0

    @property
    def left(self) -> bool:
        return self.at < len(self.blob)

    def number(self, below: int) -> int:
        size = ((below - 1).bit_length() + 7) // 8
        part = self.blob[self.at : self.at + size].ljust(size, b"\0")
        self.at += size
        return int.from_bytes(part, "big") % below

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.number(one_in) == one_in - 1

    def random(self) -> random.Random:
        return random.Random(self.number(2**32))


@dataclass
class Fault:
    """Something that must not happen, and how to see it again."""

    fuzzer: str
    repeat: str
    what: str
    input: str
    trace: str
    hits: int = 1

    @property
    def signature(self) -> str:
        return f"{self.fuzzer}: {self.what}"


@dataclass
class Tally:
    """What a batch tried, and how it ended."""

    tried: int = 0
    ok: int = 0
    refused: int = 0
    slow: int = 0
    faults: dict[str, Fault] = field(default_factory=dict)

    def add(self, fault: Fault) -> None:
        known = self.faults.setdefault(fault.signature, fault)
        if known is not fault:
            known.hits += 1
            if (len(fault.input), fault.input) < (len(known.input), known.input):
                known.repeat, known.input, known.trace = fault.repeat, fault.input, fault.trace


Batch = Callable[[int, Path], Tally]
"""A batch of a fuzzer: its number, from which everything follows, and a folder to work in."""


@dataclass(frozen=True)
class Fuzzer:
    """``kind`` is what it counts: inputs, corruptions or kills; ``size``: how many in a batch."""

    name: str
    kind: str
    batch: Batch
    size: int
    repeat: Callable[[bytes, Path], Tally] | None = None


FUZZERS: dict[str, Fuzzer] = {}


def inputs(name: str, make: Callable[[Choices], T], check: Callable[[T, Path], object]) -> None:
    """Register a fuzzer of inputs: one function makes them, the other tries them."""

    def one(blob: bytes, folder: Path, tally: Tally) -> list[str]:
        """The signatures of the faults that the inputs in these bytes cause."""
        choices, signatures = Choices(blob), []
        (folder / CURRENT).write_bytes(choices.blob)
        while (choices.left or not choices.at) and tally.slow < MOST_SLOW:
            start = choices.at
            value = make(choices)
            tally.tried += 1
            fault = judged(lambda value=value: check(value, folder), tally)
            if fault is not None:
                own = choices.blob[start : choices.at].rstrip(b"\0")
                found = Fault(name, f"{name}:x{own.hex()}", fault[0], short(value), fault[1])
                signatures.append(found.signature)
                tally.add(found)
        return signatures

    def draws(seed: str, count: int, folder: Path, tally: Tally) -> int:
        """Draw up to ``count`` times, to the first new fault; how many draws are left."""
        known, shrinking = {*tally.faults}, list[float]()

        @seeded(seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(st.binary(min_size=250, max_size=450))
        def test(blob: bytes) -> None:
            nonlocal count
            count -= not shrinking
            if shrinking and time.monotonic() - shrinking[0] > SHRINK_SECONDS:
                return
            if new := {*one(blob, folder, tally)} - known:
                shrinking.append(time.monotonic())
                raise AssertionError(sorted(new)[0])

        try:
            test()
        except Exception:  # also Hypothesis' own, of a test that is not the same twice
            if not shrinking:
                raise
        return count if shrinking and tally.slow < MOST_SLOW else 0

    def batch(number: int, folder: Path) -> Tally:
        tally, left, again = Tally(), EXAMPLES, 0
        while left > 0:
            left = draws(f"{name}:{number}:{again}", left, folder, tally)
            again += 1
        (folder / CURRENT).unlink(missing_ok=True)
        return tally

    def repeat(blob: bytes, folder: Path) -> Tally:
        tally = Tally()
        one(blob, folder, tally)
        return tally

    FUZZERS[name] = Fuzzer(name, "inputs", batch, EXAMPLES * 12, repeat)


def trials(name: str, kind: str, size: int, batch: Batch) -> None:
    """Register a fuzzer whose batches need no Hypothesis: all follows from their number."""
    FUZZERS[name] = Fuzzer(name, kind, batch, size)


def judged(attempt: Callable[[], object], tally: Tally) -> tuple[str, str] | None:
    """Try it and count how it ends; of a fault, what it is and its traceback."""
    Guard.broken.clear()
    try:
        with alarm(PATIENCE_SECONDS):
            attempt()
        accepted = True
    except ProtofedError as error:
        accepted = False
        if len(str(error)) > LONGEST_MESSAGE:
            return f"a message of more than {LONGEST_MESSAGE} characters", trace(error)
    except (Exception, TookTooLong) as error:
        tally.slow += isinstance(error, TookTooLong)
        return signature(error), trace(error)
    if Guard.broken:
        return f"{Guard.broken[0]}", ""
    if accepted:
        tally.ok += 1
    else:
        tally.refused += 1
    return None


def signature(error: BaseException) -> str:
    """The type of an error and where in the package it comes from; a wrong result in words."""
    if isinstance(error, Wrong):
        return f"silently wrong: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(f"{SOURCE}{os.sep}")]
    if not own:
        return f"{type(error).__name__} outside the package"
    place = f"{Path(own[-1].filename).relative_to(SOURCE)}:{own[-1].name}"
    return f"{type(error).__name__} in {place}"


def trace(error: BaseException) -> str:
    lines = traceback.format_exception(error, chain=False)
    return "".join(lines)[-3000:]


def short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number with too many digits
        text = "a value that has no repr"
    return text if len(text) <= 2000 else f"{text[:1000]} ... {text[-900:]}"


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Guard:
    """Sees what Python opens, moves and executes: no file outside a folder, no code inside it."""

    root = ""
    broken: list[str] = []  # noqa: RUF012 (one for the process, as the hook is)
    installed = False

    _MOVES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
              "os.chmod", "os.truncate", "os.chown")  # fmt: skip
    _CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class",
             "subprocess.Popen")  # fmt: skip

    @classmethod
    def install(cls, root: Path) -> None:
        cls.root = f"{root}{os.sep}"
        if not cls.installed:
            cls.installed = True
            sys.addaudithook(cls._see)

    @classmethod
    def _see(cls, event: str, args: tuple[Any, ...]) -> None:
        if not cls.root:
            return
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, (str, bytes)):
                cls._require_inside("written", path)
        elif event in cls._MOVES:
            for path in args[:2]:
                if isinstance(path, (str, bytes)):
                    cls._require_inside(event, path)
        elif event == "exec":
            name = str(getattr(args[0], "co_filename", ""))
            if name.startswith(cls.root):
                cls.broken.append("code of a file that was only read was executed")
        elif event in cls._CODE:
            cls.broken.append(f"{event} was called")

    @classmethod
    def _require_inside(cls, event: str, path: str | bytes) -> None:
        full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (links are not followed)
        if not full.startswith(cls.root) and full not in ("/dev/null", cls.root.rstrip(os.sep)):
            cls.broken.append(f"{event} outside the folder")

    @classmethod
    @contextlib.contextmanager
    def off(cls) -> Iterator[None]:
        root, cls.root = cls.root, ""
        try:
            yield
        finally:
            cls.root = root


def at_home(folder: Path) -> None:
    """Make a folder the place of everything that this process writes, and watch that it is."""
    for name in ("home", "cache", "tmp", "cwd"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PROTOFED_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    tempfile.tempdir = str(folder / "tmp")
    os.chdir(folder / "cwd")
    sys.dont_write_bytecode = True
    Guard.install(folder)
