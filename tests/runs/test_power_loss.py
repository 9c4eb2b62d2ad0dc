"""Power is lost at any moment: what was not synced is gone, and what was promised is there.

``Disk`` watches ``os.fsync`` and keeps what a disk would still have: the content of a file as of
its last sync, and the names in a folder as of that folder's last sync. Between two syncs a real
disk may have written any of the rest, so every state is tried with no name changed since, with all
of them changed, and with some.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs.diary import QUICK, TASK, same

from protofed import files, tree
from protofed.config import make_config
from protofed.methods import FedBN
from protofed.runs.folder import Checkpoint, RunFolder
from protofed.runs.records import without_times
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")

State = dict[str, bytes | None]
"""Every path with its content; None for a folder."""


class Disk:
    """What survives of a folder if the power is lost, at every moment of what is done in it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.states = root, list[tuple[State, int]]()
        self.promised = 0
        """The round of the last checkpoint that was reported as written."""
        self._held = root.with_name("inodes")  # a link to each: their numbers must not be reused
        self._held.mkdir()
        self._content: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, tuple[int, bool]]] = {}
        self._sync, self._rng = os.fsync, random.Random(0)
        patch.setattr(os, "fsync", self.sync)

    def sync(self, handle: int) -> None:
        """A sync, before which the power may be lost."""
        self.lose_power()
        self._sync(handle)
        path, status = Path(f"/proc/self/fd/{handle}").readlink(), os.fstat(handle)
        if not path.is_relative_to(self.root):
            return
        if stat.S_ISDIR(status.st_mode):
            self._names[path] = self._now(path)
        else:
            if status.st_ino not in self._content:
                os.link(path, self._held / str(status.st_ino))
            self._content[status.st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        for chance in (0.0, 0.5, 1.0):
            state = dict(self._surviving(self.root, chance))
            if not self.states or self.states[-1] != (state, self.promised):
                self.states.append((state, self.promised))

    def _now(self, folder: Path) -> dict[str, tuple[int, bool]]:
        """The inode of each name, and whether it is a folder."""
        if not folder.is_dir():
            return {}
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(folder)}

    def _surviving(self, folder: Path, chance: float) -> Iterator[tuple[str, bytes | None]]:
        """What is left, if each change of a name since the last sync was written by chance."""
        synced, now = self._names.get(folder, {}), self._now(folder)
        for name in sorted({*synced, *now}):
            found = (now if self._rng.random() < chance else synced).get(name)
            if found is not None:
                inode, is_folder = found
                path = str((folder / name).relative_to(self.root))
                yield path, None if is_folder else self._content.get(inode, b"")
                if is_folder:
                    yield from self._surviving(folder / name, chance)


def restore(state: State, folder: Path) -> None:
    for name, content in state.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if content is None else path.write_bytes(content)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk", monkeypatch)


def test_a_file_is_there_with_its_content_or_not_at_all(disk: Disk) -> None:
    path = disk.root / "new" / "folder" / "file"
    for content in (b"old", b"new"):
        files.write_atomic(path, content)
        disk.lose_power()
        assert {s["new/folder/file"] for s, _ in disk.states[-1:]} == {content}
    assert {s.get("new/folder/file") for s, _ in disk.states} == {None, b"old", b"new"}


ASKED = make_config(
    TASK,
    FedBN(),
    **{**QUICK, "rounds": 3, "checkpoint_every": 1, "clients": 1, "keep_rounds": "all"},
)


@pytest.mark.parametrize("kind", ["new", "overwritten"])
def test_power_is_lost_at_any_moment_of_a_run(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out, saved, save = disk.root / "runs" / "it", dict[int, Checkpoint](), RunFolder.save_checkpoint

    def promise(self: RunFolder, checkpoint: Checkpoint) -> None:
        saved[checkpoint.round] = checkpoint
        save(self, checkpoint)
        disk.promised = checkpoint.round

    monkeypatch.setattr(RunFolder, "save_checkpoint", promise)
    whole = run(TASK, config=ASKED, out=out)
    kept = {round: clients_of(RunFolder(out), found) for round, found in saved.items() if round > 1}
    if kind == "overwritten":
        disk.promised = 0
        disk.states.clear()
        run(TASK, config=ASKED, out=out, overwrite=True)
    disk.lose_power()
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    assert len(disk.states) > 60
    for number, (state, promised) in enumerate(disk.states):
        copy = tmp_path / "copy"
        restore(state, copy)
        folder = RunFolder(copy / "runs" / "it")
        if folder.is_finished() and not folder.damage():
            assert same(whole, load_run(folder.path)), number
        with folder.open(ASKED, whole.summary["hash"], resume=True) as found:
            round = found.round if found else 0
            assert round >= promised, number
            assert without_times(folder.records()) == without_times(whole.rounds[:round])
            if found is not None:
                assert tree.equal(found.state, saved[round].state), number
                assert clients_of(folder, found).keys() == found.clients.keys()
            for name, expected in kept.get(round, {}).items():
                assert found and tree.equal(clients_of(folder, found)[name], expected), number
        if number % 20 == 0:
            assert same(whole, run(TASK, config=ASKED, out=folder.path, resume=True)), number
        shutil.rmtree(copy)


def clients_of(folder: RunFolder, checkpoint: Checkpoint) -> dict[str, Tree]:
    return {name: folder.client_state(file) for name, file in checkpoint.clients.items()}
