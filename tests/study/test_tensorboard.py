"""TensorBoard: every round, live; and a word where it is not installed."""

import sys

import pytest

from protofed.errors import ProtofedError
from protofed.federation.run import run
from protofed.tensorboard import TensorBoard

TINY = {"rounds": 2, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu", "model": "cnn2",
        "width": 4}  # fmt: skip


def test_without_it_there_is_a_word(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ProtofedError, match=r"protofed\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_what_is_written(monkeypatch, tmp_path):
    """With a writer that only remembers."""
    written = {}

    class Writer:
        def __init__(self, folder, purge_step):
            self.place = (folder, purge_step)
            written["place"] = self.place

        def add_text(self, name, text):
            written[name] = text

        def add_scalar(self, name, value, step):
            written[name, step] = value

        def flush(self):
            pass

        def close(self):
            written["closed"] = True

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = run(task="glyphs", observers=[TensorBoard(tmp_path)], **TINY)
    assert written["place"] == (str(tmp_path / "tensorboard"), 1)
    assert written["accuracy/average", 2] == result.rounds[1]["average"]
    assert written["accuracy/scan", 1] == result.rounds[0]["accuracy"]["scan"]
    assert written["loss/ce", 1] == result.rounds[0]["loss"]["ce"]
    assert written["megabytes/up", 1] == result.rounds[0]["bytes_up"] / 1e6
    assert "rounds = 2" in written["config"]
    assert written["closed"]


def test_with_the_real_one(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(task="glyphs", observers=[TensorBoard(tmp_path)], **TINY)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("accuracy/average")]
    assert found == [(i + 1, pytest.approx(r["average"])) for i, r in enumerate(result.rounds)]
