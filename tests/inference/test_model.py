"""A model in use gives what the run's own evaluation gave, from images of any form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.studies.made_runs import image_folder

from protofed import analysis, load_model, run, tree
from protofed.data import load_task
from protofed.errors import ProtofedError
from protofed.federation.batches import evaluation_batch
from protofed.inference.model import cosine_distances, softmax
from protofed.methods import method_class
from protofed.runs import Result

SMALL = {"rounds": 2, "epochs": 1, "batch": 16, "width": 4, "seed": 3, "device": "cpu"}
CLIENTS = {"scan": 1, "photo": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run("glyphs", "fpl", clients=CLIENTS, out=tmp_path_factory.mktemp("runs") / "r", **SMALL)


@pytest.mark.parametrize("method", ["fpl", "copa", "fedsr", "fedseproto", "fedbn", "fedgh"])
def test_predictions_are_those_of_the_run(method: str, trained: Result, tmp_path: Path) -> None:
    result = trained
    if method != "fpl":
        result = run("glyphs", method, clients=CLIENTS, out=tmp_path / "r", **SMALL)
    assert result.folder is not None
    task, last = load_task("glyphs"), result.rounds[-1]
    own = {None: ("scan", "photo")}
    accuracy = last["accuracy"]
    if result.config.method.evaluates != "global":
        own = {"scan-0": ("scan",), "photo-0": ("photo",)}
        accuracy = last.get("beside", {}).get("own", accuracy)
    for client, domains in own.items():
        model = load_model(result.folder / "model.safetensors", client)
        for domain in domains:
            test = task.domains[domain].test
            found = model.predict(test.x)
            right = [name == task.classes[y] for name, y in zip(found, test.y, strict=True)]
            assert 100 * np.mean(right) == pytest.approx(accuracy[domain], abs=1e-3)


LOOKS = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from protofed.method import Method


@dataclass(frozen=True)
class Looks(Method):
    evaluates = "clients"
    seen: ClassVar[set] = set()

    def shared(self, entry):
        return "no" if entry.kind == "bn" else "both"

    def init_server(self, model, sizes):
        return {"sent": {"number": torch.tensor(7.0)}}

    def forward(self, client, x):
        tensors = (client.id, client.domain, client.pixel_mean, client.pixel_std)
        number = client.received["sent"]["number"].item()
        self.seen.add((number, *(str(t.flatten().tolist()) for t in tensors)))
        return super().forward(client, x)
"""


def test_a_client_is_the_same_wherever_its_model_is_used(tmp_path: Path) -> None:
    """A hot hook may look at who the client is, and at what it received."""
    file = tmp_path / "looks.py"
    file.write_text(LOOKS)
    result = run(
        "glyphs", f"{file}:Looks", clients={"scan": 1}, engine="loop", bounds="off",
        out=tmp_path / "r", **SMALL,
    )  # fmt: skip
    seen = method_class(f"{file}:Looks").seen  # type: ignore[attr-defined]
    assert len(seen) == 1  # in training and in the run's evaluation
    assert result.folder is not None
    load_model(result.folder / "model.safetensors", "scan-0").predict(
        load_task("glyphs").domains["scan"].test.x[:2]
    )
    analysis.features(result, "scan", limit=2)
    assert len(seen) == 1


def test_every_form_of_an_image_gives_the_same(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    model = load_model(trained.folder)
    x = load_task("glyphs").domains["photo"].test.x[:3]
    arrays = x.permute(0, 2, 3, 1).numpy()
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, array in zip(paths, arrays, strict=True):
        Image.fromarray(array).save(path)
    expected = model.predict_proba(x)
    np.testing.assert_allclose(expected.sum(1), 1)
    assert expected.shape == (3, len(model.classes))
    for form in (arrays, list(arrays), paths, [str(p) for p in paths], x / 255, list(x)):
        np.testing.assert_array_equal(model.predict_proba(form), expected)
    for one in (x[0], arrays[0], paths[0], Image.open(paths[0])):
        np.testing.assert_allclose(model.predict_proba(one), expected[:1], atol=1e-6)
    gray = arrays[0].mean(2).astype(np.uint8)
    assert model.predict(gray) == model.predict(np.stack([gray] * 3, 2))
    for same in (torch.from_numpy(gray), torch.from_numpy(gray)[None]):
        np.testing.assert_array_equal(model.pixels(same), model.pixels(gray))
    assert model.predict([]) == [] and model.embed([]).shape == (0, model.network.features)
    assert repr(model).startswith("<fpl on glyphs: ")


def test_large_images_come_in_the_batches_of_the_run(tmp_path: Path) -> None:
    """Else they would take gigabytes, and a method that draws (FedSR) would draw other numbers."""
    settings = {"rounds": 1, "epochs": 1, "model": "cnn2", "width": 1, "image_size": 128}
    run(f"folder:{image_folder(tmp_path / 'images')}", out=tmp_path / "r", device="cpu", **settings)
    model, seen = load_model(tmp_path / "r"), []
    method = model.scores
    model.scores = lambda x: (seen.append(len(x)), method(x))[1]  # type: ignore[method-assign]
    assert model.logits(torch.zeros(100, 3, 128, 128, dtype=torch.uint8)).shape == (100, 2)
    assert seen == [64, 36] and evaluation_batch(128) == 64


def test_an_image_in_memory_is_turned_upright_and_not_changed(trained: Result) -> None:
    assert trained.folder is not None
    model = load_model(trained.folder)
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(4, 16))
    image.getexif()[0x0112] = 6
    upright = np.asarray(image.rotate(-90, expand=True))
    np.testing.assert_array_equal(model.pixels(image), model.pixels(upright))
    assert image.size == (16, 4) and image.getexif()[0x0112] == 6


def test_images_larger_than_the_limit_can_be_allowed(trained: Result) -> None:
    assert trained.folder is not None
    model = load_model(trained.folder)
    image = Image.new("L", (300, 300))
    model.max_image_pixels = 89_999
    with pytest.raises(ProtofedError, match="--max-image-pixels 90000 allows that"):
        model.pixels(image)
    model.max_image_pixels = 90_000
    assert model.pixels(image).shape == (3, 32, 32)


def test_numbers_that_are_not_intensities_are_refused(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    model = load_model(trained.folder)
    with pytest.raises(ProtofedError, match=r"from 0 to 1, got -1 to 1.*normalizes them itself"):
        model.predict(torch.tensor([-1.0, 1.0] * 384).reshape(3, 16, 16))
    with pytest.raises(ProtofedError, match="type int64"):
        model.predict(np.zeros((16, 16, 3), dtype=np.int64))
    with pytest.raises(ProtofedError, match=r"shape \(16, 16, 4\)"):  # with transparency
        model.predict(np.zeros((16, 16, 4), dtype=np.uint8))
    with pytest.raises(ProtofedError, match="an image is empty"):
        model.predict(np.zeros((0, 5)))
    with pytest.raises(ProtofedError, match=r"shape \(5, 5, 7\)"):
        model.predict([np.zeros((5, 5, 7), dtype=np.uint8)])
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(ProtofedError, match=r"cannot decode '.*a.png': it is not an image"):
        model.predict(tmp_path / "a.png")
    with pytest.raises(ProtofedError, match=r"cannot decode '.*b.png': No such file or directory$"):
        model.predict(tmp_path / "b.png")
    with pytest.raises(ProtofedError, match="there is no folder"):
        load_model(tmp_path / "nothing")


def test_the_file_alone_is_enough_and_has_no_prototypes_of_clients(trained: Result) -> None:
    assert trained.folder is not None
    x = load_task("glyphs").domains["scan"].test.x[:2]
    alone, whole = load_model(trained.folder / "model.safetensors"), load_model(trained.folder)
    np.testing.assert_array_equal(alone.logits(x), whole.logits(x))
    assert alone.card == whole.card and alone.card.accuracy == trained.accuracy
    features = whole.embed(x)
    assert alone.nearest(features) is None
    near = whole.nearest(features)
    assert near is not None and near.distances.shape == (2,)
    assert {*near.domains} <= {"scan", "photo"}


def test_nearest_prototypes_by_hand(trained: Result) -> None:
    assert trained.folder is not None
    model = load_model(trained.folder)
    assert model.kept is not None
    (client, (rows, labels)), *_ = model.kept.sent.items()
    near = model.nearest(np.concatenate([3 * rows[:1], -rows.sum(0, keepdims=True)]))
    assert near is not None
    assert near.classes[0] == model.classes[labels[0]]
    assert near.domains[0] == model.kept.domains[client]
    assert near.distances[0] == pytest.approx(0, abs=1e-6)
    assert list(near.far) == [False, True]  # features are not negative: this is far from all
    every = np.concatenate([r for r, _ in model.kept.sent.values()])
    classes = np.concatenate([y for _, y in model.kept.sent.values()])
    to_others = []
    for row, label in zip(every, classes, strict=True):
        others = every[classes != label]
        cos = others @ row / np.linalg.norm(others, axis=1) / np.linalg.norm(row)
        to_others.append(1 - cos.max())
    assert near.threshold == pytest.approx(float(np.median(to_others)), abs=1e-6)


def test_softmax_and_distances() -> None:
    np.testing.assert_allclose(softmax(np.array([[0.0, np.log(3)]])), [[0.25, 0.75]])
    np.testing.assert_allclose(softmax(np.array([[1000.0, -np.inf]])), [[1, 0]])
    a, b = np.array([[1.0, 0.0]]), np.array([[0.0, 2.0], [3.0, 3.0]])
    np.testing.assert_allclose(cosine_distances(a, b), [[1, 1 - 0.5**0.5]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mean": 3}, "mean is not a list"),
        ({"models": {}}, "models is empty"),
        ({"models": {"a": "vgg"}}, "unknown model"),
        ({"width": 10**12}, "from 1 to 100,000"),
        ({"width": 3}, "do not fit cnn3"),
        ({"precision": "auto"}, "what precision"),
    ],
)
def test_a_file_that_says_something_else(
    trained: Result, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    assert trained.folder is not None
    content, card = tree.load(trained.folder / "model.safetensors")
    tree.save(content, tmp_path / "model.safetensors", {**card, **change})
    with pytest.raises(ProtofedError, match=words):
        load_model(tmp_path / "model.safetensors")


def test_a_model_of_8_bit_images_refuses_more(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    model, scan = load_model(trained.folder), np.full((9, 9), 4000, np.uint16)
    Image.fromarray(scan).save(tmp_path / "scan.png")
    with pytest.raises(ProtofedError, match=r"scan\.png': its pixels have more than 8 bits"):
        model.predict(tmp_path / "scan.png")
    with pytest.raises(ProtofedError, match="an image: its pixels have more than 8 bits"):
        model.predict(scan)


def test_a_file_without_a_range_is_of_an_earlier_version(trained: Result, tmp_path: Path) -> None:
    assert trained.folder is not None
    slots, metadata = tree.load(trained.folder / "model.safetensors")
    assert metadata.pop("pixel_range") is None
    tree.save(slots, tmp_path / "old.safetensors", metadata)
    assert load_model(tmp_path / "old.safetensors").card == load_model(trained.folder).card
    tree.save(slots, tmp_path / "bad.safetensors", {**metadata, "pixel_range": "9:0"})
    with pytest.raises(ProtofedError, match="pixel_range must be LOW:HIGH"):
        load_model(tmp_path / "bad.safetensors")
