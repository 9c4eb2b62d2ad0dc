"""Processes that are forked from this one and do work for it.

A fork has all that was in memory, including classes from a notebook, and starts in milliseconds.
Little has to be sent to it. Objects that it has from the start, or that are posted for all forks,
go as references. The tensors of everything else go through shared memory, which has no name and is
freed with the last process that uses it.
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.federation.cpu import die_with_parent

Work = Callable[..., Any]
"""Its first argument is made in the process, once."""
Parcel = tuple[bytes, list[int]]
"""What stands for an object in shared memory: its pickle without the bytes of its tensors, and how
many bytes each tensor has there."""
Warned = tuple[Warning, str, int]
"""A warning, and where it was raised."""

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run. Even if a terminal or a batch system sends them to all its processes, it
is for the run to answer them."""
START_SECONDS = 30.0
"""How long a process may take to start. One may hang forever: a lock that another thread held at
the fork is never released in it."""


class InProcess(Exception):
    """The traceback of an error that was raised in another process, as the error's cause."""


def fork(count: int, make: Callable[[], Any], tensors: Sequence[Tensor]) -> Processes | None:
    """Processes that have these tensors; None if that is not possible here.

    They need Linux. PyTorch refuses to compute gradients in a fork if it has threads for a GPU:
    since the first gradient, on a machine that has one. And they end with the thread that forks
    them, so that must be the main one: another may end before the run, or be one of several that
    compute, whose locks would never be released in a fork.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (hasattr(os, "memfd_create") and in_main):
        return None
    each: list[Process] = []
    try:
        shared = _Shared(tensors)
        for _ in range(count):
            each.append(Process(make, shared))
    except OSError as error:
        warnings.warn(f"workers are threads, not processes: {error.strerror}", stacklevel=1)
    else:
        if all([process.has_started() for process in each]):  # noqa: C419 (all are waited for)
            return Processes(each, shared)
    for process in each:
        process.end()
    return None


class Processes:
    """Processes, and what they share."""

    def __init__(self, each: Sequence[Process], shared: _Shared) -> None:
        self.each, self._shared = each, shared

    def post(self, what: Any) -> None:
        """Give this to all, in place of what was posted before; it is sent as a reference."""
        self._shared.post(what)

    def end(self) -> None:
        """End all at once, whatever they are doing."""
        for process in self.each:
            process.end()


class Process:
    """A process, which does what it is asked to, one thing at a time.

    It ends with this process, however this one ends.
    """

    def __init__(self, make: Callable[[], Any], shared: _Shared) -> None:
        self._shared, self._memory = shared, Memory()
        self._parent, self._ending = os.getpid(), threading.Lock()
        self._code: int | None = None
        _flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # no fork may do what a run does
        try:
            with warnings.catch_warnings():
                # Python warns about threads, which PyTorch may have: the fork uses none
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pipe, pipe = Pipe()
                self.pid = os.fork()
                if self.pid:
                    pipe.close()
            if not self.pid:
                _serve(self._pipe, pipe, self._memory, shared, make, self._parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def has_started(self) -> bool:
        """Whether it can compute; waits until that is known."""
        try:
            return self._pipe.poll(START_SECONDS) and bool(self._pipe.recv())
        except (EOFError, OSError):
            return False

    def ask(self, work: Work, *args: Any) -> Any:
        """What the work returns there; its warnings and its error are raised here."""
        asked = self._memory.put((work, args), self._shared.known)
        try:
            self._pipe.send(asked)
            answered = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        answer, error, caught = self._memory.get(answered, self._shared.find)
        for message, file, line in caught:
            category = type(message)
            warnings.warn_explicit(message, category, file, line, registry=self._shared.warned)
        if error is not None:
            raise error[0] from InProcess(error[1])
        return answer

    def _death(self) -> ProtofedError:
        self.end()
        cause, hint = "", "finished rounds are kept in the run's folder: continue with --resume"
        if self._code is not None:
            name = signal.Signals(-self._code).name if self._code < 0 else ""
            cause = f" of {name}" if name else f" with exit code {self._code}"
            if name in ("SIGKILL", "SIGBUS"):
                hint = f"out of memory? Try fewer --workers or a smaller --batch; {hint}"
        return ProtofedError(f"a worker process died{cause}", hint)

    def end(self) -> None:
        """End it, if it has not ended; do nothing in any process but the one that forked it."""
        if os.getpid() != self._parent:
            return
        with self._ending, suppress(ProcessLookupError, ChildProcessError):
            if self._code is None:  # its number may be another process's once it was waited for
                os.kill(self.pid, signal.SIGKILL)
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


# ---- shared memory -------------------------------------------------------------------------------


class Memory:
    """Memory that this process and its forks share; it holds one thing at a time."""

    def __init__(self) -> None:
        self._file = os.memfd_create("protofed")
        weakref.finalize(self, os.close, self._file)
        self._content: Any = bytearray()

    def put(self, what: Any, known: Mapping[int, Any]) -> Parcel:
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(file, known, buffers).dump(what)
        parts = [buffer.raw() for buffer in buffers]
        sizes = [len(part) for part in parts]
        self._reach(sum(sizes))
        for part, end in zip(parts, accumulate(sizes), strict=True):
            self._content[end - len(part) : end] = part
        return file.getvalue(), sizes

    def get(self, parcel: Parcel, find: Callable[[Any], Any]) -> Any:
        content, sizes = parcel
        self._reach(sum(sizes))
        view = memoryview(self._content)
        ends = zip(sizes, accumulate(sizes), strict=True)
        buffers = [view[end - size : end] for size, end in ends]
        unpickler = pickle.Unpickler(io.BytesIO(content), buffers=buffers)
        unpickler.persistent_load = find  # type: ignore[method-assign]
        return unpickler.load()

    def _reach(self, size: int) -> None:
        if len(self._content) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._content = mmap.mmap(self._file, size)


class _Shared:
    """What all processes have: tensors from the start, and what is posted later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.known: dict[int, Any] = {id(t): n for n, t in enumerate(self._tensors)}
        """What stands for an object, by its ``id``."""
        self.board = Memory()
        self._posted: tuple[int, Any] = (0, None)
        self.warned: dict[Any, Any] = {}
        """The warnings that were raised, as Python keeps them."""

    def post(self, what: Any) -> None:
        number, before = self._posted
        self.known.pop(id(before), None)
        parcel = self.board.put(what, self.known)
        self._posted = (number + 1, what)
        self.known[id(what)] = (number + 1, parcel)

    def find(self, key: Any) -> Any:
        """What a reference stands for."""
        if isinstance(key, int):
            return self._tensors[key]
        number, parcel = key
        if self._posted[0] != number:
            self._posted = (number, self.board.get(parcel, self.find))
        return self._posted[1]


class _Pickler(pickle.Pickler):
    """Pickles known objects as what stands for them, and tensors without their bytes."""

    def __init__(
        self, file: io.BytesIO, known: Mapping[int, Any], buffers: list[pickle.PickleBuffer]
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._known = known

    def persistent_id(self, found: Any) -> Any:
        return self._known.get(id(found))

    def reducer_override(self, found: Any) -> Any:
        if not isinstance(found, Tensor):
            return NotImplemented
        content: Any = found.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), found.dtype, found.shape)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    # clone: the memory is reused, and if it is not aligned, vectorized sums may round differently
    return torch.frombuffer(content, dtype=torch.uint8).clone().view(dtype).view(shape)


# ---- in the other process ------------------------------------------------------------------------


def _serve(
    parents: Connection,
    pipe: Connection,
    memory: Memory,
    shared: _Shared,
    make: Callable[[], Any],
    parent: int,
) -> NoReturn:
    """Answer, until this process is ended."""
    try:
        parents.close()
        gc.freeze()  # the parent's objects are neither finalized, nor copied by being looked at
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        torch.set_num_threads(1)
        pipe.send(_has_gradients())
        make_once = cache(make)
        while True:
            work, args = memory.get(pipe.recv(), shared.find)
            answer = _answer(lambda: work(make_once(), *args))  # noqa: B023 (called at once)
            _flush()
            pipe.send(memory.put(answer, shared.known))
    except (EOFError, OSError):  # the parent is gone
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started the run
            stream.flush()


def _has_gradients() -> bool:
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _answer(
    work: Callable[[], Any],
) -> tuple[Any, tuple[BaseException, str] | None, list[Warned]]:
    """What the work returns, or its error with the traceback; and its warnings."""
    answer, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        try:
            answer = work()
        except BaseException as found:
            error = (_portable(found, RuntimeError), traceback.format_exc())
    warned = [(_portable(w.message, UserWarning), w.filename, w.lineno) for w in caught]
    return answer, error, warned


def _portable(found: Any, other: type[Exception]) -> Any:
    """An error or a warning; if its class cannot be sent, another one with the same words."""
    try:
        pickle.loads(pickle.dumps(found))
    except Exception:
        return other(f"{type(found).__name__}: {found}")
    return found
