from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import protofed
from protofed.data import glyphs as module
from protofed.data import load_task
from protofed.data.glyphs import load_glyphs, make, sources
from protofed.data.task import Task
from protofed.errors import ProtofedError

Arrays = dict[str, NDArray[Any]]
PER_CLASS = {
    ("scan", "train"): 50,
    ("print", "train"): 50,
    ("photo", "train"): 35,
    ("inverse", "train"): 25,
    ("scan", "test"): 20,
    ("print", "test"): 20,
    ("photo", "test"): 20,
    ("inverse", "test"): 20,
}
FINGERPRINT = """
import hashlib
from protofed.data.glyphs import make
print(hashlib.sha256(b"".join(a.tobytes() for _, a in sorted(make(0).items()))).hexdigest())
"""


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return make(0)


@pytest.fixture
def ready(arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace ``make`` by its result; the list holds the seed of every call."""
    calls: list[int] = []

    def made(seed: int) -> Arrays:
        calls.append(seed)
        return {name: array.copy() for name, array in arrays.items()}

    monkeypatch.setattr(module, "make", made)
    return calls


def assert_equal(task: Task, arrays: Arrays) -> None:
    for (name, domain), split in itertools.product(task.domains.items(), ("train", "test")):
        images = getattr(domain, split)
        assert np.array_equal(images.x.numpy(), arrays[f"{name}.{split}.x"])
        assert np.array_equal(images.y.numpy(), arrays[f"{name}.{split}.y"])


def test_arrays_have_the_stated_shapes_and_class_counts(arrays: Arrays) -> None:
    assert set(arrays) == {f"{d}.{s}.{part}" for d, s in PER_CLASS for part in "xy"}
    for (domain, split), count in PER_CLASS.items():
        x, y = arrays[f"{domain}.{split}.x"], arrays[f"{domain}.{split}.y"]
        assert x.shape == (10 * count, 3, 32, 32)
        assert x.dtype == np.uint8
        assert y.dtype == np.int64
        assert np.bincount(y).tolist() == [count] * 10


def test_rows_are_not_sorted_by_class(arrays: Arrays) -> None:
    for domain, split in PER_CLASS:
        y = arrays[f"{domain}.{split}.y"]
        assert len(np.unique(y[:40])) >= 8
        assert np.mean(y[1:] == y[:-1]) < 0.2


@pytest.mark.slow
def test_another_process_makes_the_same_bytes(arrays: Arrays) -> None:
    here = hashlib.sha256(b"".join(a.tobytes() for _, a in sorted(arrays.items()))).hexdigest()
    source = Path(next(iter(protofed.__path__))).parent
    there = subprocess.run(
        [sys.executable, "-c", FINGERPRINT],
        env={**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here


def test_the_same_seed_makes_the_same_bytes_without_global_generators(arrays: Arrays) -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    again = make(0)
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())
    assert np.array_equal(np.random.get_state()[1], state)
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_another_seed_makes_other_images(arrays: Arrays) -> None:
    other = make(1)
    for domain, split in PER_CLASS:
        x = {image.tobytes() for image in arrays[f"{domain}.{split}.x"]}
        same = sum(image.tobytes() in x for image in other[f"{domain}.{split}.x"])
        # A plain scan may be dealt to the same place again; whatever is drawn anew may not.
        assert same < 0.3 * len(x) if domain == "scan" else same == 0


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_every_scan_is_used_at_most_once(seed: int) -> None:
    used = sources(seed)
    assert set(used) == {key for key in PER_CLASS if key[0] != "print"}
    indices = np.concatenate(list(used.values()))
    assert len(indices) == 1700
    assert len(np.unique(indices)) == 1700


def test_the_scans_themselves_have_no_twins() -> None:
    scans, _ = module._scans()
    assert len({scan.tobytes() for scan in scans}) == len(scans) == 1797


def test_images_show_the_scans_that_sources_names(arrays: Arrays) -> None:
    scans, labels = module._scans()
    for (domain, split), rows in sources(0).items():
        assert np.array_equal(arrays[f"{domain}.{split}.y"], labels[rows])
    rows = sources(0)["scan", "train"]
    middle = arrays["scan.train.x"][:, 0, 4:28, 4:28].reshape(-1, 8, 3, 8, 3).mean((2, 4))
    for image, scan in zip(middle[:100], scans[rows[:100]], strict=True):
        assert np.corrcoef(image.ravel(), scan.ravel())[0, 1] > 0.7


def test_no_image_is_in_two_places(arrays: Arrays) -> None:
    images = [im.tobytes() for name, a in arrays.items() if name.endswith(".x") for im in a]
    assert len(set(images)) == len(images) == 2400


def test_the_domains_really_differ(arrays: Arrays) -> None:
    brightness, color, paper = {}, {}, {}
    for domain in ("scan", "print", "photo", "inverse"):
        x = arrays[f"{domain}.train.x"].astype(np.float64)
        brightness[domain] = x.mean()
        color[domain] = (x.max(1) - x.min(1)).mean()
        # How uneven the top left corner is: flat paper, grain or texture.
        paper[domain] = np.median(x[:, :, :3, :3].std((2, 3)))
    assert brightness["scan"] < 70 < 90 < brightness["print"] < 160 < brightness["inverse"]
    assert color["scan"] == 0 < color["inverse"] < 20 < color["print"] < 90 < color["photo"]
    assert paper["scan"] == paper["print"] == 0 < 2 < paper["inverse"] < paper["photo"]


def test_the_task_is_what_make_made(arrays: Arrays, ready: list[int], own_cache: Path) -> None:
    task = load_glyphs()
    assert_equal(task, arrays)
    assert task.name == "glyphs"
    assert task.classes == tuple("0123456789")
    assert list(task.domains) == ["scan", "print", "photo", "inverse"]
    assert task.image_size == 32
    assert not task.augment.flip
    assert list(task.clients) == list(task.samples) == list(task.domains)
    for name, domain in task.domains.items():
        # Every client finds its own images in the pool.
        assert task.clients[name] * task.samples[name] <= len(domain.train)


def test_the_cache_returns_what_was_made(arrays: Arrays, ready: list[int], own_cache: Path) -> None:
    load_glyphs()
    task = load_glyphs()
    assert ready == [0]
    assert_equal(task, arrays)
    for domain in task.domains.values():
        for tensor in (domain.train.x, domain.train.y, domain.test.x, domain.test.y):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.is_contiguous()


def test_every_seed_has_its_own_entry(ready: list[int], own_cache: Path) -> None:
    load_glyphs(0)
    load_glyphs(1)
    assert ready == [0, 1]
    assert len(list((own_cache / "decoded").glob("*.npy"))) == 2


def test_a_damaged_entry_is_made_again(arrays: Arrays, ready: list[int], own_cache: Path) -> None:
    load_glyphs()
    (file,) = (own_cache / "decoded").glob("*.npy")
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes(4096) + whole[middle + 4096 :])
    assert_equal(load_glyphs(), arrays)
    assert_equal(load_glyphs(), arrays)  # from the new entry
    assert ready == [0, 0]


def test_a_cache_folder_that_cannot_be_written_does_not_matter(
    arrays: Arrays, ready: list[int], own_cache: Path
) -> None:
    own_cache.write_text("in the way")  # not chmod, which does not stop root
    assert_equal(load_glyphs(), arrays)


def test_a_flip_is_the_only_option(ready: list[int], own_cache: Path) -> None:
    assert not load_task("glyphs").augment.flip
    assert load_task("glyphs", flip=True).augment.flip
    for options in ({"image_size": 64}, {"test_split": "mod10"}, {"augment": "large"}):
        with pytest.raises(ProtofedError, match="glyphs have"):
            load_task("glyphs", **options)  # type: ignore[arg-type]
