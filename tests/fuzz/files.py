"""Fuzzers of files from elsewhere: arrays of images, image files, trees, archives, caches."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from protofed.data import cache, load_task
from protofed.data.decode import BadImage, Budget, decode, measure
from protofed.data.listing import content_key, is_archive, list_files, stamp
from protofed.data.readers import (
    Arrays,
    pair,
    read_arrays,
    read_idx,
    read_libsvm,
    read_mat,
    read_npz,
    sniff,
)
from protofed.data.sources.folder import folder_plan, public_plan
from protofed.data.task import MAX_IMAGE_PIXELS
from protofed.errors import ProtofedError
from tests.data.dicoms import dicom
from tests.fuzz.harness import Choices, Guard, Wrong, inputs
from tests.fuzz.mutate import mutated

# ---- files of many images -----------------------------------------------------------------------


class Written(NamedTuple):
    kind: str
    content: bytes


@functools.cache
def _array_files() -> dict[str, tuple[bytes, ...]]:
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    idx = b"\0\0\x08\x03" + struct.pack(">3I", 2, 5, 4) + rng.bytes(40)
    labels = b"\0\0\x08\x01" + struct.pack(">I", 2) + b"\3\7"
    svm = b"7 1:-1 2:0.5 256:0.25 \n1 3:-0.631 4:0.862 \n10 \n"
    x, y = rng.integers(0, 255, (32, 32, 3, 2), np.uint8), np.array([[10], [3]], np.uint8)
    mats = []
    for squeezed in (False, True):
        buffer = io.BytesIO()
        savemat(buffer, {"X": x[:6, :6], "y": y}, do_compression=squeezed)
        mats.append(b"MATLAB 5.0 MAT-file".ljust(116) + buffer.getvalue()[116:])  # no date
    npzs = []
    for save in (np.savez, np.savez_compressed):
        for more in ({}, {"suggested_split": np.array([0, 1])}):
            buffer = io.BytesIO()
            save(buffer, images=np.moveaxis(x[:4, :4], 3, 0), labels=np.array([1, 2]), **more)
            npzs.append(buffer.getvalue())
    return {"idx": (idx, labels), "libsvm": (svm,), "mat": tuple(mats), "npz": tuple(npzs)}


def _npz(arrays: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


_ODD = ("text", 1.5, np.nan, 10**18, -1, True, b"x", None)


def _array_file(kind: str, choices: Choices) -> Written:
    bases = _array_files()[kind]
    content = choices.pick(bases)
    if kind == "npz" and choices.chance(3):  # whole arrays of other kinds, in sound files
        odd = choices.pick(_ODD)
        shape = choices.pick(((), (2,), (0,), (2, 4, 4), (2, 4, 4, 3), (2, 4, 4, 4), (0, 4, 4)))
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            own = {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.array([1, 2])}
            name = choices.pick(("images", "labels", "suggested_split"))
            dtype = choices.pick((None, np.uint8, np.float64, np.int64, "U4", "S3", "M8[s]", "c16"))
            own[name] = np.full(shape, odd, dtype)  # type: ignore[arg-type]
            if own[name].dtype != object:
                return Written(kind, _npz(own))
    if not choices.chance(12):
        content = mutated(content, choices, bases)
    if kind in ("idx", "libsvm") and choices.chance(4):
        content = choices.pick((gzip.compress, bz2.compress))(content)
        if choices.chance(3):
            content = mutated(content, choices)
    return Written(kind, content)


def _try_array_file(given: Written, folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(given.content)
    kind = sniff(path)
    if given.kind == "idx":
        other, labels = folder / "other", read_idx(path).ndim == 1
        other.write_bytes(_array_files()["idx"][not labels])
        _check_arrays(pair(other, path) if labels else pair(path, other))
        return
    if kind in ("libsvm", "mat", "mat-hdf5", "npz"):
        _check_arrays(read_arrays(path, kind))
    reader = {"libsvm": read_libsvm, "mat": read_mat, "npz": read_npz}[given.kind]
    _check_arrays(reader(path))


def _check_arrays(found: Arrays) -> None:
    images, labels, split = found
    sound = images.dtype == np.uint8 and images.ndim in (3, 4) and labels.dtype == np.int64
    _require(sound and len(images) == len(labels), "arrays of other types or lengths")
    _require(not len(labels) or 0 <= labels.min() <= labels.max() <= 9, "labels that are no digits")
    if split is not None:
        _require(split.dtype == np.int64 and split.shape == labels.shape, "a split of another kind")
        _require({*split.tolist()} <= {0, 1}, "images of neither part")


def _require(right: bool, what: str) -> None:
    if not right:
        raise Wrong(what)


for _kind in ("idx", "libsvm", "mat", "npz"):
    inputs(_kind, functools.partial(_array_file, _kind), _try_array_file)


# ---- images -------------------------------------------------------------------------------------


@functools.cache
def _images() -> tuple[bytes, ...]:
    pixels = np.random.default_rng(1).integers(0, 256, (7, 9, 3), np.uint8)
    image, made = Image.fromarray(pixels), []
    gray16 = Image.fromarray(pixels[..., 0].astype(np.uint16) << 8)
    kinds: list[tuple[Image.Image, str, dict[str, object]]] = [
        (image, "PNG", {}), (image.convert("P"), "PNG", {"transparency": 1}), (gray16, "PNG", {}),
        (image.convert("LA"), "PNG", {}), (image.convert("1"), "PNG", {}), (image, "JPEG", {}),
        (image, "JPEG", {"progressive": True}), (image.convert("CMYK"), "JPEG", {}),
        (image, "BMP", {}), (image.convert("P"), "GIF", {}), (image, "TIFF", {}),
        (image, "TIFF", {"compression": "tiff_lzw"}), (image, "PPM", {}), (image, "WEBP", {}),
        (image.convert("F"), "TIFF", {}), (image, "ICO", {}), (image, "TGA", {}),
        (image, "AVIF", {}), (image, "JPEG2000", {}), (image, "TIFF", {"compression": "jpeg"}),
        (image.convert("RGBA"), "WEBP", {"lossless": True}),
    ]  # fmt: skip
    for source, kind, options in kinds:
        buffer = io.BytesIO()
        with contextlib.suppress(OSError, KeyError):  # Pillow was built without it
            source.save(buffer, kind, **options)
            made.append(buffer.getvalue())
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    made.append(buffer.getvalue())
    with contextlib.suppress(ImportError):  # the extra is not installed
        made.append(dicom(pixels[..., 0].astype(np.int16), WindowCenter=40, WindowWidth=400))
        made.append(dicom(pixels, RescaleSlope=2))
    return tuple(made)


def _image(choices: Choices) -> bytes:
    content = mutated(choices.pick(_images()), choices, _images())
    return _with_checksums(content) if choices.chance(2) else content


def _with_checksums(content: bytes) -> bytes:
    """A PNG with the checksums that its chunks ought to have: else few changes get far."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        body = content[at + 4 : at + 8 + length]
        if len(body) < length + 4:
            break
        crc = zlib.crc32(body).to_bytes(4, "big")
        parts += [content[at : at + 4], body, crc]
        at += 12 + length
    return b"".join(parts) + content[at:]


def _try_image(content: bytes, folder: Path) -> None:
    try:
        with contextlib.suppress(BadImage):
            measured = measure(content, Budget(MAX_IMAGE_PIXELS))
            _require(measured.side > 0, "an image without a side")
        found = decode(content, 8, pixel_range="-100:4095")
    except BadImage as error:
        raise ProtofedError(str(error)) from None
    _require(found.shape == (3, 8, 8) and found.dtype == np.uint8, "an image of another shape")


inputs("image", _image, _try_image)


# ---- trees of folders ---------------------------------------------------------------------------

_NAMES = (
    "a", "b", "train", "test", "val", "Dog", "dog", "images", ".hidden", "é", "e\u0301", "x y",
    "-", "[bold]", "n\nl", "\x7f", "\udcff", "con", "photo", "x" * 200, "a.txt", "mnist",
)  # fmt: skip
_FILES = (
    "0.png", "1.jpg", "2.png", "3.png", "4.png", "notes.txt", ".DS_Store", "é.png", "\udcfe.png",
    "a b.gif", "x.part", "no", "[b].png", "5.PNG", "6.png", "7.png", "8.png", "9.png",
)  # fmt: skip
_KINDS = ("image",) * 10 + ("empty", "noise", "fifo", "broken link", "loop", "zero", "null", "up",
                            "folder", "locked", "mutated", "link")  # fmt: skip


class Entry(NamedTuple):
    parts: tuple[str, ...]
    kind: str
    content: bytes


def _entries(choices: Choices) -> list[Entry]:
    entries = []
    for domain in ("a", "b")[: choices.pick((1, 2, 1, 0))]:  # sound, and odd ones are added
        for i in range(9 + choices.number(3)):
            parts = (domain, ("a", "Dog")[i % 2], f"{i}.png")
            entries.append(Entry(parts, "image", _images()[i % 9]))
    for _ in range(choices.pick((0, 1, 1, 2, 3, 6))):
        depth = choices.pick((2, 2, 2, 1, 3, 0, 4))
        parts = (*(choices.pick(_NAMES) for _ in range(depth)), choices.pick(_FILES))
        kind = choices.pick(_KINDS)
        content = _image(choices) if kind == "mutated" else choices.pick(_images()[:9])
        entries.append(Entry(parts, kind, content))
    return entries


class Tree(NamedTuple):
    entries: list[Entry]
    whole: bool
    skip_bad: bool


def _tree(choices: Choices) -> Tree:
    return Tree(_entries(choices), choices.chance(6), choices.chance(2))


def _try_tree(tree: Tree, folder: Path) -> None:
    root = folder / "tree"
    with Guard.off():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for entry in tree.entries:
            with contextlib.suppress(OSError, ValueError):
                _make(root, entry)
    try:
        if tree.whole:
            _check_task(f"folder:{root}", tree)
            return
        with contextlib.suppress(ProtofedError):
            public_plan(root)
        stamp([root])
        list_files(root)
        content_key([root])
        plan = folder_plan(root)
        _require(all(plan.parts.values()) and bool(plan.classes), "a plan without images")
    finally:
        with Guard.off():
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(folder / "cache" / "decoded", ignore_errors=True)


def _make(root: Path, entry: Entry) -> None:
    path = root.joinpath(*entry.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = {
        "broken link": "nowhere", "loop": path.name, "zero": "/dev/zero", "null": "/dev/null",
        "up": "../..", "link": root / "a" / "a" / "0.png",
    }  # fmt: skip
    if entry.kind == "fifo":
        os.mkfifo(path)
    elif entry.kind == "folder":
        path.mkdir()
    elif entry.kind in targets:
        path.symlink_to(targets[entry.kind])
    else:
        content = {"empty": b"", "noise": entry.content[::-1]}.get(entry.kind, entry.content)
        with path.open("xb") as file:  # opening a pipe that is already there would wait forever
            file.write(content)
        if entry.kind == "locked":
            path.chmod(0)


def _check_task(name: str, tree: Tree) -> None:
    task = load_task(name, image_size=8, skip_bad=tree.skip_bad)
    held = 0
    for domain in task.domains.values():
        for images in (domain.train, domain.test):
            held += len(images.y)
            sound = images.x.shape == (len(images.y), 3, 8, 8)
            _require(sound and bool((images.y < len(task.classes)).all()), "images without labels")
    _require(held <= len(list_files(Path(name[7:]))[0]), "more images than files")


inputs("tree", _tree, _try_tree)


# ---- archives -----------------------------------------------------------------------------------

_MEMBERS = (
    "../../up.png", "/up.png", "a/../../b/0.png", "./a/a/0.png", "a//a/0.png", "a/a/", "",
    "a/a/0.png", "\\..\\x.png", "a/\x00/x.png", "a" * 300 + "/a/0.png", "C:/x/y.png",
)  # fmt: skip


class Packed(NamedTuple):
    content: bytes
    whole: bool


def _archive(choices: Choices) -> Packed:
    entries, buffer = _entries(choices), io.BytesIO()
    names = ["/".join(e.parts).encode(errors="replace").decode() for e in entries]
    odd = choices.pick((0, 0, 1, 2, 5))
    names = [choices.pick(_MEMBERS) if i < odd else n for i, n in enumerate(names)]
    if choices.chance(2):
        with zipfile.ZipFile(buffer, "w", choices.pick((0, 8, 12, 14))) as file:
            for name, entry in zip(names, entries, strict=True):
                with contextlib.suppress(ValueError):
                    file.writestr(name or "x", entry.content)
    else:
        mode = choices.pick(("w", "w:gz", "w:bz2", "w:xz"))
        with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
            for name, entry in zip(names, entries, strict=True):
                info = tarfile.TarInfo(name)
                info.size = len(entry.content)
                kinds = {"fifo": tarfile.FIFOTYPE, "zero": tarfile.CHRTYPE, "link": tarfile.LNKTYPE,
                         "broken link": tarfile.SYMTYPE, "folder": tarfile.DIRTYPE}  # fmt: skip
                info.type = kinds.get(entry.kind, tarfile.REGTYPE)
                info.linkname = "../../up" if entry.kind in ("link", "broken link") else ""
                with contextlib.suppress(ValueError, tarfile.TarError):
                    tar.addfile(info, io.BytesIO(entry.content))
    content = buffer.getvalue()
    return Packed(mutated(content, choices) if choices.chance(3) else content, choices.chance(8))


def _try_archive(given: Packed, folder: Path) -> None:
    path = folder / "archive"
    path.write_bytes(given.content)
    if not is_archive(path):
        raise ProtofedError("not an archive")
    if given.whole:
        try:
            _check_task(f"folder:{path}", Tree([], True, True))
        finally:
            with Guard.off():
                shutil.rmtree(folder / "cache" / "decoded", ignore_errors=True)
        return
    plan = folder_plan(path)
    for sample in plan.parts[next(iter(plan.parts))][:2]:
        with contextlib.suppress(OSError):
            sample.read()


inputs("archive", _archive, _try_archive)


# ---- the cache of decoded images ----------------------------------------------------------------


def _entry(choices: Choices) -> tuple[str, bytes]:
    ending = choices.pick(("npy", "json"))
    content = _cached(ending)
    return ending, choices.pick((mutated(content, choices), b"", content[:20]))


@functools.cache
def _cached(ending: str) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 255, (4, 3, 8, 8), np.uint8)
    parts = [("a", "train", [0, 1]), ("a", "test", [1, 0])]
    with Guard.off():
        cache.store("kept", pixels, ("x", "y"), parts, ["note"], [])
    return (cache.entries_folder() / f"kept.{ending}").read_bytes()


def _try_entry(given: tuple[str, bytes], folder: Path) -> None:
    ending, content = given
    decoded = cache.entries_folder()
    decoded.mkdir(exist_ok=True, parents=True)
    for name in ("npy", "json"):
        (decoded / f"kept.{name}").write_bytes(content if name == ending else _cached(name))
    found = cache.load("kept")
    if found is None:
        raise ProtofedError("counts as missing")
    pixels = np.random.default_rng(3).integers(0, 255, (4, 3, 8, 8), np.uint8)
    same = np.array_equal(found.domains["a"].train.x.numpy(), pixels[:2])
    labels = found.domains["a"].train.y.tolist(), found.domains["a"].test.y.tolist()
    same = same and np.array_equal(found.domains["a"].test.x.numpy(), pixels[2:])
    _require(same and labels == ([0, 1], [1, 0]), "a damaged cache gives other images")


inputs("cache", _entry, _try_entry)
