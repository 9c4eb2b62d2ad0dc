"""``folder:PATH``, and everything that can be wrong with a user's own files."""

from __future__ import annotations

import os
import shutil
import tarfile
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.data import DataMissing, load_task
from protofed.data.choose import Survey
from protofed.data.decode import decode
from protofed.errors import ProtofedError

pytestmark = pytest.mark.usefixtures("own_cache")


def names(domains: tuple[str, ...], classes: tuple[str, ...], n: int = 5) -> list[str]:
    return [f"{d}/{c}/{i}.png" for d in domains for c in classes for i in range(n)]


def labels(images: Any) -> list[int]:
    return [int(y) for y in images.y]


def test_any_tree(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "pets", names(("b", "a"), ("dog", "cat")))
    task = load_task(f"folder:{root}")
    assert list(task.domains) == ["a", "b"] and task.classes == ("cat", "dog")
    assert labels(task.domains["a"].train) == [0] * 4 + [1] * 4
    assert labels(task.domains["a"].test) == [0, 1]
    content = (root / "a" / "dog" / "4.png").read_bytes()
    np.testing.assert_array_equal(task.domains["a"].test.x[1].numpy(), decode(content, 32))
    assert task.clients == {"a": 1, "b": 1} and task.samples == {"a": 1.0, "b": 1.0}
    assert task.name == f"folder:{root}" and task.test_split == "auto"


def test_relative_path_and_the_folder_one_is_in(
    tmp_path: Path, pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pictures.tree(tmp_path / "pets", names(("a",), ("dog", "cat")))
    monkeypatch.chdir(root)
    assert load_task("folder:.").digest == load_task(f"folder:{root}").digest
    monkeypatch.chdir(tmp_path)
    assert load_task("folder:pets").digest == load_task(f"folder:{root}").digest


@pytest.mark.parametrize("test", ["test", "val", "Valid"])
def test_split_folders(tmp_path: Path, pictures: Any, test: str) -> None:
    parts = [f"a/train/{c}/{i}.png" for c in ("dog", "cat") for i in range(3)]
    parts += [f"a/{test}/dog/{i}.png" for i in range(2)]
    root = pictures.tree(tmp_path / "x", parts + names(("b",), ("dog", "cat")))
    task = load_task(f"folder:{root}")
    assert labels(task.domains["a"].train) == [0] * 3 + [1] * 3
    assert labels(task.domains["a"].test) == [1, 1]
    assert len(task.domains["b"].train) == 8


def test_validation_images_beside_test_images(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", ["a/train/c/1.png", "a/val/c/2.png", "a/test/c/3.png"])
    for _ in range(2):  # decoded, then from the cache
        task = load_task(f"folder:{root}")
        own = task.domains["a"]
        assert len(own.train) == len(own.test) == 1 and own.validation is not None
        content = (root / "a" / "val" / "c" / "2.png").read_bytes()
        np.testing.assert_array_equal(own.validation.x[0].numpy(), decode(content, 32))
        assert "a has 1 images for --validate folder." in task.note


@pytest.mark.parametrize("tree", ["{s}/{d}/{c}", "{d}/{s}/{c}", "{d}/{c}/{s}", "{d}/{s}/{c}/{i}"])
def test_split_folders_at_any_level(tmp_path: Path, pictures: Any, tree: str) -> None:
    listed = [
        tree.format(s=s, d=d, c=c, i=i) + f"/{i}.png"
        for s, n in (("Training", 3), ("Testing", 2))
        for d in ("a", "b")
        for c in ("cat", "dog")
        for i in range(n)
    ]
    root = pictures.tree(tmp_path / "pets", listed)
    named = tree.replace("/{i}", "").format(s="{train,test}", d="domain", c="class")
    packed = pictures.tar(root, tmp_path / "packed.tar")
    for where in (root, packed):
        task = load_task(f"folder:{where}")
        assert list(task.domains) == ["a", "b"] and task.classes == ("cat", "dog")
        for domain in task.domains.values():
            assert labels(domain.train) == [0] * 3 + [1] * 3
            assert labels(domain.test) == [0] * 2 + [1] * 2
        assert f"Read as {named}/image." in task.note


def test_splits_without_domains_are_refused(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", ["train/cat/1.png", "train/dog/1.png", "test/cat/2.png"])
    with pytest.raises(ProtofedError, match="in its folders test, train, and no domains") as error:
        load_task(f"folder:{root}")
    assert "domain/{train,test}/class/image" in error.value.hint


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("a/unlabeled/c/0.png", "'a' has test, train and beside them 'unlabeled'"),
        ("a/c/stray.png", "'a/CLASS' has test, train and beside them images"),
        ("other/a/c/0.png", "test, train and beside them 'other'"),
    ],
)
def test_split_folders_beside_others_are_refused(
    tmp_path: Path, pictures: Any, other: str, found: str
) -> None:
    """They were classes or domains, and their test images were trained on."""
    trees = {"unlabeled": "{d}/{s}/{c}", "c": "{d}/{c}/{s}", "a": "{s}/{d}/{c}"}
    tree = trees[other.split("/")[1]]
    parts = [tree.format(d=d, s=s, c=c) for d in "ab" for c in "cd" for s in ("train", "test")]
    root = pictures.tree(tmp_path / "x", [f"{p}/{i}.png" for p in parts for i in range(3)])
    assert len(load_task(f"folder:{root}").domains["a"].test) == 6
    pictures.tree(root, [other])
    with pytest.raises(ProtofedError, match=found):
        load_task(f"folder:{root}")


def test_every_class_is_trained_and_tested_with_few_images(tmp_path: Path, pictures: Any) -> None:
    """By the papers' split of the whole domain, the classes of 2 could be all for testing."""
    counts = {"many": 23, "nine": 9, "one": 1, "two": 2, "two more": 2}
    listed = [f"a/{c}/{i:02}.png" for c, n in counts.items() for i in range(n)]
    task = load_task(f"folder:{pictures.tree(tmp_path / 'x', listed)}")
    train, test = ([labels(i).count(k) for k in range(5)] for i in vars(task.domains["a"]).values()
                   if i is not None)  # fmt: skip
    assert (train, test) == ([18, 7, 1, 1, 1], [5, 2, 0, 1, 1])
    assert "The last fifth of each class, by file name, is for testing." in task.note
    assert "a has no test images of one." in task.note
    (tmp_path / "y/a/c").mkdir(parents=True)
    (tmp_path / "y/a/c/1.png").write_bytes(pictures.one())
    with pytest.raises(ProtofedError, match="too few images: none for test") as error:
        load_task(f"folder:{tmp_path / 'y'}")
    assert "two images or more" in error.value.hint


def test_images_are_not_shrunk_without_a_word(tmp_path: Path, pictures: Any) -> None:
    root = tmp_path / "x"
    for seed, name in enumerate(names(("a", "b"), ("cat", "dog"))):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(pictures.one(seed, side=50 if name[0] == "a" else 100))
    for _ in range(2):  # measured, then from the cache
        task = load_task(f"folder:{root}")
        assert task.survey == Survey(100, {"a": 50, "b": 100})
        assert task.image_size == 104 and task.augment.jitter is not None
    small = load_task(f"folder:{root}", image_size=16)
    assert small.image_size == 16 and small.augment.jitter is None
    assert load_task(f"folder:{root}", augment="crop").augment.jitter is None


def test_the_range_of_all_images_of_a_folder(tmp_path: Path, pictures: Any) -> None:
    root, rng = tmp_path / "x", np.random.default_rng(0)
    for name in names(("a", "b"), ("cat", "dog")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        low = 100 if name.startswith("a") else 1000
        pixels = rng.integers(low, 4000, (40, 40)).astype(np.uint16)
        pixels[0, 0] = low
        (root / name).write_bytes(pictures.encoded(Image.fromarray(pixels)))
    (root / "a/cat/0.png").write_bytes(pictures.one())  # an 8-bit image stays as it is
    pixels[0, 1] = 4095
    (root / "b/dog/4.png").write_bytes(pictures.encoded(Image.fromarray(pixels)))
    task = load_task(f"folder:{root}")
    assert task.pixel_range == "100:4095"
    assert "with more than 8 bits, values from 100:4095 became 0 to 255." in task.note
    x = task.domains["a"].train.x
    assert (x[0].numpy() == decode(pictures.one(), 40)).all()
    assert len(np.unique(x[1])) > 200
    other = load_task(f"folder:{root}", pixel_range="0:65535")
    assert other.pixel_range == "0:65535" and other.digest != task.digest


def test_train_without_test(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", ["a/train/c/1.png", "a/train/d/2.png"])
    with pytest.raises(ProtofedError, match="'a' has the folder train, not train and test"):
        load_task(f"folder:{root}")


def test_archives_with_and_without_a_folder_around(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "pets", names(("a", "b"), ("dog", "cat")))
    digest = load_task(f"folder:{root}").digest
    wrapped = pictures.tar(root, tmp_path / "wrapped.tar")
    assert load_task(f"folder:{wrapped}").digest == digest
    with tarfile.open(tmp_path / "bare.tar.gz", "w:gz") as archive:
        for domain in ("a", "b"):
            archive.add(root / domain, arcname=domain)
    assert load_task(f"folder:{tmp_path / 'bare.tar.gz'}").digest == digest


def test_names_in_any_script(tmp_path: Path, pictures: Any) -> None:
    parts = names(("写真", "фото"), ("собака", "גמל", "ñandú"))
    root = pictures.tree(tmp_path / "ζώα", parts)
    task = load_task(f"folder:{root}")
    assert set(task.domains) == {"写真", "фото"}
    assert set(task.classes) == {"собака", "גמל", "ñandú"}
    assert load_task(f"folder:{root}").digest == task.digest  # from the cache


def test_a_name_composed_and_decomposed_is_one_class(tmp_path: Path, pictures: Any) -> None:
    """As a Mac and other systems write it; in folders and in archives."""
    composed, decomposed = (unicodedata.normalize(f, "bébé") for f in ("NFC", "NFD"))
    assert composed != decomposed
    listed = names(("a",), (composed, "chat")) + names(("b",), (decomposed, "chat"))
    root = pictures.tree(tmp_path / "pets", listed)
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", root)
    for where in (root, packed):
        task = load_task(f"folder:{where}")
        assert task.classes == (composed, "chat")
        assert labels(task.domains["a"].train) == labels(task.domains["b"].train)


def test_a_name_that_is_not_valid_text(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c",), 10))
    try:
        (root / "a" / "c" / os.fsdecode(b"caf\xe9.png")).write_bytes(pictures.one(99))
    except (OSError, UnicodeError):
        pytest.skip("this file system has only text as names")
    assert len(load_task(f"folder:{root}").domains["a"].train) == 9


def test_hidden_files_and_side_files_are_ignored(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a", "b"), ("c", "d")))
    digest = load_task(f"folder:{root}").digest
    for name in (".DS_Store", "a/.DS_Store", "a/c/._1.png", "a/c/Thumbs.db", "a/c/labels.txt",
                 "README.md", ".git/config", "__MACOSX/a/c/1.png"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"junk")
    assert load_task(f"folder:{root}").digest == digest


@pytest.mark.filterwarnings("ignore:.*one domain only")
def test_a_class_missing_in_one_domain_is_said(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")) + names(("b",), ("c",), 10))
    task = load_task(f"folder:{root}")
    assert task.classes == ("c", "d")
    assert "b has no images of d" in task.note
    (root / "b" / "d").mkdir()  # an empty folder is the same
    assert "b has no images of d" in load_task(f"folder:{root}").note


def test_names_that_are_probably_mistakes_are_warned_of(tmp_path: Path, pictures: Any) -> None:
    listed = names(("a",), ("Dog", "cat")) + names(("b", "c"), ("dog", "cat", "cow"))
    root = pictures.tree(tmp_path / "x", listed)
    for _ in range(2):  # decoded, then from the cache
        with pytest.warns(UserWarning) as told:
            load_task(f"folder:{root}")
        assert [str(w.message).partition("/x: ")[2] for w in told] == [
            "the classes 'Dog' and 'dog' differ only in case",
            "classes with images in one domain only: 'Dog' (a)",
        ]
    (root / "b").rename(root / "C")
    with pytest.warns(UserWarning) as told:
        load_task(f"folder:{root}")
    assert "the domains 'C' and 'c' differ only in case" in str(told[1].message)


def test_classes_of_a_single_domain_are_in_order(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")))
    with warnings.catch_warnings(action="error"):
        load_task(f"folder:{root}")


def test_a_class_without_any_image_is_refused(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a", "b"), ("c", "d")))
    (root / "a" / "ghost").mkdir()
    with pytest.raises(ProtofedError, match=r"class 'ghost'.*empty"):
        load_task(f"folder:{root}")


def test_a_domain_without_images_and_one_with_too_few(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")))
    (root / "void").mkdir()
    with pytest.raises(ProtofedError, match=r"'void'.*no images"):
        load_task(f"folder:{root}")
    pictures.tree(root, ["void/c/1.png"])
    with pytest.raises(ProtofedError, match=r"'void'.*too few images: none for test"):
        load_task(f"folder:{root}")


def test_images_outside_of_class_folders(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", [*names(("a",), ("c",)), "a/stray.png"])
    with pytest.raises(ProtofedError, match=r"stray\.png' is not in a class folder"):
        load_task(f"folder:{root}")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="folder:PATH"):
        load_task(f"folder:{tmp_path / 'absent'}")
    with pytest.raises(ProtofedError, match="folder:PATH"):
        load_task("folder:")
    with pytest.raises(DataMissing, match="no images"):
        load_task(f"folder:{tmp_path}")


def test_a_link_into_itself_ends(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")))
    (root / "a" / "c" / "again").symlink_to(root, target_is_directory=True)
    with pytest.raises(ProtofedError, match="again': it is a link to a folder that contains it"):
        load_task(f"folder:{root}")


def spoiled(root: Path, pictures: Any) -> Path:
    pictures.tree(root, names(("a", "b"), ("c", "d"), 10))
    (root / "a" / "c" / "3.png").write_bytes(b"")
    whole = (root / "b" / "d" / "9.png").read_bytes()
    (root / "b" / "d" / "9.png").write_bytes(whole[: len(whole) // 2])
    (root / "b" / "d" / "notes.doc").write_bytes(b"not an image")
    return root


def test_bad_images_are_refused_by_name(tmp_path: Path, pictures: Any) -> None:
    root = spoiled(tmp_path / "x", pictures)
    for _ in range(2):
        with pytest.raises(ProtofedError) as error:
            load_task(f"folder:{root}")
        text = str(error.value)
        assert "3 of 41 images" in text and "--skip-bad" in text
        assert "a/c/3.png': it is empty" in text
        assert "b/d/9.png" in text and "notes.doc': it is not an image" in text


def test_skip_bad_counts_and_lists(tmp_path: Path, pictures: Any) -> None:
    root = spoiled(tmp_path / "x", pictures)
    for _ in range(2):  # decoded, then from the cache
        task = load_task(f"folder:{root}", skip_bad=True)
        assert len(task.skipped) == 3 and "a/c/3.png: it is empty" in task.skipped[0]
        assert "Left out 3 files that are not images" in task.note
        # the others stay where they would be: test images are the last two of ten
        assert labels(task.domains["a"].train) == [0] * 7 + [1] * 8
        content = (root / "a" / "c" / "4.png").read_bytes()
        np.testing.assert_array_equal(task.domains["a"].train.x[3].numpy(), decode(content, 32))
        assert labels(task.domains["b"].test) == [0, 0]  # d/9.png and notes.doc are bad
    with pytest.raises(ProtofedError, match="cannot decode 3"):  # the cache does not hide them
        load_task(f"folder:{root}")


def test_skip_bad_warns_of_a_class_that_it_leaves_nothing_of(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a", "b"), ("c", "d")))
    (root / "a" / "ghost").mkdir()
    (root / "a" / "ghost" / "0.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="classes without an image that can be read: 'ghost'"):
        load_task(f"folder:{root}", skip_bad=True)


def test_skip_bad_where_nothing_is_bad_is_the_same_task(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")))
    a, b = load_task(f"folder:{root}", skip_bad=True), load_task(f"folder:{root}")
    assert a.digest == b.digest and a.skipped == ()


def test_a_damaged_archive(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", names(("a",), ("c", "d")))
    path = pictures.tar(root, tmp_path / "x.tar.gz", "w:gz")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ProtofedError, match=r"x\.tar\.gz' is damaged"):
        load_task(f"folder:{path}")
