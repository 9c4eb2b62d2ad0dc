"""Exports compute what the model computes, and errors say why one cannot be made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protofed import load_model, run
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.inference import TrainedModel
from protofed.inference.export import _compare, export_onnx, export_pt2, write_card

SMALL = {"rounds": 1, "epochs": 1, "batch": 32, "width": 8, "clients": {"scan": 1, "photo": 1}}


def trained(folder: Path, method: str = "fpl") -> TrainedModel:
    run("glyphs", method, out=folder, device="cpu", **SMALL)
    return load_model(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return trained(tmp_path_factory.mktemp("runs") / "r")


def test_onnx(model: TrainedModel, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_onnx(model, tmp_path / "m.onnx")
    assert b"protofed/" not in (tmp_path / "m.onnx").read_bytes(), "no paths of this machine"
    x = load_task("glyphs").domains["photo"].test.x[:7]
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (found,) = session.run(None, {"images": x.numpy()})
    np.testing.assert_allclose(found, model.predict_proba(x), atol=1e-5)


@pytest.mark.parametrize("method", ["copa", "fedsr", "fedseproto", "stablefdg"])
def test_pt2_of_methods_with_rules_and_modules_of_their_own(method: str, tmp_path: Path) -> None:
    own = trained(tmp_path / "r", method)
    export_pt2(own, tmp_path / "m.pt2")
    assert b"protofed/" not in (tmp_path / "m.pt2").read_bytes(), "no paths of this machine"
    x = load_task("glyphs").domains["scan"].test.x[:3]
    found = torch.export.load(tmp_path / "m.pt2").module()(x)
    np.testing.assert_allclose(found.detach().numpy(), own.predict_proba(x), atol=1e-5)


def test_an_export_that_differs_is_an_error(model: TrainedModel) -> None:
    with pytest.raises(ProtofedError, match="off by"):
        _compare(model, "it", lambda x: np.full((len(x), len(model.classes)), 0.1))


def test_card(model: TrainedModel, tmp_path: Path) -> None:
    write_card(model, tmp_path / "card.md", ["model.onnx", "model.pt2", "model.safetensors"])
    text = (tmp_path / "card.md").read_text()
    for part in (
        "# fpl on glyphs\n", "tau = ", model.card.hash, "| scan | 1 (scan-0) |",
        f"{model.card.accuracy['average']:.1f}", ", ".join(model.classes),
        'InferenceSession("model.onnx")', 'torch.export.load("model.pt2")',
        'protofed.load_model("model.safetensors")', "turned upright", "## Limits",
    ):  # fmt: skip
        assert part in text, part
    assert "trained from" not in text
    accuracy = {**model.card.accuracy, "a|b": 50.0}
    model.card = replace(
        model.card,
        start="weights from w.pth, backbone frozen",
        domains={**model.card.domains, "a|b-0": "a|b"},
        accuracy=accuracy,
    )
    write_card(model, tmp_path / "card.md", [])
    text = (tmp_path / "card.md").read_text()
    assert "parameters |\n| trained from | weights from w.pth, backbone frozen |\n| rounds" in text
    assert r"| a\|b | 1 (a\|b-0) |" in text and r" | a\|b |" in text
