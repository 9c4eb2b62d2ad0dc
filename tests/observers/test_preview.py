"""What a person is told before a run on images of their own starts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.cli.commands import call

from protofed import load_model, load_run, run
from protofed.config import make_config
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.observers.preview import preview

SMALL = ("--rounds", "1", "--model", "cnn2", "--width", "4", "--epochs", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12-bit scans of 40 pixels; one class has far fewer images, with a folder for validation."""
    root, rng = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    for domain in ("north", "south"):
        for name, count in (("ill", 3), ("well", 24)):
            for split, n in (("train", count), ("val", 12), ("test", 4)):
                folder = root / domain / split / name
                folder.mkdir(parents=True)
                for i in range(n):
                    pixels = rng.integers(0, 2000, (40, 40)) + 2000 * (name == "ill")
                    Image.fromarray(pixels.astype(np.uint16)).save(folder / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path_factory.getbasetemp() / "preview-cache"))


def test_what_cannot_be_run_is_an_error_in_words(scans: Path, tmp_path: Path) -> None:
    for given in (["--clients", "0"], ["--clients", "south=0", "--leave-out", "north"]):
        done = call("run", "--task", f"folder:{scans}", *SMALL, *given, "--out", tmp_path / "r")
        assert done.code == 2 and "no domain has a client" in done.err


def test_every_choice_has_its_reason(scans: Path) -> None:
    task = load_task(f"folder:{scans}")
    lines = preview(make_config(task.name, rounds=20, batch=4, device="cpu"), task)
    assert lines[0] == f"{task.name}: {task.note}"
    assert "Read as domain/{train,test}/class/image" in lines[0]
    rows = {line[2:14].strip(): line[15:] for line in lines[1:]}
    assert rows["image size"] == "40: the images' median shorter side is 40 pixels"
    assert rows["model"].startswith("resnet10: ")
    assert rows["epochs"] == "10: about 68 steps of a client between two averages"
    assert rows["augment"].endswith("--no-flip if left and right differ")
    assert rows["pixel range"].startswith(f"{task.pixel_range}: the lowest and highest value")
    assert rows["classes"].startswith("48 training images of well, 6 of ill; ")
    assert rows["classes"].endswith("few training images: 3 of ill in north, 3 of ill in south")
    assert rows["memory"].startswith("about ") and "GB" in rows["memory"]
    assert "batch" not in rows  # it was given
    assert rows["time"].startswith("about ") and ": 20 × " in rows["time"]
    assert re.search(r" ms an image here \(\d clients? at a time\)", rows["time"])
    silent = preview(make_config(task.name, flip=False, pixel_range="0:4095", device="cpu"), task)
    assert not any("--no-flip" in line or "pixel range" in line for line in silent)


def test_weights_that_do_not_fit_are_an_error_before_anything_is_measured(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, given = load_task(f"folder:{scans}"), {"model": "resnet18_imagenet", "train": "head"}
    small = make_config(task.name, **given, width=8, device="cpu")
    (told,) = (line for line in preview(small, task) if line.startswith("  train "))
    assert "head: the backbone is frozen" in told
    torch.save({"conv1.weight": torch.zeros(8, 3, 7, 7)}, tmp_path / "w.pt")
    monkeypatch.setattr("protofed.observers.preview.one_thread", None)
    bad = make_config(task.name, **given, width=8, device="cpu", weights=str(tmp_path / "w.pt"))
    with pytest.raises(ProtofedError, match=r"do not fit resnet18_imagenet: \d+ missing"):
        preview(bad, task)


def test_a_run_and_a_comparison_tell_before_they_start(scans: Path, tmp_path: Path) -> None:
    common = ("--task", f"folder:{scans}", *SMALL, "--runs", tmp_path)
    done = call("run", "--method", "fpl", *common)
    assert done.code == 0, done.err
    choice = "image size   40: the images' median shorter side"
    assert done.out.index(choice) < done.out.index("protocol folder: cnn2, 40×40 pixels")
    assert done.out.count(" GB of memory (") == 1
    compared = call("compare", "--methods", "fedavg,fpl", *common)
    assert compared.code == 0, compared.err
    assert compared.out.count(choice) == 1
    assert "protocol folder: cnn2, epochs 1, rounds 1" in compared.out
    # nothing is left to run: the comparison found FPL's run, and now its own
    again = call("compare", "--methods", "fedavg,fpl", *common)
    assert again.code == 0 and choice not in again.out
    assert len(list(tmp_path.glob("folder-*/summary.json"))) == 2
    # the same settings, named: the same run
    (own,) = tmp_path.glob("folder-*-fpl-0-*")
    repeated = call("run", "--config", own / "config.toml", "--runs", tmp_path)
    assert f"{own} already holds this run" in repeated.out.replace("\n", "")
    assert "--resume" not in call("run", "--method", "fpl", *common, "--resume").err


def test_python_tells_what_the_command_tells(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = "image size   40: the images' median shorter side"
    tiny = {"model": "cnn2", "width": 4, "epochs": 1, "device": "cpu", "out": tmp_path / "r"}
    run(f"folder:{scans}", "fedavg", rounds=1, progress=True, **tiny)
    told = capsys.readouterr().out
    assert told.index(choice) < told.index("protocol folder: cnn2, 40×40 pixels")
    run(f"folder:{scans}", "fedavg", rounds=2, progress=True, resume=True, **tiny)
    assert choice not in capsys.readouterr().out, "it is resumed: nothing is chosen"
    run(f"folder:{scans}", "fedavg", rounds=1, progress=False, overwrite=True, **tiny)
    assert capsys.readouterr().out == ""


def test_a_model_scales_deep_images_as_in_training(scans: Path, tmp_path: Path) -> None:
    result = run(f"folder:{scans}", "fedavg", out=tmp_path / "r", rounds=1, model="cnn2",
                 width=4, epochs=1, batch=8, device="cpu", validate="folder")  # fmt: skip
    task, again = load_task(f"folder:{scans}"), load_run(tmp_path / "r")
    assert again.config.image_size == 40 and again.config.pixel_range == task.pixel_range
    assert again.task().digest == task.digest
    assert result.validation.keys() == {"north", "south", "average"}
    model = load_model(tmp_path / "r")
    assert model.card.pixel_range == task.pixel_range
    files = [f for c in ("ill", "well") for f in sorted((scans / "north/test" / c).iterdir())]
    expected = model.predict_proba(task.domains["north"].test.x)
    arrays = [np.asarray(Image.open(f)).astype(np.uint16) for f in files]
    for form in (files, arrays, [Image.open(f) for f in files]):
        np.testing.assert_array_equal(model.predict_proba(form), expected)
    done = call("evaluate", tmp_path / "r", "--device", "cpu")
    assert done.code == 0 and f"{again.rounds[-1]['accuracy']['north']:.1f}" in done.out
    with pytest.raises(ProtofedError, match="16 bits of gray"):
        model.predict([np.zeros((4, 4, 3), np.uint16)])
