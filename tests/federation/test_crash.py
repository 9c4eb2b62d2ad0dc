"""A run's folder whatever happens: a kill between any two writes, a full disk, a second process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofed import files, tree
from protofed.config import Config, make_config
from protofed.errors import ProtofedError
from protofed.federation import client_state as store
from protofed.federation.simulation import Observer
from protofed.methods import FedBN, Method
from protofed.runs import folder as folders
from protofed.runs import run as runs
from protofed.runs.records import read_records, without_times
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread")
TASK = tiny_task()
LIMIT = 700


class Kill(BaseException):
    """What no handler of the run can do anything about: nothing is written any more."""


def config(method: Method | None = None, **more: Any) -> Config:
    given = {"norm": "batch", "epochs": 1, "rounds": 4, "checkpoint_every": 2, **more}
    return make_config(TASK, method or FedBN(), **{**TINY, "participation": 0.5, **given})


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, bool], list[str]]:
    """Let the process die at a write: before it (a torn file stays), or right after it."""
    # some states in memory, some on disk
    monkeypatch.setattr(store.ClientStore.__init__, "__defaults__", (LIMIT, 1.0))
    write, append = files.write_atomic, folders.append_record

    def arm(at: int | None, after: bool = False) -> list[str]:
        seen: list[str] = []

        def step(path: Path, act: Callable[[], None], torn: Callable[[], object]) -> None:
            if at is not None and len(seen) > at:
                raise Kill  # dead: a handler cannot write either
            seen.append(path.name)
            if at is not None and len(seen) > at and not after:
                torn()
                raise Kill
            act()
            if at is not None and len(seen) > at:
                raise Kill

        def atomic(path: Path, content: bytes | str) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            litter = path.with_name(f".{path.name}.x.tmp")
            step(path, lambda: write(path, content), lambda: litter.write_bytes(b"cut"))

        def line(folder: Path, record: Any) -> None:
            path = folder / "rounds.jsonl"
            step(path, lambda: append(folder, record), lambda: path.open("a").write('{"rou'))

        for module in (tree, runs):
            monkeypatch.setattr(module, "write_atomic", atomic)
        monkeypatch.setattr(runs, "append_record", line)
        return seen

    return arm


def numbers(folder: Path) -> Any:
    return without_times(read_records(folder / "rounds.jsonl"))


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_it_resumes_to_the_same_bits(
    tmp_path: Path, writes: Callable[..., list[str]], after: bool
) -> None:
    asked = config()
    seen = writes(None)
    whole = run(TASK, config=asked, out=tmp_path / "whole")
    names = sorted(p.name for p in (tmp_path / "whole").rglob("*"))
    assert len(seen) > 15 and any(name.startswith("left-") for name in seen), seen
    for at in range(len(seen)):
        out = tmp_path / "run"
        writes(at, after)
        with pytest.raises(Kill):
            run(TASK, config=asked, out=out)
        assert not is_finished(out, asked) or (after and at == len(seen) - 1)
        writes(None)
        again = run(TASK, config=asked, out=out, resume=True)
        assert tree.equal({"m": again.model}, {"m": whole.model}), (at, seen[at])
        assert numbers(out) == numbers(tmp_path / "whole"), (at, seen[at])
        litter = {p.name for p in out.rglob("*")} - set(names)
        assert all(name.endswith(".tmp") for name in litter), litter
        shutil.rmtree(out)


class Interrupt(Observer):
    """Presses Ctrl-C at an event: a client that has trained or was tested, a round."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, 0

    def _count(self) -> None:
        self.seen += 1
        if self.at is not None and self.seen > self.at:
            raise KeyboardInterrupt

    def client(self, round: int, done: int, total: int) -> None:
        self._count()

    def tested(self, round: int, done: int, total: int) -> None:
        self._count()

    def round(self, record: Any) -> None:
        self._count()


def test_stopped_at_any_event_it_resumes_to_the_same_bits(
    tmp_path: Path, writes: Callable[..., list[str]]
) -> None:
    asked, events = config(checkpoint_every=3), Interrupt(None)
    writes(None)
    whole = run(TASK, config=asked, out=tmp_path / "whole", observers=[events])
    for at in range(0, events.seen, 2):
        out = tmp_path / "run"
        with pytest.raises(KeyboardInterrupt):
            run(TASK, config=asked, out=out, observers=[Interrupt(at)])
        again = run(TASK, config=asked, out=out, resume=True)
        assert tree.equal({"m": again.model}, {"m": whole.model}), at
        assert numbers(out) == numbers(tmp_path / "whole"), at
        found, expected = (
            sorted(p.name for p in folder.rglob("*")) for folder in (out, tmp_path / "whole")
        )
        # a state that was read from its file stays there; the same states are in force
        assert len(found) == len(expected), (found, expected)
        shutil.rmtree(out)


def test_a_full_disk_is_told_in_words_and_what_is_complete_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sync, left = config(checkpoint_every=1), os.fsync, [12]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ProtofedError, match=r"cannot write '.*': No space.*make room"):
            run(TASK, config=asked, out=tmp_path / "run")
    again = run(TASK, config=asked, out=tmp_path / "run", resume=True)
    assert tree.equal({"m": again.model}, {"m": run(TASK, config=asked).model})


def test_a_place_where_nothing_can_be_written_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ProtofedError, match=r"cannot write '.*file/run': Not a directory"):
        run(TASK, config=config(), out=tmp_path / "file" / "run")


class Another(Observer):
    """Starts the same run once more while one is under way."""

    def __init__(self, asked: Config, out: Path, **how: bool) -> None:
        self.asked, self.out, self.how, self.told = asked, out, how, ""

    def round(self, record: Any) -> None:
        with pytest.raises(ProtofedError) as told:
            run(TASK, config=self.asked, out=self.out, **self.how)
        self.told = str(told.value)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_two_runs_do_not_write_one_folder(tmp_path: Path, how: str) -> None:
    """They would mix their rounds, and remove each other's states."""
    asked = config(checkpoint_every=1)
    another = Another(asked, tmp_path, **{how: True})
    first = run(TASK, config=asked, out=tmp_path, observers=[another])
    assert "another process has a run under way" in another.told
    assert numbers(tmp_path) == without_times(first.rounds)
    run(TASK, config=asked, out=tmp_path, resume=True)  # and the folder is free again


def test_overwriting_begins_with_what_says_that_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in between must not leave a folder that says so and has lost its rounds."""
    asked = config()
    run(TASK, config=asked, out=tmp_path)
    unlink = Path.unlink

    def die(path: Path, **more: Any) -> None:
        unlink(path, **more)
        if path.name in folders.RUN_FILES and path.name not in ("trace.json.gz", "curves.png"):
            raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(Kill):
            run(TASK, config=asked, out=tmp_path, overwrite=True)
    assert not is_finished(tmp_path, asked)
    run(TASK, config=asked, out=tmp_path, resume=True)
    assert is_finished(tmp_path, asked)
