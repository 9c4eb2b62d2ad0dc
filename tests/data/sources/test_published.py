"""The published tasks from small files in their layouts, found, split and described."""

from __future__ import annotations

import bz2
import gzip
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from protofed.data import DataMissing, load_task
from protofed.data.decode import decode
from protofed.errors import ProtofedError

pytestmark = pytest.mark.usefixtures("own_cache")

OFFICE = ("caltech", "amazon", "webcam", "dslr")
PACS = ("photo", "art_painting", "cartoon", "sketch")


def counts(task: Any) -> dict[str, tuple[int, int]]:
    return {name: (len(d.train), len(d.test)) for name, d in task.domains.items()}


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


def official_digits(root: Path, pictures: Any) -> Path:
    """MNIST, USPS, SVHN and SYN as their homes serve them: 3 training and 2 test images each."""
    folder = root / "digits"
    (folder / "MNIST" / "raw").mkdir(parents=True)
    for part, n in (("train", 3), ("t10k", 2)):
        raw = folder / "MNIST" / "raw"
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(np.full((n, 28, 28), 10 * n)))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(n)))
    other = folder / "FashionMNIST" / "raw"  # the same format, and before MNIST in the alphabet
    other.mkdir(parents=True)
    (other / "train-images-idx3-ubyte.gz").write_bytes(idx(np.zeros((9, 28, 28))))
    row = " ".join(f"{i}:1" for i in range(1, 257))
    for name, n in (("usps.bz2", 3), ("usps.t.bz2", 2)):
        (folder / name).write_bytes(
            bz2.compress("".join(f"{d + 1} {row} \n" for d in range(n)).encode())
        )
    for name, n in (("train_32x32.mat", 3), ("test_32x32.mat", 2), ("extra_32x32.mat", 7)):
        x = np.full((32, 32, 3, n), 99, np.uint8)
        savemat(folder / name, {"X": x, "y": np.full((n, 1), 10, np.uint8)})
    names = [f"synthetic_digits/imgs_train/{d}/a.png" for d in range(3)]
    names += [f"synthetic_digits/imgs_valid/{d}/b.jpg" for d in (4, 9)]
    pictures.tree(folder, names)
    return root


def test_official_digits(tmp_path: Path, pictures: Any) -> None:
    task = load_task("digits", official_digits(tmp_path, pictures))
    assert counts(task) == dict.fromkeys(("mnist", "usps", "svhn", "syn"), (3, 2))
    mnist, usps, svhn, syn = task.domains.values()
    assert mnist.train.y.tolist() == usps.train.y.tolist() == [0, 1, 2]
    assert svhn.test.y.tolist() == [0, 0]
    assert syn.train.y.tolist() == [0, 1, 2] and syn.test.y.tolist() == [4, 9]
    assert (mnist.train.x == 30).all() and mnist.train.x.shape == (3, 3, 32, 32)
    assert (usps.test.x == 255).all() and (svhn.train.x == 99).all()
    content = (tmp_path / "digits/synthetic_digits/imgs_train/1/a.png").read_bytes()
    np.testing.assert_array_equal(syn.train.x[1].numpy(), decode(content, 32))
    assert task.samples == {"mnist": 600, "usps": 72, "svhn": 732, "syn": 100}
    assert task.clients == {"mnist": 6, "usps": 4, "svhn": 3, "syn": 7}
    assert task.augment.flip and task.augment.padding == 4
    assert "official" not in task.note


def test_digits_in_the_folder_itself_and_syn_in_a_zip(tmp_path: Path, pictures: Any) -> None:
    root = official_digits(tmp_path, pictures) / "digits"
    packed = root / "synthetic-digits.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in (root / "synthetic_digits").rglob("*.*"):
            archive.write(path, path.relative_to(root / "synthetic_digits"))
            path.unlink()
    task = load_task("digits", root)
    assert counts(task)["syn"] == (3, 2)


def npz_digits(root: Path) -> Path:
    folder = root / "digits"
    folder.mkdir()
    for name, n in (("mnist_train", 3), ("mnist_test", 2), ("usps_train", 3), ("usps_test", 2),
                    ("syn_recreated_train", 3), ("syn_recreated_test", 2)):  # fmt: skip
        x = np.full((n, 16, 16), n, np.uint8)
        np.savez(folder / f"{name}.npz", images=x, labels=np.arange(n))
    np.savez(
        folder / "svhn_pool.npz",
        images=np.arange(3, dtype=np.uint8)[:, None, None, None]
        * np.ones((3, 32, 32, 3), np.uint8),
        labels=np.array([5, 6, 7]),
        suggested_split=np.array([0, 1, 0]),
    )
    return root


def test_plain_npz_digits_say_what_they_are(tmp_path: Path) -> None:
    task = load_task("digits", npz_digits(tmp_path))
    svhn = task.domains["svhn"]
    assert svhn.train.y.tolist() == [5, 7] and svhn.test.y.tolist() == [6]
    assert svhn.train.x[:, 0, 0, 0].tolist() == [0, 2]
    assert "SVHN is partial" in task.note and "not the official split" in task.note
    assert "syn is a re-creation" in task.note


def test_a_missing_domain_of_digits_says_what_was_looked_for(tmp_path: Path) -> None:
    root = npz_digits(tmp_path)
    (root / "digits" / "usps_test.npz").unlink()
    with pytest.raises(
        DataMissing, match=r"'usps'.*only its train part.*usps\.t.*data fetch digits"
    ):
        load_task("digits", root)


@pytest.mark.parametrize("name", ["digits", "office_caltech", "pacs", "vlcs"])
def test_no_data_at_all(tmp_path: Path, name: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for data in (empty, tmp_path / "absent", None):
        with pytest.raises(DataMissing, match=f"looked for .*protofed data fetch {name}"):
            load_task(name, data)


def domains(names: tuple[str, ...], classes: tuple[str, ...], n: int, end: str) -> list[str]:
    return [f"{d}/{c}/x{i:02}.{end}" for d in names for c in classes for i in range(n)]


@pytest.mark.parametrize("layout", ["tree", "inside", "tar", "tar.gz", "zip", "file"])
def test_office_by_mod_10_from_any_layout(tmp_path: Path, pictures: Any, layout: str) -> None:
    classes = ("bike", "mug", "mouse")
    folder = pictures.tree(tmp_path / "office_caltech", domains(OFFICE, classes, 5, "jpg"))
    content = (folder / "amazon" / "mouse" / "x03.jpg").read_bytes()
    data = tmp_path
    if layout == "inside":
        data = folder
    elif layout != "tree":
        data = tmp_path / "packed"
        data.mkdir()
        if layout == "zip":
            with zipfile.ZipFile(data / "Office-Caltech-10.zip", "w") as archive:
                for path in folder.rglob("*.jpg"):
                    archive.write(path, path.relative_to(tmp_path))
        else:
            mode = "w:gz" if layout == "tar.gz" else "w"
            packed = pictures.tar(folder, data / "office_caltech.tar", mode)
            if layout == "tar.gz":
                packed.rename(data / "office_caltech.tgz")
            elif layout == "file":
                data = packed
    task = load_task("office_caltech", data)
    # bike 0-4, mouse 5-9, mug 10-14 in order of name: 8, 9 (mouse 3, 4) are for test
    assert counts(task) == dict.fromkeys(OFFICE, (13, 2))
    assert list(task.domains) == list(OFFICE)
    test = task.domains["amazon"].test
    assert [task.classes[y] for y in test.y.tolist()] == ["mouse", "mouse"]
    np.testing.assert_array_equal(test.x[0].numpy(), decode(content, 32))
    assert task.repair and not task.leftover
    assert "caltech has no images of backpack, calculator" in task.note


def test_the_digest_does_not_depend_on_the_container(tmp_path: Path, pictures: Any) -> None:
    folder = pictures.tree(tmp_path / "pacs", domains(PACS, ("dog", "house"), 5, "png"))
    packed = tmp_path / "packed"
    packed.mkdir()
    pictures.tar(folder, packed / "pacs.tar")
    a, b = load_task("pacs", tmp_path), load_task("pacs", packed)
    assert a.digest == b.digest and len(a.digest) == 64
    assert load_task("pacs", tmp_path, image_size=16).digest != a.digest
    (folder / "photo" / "dog" / "x00.png").write_bytes(pictures.one(999))
    assert load_task("pacs", tmp_path).digest != a.digest


def kfold(root: Path, pictures: Any) -> Path:
    """PACS as its archive has it, with the lists: the first 3 of 5 images are for training."""
    pictures.tree(root / "PACS" / "kfold", domains(PACS, ("dog", "house"), 5, "jpg"))
    lists = root / "PACS" / "Train val splits"
    lists.mkdir()
    for domain in PACS:
        for part, rows in (("train", (2, 0, 1)), ("crossval", (3,)), ("test", range(5))):
            lines = [
                f"{domain}/{c}/x{i:02}.jpg {label}\n"
                for c, label in (("dog", 1), ("house", 6))
                for i in rows
            ]
            (lists / f"{domain}_{part}_kfold.txt").write_text("".join(lines))
    return root


def test_pacs_kfold_leaky(tmp_path: Path, pictures: Any) -> None:
    root = kfold(tmp_path, pictures)
    task = load_task("pacs", root, test_split="kfold_leaky")
    assert counts(task) == dict.fromkeys(PACS, (6, 10))
    photo = task.domains["photo"]
    assert photo.train.y.tolist() == [0, 0, 0, 5, 5, 5]
    content = (root / "PACS" / "kfold" / "photo" / "dog" / "x02.jpg").read_bytes()
    np.testing.assert_array_equal(photo.train.x[0].numpy(), decode(content, 32))  # the list's order
    assert "include the training images" in task.note
    clean = load_task("pacs", root)
    assert counts(clean) == dict.fromkeys(PACS, (8, 2))
    assert clean.digest != task.digest and clean.leftover
    with pytest.raises(ProtofedError, match="test split of pacs"):
        load_task("pacs", root, test_split="standard")


def test_pacs_lists_missing_wrong_or_of_another_copy(tmp_path: Path, pictures: Any) -> None:
    root = kfold(tmp_path, pictures)
    path = root / "PACS" / "Train val splits" / "cartoon_train_kfold.txt"
    text = path.read_text()
    for content, words in (
        (text.replace("x02", "x77"), "line 1: there is no image 'cartoon/dog/x77.jpg'"),
        (text.replace("x0", "y0"), "matches none of the images"),
        (text.replace("jpg 6", "jpg 5"), "labels do not match"),
        ("nonsense\n", "is not a path and a label"),
        (f"photo/dog/pic_00.jpg {'1' * 5000}\n", "is not a path and a label"),
    ):
        path.write_text(content)
        with pytest.raises(ProtofedError, match=words):
            load_task("pacs", root, test_split="kfold_leaky")
    path.unlink()
    with pytest.raises(ProtofedError, match=r"cartoon_train_kfold\.txt, which is not found"):
        load_task("pacs", root, test_split="kfold_leaky")


VLCS = ("CALTECH", "LABELME", "PASCAL", "SUN")


def test_vlcs_from_lists(tmp_path: Path, pictures: Any) -> None:
    parts = (("train", 5), ("crossval", 2), ("test", 3))
    names = [f"{d}/full/{c}/{p}_imgs_{i}.jpg" for d in VLCS for c in (0, 4) for p, n in parts
             for i in range(n)]  # fmt: skip
    pictures.tree(tmp_path / "VLCS", names)
    lists = tmp_path / "txt_lists"
    lists.mkdir()
    for domain in VLCS:
        for part in ("train", "test"):
            # as JigenDG has them: with the path of another machine, labels from 0 on
            chosen = [
                n for n in names if n.startswith(domain) and ("/test_" in n) == (part == "test")
            ]
            lines = [f"/home/somebody/VLCS/{n} {n.split('/')[2]}\n" for n in reversed(chosen)]
            (lists / f"{domain}_{part}.txt").write_text("".join(lines))
    task = load_task("vlcs", tmp_path)
    assert counts(task) == dict.fromkeys(("caltech", "labelme", "pascal", "sun"), (14, 6))
    assert task.domains["sun"].train.y.tolist() == [4] * 7 + [0] * 7
    assert "from the lists" in task.note and "no images of car, chair, dog" in task.note
    assert task.clients == {"caltech": 2, "labelme": 3, "pascal": 4, "sun": 1}
    # the same images in folders of their splits, for which those lists have other names
    again = tmp_path / "again" / "vlcs"
    for name in names:
        domain, _, c, file = name.split("/")
        part, _, rest = file.partition("_")
        path = again / domain.capitalize() / part / c / rest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((tmp_path / "VLCS" / name).read_bytes())
    lists.rename(tmp_path / "again" / "txt_lists")
    assert load_task("vlcs", tmp_path / "again").digest == task.digest


def test_vlcs_without_lists(tmp_path: Path, pictures: Any) -> None:
    named = ("Caltech101", "LabelMe", "VOC2007", "SUN09")  # as DomainBed has it
    pictures.tree(tmp_path / "VLCS", domains(named, ("bird", "person"), 10, "jpg"))
    task = load_task("vlcs", tmp_path)
    assert counts(task) == dict.fromkeys(("caltech", "labelme", "pascal", "sun"), (14, 6))
    for domain in task.domains.values():
        assert domain.train.y.tolist() == [0] * 7 + [4] * 7  # class by class
    assert "drawn, class by class" in task.note
    assert load_task("vlcs", tmp_path, test_split="mod10").domains["sun"].test.y.tolist() == [
        0,
        0,
        4,
        4,
    ]
    # lists of another copy are no reason to stop
    (tmp_path / "CALTECH_train.txt").write_text("/VLCS/CALTECH/full/0/train_imgs_1.jpg 0\n")
    (tmp_path / "CALTECH_test.txt").write_text("/VLCS/CALTECH/full/0/test_imgs_1.jpg 0\n")
    assert load_task("vlcs", tmp_path).digest == task.digest


def test_vlcs_split_by_folders_with_the_full_set_beside(tmp_path: Path, pictures: Any) -> None:
    parts = (("train", 4), ("crossval", 1), ("test", 2))
    names = [f"{d}/{p}/{c}/imgs_{i}.jpg" for d in VLCS for p, n in parts for c in (0, 1)
             for i in range(n)]  # fmt: skip
    full = [f"{d}/full/{c}/{p}_imgs_{i}.jpg" for d in VLCS for p, n in parts for c in (0, 1)
            for i in range(n)]  # fmt: skip
    pictures.tree(tmp_path / "vlcs", names + full)
    task = load_task("vlcs", tmp_path)
    assert set(counts(task).values()) == {(10, 4)}
    assert "from the folders" in task.note


def test_options(tmp_path: Path, pictures: Any) -> None:
    pictures.tree(tmp_path / "pacs", domains(PACS, ("dog", "house"), 5, "png"))
    task = load_task("pacs", tmp_path, image_size=70, flip=False, augment="large")
    assert task.image_size == 70 and not task.augment.flip
    assert task.augment.resized_crop == (0.7, 1.0) and task.augment.padding == 0
    for wrong in (0, 7, 2000, True, "32"):
        with pytest.raises(ProtofedError, match="image_size"):
            load_task("pacs", tmp_path, image_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ProtofedError, match=r"augmentation 'lage'.*large"):
        load_task("pacs", tmp_path, augment="lage")
    with pytest.raises(ProtofedError, match="did you mean pacs"):
        load_task("pasc")
    with pytest.raises(ProtofedError, match="folder:PATH"):
        load_task("folder")


@pytest.mark.parametrize(
    "options", [{"data": 5}, {"flip": "no"}, {"skip_bad": 1}, {"test_split": [1]}, {"augment": {}}]
)
def test_wrong_types(options: dict[str, Any]) -> None:
    with pytest.raises(ProtofedError, match=rf"{next(iter(options))} must be"):
        load_task("pacs", **options)


def test_data_from_the_environment(
    tmp_path: Path, pictures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.tree(tmp_path / "there" / "pacs", domains(PACS, ("dog",), 10, "png"))
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "there"))
    assert counts(load_task("pacs"))["sketch"] == (8, 2)
