"""TensorBoard: every round, live; and a word where it is not installed."""

import sys
from pathlib import Path

import pytest
from tests.cli.commands import TINY as OPTIONS
from tests.cli.commands import call
from tests.studies.in_process import run_in_process
from tests.studies.made_runs import study

from protofed.errors import ProtofedError
from protofed.observers.tensorboard import TensorBoard
from protofed.runs.run import run

TINY = {"rounds": 2, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu", "model": "cnn2",
        "width": 4}  # fmt: skip


def test_without_it_there_is_a_word(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ProtofedError, match=r"protofed\[tensorboard\]"):
        TensorBoard(tmp_path)


@pytest.fixture
def written(monkeypatch):
    """What a writer that only remembers was given."""
    found = {}

    class Writer:
        def __init__(self, folder, purge_step):
            found["place"] = (folder, purge_step)

        def add_text(self, name, text):
            found[name] = text

        def add_scalar(self, name, value, step):
            found[name, step] = value

        def flush(self):
            pass

        def close(self):
            found["closed"] = True

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return found


def test_what_is_written(written, tmp_path):
    result = run(task="glyphs", observers=[TensorBoard(tmp_path)], **TINY)
    assert written["place"] == (str(tmp_path / "tensorboard"), 1)
    assert written["accuracy/average", 2] == result.rounds[1]["average"]
    assert written["accuracy/scan", 1] == result.rounds[0]["accuracy"]["scan"]
    assert written["loss/ce", 1] == result.rounds[0]["loss"]["ce"]
    assert written["megabytes/up", 1] == result.rounds[0]["bytes_up"] / 1e6
    assert "rounds = 2" in written["config"]
    assert written["closed"]


def test_with_a_domain_left_out_no_average_mixes_it_with_the_others(written, tmp_path):
    given = {**TINY, "rounds": 1, "clients": "one", "leave_out": "photo"}
    result = run(task="glyphs", observers=[TensorBoard(tmp_path)], **given)
    assert ("accuracy/average", 1) not in written
    assert written["accuracy/seen average", 1] == result.summary["seen_average"]
    assert written["accuracy/photo", 1] == result.summary["unseen_accuracy"]


def test_with_the_real_one(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(task="glyphs", observers=[TensorBoard(tmp_path)], **TINY)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("accuracy/average")]
    assert found == [(i + 1, pytest.approx(r["average"])) for i, r in enumerate(result.rounds)]


@pytest.mark.parametrize("command", [
    ("study", "run", "mine.toml"),
    ("compare", "--methods", "fedavg"),
    ("sweep", "--method", "fpl", "--over", "tau=0.1"),
    ("run",),
])  # fmt: skip
def test_it_is_asked_for_before_anything_runs(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(study().toml())
    code, _, err = call(*command, "--tensorboard")
    assert code == 2
    assert "protofed[tensorboard]" in err
    assert not Path("runs").exists()


def test_on_the_command_line(written, monkeypatch, tmp_path):
    """A study passes it on to its runs, which write it."""
    monkeypatch.chdir(tmp_path)
    assert call("run", *OPTIONS, "--tensorboard", "--quiet", "--out", "it").code == 0
    assert written["place"] == (str(Path("it/tensorboard")), 1)
    assert ("accuracy/average", 1) in written
    assert written["closed"]
    started = run_in_process(monkeypatch)
    assert call("compare", *OPTIONS, "--methods", "fedavg", "--tensorboard").code == 0
    assert "--tensorboard" in started[0]
