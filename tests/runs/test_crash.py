"""Whatever stops a run, it resumes to the same bits: Ctrl-C, a kill at any write, a full disk."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.runs.diary import QUICK, TASK, At, Diary, ctrl_c, numbers, same, states

from protofed import files, tree
from protofed.config import Config, make_config
from protofed.errors import Diverged, ProtofedError
from protofed.federation import simulation
from protofed.federation.client_state import ClientStore
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation, Observer
from protofed.method import Method
from protofed.methods import FPL, FedAvg, FedBN
from protofed.runs import folder as folders
from protofed.runs.folder import RunFolder
from protofed.runs.result import Result
from protofed.runs.run import run

pytestmark = pytest.mark.usefixtures("single_thread")


def config(method: Method | None = None, **more: Any) -> Config:
    given = {"rounds": 4, "checkpoint_every": 2, "participation": 0.5, **more}
    return make_config(TASK, method or FedBN(), **{**QUICK, **given})


def round_of(folder: Path) -> int:
    checkpoint = RunFolder(folder).checkpoint()
    assert checkpoint is not None
    return checkpoint.round


# ---- a kill at any write -----------------------------------------------------------------------


class Kill(BaseException):
    """The process dies: no handler of the run can write any more."""


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[str]]:
    """Let the process die at a write, of which a torn file stays."""
    # some states in memory, some on disk
    monkeypatch.setattr(ClientStore.__init__, "__defaults__", (700, 1.0))
    write, append = files.write_atomic, RunFolder.append_record

    def arm(at: int | None) -> list[str]:
        seen: list[str] = []

        def step(path: Path, act: Callable[[], None], torn: Callable[[], object]) -> None:
            dead = at is not None and len(seen) > at
            seen.append(path.name)
            if dead:
                raise Kill
            if len(seen) - 1 == at:
                torn()
                raise Kill
            act()

        def atomic(path: Path, content: bytes | str, private: bool = False) -> None:
            files.make_folder(path.parent, private)
            litter = files.temporary_file(path)
            step(path, lambda: write(path, content, private), lambda: litter.write_bytes(b"cut"))

        def line(self: RunFolder, record: Any) -> None:
            path = self.rounds_file
            step(path, lambda: append(self, record), lambda: path.open("a").write('{"rou'))

        for module in (files, tree, folders):
            monkeypatch.setattr(module, "write_atomic", atomic)
        monkeypatch.setattr(RunFolder, "append_record", line)
        return seen

    return arm


def test_killed_at_any_write_it_resumes_to_the_same_bits(
    tmp_path: Path, writes: Callable[[int | None], list[str]]
) -> None:
    asked = config()
    seen = writes(None)
    whole = run(TASK, config=asked, out=tmp_path / "whole")
    names = {p.name for p in (tmp_path / "whole").rglob("*")}
    assert len(seen) > 15 and any(name.startswith("left-") for name in seen), seen
    for at in range(len(seen)):
        out = tmp_path / "run"
        writes(at)
        with pytest.raises(Kill):
            run(TASK, config=asked, out=out)
        assert not RunFolder(out).is_finished()
        writes(None)
        again = run(TASK, config=asked, out=out, resume=True)
        assert tree.equal({"m": again.model}, {"m": whole.model}), (at, seen[at])
        assert numbers(out) == numbers(tmp_path / "whole"), (at, seen[at])
        assert {p.name for p in out.rglob("*")} == names, (at, seen[at])
        shutil.rmtree(out)


class Interrupt(Observer):
    """Presses Ctrl-C at an event: a client has trained or was tested, a round is complete."""

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
    tmp_path: Path, writes: Callable[[int | None], list[str]]
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


# ---- interrupts --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[FedAvg(), FPL(), Diary()], ids=lambda m: m.name)
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with one_thread():
        out = tmp_path_factory.mktemp("whole") / "run"
        yield run(TASK, config=config(request.param, participation=0.75), out=out)


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, whole: Result) -> None:
    assert whole.folder is not None
    for at in (1, 2, 3):
        out = tmp_path / f"cut{at}"
        with pytest.raises(KeyboardInterrupt):
            run(TASK, config=whole.config, out=out, observers=[At(at, 2, ctrl_c)])
        assert round_of(out) == len(RunFolder(out).records()) == at, "what is complete is kept"
        assert not RunFolder(out).is_finished()
        resumed = run(TASK, config=whole.config, out=out, resume=True)
        assert same(whole, resumed)
        assert numbers(out) == numbers(whole.folder)
        model = "model.safetensors"
        assert (out / model).read_bytes() == (whole.folder / model).read_bytes()
        a, b = states(whole.folder), states(out)
        assert a.keys() == b.keys()
        assert all(tree.equal(a[n], b[n]) for n in a)
        assert bool(a) == (whole.config.method.name == "diary")


@pytest.mark.parametrize(
    ("in_memory", "share", "every"), [("none", 1.0, 1), ("one", 0.5, 2), ("all", 0.5, 1)]
)
@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_states_on_disk_survive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_memory: str,
    share: float,
    every: int,
    how: str,
) -> None:
    """Killed: the folder as it is in the middle of a round; interrupted: Ctrl-C tidies up."""
    asked = config(Diary(), rounds=3, participation=share, checkpoint_every=every)
    whole = run(TASK, config=asked)
    one = tree.nbytes(Federation(asked, TASK).store.get("left-0")) * 3 // 2
    limit = {"none": 0, "one": one, "all": 1 << 30}[in_memory]
    monkeypatch.setattr(simulation, "ClientStore", functools.partial(ClientStore, limit=limit))
    clients = 4 if share == 1 else 2
    for at in (1, 2):
        out, copy = tmp_path / f"cut{at}", tmp_path / f"copy{at}"
        act = ctrl_c if how == "interrupted" else functools.partial(shutil.copytree, out, copy)
        observers = [At(at, clients, act)]
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                run(TASK, config=asked, out=out, observers=observers)
        else:
            assert same(whole, run(TASK, config=asked, out=out, observers=observers))
            out = copy
        resumed = run(TASK, config=asked, out=out, resume=True)
        assert same(whole, resumed), f"round {at}"
        kept = (RunFolder(out).checkpoint(), RunFolder(out).older_checkpoint())
        names = {file for c in kept if c for file in c.clients.values()}
        assert {p.name for p in (out / "clients").iterdir()} == names, "no litter is left"


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_interrupted_while_evaluating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The round's states are accepted but its record is not there: the round does not count."""
    asked = config(Diary(), rounds=3)
    whole, out = run(TASK, config=asked), tmp_path / "run"
    monkeypatch.setattr(simulation, "ClientStore", functools.partial(ClientStore, limit=limit))
    evaluate = Federation._evaluate

    def interrupted(self: Federation, observers: Sequence[Observer]) -> object:
        return ctrl_c() if self.server.round == 2 else evaluate(self, observers)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Federation, "_evaluate", interrupted)
        run(TASK, config=asked, out=out)
    assert round_of(out) == len(RunFolder(out).records()) == 1
    assert same(whole, run(TASK, config=asked, out=out, resume=True))


def test_a_diverging_run_keeps_what_is_complete(tmp_path: Path) -> None:
    asked = config(Diary(fails_in=2), participation=1.0)
    with pytest.raises(Diverged, match=r"right-0, round 3, phase 0"):
        run(TASK, config=asked, out=tmp_path)
    assert round_of(tmp_path) == len(RunFolder(tmp_path).records()) == 2
    assert not RunFolder(tmp_path).is_finished()


def test_resume_of_a_run_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    asked = config(Diary(), checkpoint_every=5)
    out, copy = tmp_path / "run", tmp_path / "copy"
    act = functools.partial(shutil.copytree, out, copy)
    whole = run(TASK, config=asked, out=out, observers=[At(1, 1, act)])
    killed = RunFolder(copy)
    assert killed.checkpoint() is None and len(killed.records()) == 1
    assert killed.starts_over(asked)
    assert same(whole, run(TASK, config=asked, out=copy, resume=True))
    assert numbers(copy) == numbers(out)
    assert not killed.starts_over(asked)


def test_a_truncated_record_is_repeated(tmp_path: Path) -> None:
    asked = config(FedAvg(), rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(TASK, config=asked, out=tmp_path, observers=[At(1, 2, ctrl_c)])
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1, "acc')
    assert same(run(TASK, config=asked), run(TASK, config=asked, out=tmp_path, resume=True))
    assert len(numbers(tmp_path)) == 3


def test_resume_of_nothing_and_of_a_finished_run(tmp_path: Path) -> None:
    asked = config(FedAvg())
    first = run(TASK, config=asked, out=tmp_path / "run", resume=True)
    again = run(TASK, config=asked, out=tmp_path / "run", resume=True)
    assert first.rounds == again.rounds, "seconds too: nothing was run again"
    assert same(first, again)


# ---- the disk ----------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_what_is_complete_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sync, left = config(checkpoint_every=1), os.fsync, [26]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ProtofedError, match=r"cannot write '.*': No space.*--resume"):
            run(TASK, config=asked, out=tmp_path / "run")
    assert 1 <= round_of(tmp_path / "run") < 4
    again = run(TASK, config=asked, out=tmp_path / "run", resume=True)
    assert tree.equal({"m": again.model}, {"m": run(TASK, config=asked).model})


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ProtofedError, match=r"cannot write '.*file/run': Not a directory"):
        run(TASK, config=config(), out=tmp_path / "file" / "run")
