"""predict, evaluate and export as a user types them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from tests.studies.made_runs import image_folder
from typer.testing import CliRunner

from protofed import load_model, run
from protofed.cli import model
from protofed.cli.app import app
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.inference.calibration import calibrate, held_out_images
from protofed.inference.metrics import fit_temperature, measure
from protofed.inference.model import TrainedModel, softmax
from protofed.runs import Result
from protofed.runs.model_file import read_model


def call(*arguments: str | Path) -> str:
    found = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(found.exception, ProtofedError):
        raise found.exception
    assert found.exit_code == 0, found.output
    assert "\n\n" not in f"\n{found.stderr}"
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
        assert row["prototype_domain"] in ("scan", "photo")
        assert (row["far"] == "yes") == (row["prototype_distance"] > row["far_beyond"])
    said = call("predict", trained.folder, images / "0.png", "-o", tmp_path / "p.csv")
    assert "1 image," in said and "far from all prototypes (cosine distance above" in said
    (row,) = csv.DictReader((tmp_path / "p.csv").open())
    assert row["class"] == rows[0]["class"]
    alone = call("predict", trained.folder / "model.safetensors", images / "0.png")
    assert "far" not in alone.splitlines()[0]


def test_predict_finds_the_images_that_training_would_find(trained: Result, images: Path) -> None:
    (images / "0.png").rename(images / "0001")  # as DICOM files are named
    (images / "._1.png").write_text("left behind by macOS")
    (images / "report.pdf").write_text("a side file")
    rows = list(csv.DictReader(io.StringIO(call("predict", str(trained.folder), images))))
    assert [Path(row["file"]).name for row in rows] == ["0001", "1.png", "2.png"]
    limit = ("--max-image-pixels", "255", "--skip-bad")  # the images have 256
    with pytest.raises(ProtofedError, match="none of the files could be decoded"):
        call("predict", str(trained.folder), images, *limit)


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


def test_predict_with_a_single_class(tmp_path: Path) -> None:
    pictures = tmp_path / "images"
    shutil.copytree(image_folder(tmp_path / "two") / "day" / "cat", pictures / "day" / "cat")
    settings = {"rounds": 1, "epochs": 1, "model": "cnn2", "width": 4, "image_size": 16}
    run(f"folder:{pictures}", out=tmp_path / "r", device="cpu", **settings)
    rows = list(csv.DictReader(io.StringIO(call("predict", tmp_path / "r", pictures))))
    assert {(row["class"], row["runner_up"]) for row in rows} == {("cat", "")}


def test_a_device_that_is_not_there(trained: Result) -> None:
    for name, words in {
        "bogus": r"unknown device 'bogus' \(valid: auto",
        "cuda:7": "no GPU",
    }.items():
        if name == "bogus" or not torch.cuda.is_available():
            with pytest.raises(ProtofedError, match=words):
                call("evaluate", str(trained.folder), "--device", name)


def test_evaluate_reads_the_images_as_the_run_did(tmp_path: Path) -> None:
    """As with a test split that is not the task's first: its test images were for training."""
    folder = image_folder(tmp_path / "images")
    (folder / "day" / "cat" / "bad.png").write_bytes(b"not an image")
    settings = {"rounds": 1, "epochs": 1, "model": "cnn2", "width": 4, "image_size": 16}
    run(f"folder:{folder}", out=tmp_path / "r", device="cpu", skip_bad=True, **settings)
    assert "night" in call("evaluate", tmp_path / "r")
    with pytest.raises(ProtofedError, match=r"bad\.png"):
        call("evaluate", tmp_path / "r" / "model.safetensors", "--task", f"folder:{folder}")
    with pytest.raises(ProtofedError, match="does not say where the images of folder:images are"):
        call("evaluate", tmp_path / "r" / "model.safetensors")
    stored = read_model(tmp_path / "r" / "model.safetensors")
    replace(stored, card=replace(stored.card, task="vlcs")).save(tmp_path / "v.safetensors")
    with (
        pytest.warns(UserWarning, match="does not say which images of vlcs are for testing"),
        pytest.raises(ProtofedError),  # there are none here
    ):
        call("evaluate", tmp_path / "v.safetensors", "--data", tmp_path)


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


def test_the_table_of_an_evaluation_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(model, "wide_console", lambda: Console(file=out, width=80))
    found = measure(np.eye(3), np.arange(3))
    model._print_metrics({"art_painting": found, "photo of the north gate": found}, None)
    words = out.getvalue().split()
    assert {"art_painting", "accuracy", "precision", "calibration"} <= {*words}
    assert words.count("0.0") == 3, "the calibration error of both domains and on average"


def test_export(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    with pytest.raises(ProtofedError, match="say what to export"):
        call("export", trained.folder)
    call("export", trained.folder, "--pt2", "--safetensors", "-o", tmp_path / "x")
    names = {path.name for path in (tmp_path / "x").iterdir()}
    assert names == {"model.pt2", "model.safetensors", "MODEL_CARD.md"}


def test_a_client_s_export_has_no_other_client_s_model(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "width": 4, "clients": {"scan": 1, "photo": 1}}
    run("glyphs", "fedbn", out=tmp_path / "r", device="cpu", **settings)
    call("export", tmp_path / "r", "--safetensors", "--client", "photo-0", "-o", tmp_path / "x")
    exported = load_model(tmp_path / "x" / "model.safetensors")
    x = load_task("glyphs").domains["photo"].test.x[:5]
    whole = load_model(tmp_path / "r", "photo-0")
    assert exported.client == "photo-0"
    np.testing.assert_array_equal(exported.logits(x), whole.logits(x))
    assert [*read_model(tmp_path / "x" / "model.safetensors").clients] == ["photo-0"]
    assert "photo-0's own entries" in (tmp_path / "x" / "MODEL_CARD.md").read_text()


def test_a_method_without_a_global_model_needs_a_client(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "width": 4, "clients": {"scan": 1, "photo": 1}}
    run("glyphs", "fedbn", out=tmp_path / "r", device="cpu", **settings)
    for command in ("evaluate", "export"):
        with pytest.raises(ProtofedError, match=r"fedbn has no global model.*'scan-0'"):
            call(command, tmp_path / "r", *(["--pt2"] if command == "export" else []))
    out = tmp_path / "x"
    call("export", tmp_path / "r", "--pt2", "--client", "photo-0", "-o", out)
    assert "photo-0's own entries" in (out / "MODEL_CARD.md").read_text("utf-8")


def test_images_that_nobody_trained_on_are_all_tested_if_asked(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "model": "cnn2", "width": 4, "image_size": 16}
    run(f"folder:{image_folder(tmp_path / 'one')}", out=tmp_path / "r", device="cpu", **settings)
    other = image_folder(tmp_path / "two")
    files = len([*other.rglob("*.png")])
    bad = other / "day" / "cat" / "bad.png"
    bad.write_bytes(b"")
    asked = ("evaluate", tmp_path / "r", "--task", f"folder:{other}")
    with pytest.raises(ProtofedError, match="--skip-bad"):
        call(*asked)

    def images(*more: str) -> int:
        call(*asked, "--skip-bad", "-o", tmp_path / "e", *more)
        domains = json.loads((tmp_path / "e/evaluation.json").read_text())["domains"]
        return sum(domain["images"] for domain in domains.values())

    assert images("--all-images") == files > images()
    assert "The last fifth of each class" in call(*asked, "--skip-bad")
    with pytest.raises(ProtofedError, match="trained on images of"):
        call("evaluate", tmp_path / "r", "--all-images")
    Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16)).save(bad)
    with pytest.raises(ProtofedError, match="more than 8 bits; the model was trained on"):
        call(*asked)


def test_a_domain_that_the_run_left_out_is_tested_on_all_its_images(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "width": 4, "clients": {"scan": 1, "print": 1}}
    made = run("glyphs", leave_out="photo", out=tmp_path / "r", device="cpu", **settings)
    said = call("evaluate", tmp_path / "r", "-o", tmp_path / "e")
    photo = load_task("glyphs").domains["photo"]
    count = len(photo.test) + len(photo.train)
    lines = [line.split() for line in said.splitlines() if line.strip()]
    (first,) = [line for line in lines if line[:2] == ["photo", "(unseen)"]]
    assert int(first[2]) == count and lines.index(first) == 1 + lines.index(
        next(line for line in lines if "domain" in line)
    )
    assert float(first[3]) == pytest.approx(made.rounds[-1]["accuracy"]["photo"], abs=0.06)
    (mean,) = [line for line in lines if line[:3] == ["average", "of", "the"]]
    seen = [line for line in lines if line[0] in ("scan", "print", "inverse")]
    assert int(mean[4]) == sum(int(line[1]) for line in seen)
    assert float(mean[5]) == pytest.approx(sum(float(line[2]) for line in seen) / 3, abs=0.06)
    found = json.loads((tmp_path / "e/evaluation.json").read_text())["domains"]["photo"]
    assert found["images"] == count


def test_calibrate(trained: Result, images: Path, tmp_path: Path) -> None:
    """Fitted on images that were not trained on, and used by all that gives probabilities."""
    assert trained.folder is not None
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    before, plain = load_model(folder), call("predict", folder, images)
    said = call("evaluate", folder, "--calibrate", "-o", tmp_path / "e")
    after = load_model(folder)
    task = load_task("glyphs")
    held = held_out_images(trained)
    x, y = (torch.cat([getattr(i, n) for i in held.values()]) for n in "xy")
    assert held.keys() == {"scan", "photo"} and f"fitted on {len(y)} images" in said
    expected = fit_temperature(before.logits(x), y.numpy())
    exact = torch.from_numpy(before.logits(x)).double()
    losses = [F.cross_entropy(exact / t, y).item() for t in (1, expected)]
    shutil.copytree(trained.folder, tmp_path / "again")
    fitted = calibrate(tmp_path / "again")
    assert fitted.cross_entropy == pytest.approx(losses, rel=1e-6)
    assert losses[1] < losses[0] * (1 - 1e-5)
    assert f"cross-entropy on them {losses[0]:.3f} → {losses[1]:.3f}" in " ".join(said.split())
    assert after.temperature == pytest.approx(expected, rel=1e-4) and expected != 1
    assert (
        json.loads((tmp_path / "e/evaluation.json").read_text())["temperature"] == after.temperature
    )
    scan = task.domains["scan"].test.x[:5]
    np.testing.assert_allclose(
        after.predict_proba(scan), softmax(before.logits(scan) / after.temperature)
    )
    assert after.predict(scan) == before.predict(scan)
    assert call("predict", folder, images) != plain
    call("export", folder, "--pt2", "--safetensors", "-o", tmp_path / "out")
    assert "are calibrated on held-out" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert load_model(tmp_path / "out" / "model.safetensors").temperature == after.temperature
    call("evaluate", folder, "--calibrate")
    assert load_model(folder).temperature == after.temperature, "the raw scores are fitted"
    with pytest.raises(ProtofedError, match="name the run's folder"):
        call("evaluate", folder / "model.safetensors", "--calibrate")


def test_a_client_is_calibrated_on_its_own_domain(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "width": 4, "clients": {"scan": 1, "photo": 1}}
    run("glyphs", "fedbn", out=tmp_path, device="cpu", validate=0.1, samples=240, **settings)
    said = call("evaluate", tmp_path, "--client", "photo-0", "--calibrate")
    assert "fitted on 2" in said, "a tenth of 240"
    assert load_model(tmp_path, "photo-0").temperature != 1
    assert load_model(tmp_path, "scan-0").temperature == 1


def test_no_temperature_fits_images_that_are_all_right(
    trained: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the lowest that is tried, and every probability 100 %."""
    assert trained.folder is not None
    shutil.copytree(trained.folder, tmp_path / "run")
    labels = torch.cat([images.y for images in held_out_images(trained).values()])
    right = F.one_hot(labels, 10).double().numpy()
    monkeypatch.setattr(TrainedModel, "logits", lambda self, x: right)
    with pytest.raises(ProtofedError, match=f"right on all {len(labels)} images"):
        calibrate(tmp_path / "run")
    assert load_model(tmp_path / "run").temperature == 1
    right[0] = right[0][::-1]
    assert 0.05 < calibrate(tmp_path / "run").temperature < 1


def test_nothing_to_calibrate_on(tmp_path: Path) -> None:
    settings = {"rounds": 1, "epochs": 1, "width": 4, "clients": {"inverse": 1}, "samples": 245}
    run("glyphs", "fedavg", out=tmp_path, device="cpu", **settings)
    with pytest.raises(ProtofedError, match=r"no images to calibrate on.*--validate 0.1") as told:
        call("evaluate", tmp_path, "--calibrate")
    assert "unused" not in str(told.value), "a setting that nobody gave"
