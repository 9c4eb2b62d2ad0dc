"""Files that are not as they were written: the same model or a clear message, never another."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import flipped
from tests.runs.diary import QUICK, TASK, At, ctrl_c, same, states

from protofed import tree
from protofed.config import make_config
from protofed.errors import ProtofedError
from protofed.federation.cpu import one_thread
from protofed.methods import FedBN
from protofed.report.collect import collect
from protofed.runs.folder import RunFolder
from protofed.runs.result import Result, load_run
from protofed.runs.run import run
from protofed.tree import Tree

pytestmark = pytest.mark.usefixtures("single_thread")

CONFIG = make_config(TASK, FedBN(), **{**QUICK, "rounds": 4, "checkpoint_every": 1})
NEWEST, OLDER = "checkpoint.safetensors", "checkpoint.previous.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A finished run, and the folder of the same run stopped in its last round."""
    folder = tmp_path_factory.mktemp("made")
    with one_thread():
        whole = run(TASK, config=CONFIG, out=folder / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(TASK, config=CONFIG, out=folder / "cut", observers=[At(3, 1, ctrl_c)])
    return whole, folder / "cut"


@pytest.fixture
def whole(made: tuple[Result, Path]) -> Result:
    return made[0]


@pytest.fixture
def cut(made: tuple[Result, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "cut"))


def damages(content: bytes, flips: int, rng: random.Random) -> Iterator[bytes]:
    """The content with a flipped bit; cut off; with a hole; without a byte."""
    for bit in rng.sample(range(8 * len(content)), flips):
        yield flipped(content, bit)
    at = rng.randrange(len(content))
    hole = content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    others = [content[:at], hole, content[:at] + content[at + 1 :]]
    yield from rng.sample(others, min(flips, len(others)))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_damaged_run_resumes_to_the_same_bits_or_says_why(
    whole: Result, cut: Path, tmp_path: Path
) -> None:
    rng, tried, recovered = random.Random(0), 0, 0
    for file in files(cut):
        for content in damages(file.read_bytes(), 1, rng):
            copy = Path(shutil.copytree(cut, tmp_path / "copy"))
            (copy / file.relative_to(cut)).write_bytes(content)
            tried += 1
            try:
                with warnings.catch_warnings(action="ignore"):
                    again = run(TASK, config=CONFIG, out=copy, resume=True)
            except ProtofedError as error:
                assert str(copy) in str(error)
            else:
                recovered += 1
                assert same(whole, again), (file, content)
                assert all(tree.equal(states(whole.folder)[n], s) for n, s in states(copy).items())
            shutil.rmtree(copy)
    assert tried > 20 and recovered > tried / 2


def test_a_damaged_result_is_the_same_or_says_why(whole: Result, tmp_path: Path) -> None:
    assert whole.folder is not None
    rng, refused = random.Random(1), 0
    for name in ("config.toml", "facts.json", "rounds.jsonl", "model.safetensors", "summary.json"):
        copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
        for content in damages((whole.folder / name).read_bytes(), 20, rng):
            (copy / name).write_bytes(content)
            try:
                read = load_run(copy)
                assert same(whole, read) and read.config == whole.config
                assert (read.summary, read.facts) == (whole.summary, load_run(whole.folder).facts)
                assert read.client_models.keys() == whole.client_models.keys()
                assert all(
                    tree.equal({"m": read.client_models[n]}, {"m": own})
                    for n, own in whole.client_models.items()
                )
            except ProtofedError as error:
                refused += 1
                assert str(copy) in str(error)
        shutil.rmtree(copy)
    assert refused > 100


# ---- generations -------------------------------------------------------------------------------


def test_two_generations_are_kept(cut: Path) -> None:
    folder = RunFolder(cut)
    newest, older = folder.checkpoint(), folder.older_checkpoint()
    assert newest is not None and older is not None
    assert (newest.round, older.round) == (3, 2)
    named = {*newest.clients.values(), *older.clients.values()}
    assert len(named) == 8 and {p.name for p in folder.client_states.iterdir()} == named


@pytest.mark.parametrize("what", [NEWEST, "client", "records", "lost client", "other client"])
def test_the_older_generation_is_used_and_the_run_says_so(
    whole: Result, cut: Path, what: str
) -> None:
    folder = RunFolder(cut)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    state = folder.client_states / checkpoint.clients["left-0"]
    file = {NEWEST: cut / NEWEST, "records": folder.rounds_file}.get(what, state)
    content = file.read_bytes()
    if what == "lost client":
        file.unlink()
    elif what == "other client":  # a whole file, such as that of another run
        other = folder.client_states / checkpoint.clients["right-0"]
        file.write_bytes(other.read_bytes())
    else:
        file.write_bytes(flipped(content, 8 * (len(content) - 20)))
    with pytest.warns(UserWarning, match=rf"{file.name}' is damaged.* before it, of round 2"):
        assert same(whole, run(TASK, config=CONFIG, out=cut, resume=True))
    assert not RunFolder(cut).damage()


def test_both_generations_damaged_is_an_error_and_nothing_is_touched(cut: Path) -> None:
    for name in (NEWEST, OLDER):
        content = (cut / name).read_bytes()
        (cut / name).write_bytes(flipped(content, 8 * len(content) - 9))
    before = {path: path.read_bytes() for path in files(cut)}
    with pytest.raises(ProtofedError, match=r"checkpoint\.safetensors' is damaged: its content"):
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert {path: path.read_bytes() for path in files(cut)} == before


def test_the_good_generation_is_never_replaced_by_the_damaged_one(
    whole: Result, cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes its next checkpoint: the one it resumed from is still there."""
    (cut / NEWEST).write_bytes(b"damaged")
    save = tree.save

    def die(content: Tree, path: Path, *metadata: Any, private: bool = False) -> None:
        if path.name == NEWEST:
            raise KeyboardInterrupt
        save(content, path, *metadata, private=private)

    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(KeyboardInterrupt),
    ):
        patch.setattr(tree, "save", die)
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert same(whole, run(TASK, config=CONFIG, out=cut, resume=True))


def test_a_finished_run_that_lost_its_end_is_no_longer_finished_while_it_is_repeated(
    whole: Result, tmp_path: Path
) -> None:
    assert whole.folder is not None
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    (copy / NEWEST).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(KeyboardInterrupt):
        run(TASK, config=CONFIG, out=copy, resume=True, observers=[At(3, 1, ctrl_c)])
    assert not RunFolder(copy).is_finished() and not RunFolder(copy).has_model
    assert same(whole, run(TASK, config=CONFIG, out=copy, resume=True))


# ---- folders that were put together ------------------------------------------------------------


def test_the_model_of_another_run_is_not_taken_for_this_ones(whole: Result, tmp_path: Path) -> None:
    assert whole.folder is not None
    other = run(TASK, FedBN(), **{**QUICK, "seed": 1}, out=tmp_path / "other")
    assert other.folder is not None
    shutil.copy(whole.folder / "model.safetensors", other.folder)
    with pytest.raises(ProtofedError, match="the model of another run"):
        load_run(other.folder)
    assert RunFolder(other.folder).damage() == {
        "model.safetensors": "it is the model of another run"
    }


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with another seed."""
    out = tmp_path_factory.mktemp("other") / "run"
    with one_thread():
        run(TASK, config=replace(CONFIG, seed=1), out=out)
    return out


@pytest.mark.parametrize("name", ["config.toml", "facts.json", "rounds.jsonl", "summary.json"])
def test_a_finished_run_with_a_file_of_another(
    whole: Result, other: Path, tmp_path: Path, name: str
) -> None:
    assert whole.folder is not None
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    shutil.copy(other / name, copy)
    with pytest.raises(ProtofedError, match=r"' is damaged: it") as error:
        load_run(copy, model=False)
    with pytest.raises(ProtofedError, match="no finished run"):
        collect([copy])
    named = "summary.json" if name == "facts.json" else name
    assert named in error.value.message and named in RunFolder(copy).damage()


def test_a_stopped_run_with_the_rounds_of_another(cut: Path, other: Path) -> None:
    shutil.copy(other / "rounds.jsonl", cut)
    before = [path.read_bytes() for path in files(cut)]
    with pytest.raises(ProtofedError, match=f"its rounds do not match {NEWEST}"):
        run(TASK, config=CONFIG, out=cut, resume=True)
    assert [path.read_bytes() for path in files(cut)] == before


def test_a_run_that_does_not_say_what_its_rounds_are(whole: Result, cut: Path) -> None:
    """As versions before format 2 wrote it."""
    assert whole.folder is not None
    found, about = tree.load(cut / NEWEST)
    del about["records"]
    tree.save(found, cut / NEWEST, about)
    with one_thread():
        assert same(run(TASK, config=CONFIG, out=cut, resume=True), whole)
    summary = RunFolder(cut).summary()
    del summary["records"]
    RunFolder(cut).finish(summary)
    assert load_run(cut).rounds["average"] == whole.rounds["average"]


def test_rounds_that_are_missing_or_in_another_order(whole: Result, tmp_path: Path) -> None:
    assert whole.folder is not None
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    lines = (copy / "rounds.jsonl").read_text().splitlines(keepends=True)
    for changed in (lines[:-1], lines[1:], lines[::-1], [*lines, lines[-1]]):
        (copy / "rounds.jsonl").write_text("".join(changed))
        with pytest.raises(ProtofedError, match=r"rounds\.jsonl' is damaged"):
            load_run(copy, model=False)


def test_a_folder_without_checksums_is_read(whole: Result, tmp_path: Path) -> None:
    """As versions before format 2 wrote it."""
    assert whole.folder is not None
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text("format = 1\n" + text.partition("format = 2\n")[2])
    assert load_run(copy).config == whole.config
    assert not RunFolder(copy).has_checksums and not RunFolder(copy).damage()
    assert RunFolder(whole.folder).has_checksums
    (copy / "config.toml").write_text("format = 2\n" + text.partition("format = 2\n")[2])
    with pytest.raises(ProtofedError, match="its checksum is missing"):
        load_run(copy)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "checkpoint.safetensors", "summary.json", "rounds.jsonl"]
)
def test_what_a_finished_run_has_lost(whole: Result, tmp_path: Path, name: str) -> None:
    assert whole.folder is not None
    copy = Path(shutil.copytree(whole.folder, tmp_path / "copy"))
    assert RunFolder(copy).damage() == {}
    (copy / name).unlink()
    assert list(RunFolder(copy).damage()) == ([] if name == "summary.json" else [name])
