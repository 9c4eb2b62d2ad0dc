"""Errors that say what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Container, Iterable


class ProtofedError(Exception):
    """A problem the user can fix; ``hint`` says how. The command line prints both on one line."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)


class Diverged(ProtofedError):
    """Training produced a number that is not finite."""

    exit_code = 3


class Busy(ProtofedError):
    """Another process is writing the folder."""

    exit_code = 75  # sysexits' EX_TEMPFAIL: worth another try


class NoSecondDerivative(NotImplementedError):
    """The gradient of a gradient was asked for, but the operation's gradient is written by hand.

    It has to be an error: PyTorch's ``once_differentiable`` passes such a gradient off as a
    constant where ``torch.autograd.grad`` asks for it.
    """


def unknown(what: str, given: object, valid: Iterable[str]) -> ProtofedError:
    """The error for a name that does not exist, with the nearest names that do."""
    names, typed = sorted(valid), str(given)[:100]
    near = [name for name in names if name.casefold() == typed.casefold()]
    near = near or difflib.get_close_matches(typed, names, n=3, cutoff=0.6)
    all_of_them = f"valid: {', '.join(names)}" if names else "there is none"
    hint = f"did you mean {' or '.join(near)}?" if near else all_of_them
    return ProtofedError(f"unknown {what} '{given!s:.100}'", hint)


def printable(text: str) -> str:
    """Text in which names from elsewhere (of files in an archive) give a terminal no commands."""
    unknown = "\N{REPLACEMENT CHARACTER}"
    return "".join(c if c.isprintable() or c in "\n\t" else unknown for c in text)


def raised_at(error: BaseException, files: Container[str]) -> str:
    """Where in these files an error comes from, as ``file:line``; empty if from elsewhere."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return place(frames[-1].filename, frames[-1].lineno) if frames else ""


def place(file: str, line: int | None) -> str:
    """``file:line``, with the shorter of the file's absolute and relative path."""
    return f"{min(file, os.path.relpath(file), key=len)}:{line}"
