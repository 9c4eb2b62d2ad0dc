"""The cache of decoded images: hit, damage, two builders at once, a folder that cannot be used."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.data import decode, load, load_task
from protofed.data.cache import cache_folder

NAMES = [f"{d}/{c}/{i}.png" for d in "ab" for c in "cd" for i in range(10)]


@pytest.fixture
def name(tmp_path: Path, pictures: Any, own_cache: Path) -> str:
    return f"folder:{pictures.tree(tmp_path / 'x', NAMES)}"


def no_decoding(*_: Any) -> None:
    raise AssertionError("decoded again")


def digest(name: str) -> str:
    return load_task(name).digest


def files(cache: Path) -> list[Path]:
    return sorted((cache / "decoded").glob("*.*"))


def test_decoded_once_and_mapped(
    name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_task(name)
    assert [p.suffix for p in files(own_cache)] == [".json", ".npy"]
    monkeypatch.setattr(load, "decode_all", no_decoding)
    monkeypatch.setattr(load, "content_key", no_decoding)  # stamps are enough
    second = load_task(name)
    assert second.digest == first.digest
    assert torch.equal(first.domains["a"].train.x, second.domains["a"].train.x)
    assert load_task(name, flip=False).digest == first.digest
    # writing to a tensor changes neither the file nor the next one that loads it
    second.domains["a"].train.x.zero_()
    assert torch.equal(first.domains["a"].train.x, load_task(name).domains["a"].train.x)


def test_the_same_content_elsewhere_is_not_decoded_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = load_task(name).digest
    monkeypatch.setattr(load, "decode_all", no_decoding)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").rename(tmp_path / "elsewhere" / "x")
    for path in (tmp_path / "elsewhere" / "x").rglob("*.png"):
        path.touch()
    assert load_task(f"folder:{tmp_path / 'elsewhere' / 'x'}").digest == digest


def test_any_change_is_seen(name: str, tmp_path: Path, pictures: Any) -> None:
    digests = {load_task(name).digest, load_task(name, image_size=16).digest}
    path = tmp_path / "x" / "a" / "c" / "0.png"
    old = path.read_bytes()
    path.write_bytes(pictures.one(77))
    digests.add(load_task(name).digest)
    path.rename(path.with_name("zz.png"))
    digests.add(load_task(name).digest)
    path.with_name("zz.png").unlink()
    digests.add(load_task(name).digest)
    assert len(digests) == 5
    path.write_bytes(old)
    assert load_task(name).digest in digests


@pytest.mark.parametrize("damage", ["flip", "cut", "zeros", "labels", "no json", "no npy", "junk"])
def test_a_damaged_cache_is_rebuilt(name: str, own_cache: Path, damage: str) -> None:
    first = load_task(name)
    about, pixels = files(own_cache)
    content = bytearray(pixels.read_bytes())
    if damage == "flip":
        content[-1000] ^= 1
    elif damage == "cut":
        content = content[:-1]
    elif damage == "zeros":
        content[4096:8192] = bytes(4096)
    pixels.write_bytes(content)
    if damage == "labels":
        about.write_text(about.read_text().replace("[0, 0, 0", "[1, 0, 0", 1))
    elif damage == "no json":
        about.unlink()
    elif damage == "no npy":
        pixels.unlink()
    elif damage == "junk":
        about.write_text("{}")
    again = load_task(name)
    assert again.digest == first.digest
    assert torch.equal(again.domains["b"].test.x, first.domains["b"].test.x) or damage in (
        "flip", "cut", "zeros",  # the first one is mapped to the file that was spoiled here
    )  # fmt: skip
    stored = np.load(files(own_cache)[1])
    assert np.array_equal(stored[:16], again.domains["a"].train.x.numpy())


def test_two_processes_at_once(name: str, own_cache: Path) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes would import everything again")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        digests = set(pool.map(digest, [name, name], chunksize=1))
    assert digests == {load_task(name).digest}
    assert [p.suffix for p in files(own_cache)] == [".json", ".npy"]
    assert not list((own_cache / "decoded").glob(".*"))  # nothing temporary is left


def test_a_cache_folder_that_cannot_be_written(name: str, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    task = load_task(name)
    assert len(task.domains["a"].train) == 16
    assert task.digest == load_task(name).digest


def test_an_interrupted_build_leaves_nothing(
    name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decode, "decode", interrupt)
        load_task(name)
    assert list((own_cache / "decoded").iterdir()) == []
    load_task(name)


def test_a_long_build_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_task(name)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(decode, "PATIENCE_SECONDS", -1.0)
    load_task(name, image_size=16)
    assert "decoding 40 images of folder" in capsys.readouterr().err


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PROTOFED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "protofed"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "protofed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "protofed"
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
