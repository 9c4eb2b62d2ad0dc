"""Clients' private states, kept in memory up to a limit and then on disk, and safe in a crash.

A private state is what a client keeps from one round to the next and does not send, e.g. its own
BatchNorm statistics. States of a round in progress are staged, and take effect when the round is
accepted. On disk each state is a file of its own, written next to the old one; a checkpoint says
which files are current. Those of the checkpoint before it are kept, and all others can be removed.
A file's name ends with a digest of its state, so the state of another run or client is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from protofed import keys, tree
from protofed.files import Damaged
from protofed.tree import Tree

MEMORY_LIMIT = 1 << 30
"""Bytes of client state that a run with a folder keeps in memory."""

LONGEST_STEM = 200
"""Of the 255 bytes that a file's name may have, a round, a digest and endings take the rest."""

Index = dict[str, Tree | str]
"""For each client its state, or the name of the file that holds it."""


class ClientStore:
    """The private state of every client; ``initial`` makes the state before its first round.

    ``share`` is the fraction of the clients that train in a round. The store uses only this
    fraction of ``limit``, since the states of the other clients are rarely read. Without a
    ``folder`` everything stays in memory.
    """

    def __init__(
        self,
        initial: Callable[[str], Tree],
        folder: Path | None,
        limit: int = MEMORY_LIMIT,
        share: float = 1.0,
    ) -> None:
        self.folder, self.limit = folder, int(limit * share)
        self._initial = initial
        self._used = 0  # bytes in memory
        self._current: Index = {}
        self._staged: Index = {}
        # states in memory that a checkpoint has written too, with their files
        self._saved: dict[str, tuple[Tree, str]] = {}
        self._before: set[str] = set()  # files that the checkpoint before the last one names

    def get(self, name: str) -> Tree:
        """A client's state as of the last accepted round."""
        state = self._current.get(name)
        if state is None:
            return self._initial(name)
        return self._read(state) if isinstance(state, str) else state

    def stage(self, name: str, state: Tree, round: int) -> None:
        """Keep a client's state after its round, until the round is accepted."""
        if not any(state.values()) and not any(self.get(name).values()):
            return  # the client has no private state, and had none
        self.discard(name)
        size = tree.nbytes(state)
        if self.folder is not None and self._used + size > self.limit:
            # the name that a checkpoint after this round would give: no older state has it
            self._staged[name] = self._write(name, state, round + 1)
        else:
            self._staged[name] = state
            self._used += size

    def discard(self, name: str) -> None:
        """Drop a client's staged state, if there is one: its round does not count."""
        self._used -= _in_memory(self._staged.pop(name, ""))

    def accept(self) -> Index:
        """Make the staged states, if any, current; returns the index of all current states.

        Later rounds do not change the returned index.
        """
        for name in self._staged:
            self._used -= _in_memory(self._current.get(name, ""))
            self._saved.pop(name, None)  # the state it refers to is replaced
        self._current = self._current | self._staged  # a new dict: the old one was handed out
        self._staged = {}
        return self._current

    def save(self, index: Index, round: int) -> dict[str, str]:
        """Write the states of an index to disk for a checkpoint; returns each client's file."""
        files = {}
        for name, state in index.items():
            if isinstance(state, str):
                files[name] = state
                continue
            saved, file = self._saved.get(name, (None, ""))
            if saved is not state:  # otherwise unchanged since the last checkpoint
                file = self._write(name, state, round)
                self._saved[name] = (state, file)
            files[name] = file
        return files

    def restore(self, files: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Continue from the states that a checkpoint names; ``before`` are the older one's."""
        self._current, self._used = dict(files), 0
        self._before = set(before.values())
        self.clean(files)

    def clean(self, files: Mapping[str, str]) -> None:
        """After a checkpoint that names these files: remove what neither it nor the last needs."""
        named = set(files.values())
        if self.folder is not None and self.folder.is_dir():
            held = (
                named
                | self._before
                | {
                    s
                    for i in (self._current, self._staged)
                    for s in i.values()
                    if isinstance(s, str)
                }
            )
            for path in self.folder.iterdir():
                if path.name not in held:
                    path.unlink()
        self._before = named

    def _write(self, name: str, state: Tree, round: int) -> str:
        assert self.folder is not None
        file = f"{_file_stem(name)}.{round}-{_digest(state)}.safetensors"
        tree.save(state, self.folder / file, private=True)
        return file

    def _read(self, file: str) -> Tree:
        assert self.folder is not None
        return read_state(self.folder / file)


def read_state(path: Path) -> Tree:
    """The private state in a file; earlier versions gave files names without a digest."""
    state, _ = tree.load(path)
    named = re.search(r"\.[0-9]+-([0-9a-f]+)\.safetensors$", path.name)
    if named is not None and named[1] != _digest(state):
        raise Damaged(path, "it holds another state than its name says")
    return state


def _digest(state: Tree) -> str:
    return tree.digest(state)[:8]


def _file_stem(name: str) -> str:
    """A client's name as the start of a file's name; a character may take nine bytes there."""
    quoted = quote(name, safe="")
    if len(quoted) <= LONGEST_STEM:
        return quoted
    whole = f"-{keys.key(name):016x}"
    return quoted[: LONGEST_STEM - len(whole)] + whole


def _in_memory(state: Tree | str) -> int:
    """Bytes of a state in memory; 0 if it is a file."""
    return 0 if isinstance(state, str) else tree.nbytes(state)
