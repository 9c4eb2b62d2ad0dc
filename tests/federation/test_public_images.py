"""Public images that are not the task's: those of a folder, or of another task."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protofed.config import make_config, merged_config
from protofed.data import DataMissing
from protofed.data.decode import decode
from protofed.errors import ProtofedError
from protofed.federation import public_images as module
from protofed.federation.simulation import Federation
from protofed.methods import FedMD
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.testing.checks import TINY, tiny_task

pytestmark = pytest.mark.usefixtures("single_thread", "own_cache")
PIXELS = 8  # of the tiny task


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve images at several depths, next to files that are not images."""
    root = tmp_path / "public"
    rng = np.random.default_rng(5)
    for i in range(12):
        path = root.joinpath(*["deep"] * (i % 3), f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 12, 3), dtype=np.uint8)).save(path)
    (root / "LICENSE.txt").write_text("no image")
    (root / ".DS_Store").write_text("no image")
    return root


def config_of(path: Path | str, **more: Any) -> Any:
    images = more.pop("images", 2000)
    method = FedMD(public=f"folder:{path}", images=images)
    return make_config(tiny_task(), method, **{**TINY, **more})


def federation(path: Path | str, **more: Any) -> Federation:
    return Federation(config_of(path, **more), tiny_task())


def pixels(path: Path) -> list[Any]:
    return [decode(p.read_bytes(), PIXELS) for p in path.rglob("*.png")]


def test_the_digest_and_the_order_are_of_hashes_of_pixels(folder: Path) -> None:
    one = federation(folder)
    by_hash = {hashlib.sha256(x.tobytes()).digest(): x for x in pixels(folder)}
    whole = hashlib.sha256(b"".join(sorted(by_hash))).hexdigest()
    assert one.facts.public_digest == f"12-{whole}"
    assert one.setup.public is not None
    pool = one.setup.public.pools["folder"]
    in_order = np.stack([by_hash[h] for h in sorted(by_hash)])
    np.testing.assert_array_equal(pool.x[pool.rows].numpy(), in_order)


def test_names_places_and_other_files_do_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    copy.mkdir(parents=True)
    for i, path in enumerate(sorted(folder.rglob("*.png"), reverse=True)):
        shutil.copy(path, copy / f"{(7 * i) % 12} photo.png")
    one, other = federation(folder, images=5), federation(copy, images=5)
    assert (one.hash, one.name) == (other.hash, other.name)
    for round in range(3):
        assert one.setup.public and other.setup.public
        mine, theirs = one.setup.public.draw(round), other.setup.public.draw(round)
        assert len(mine) == 5 and torch.equal(mine.x, theirs.x)
    archive = shutil.make_archive(str(tmp_path / "packed"), "tar", folder)
    assert federation(archive, images=5).hash == one.hash


@pytest.mark.parametrize("change", ["pixel", "twin", "less"])
def test_other_images_are_another_run(folder: Path, tmp_path: Path, change: str) -> None:
    config, out = config_of(folder, rounds=1), tmp_path / "run"
    run(tiny_task(), config=config, out=out)
    before = Federation(config, tiny_task())
    first = folder / "0.png"
    if change == "pixel":
        image = np.asarray(Image.open(first)).copy()
        image[:8] ^= 255
        Image.fromarray(image).save(first)
    elif change == "twin":
        shutil.copy(first, folder / "again.png")
    else:
        first.unlink()
    after = Federation(config, tiny_task())
    assert after.hash != before.hash and after.config.hash == before.config.hash
    count = {"pixel": 12, "twin": 13, "less": 11}[change]
    digest = str(after.facts.public_digest)
    assert module.digest_count(digest) == count
    assert module.describe_digest(digest).startswith(f"{count} images (")
    with pytest.raises(ProtofedError, match=f"public_digest 12-.* → {digest}"):
        run(tiny_task(), config=config, out=out, resume=True)


def test_a_copy_of_the_images_elsewhere_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    task, config, out = tiny_task(), config_of(folder, images=7), tmp_path / "run"
    result = run(task, config=config, out=out)
    assert result.summary["public"] == {"folder": 7}
    assert load_run(out).facts["public_digest"] == result.facts["public_digest"]
    moved = folder.rename(tmp_path / "moved")
    named = merged_config(out / "config.toml", task, None, {"public": f"folder:{moved}"}, {})
    assert named.hash == config.hash
    assert Federation(named, task).hash == result.summary["hash"]


def test_a_finished_run_is_read_without_its_public_images(folder: Path, tmp_path: Path) -> None:
    method = FedMD(public=f"folder:{folder}", images=4)
    small = {"clients": {"scan": 1}, "samples": {"scan": 8}, "rounds": 1, "epochs": 1}
    run("glyphs", method, out=tmp_path / "run", **{**TINY, **small})
    shutil.rmtree(folder)
    result = load_run(tmp_path / "run")
    assert result.facts["public_digest"] and result.network("scan-0")


def test_images_of_the_task_itself_have_no_digest() -> None:
    task = tiny_task(spare=3)
    assert Federation(make_config(task, FedMD(), **TINY), task).facts.public_digest is None


def test_all_engines_see_the_same_images(folder: Path) -> None:
    models = [
        run(tiny_task(), FedMD(public=f"folder:{folder}", images=9), **{**TINY, "engine": e})
        for e in ("loop", "workers")
    ]
    assert models[0].rounds[2]["loss"]["digest"] > 0
    for name, slot in models[0].client_models.items():
        assert all(torch.equal(t, models[1].client_models[name][n]) for n, t in slot.items())


def test_what_is_wrong_with_a_folder_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"there is no folder '.*nowhere'") as error:
        federation(tmp_path / "nowhere")
    assert "public=folder:PATH" in error.value.hint
    with pytest.raises(DataMissing, match="which folder"):
        federation("")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("none yet")
    with pytest.raises(DataMissing, match=r"'.*empty' has no images"):
        federation(empty)
    with pytest.raises(ProtofedError, match="unknown source of public images 'foldr:x'") as error:
        Federation(make_config(tiny_task(), FedMD(public="foldr:x"), **TINY), tiny_task())
    assert "folder:PATH" in error.value.hint


def test_files_that_are_not_images_are_named_or_skipped(folder: Path) -> None:
    good = federation(folder)
    (folder / "broken.png").write_bytes(b"no image")
    with pytest.raises(ProtofedError, match=r"cannot decode 1 of 13 images: '.*broken.png'"):
        federation(folder)
    skipping = federation(folder, skip_bad=True)
    assert skipping.hash == good.hash and skipping.setup.public
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ProtofedError, match="no image for train is left in domain 'public'"):
        federation(folder, skip_bad=True)


def test_another_tasks_files_are_in_the_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The task's name alone does not identify them."""
    asked: list[tuple[Any, ...]] = []

    def loader(digest: str) -> Callable[..., Any]:
        def load(name: str, *args: Any, **more: Any) -> Any:
            asked.append((name, *args, more))
            return replace(tiny_task(), name=name, digest=digest)

        return load

    reading = {"skip_bad": True, "max_image_pixels": 5000, "max_unpacked_gb": 0.5}
    reading["pixel_range"] = None
    hashes = set()
    for digest in ("a" * 64, "b" * 64):
        monkeypatch.setattr(module, "load_task", loader(digest))
        config = make_config(
            tiny_task(), FedMD(public="digits"), **TINY, data=str(tmp_path), **reading
        )
        found = Federation(config, tiny_task())
        assert found.facts.public_digest == f"88-{digest}"
        assert found.setup.public
        hashes.add(found.hash)
    assert len(hashes) == 2
    # from the folder of images that the run names, in the run's size
    assert set(map(str, asked)) == {
        str(("digits", str(tmp_path), {"image_size": PIXELS, **reading}))
    }


def test_clients_that_draw_at_once_draw_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy would free the first while others still read it."""
    task = tiny_task(spare=12)
    public = Federation(make_config(task, FedMD(), **TINY), task).setup.public
    assert public is not None
    generator = module.keys.generator

    def slow(*key: int | str) -> np.random.Generator:
        time.sleep(0.05)
        return generator(*key)

    monkeypatch.setattr(module.keys, "generator", slow)
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(public.draw, [0, 1, 1, 0, 1, 1]))
    assert len({id(images) for images in drawn}) == 2
