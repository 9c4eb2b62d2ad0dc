"""A run's folder: who may use it, what it says of itself, and that errors touch nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.diary import QUICK, TASK, At, Diary, ctrl_c, numbers, same

from protofed import tree
from protofed.config import Config, make_config
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Observer
from protofed.files import CannotWrite
from protofed.methods import FedAvg
from protofed.runs.folder import FILES, Checkpoint, RunFolder, find_runs
from protofed.runs.model_file import ModelCard, StoredModel
from protofed.runs.run import run

pytestmark = pytest.mark.usefixtures("single_thread")

Digests = Callable[[Path], dict[str, str]]
CONFIG = make_config(TASK, Diary(), **QUICK)
FACTS = {"numerics": 1, "precision": "fp32", "device": "cpu", "versions": {"torch": "2.11"}}
STATE = {"model": {"x": torch.arange(3.0)}}
RECORD = {"round": 1, "accuracy": {"left": 50.0}, "average": 50.0}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interrupted") / "run"
    with one_thread(), pytest.raises(KeyboardInterrupt):
        run(TASK, config=CONFIG, out=out, observers=[At(2, 1, ctrl_c)])
    return out


@pytest.fixture
def cut(interrupted: Path, tmp_path: Path) -> Path:
    """The folder of a run that was interrupted in its third round."""
    return Path(shutil.copytree(interrupted, tmp_path / "cut"))


# ---- the files ---------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.exists and folder.records() == [] and folder.checkpoint() is None
    with folder.open(CONFIG, "abc", FACTS) as checkpoint:
        assert checkpoint is None and folder.exists and not folder.is_finished()
        folder.append_record(RECORD)
        folder.save_clients([{"client": "left-0"}])
        saved = Checkpoint(
            "abc", 2, STATE, {"left-0": "f"}, {**RECORD, "round": 2}, {"accepted": {}}
        )
        folder.save_checkpoint(saved)
        card = ModelCard(
            "abc", "everything", "glyphs", ("a",), 8, (0.0,), (1.0,), {"a/b": "cnn2"}, {"a/b": "d"},
            None, None, "fpl", {"tau": 0.1}, 0, 2, "fp32", {"average": 50.0},
        )  # fmt: skip
        model = StoredModel(card, STATE["model"], {"a/b": {"x": torch.ones(1)}})
        folder.save_model(model)
        folder.save_artifact("snapshots", 2, STATE, {"hash": "abc"})
        folder.finish(
            dict.fromkeys(("bytes_up", "bytes_down", "seconds"), 0)
            | {"hash": "abc", "method": "fpl", "accuracy": {}}
            | {"split": {"clients": {}, "samples": {}}}
        )
    assert folder.facts() == FACTS and folder.records() == [RECORD]
    found = folder.checkpoint()
    assert found is not None and found.records == 1
    assert replace(found, state={}) == replace(saved, state={})
    assert torch.equal(found.state["model"]["x"], STATE["model"]["x"])
    read = folder.model()
    assert read.card == card and list(read.model) == ["x"]
    assert list(read.clients) == ["a/b"] and list(read.clients["a/b"]) == ["x"]
    assert folder.artifact_rounds("snapshots") == [2] and folder.artifact_rounds("prototypes") == []
    assert folder.artifact("snapshots", 2)[1] == {"round": 2, "hash": "abc"}
    assert folder.is_finished("abc") and not folder.is_finished("abd")
    assert find_runs(tmp_path)[0].path == find_runs(folder.path)[0].path == folder.path


def test_every_file_carries_its_format(cut: Path) -> None:
    assert (cut / "config.toml").read_text().splitlines()[1] == "format = 2"
    assert json.loads((cut / "clients.json").read_text())["format"] == 2
    for file in (cut / "checkpoint.safetensors", next((cut / "clients").iterdir())):
        assert b'\\"format\\": 2' in file.read_bytes()[:2000]


@pytest.mark.parametrize("file", ["config.toml", "checkpoint.safetensors"])
def test_a_folder_of_a_newer_version_is_refused(cut: Path, digests: Digests, file: str) -> None:
    content = (cut / file).read_bytes()
    for old, new in ((b"format = 2", b"format = 3"), (b'\\"format\\": 2', b'\\"format\\": 3')):
        content = content.replace(old, new)
    (cut / file).write_bytes(content)
    before = digests(cut)
    with pytest.raises(ProtofedError, match=rf"{file}' was written by a newer version of protofed"):
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert digests(cut) == before


def test_folders_from_before_formats_are_read(cut: Path) -> None:
    text = (cut / "config.toml").read_text()
    (cut / "config.toml").write_text(text.partition("format = 2\n")[2])
    assert RunFolder(cut).settings()["rounds"] == 3
    assert not RunFolder(cut).differences(CONFIG)


# ---- one run at a time -------------------------------------------------------------------------


class Another(Observer):
    """Starts the same run once more while one is under way."""

    def __init__(self, asked: Config, out: Path, **how: bool) -> None:
        self.asked, self.out, self.how, self.error = asked, out, how, ""

    def round(self, record: Any) -> None:
        with pytest.raises(ProtofedError) as error:
            run(TASK, config=self.asked, out=self.out, **self.how)
        self.error = str(error.value)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_two_runs_do_not_write_one_folder(tmp_path: Path, how: str) -> None:
    asked = make_config(TASK, FedAvg(), **QUICK, checkpoint_every=1)
    another = Another(asked, tmp_path, **{how: True})
    first = run(TASK, config=asked, out=tmp_path, observers=[another])
    assert "another process has a run under way" in another.error
    assert same(first, run(TASK, config=asked, out=tmp_path, resume=True)), "it is free again"
    assert not (tmp_path / ".lock").exists()


def test_what_a_kill_left_does_no_harm_and_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / ".config.toml.01e2f3a4.tmp", tmp_path / "snapshots" / ".1.0a1b2c3d.tmp"]
    left[0].write_text("rou")
    (tmp_path / ".lock").touch()
    asked = make_config(TASK, FedAvg(), **{**QUICK, "rounds": 1})
    run(TASK, config=asked, out=tmp_path)
    assert RunFolder(tmp_path).is_finished() and not left[0].exists()
    (tmp_path / "snapshots").mkdir()
    others = [tmp_path / ".mine.tmp", tmp_path / "mine.01e2f3a4.tmp"]
    for path in (*left, *others):
        path.touch()
    with pytest.raises(ProtofedError):
        run(TASK, config=replace(asked, lr=0.5), out=tmp_path, resume=True)
    assert all(path.exists() for path in left), "an error touches nothing"
    run(TASK, config=asked, out=tmp_path, resume=True)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(37, "No locks available")])
def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    with RunFolder(tmp_path).open(CONFIG, "abc"):
        assert RunFolder(tmp_path).exists


def test_a_lock_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    opened = RunFolder(tmp_path).open(CONFIG, "abc")
    with pytest.raises(CannotWrite, match=r"\.lock': Permission denied"), opened:
        pass


# ---- which run it is ---------------------------------------------------------------------------


def test_what_differs_is_named(cut: Path) -> None:
    folder = RunFolder(cut)
    assert folder.differences(CONFIG) == []
    other = make_config(TASK, Diary(fails_in=7), **{**QUICK, "lr": 0.5, "workers": 3})
    assert folder.differences(other) == ["lr 0.05 → 0.5", "method.fails_in -1 → 7"]
    wide = replace(CONFIG, width=None)
    assert folder.differences(wide) == ["width 4 → not set"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.5}])
def test_checkpoint_of_another_configuration(
    cut: Path, digests: Digests, change: dict[str, Any]
) -> None:
    before = digests(cut)
    words = rf"another configuration: {next(iter(change))} \S+ → \S+ \("
    with pytest.raises(ProtofedError, match=words):
        run(TASK, Diary(), **{**QUICK, **change}, out=cut, resume=True)
    assert digests(cut) == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.5}, {"rounds": 9}, None])
def test_another_configuration_without_a_checkpoint_is_refused(
    tmp_path: Path, digests: Digests, change: dict[str, Any] | None
) -> None:
    text = "rounds = " if change is None else replace(CONFIG, **change).toml()
    (tmp_path / "config.toml").write_text(text)
    before = digests(tmp_path)
    assert not RunFolder(tmp_path).starts_over(CONFIG)
    with pytest.raises(ProtofedError, match=r"another configuration.*--overwrite"):
        run(TASK, config=CONFIG, out=tmp_path, resume=True)
    assert digests(tmp_path) == before


def test_facts_that_change_numbers_are_compared(tmp_path: Path, digests: Digests) -> None:
    folder = RunFolder(tmp_path)
    with folder.open(CONFIG, "abc", FACTS):
        pass
    assert folder.starts_over(CONFIG, FACTS)
    now = {**FACTS, "precision": "bf16", "versions": {"torch": "2.12"}}
    for saved in (False, True):
        if saved:
            folder.save_checkpoint(Checkpoint("abc", 0, STATE))
        before = digests(tmp_path)
        with (
            pytest.raises(ProtofedError, match=r"another configuration.*: precision fp32 → bf16 "),
            folder.open(CONFIG, "abc", now, resume=True),
        ):
            pass
        assert digests(tmp_path) == before
    now = {**now, "precision": "fp32"}
    with folder.open(CONFIG, "abc", now, resume=True) as checkpoint:
        assert checkpoint is not None
    assert folder.facts() == now, "what is only recorded may differ"


def test_what_cannot_change_a_number_is_not_another_configuration(tmp_path: Path) -> None:
    """A study asks for other workers with other --jobs, and a copied folder for other paths."""
    given = make_config(TASK, Diary(), **QUICK, workers=1)
    folder = RunFolder(tmp_path)
    with folder.open(given, given.hash):
        pass
    for name in ("prototypes/7.safetensors", "clients/x", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of the run that was killed")
    asked = make_config(TASK, Diary(), **QUICK, workers=2, checkpoint_every=1)
    assert folder.starts_over(asked)
    assert same(run(TASK, config=asked), run(TASK, config=asked, out=tmp_path, resume=True))
    assert not folder.starts_over(asked)
    assert not (tmp_path / "prototypes" / "7.safetensors").exists()
    assert not (tmp_path / "clients" / "x").exists()
    assert (tmp_path / "notes.txt").exists(), "not a run's"


def test_checkpoint_every_is_not_another_configuration(cut: Path) -> None:
    run(TASK, Diary(), **QUICK, checkpoint_every=1, out=cut, resume=True)


@pytest.mark.parametrize("deployed", [True, False])
def test_simulations_and_deployments_do_not_resume_each_other(
    tmp_path: Path, deployed: bool
) -> None:
    folder, extra = RunFolder(tmp_path), {} if deployed else {"accepted": {}}
    with folder.open(CONFIG, "abc"):
        folder.save_checkpoint(Checkpoint("abc", 0, STATE, extra=extra))
    words = "of the simulator, not" if deployed else "of a deployment, not"
    with (
        pytest.raises(ProtofedError, match=words),
        folder.open(CONFIG, "abc", resume=True, deployed=deployed),
    ):
        pass


# ---- folders that cannot be used: an error, and nothing is touched -----------------------------


@pytest.mark.parametrize("size", [0, 5, 500, -1])
def test_truncated_checkpoint(cut: Path, digests: Digests, size: int) -> None:
    path = cut / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    before = digests(cut)
    with pytest.raises(ProtofedError, match=r"checkpoint\.safetensors"):
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert digests(cut) == before


def test_fewer_records_than_the_checkpoint(cut: Path, digests: Digests) -> None:
    path = cut / "rounds.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    (cut / "clients" / "litter").write_text("x")
    before = digests(cut)
    with pytest.raises(ProtofedError, match=r"rounds\.jsonl' is damaged: it has 1 rounds of 2"):
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert digests(cut) == before


@pytest.mark.parametrize(
    "change", [{"round": "2"}, {"clients": ["a"]}, {"clients": {"a": "../x"}}, {"pending": 1}]
)
def test_a_checkpoint_that_is_made_up(cut: Path, change: dict[str, Any]) -> None:
    path = cut / "checkpoint.safetensors"
    state, metadata = tree.load(path)
    tree.save(state, path, {**metadata, **change})
    with pytest.raises(ProtofedError, match="its metadata is not that of a checkpoint"):
        RunFolder(cut).checkpoint()


def test_missing_client_state_is_named(cut: Path) -> None:
    victim = sorted((cut / "clients").iterdir())[0]
    victim.unlink()
    with pytest.raises(ProtofedError, match=victim.name):
        run(TASK, config=CONFIG, out=cut, resume=True)


def test_a_finished_run_without_its_checkpoint_is_kept(tmp_path: Path, digests: Digests) -> None:
    asked = make_config(TASK, FedAvg(), **{**QUICK, "rounds": 1})
    run(TASK, config=asked, out=tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    before = digests(tmp_path)
    assert not RunFolder(tmp_path).starts_over(asked)
    with pytest.raises(ProtofedError, match="finished run without its checkpoint"):
        run(TASK, config=asked, out=tmp_path, resume=True)
    assert digests(tmp_path) == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_that_is_not_a_runs(
    tmp_path: Path, digests: Digests, flags: dict[str, bool]
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    before = digests(tmp_path)
    with pytest.raises(ProtofedError, match="is not a run's folder"):
        run(TASK, FedAvg(), **QUICK, out=tmp_path, **flags)
    assert digests(tmp_path) == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_instead_of_a_folder(tmp_path: Path, flags: dict[str, bool]) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ProtofedError, match="is a file"):
        run(TASK, FedAvg(), **QUICK, out=path, **flags)
    assert path.read_text() == "precious"


def test_an_existing_run_is_not_overwritten_by_accident(cut: Path, digests: Digests) -> None:
    before = digests(cut)
    with pytest.raises(ProtofedError, match=r"already holds a run.*--resume.*--overwrite"):
        run(TASK, config=CONFIG, out=cut)
    with pytest.raises(ProtofedError, match="give only one of them"):
        run(TASK, config=CONFIG, out=cut, resume=True, overwrite=True)
    assert digests(cut) == before


# ---- overwriting -------------------------------------------------------------------------------


def test_overwrite_starts_over(cut: Path) -> None:
    one: dict[str, Any] = {**QUICK, "rounds": 1}
    result = run(TASK, FedAvg(), **one, out=cut, overwrite=True)
    assert same(result, run(TASK, FedAvg(), **one))
    assert len(numbers(cut)) == 1
    assert not (cut / "clients").exists(), "nothing of the old run is left"
    assert RunFolder(cut).summary()["method"] == "fedavg"


def test_overwrite_with_a_setting_that_cannot_run_leaves_the_old_run(
    cut: Path, digests: Digests
) -> None:
    before = digests(cut)
    with pytest.raises(ProtofedError, match="training images"):
        run(TASK, FedAvg(), **{**QUICK, "samples": 10_000}, out=cut, overwrite=True)
    assert digests(cut) == before


class Kill(BaseException):
    """The process dies."""


def test_overwriting_first_removes_what_says_that_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in between must not leave a folder that says so and has lost its rounds."""
    asked = make_config(TASK, FedAvg(), **{**QUICK, "rounds": 1})
    run(TASK, config=asked, out=tmp_path)
    unlink = Path.unlink

    def die(path: Path, **more: Any) -> None:
        there = path.exists()
        unlink(path, **more)
        if there and path.name in FILES:
            raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(Kill):
            run(TASK, config=asked, out=tmp_path, overwrite=True)
    assert not RunFolder(tmp_path).is_finished()
    run(TASK, config=asked, out=tmp_path, resume=True)
    assert RunFolder(tmp_path).is_finished()


# ---- a copy elsewhere ----------------------------------------------------------------------------


def test_a_folder_follows_one_elsewhere(
    interrupted: Path, tmp_path: Path, digests: Digests
) -> None:
    """What is new there comes, what is gone there goes; what is not the run's stays."""
    here, there = RunFolder(tmp_path / "here"), RunFolder(interrupted)
    content = there.contents()
    assert "rounds.jsonl" in content and any(name.startswith("clients/") for name in content)
    here.receive(content, content)
    assert here.contents() == content
    private = next(here.client_states.iterdir())
    assert private.stat().st_mode & 0o077 == 0
    (here.path / "notes.txt").write_text("mine")
    names = [n for n in content if not n.startswith("clients/") and n != "checkpoint.safetensors"]
    changed = {"rounds.jsonl": b"new", "checkpoint.previous.safetensors": "config.toml"}
    here.receive(changed, names)
    found = here.contents()
    assert found.keys() == {*names, "checkpoint.previous.safetensors", "notes.txt"}
    assert found["checkpoint.previous.safetensors"] == content["config.toml"]
    assert found["rounds.jsonl"] == b"new"


def test_at_no_moment_is_a_followed_folder_worse_than_after_a_crash(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States before records, records before the checkpoint that counts them, the summary last."""
    written: list[str] = []
    monkeypatch.setattr(
        "protofed.runs.folder.write_atomic", lambda path, *_, **__: written.append(path.name)
    )
    content = {**RunFolder(interrupted).contents(), "summary.json": b"", "model.safetensors": b""}
    RunFolder(tmp_path / "here").receive(dict(reversed(content.items())), content)
    last = [name for name in FILES if name in content]
    assert written[-len(last) :] == last
    assert all(name.startswith(("left", "right")) for name in written[: -len(last)])
