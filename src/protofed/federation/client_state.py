"""Clients' private states: in memory up to a limit, then on disk, and safe against a crash.

States of a round in progress are staged and take effect when the round is accepted. On disk each
state is a file of its own, written next to the old one; the index in a checkpoint says which files
are current, and all others can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from protofed import tree
from protofed.tree import Tree

MEMORY_LIMIT = 1 << 30
"""Bytes of client state kept in memory by a run that has a folder and trains all its clients.

A run whose rounds take only some of the clients keeps proportionally less, since the states of the
others are rarely read. So memory does not grow with their number.
"""

Index = dict[str, Tree | str]
"""For each client its state, or the name of the file that holds it."""


class ClientStore:
    """The private state of every client; ``initial`` makes the state before its first round.

    ``share`` is the fraction of clients that a round takes, and the fraction of ``limit`` used.
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
        self._used = 0
        self._current: Index = {}
        self._staged: Index = {}
        self._saved: dict[str, tuple[Tree, str]] = {}

    def get(self, name: str) -> Tree:
        """A client's state as of the last accepted round."""
        state = self._current.get(name)
        if state is None:
            return self._initial(name)
        return self._read(state) if isinstance(state, str) else state

    def stage(self, name: str, state: Tree, round: int) -> None:
        """Keep a client's state after its round, until the round is accepted."""
        if not any(state.values()) and not any(self.get(name).values()):
            return  # the client has no private state
        self._used -= _in_memory(self._staged.pop(name, ""))
        size = tree.nbytes(state)
        if self.folder is not None and self._used + size > self.limit:
            # named as by a checkpoint after this round, so no older state has the same name
            self._staged[name] = self._write(name, state, round + 1)
        else:
            self._staged[name] = state
            self._used += size

    def accept(self) -> Index:
        """Make the staged states current; returns the index of all current states."""
        for name in self._staged:
            self._used -= _in_memory(self._current.get(name, ""))
            self._saved.pop(name, None)  # the state it refers to is replaced
        self._current = self._current | self._staged
        self._staged = {}
        return self._current

    def save(self, index: Index, round: int) -> dict[str, str]:
        """Write an index to disk for a checkpoint; returns the file of each client."""
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

    def restore(self, files: Mapping[str, str]) -> None:
        """Continue from the states that a checkpoint names."""
        self._current, self._used = dict(files), 0
        self.clean(files)

    def clean(self, files: Mapping[str, str]) -> None:
        """Remove the files that no checkpoint names and no client uses."""
        if self.folder is not None and self.folder.is_dir():
            held = set(files.values()) | {
                s for i in (self._current, self._staged) for s in i.values() if isinstance(s, str)
            }
            for path in self.folder.iterdir():
                if path.name not in held:
                    path.unlink()

    def _write(self, name: str, state: Tree, round: int) -> str:
        assert self.folder is not None
        file = f"{quote(name, safe='')}.{round}.safetensors"
        tree.save(state, self.folder / file)
        return file

    def _read(self, file: str) -> Tree:
        assert self.folder is not None
        return tree.load(self.folder / file)[0]


def _in_memory(state: Tree | str) -> int:
    """Bytes of a state in memory; 0 if it is a file."""
    return 0 if isinstance(state, str) else tree.nbytes(state)
