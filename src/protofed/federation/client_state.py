"""Clients' private states: in memory up to a limit, then on disk, and safe against a crash.

States of a round in progress are staged and count only once the round is accepted. On disk each
state is a file of its own, written beside the old one; the index that a checkpoint carries tells
which files are in force, and all others are litter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from protofed import tree
from protofed.tree import Tree

MEMORY_LIMIT = 1 << 30
"""Bytes of client state kept in memory by a run that has a folder and trains all its clients.

Of fewer where a round takes only some of the clients: what is kept of the others is seldom read.
So memory does not grow with their number.
"""

Index = dict[str, Tree | str]
"""For each client its state, or the name of the file that holds it."""


class ClientStore:
    """The private state of every client; ``initial`` makes the one before its first round.

    ``share`` is the fraction of the clients that a round takes, and of ``limit`` that is used.
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
        """Keep what a client's round ended with, until the round is accepted."""
        if not any(state.values()) and not any(self.get(name).values()):
            return  # nothing private: nothing to remember
        self._used -= _in_memory(self._staged.pop(name, ""))
        size = tree.nbytes(state)
        if self.folder is not None and self._used + size > self.limit:
            # the name a checkpoint after this round would give it: never that of an older state
            self._staged[name] = self._write(name, state, round + 1)
        else:
            self._staged[name] = state
            self._used += size

    def accept(self) -> Index:
        """Make the staged states current; returns what is now in force."""
        for name in self._staged:
            self._used -= _in_memory(self._current.get(name, ""))
            self._saved.pop(name, None)  # what it holds is no longer needed in memory
        self._current = self._current | self._staged
        self._staged = {}
        return self._current

    def abandon(self) -> None:
        """Forget the staged states."""
        self._used -= sum(map(_in_memory, self._staged.values()))
        self._staged = {}

    def save(self, index: Index, round: int) -> dict[str, str]:
        """Bring an index onto disk, for a checkpoint; returns the file of each client."""
        files = {}
        for name, state in index.items():
            if isinstance(state, str):
                files[name] = state
                continue
            saved, file = self._saved.get(name, (None, ""))
            if saved is not state:  # a client that sat out since the last checkpoint is there
                file = self._write(name, state, round)
                self._saved[name] = (state, file)
            files[name] = file
        return files

    def restore(self, files: Mapping[str, str]) -> None:
        """Take up the states a checkpoint names."""
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
    """Bytes of a state that is kept in memory; none where it is a file."""
    return 0 if isinstance(state, str) else tree.nbytes(state)
