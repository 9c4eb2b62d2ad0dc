"""The cache of decoded images: hit, damage, two builders at once, a folder that cannot be used."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.data import cache, decode, load, load_task
from protofed.data.cache import cache_folder
from protofed.errors import ProtofedError

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


@pytest.mark.parametrize("damage", [
    "flip", "cut", "zeros", "empty", "labels", "no json", "no npy", "junk", "nested json",
    "stamps",
])  # fmt: skip
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
    elif damage == "empty":
        content.clear()
    pixels.unlink()  # the first task stays mapped to the file as it was
    pixels.write_bytes(content)
    if damage == "labels":
        about.write_text(about.read_text().replace("[0, 0, 0", "[1, 0, 0", 1))
    elif damage == "no json":
        about.unlink()
    elif damage == "no npy":
        pixels.unlink()
    elif damage == "junk":
        about.write_text("{}")
    elif damage == "nested json":
        about.write_text("[" * 100_000)
    elif damage == "stamps":
        for stamp in (own_cache / "decoded" / "stamps").iterdir():
            stamp.write_bytes(b"\xff")
    again = load_task(name)
    assert again.digest == first.digest
    assert torch.equal(again.domains["b"].test.x, first.domains["b"].test.x)
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
    assert list((own_cache / "decoded").glob("*.*")) == []
    load_task(name)


def test_a_long_build_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_task(name)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(decode, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(decode, "_CHUNK", 10)
    clock = itertools.count(0, 6)
    monkeypatch.setattr("protofed.silence.monotonic", lambda: next(clock))
    load_task(name, image_size=16)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("decoding 40 images of folder") and second == "20 of 40 decoded"


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PROTOFED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "protofed"
    with monkeypatch.context() as nobody, pytest.raises(ProtofedError, match="home folder"):
        nobody.delenv("HOME")
        nobody.setattr("pwd.getpwuid", {}.__getitem__)
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "protofed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "protofed"
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
def test_only_the_owner_can_read_decoded_images(name: str, own_cache: Path) -> None:
    (own_cache / "decoded").mkdir(parents=True)
    (own_cache / "decoded").chmod(0o755)  # as older versions left it
    load_task(name)
    found = [own_cache / "decoded", *(own_cache / "decoded").rglob("*")]
    assert len(found) == 6  # pixels, what they are, two stamps in a folder
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_full_disk_is_noticed_before_decoding(
    name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a mapped file that has no room on the disk would end the process."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert len(load_task(name).domains["a"].train) == 16
    assert list((own_cache / "decoded").glob("*.*")) == []
    with cache.scratch("x", (2, 2)):  # what could be reserved is given back before decoding
        assert not [p for p in (own_cache / "decoded").iterdir() if p.is_file()]
    too_much = (10**7, 3, 1024, 1024)
    with (
        pytest.raises(ProtofedError, match=r"take 31457\.3 GB, more than the memory"),
        cache.scratch("x", too_much),
    ):
        pass


def test_skipped_images_depend_on_the_limit(name: str, tmp_path: Path, pictures: Any) -> None:
    (tmp_path / "x" / "a" / "c" / "0.png").write_bytes(pictures.one(5, side=60))
    small = load_task(name, skip_bad=True, max_image_pixels=3000)
    assert "60 pixels; --max-image-pixels 3720" in small.skipped[0]
    assert load_task(name, skip_bad=True, max_image_pixels=4000).skipped == ()


def test_entries_can_be_listed_and_purged(name: str, own_cache: Path, tmp_path: Path) -> None:
    assert cache.entries() == []
    load_task(name)
    load_task(name, image_size=16)
    (own_cache / "decoded" / ".folder-8-00.a1b2.tmp").write_bytes(bytes(100))  # left by a kill
    found = {entry.name: entry for entry in cache.entries()}
    kept, small = sorted((n for n in found if n != "folder-8-00"), reverse=True)
    assert found[small].images == 40 and found[small].size > 40 * 3 * 16 * 16
    assert found[small].source == str(tmp_path / "x")
    assert (found["folder-8-00"].images, found["folder-8-00"].size) == (0, 100)
    cache.purge([small, "folder-8-00"])
    assert [entry.name for entry in cache.entries()] == [kept]
    stamps = own_cache / "decoded" / "stamps"
    assert len(list(stamps.iterdir())) == 1  # not that of a survey
    assert load_task(name, image_size=16).digest
    (stamps / "damaged").write_bytes(b"\xff")
    cache.purge([kept])
    assert not (stamps / "damaged").exists()


def test_files_that_another_process_deletes_are_not_listed(
    name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_task(name)
    about, pixels = files(own_cache)
    left = pixels.stat().st_size
    listed = cache._entry

    def deleted(*entry: Any) -> cache.CacheEntry:
        about.unlink()
        return listed(*entry)

    monkeypatch.setattr(cache, "_entry", deleted)
    [entry] = cache.entries()
    assert entry.size == left
