"""predict, evaluate and export as a user types them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from protofed import run
from protofed.cli.app import app
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.runs import Result


def call(*arguments: str | Path) -> str:
    found = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(found.exception, ProtofedError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    settings = {"rounds": 2, "epochs": 1, "width": 8, "clients": {"scan": 1, "photo": 1}}
    return run("glyphs", "fpl", out=tmp_path_factory.mktemp("runs") / "r", device="cpu", **settings)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    for i, x in enumerate(load_task("glyphs").domains["scan"].test.x[:3]):
        place = folder / ("deep" if i else "") / f"{i}.png"
        Image.fromarray(x.permute(1, 2, 0).numpy()).save(place)
    (folder / "notes.txt").write_text("not an image, not looked at")
    return folder


def test_predict(trained: Result, images: Path, tmp_path: Path) -> None:
    assert trained.folder is not None
    text = call("predict", trained.folder, images)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [Path(row["file"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    for row in rows:
        assert 1 >= float(row["probability"]) >= float(row["runner_up_probability"])
        assert row["class"] != row["runner_up"]
        assert row["prototype_domain"] in ("scan", "photo") and row["far"] in ("yes", "no")
    said = call("predict", trained.folder, images / "0.png", "-o", tmp_path / "p.csv")
    assert "1 images" in said and "far from all prototypes" in said
    (row,) = csv.DictReader((tmp_path / "p.csv").open())
    assert row["class"] == rows[0]["class"]
    alone = call("predict", trained.folder / "model.safetensors", images / "0.png")
    assert "far" not in alone.splitlines()[0]


def test_predict_errors(trained: Result, images: Path, tmp_path: Path) -> None:
    assert trained.folder is not None
    (images / "bad.png").write_text("nothing")
    with pytest.raises(ProtofedError, match=r"cannot decode.*bad.png.*--skip-bad"):
        call("predict", trained.folder, images)
    assert len(call("predict", trained.folder, images, "--skip-bad").splitlines()) == 4
    with pytest.raises(ProtofedError, match="no file or folder"):
        call("predict", trained.folder, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProtofedError, match="no images in"):
        call("predict", trained.folder, tmp_path / "empty")


def test_evaluate(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    said = call("evaluate", trained.folder, "-o", tmp_path / "e")
    assert "balanced" in said and "average" in said
    found = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    for domain in ("scan", "photo"):
        accuracy = trained.rounds[-1]["accuracy"][domain]
        assert found["domains"][domain]["accuracy"] == pytest.approx(accuracy, abs=1e-3)
    assert (tmp_path / "e" / "confusion-fpl.png").is_file()
    with pytest.raises(ProtofedError, match="unknown task"):
        call("evaluate", trained.folder, "--task", "glyph")


def test_export(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    with pytest.raises(ProtofedError, match="say what to export"):
        call("export", trained.folder)
    call("export", trained.folder, "--pt2", "--safetensors", "-o", tmp_path / "x")
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"model.pt2", "model.safetensors", "MODEL_CARD.md"}
