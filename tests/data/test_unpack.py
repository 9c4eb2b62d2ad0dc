"""Files that unpack to far more than they are, and other traps among images: no memory, no hang."""

from __future__ import annotations

import bz2
import gzip
import inspect
import io
import lzma
import os
import socket
import struct
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from protofed.data import load_task
from protofed.data.inspect import verify
from protofed.data.listing import is_archive, list_files
from protofed.data.readers import read_arrays, read_idx, sniff
from protofed.data.unpack import unpacking_at_most
from protofed.errors import ProtofedError

pytestmark = pytest.mark.usefixtures("own_cache")

BOMB = 8_000_000
"""What each bomb unpacks to; 1 MB is allowed."""
ZEROS = bytes(BOMB)
HINT = r"unpacks to more than 0\.001 GB .*--max-unpacked-gb 0\.002"


def tar(content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    header = tarfile.TarInfo("a/b/c.png")
    header.size, header.type = len(content), kind
    return header.tobuf() + content + bytes(-len(content) % 512 + 1024)


FIRST = tar(b"")[:512]


def sparse_tar(size: int) -> bytes:
    """A member of 512 bytes and a hole."""
    header = tarfile.TarInfo("a/b/c.png")
    header.size = 512
    raw = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    raw[156:157] = tarfile.GNUTYPE_SPARSE
    raw[386 : 386 + 24] = b"%011o\0%011o\0" % (size - 512, 512)
    raw[483:495] = b"%011o\0" % size
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw) + bytes(512 + 1024)


def negative_tar(size: int, sparse: bool = False) -> bytes:
    """Two members, of which the second claims to end before it starts."""
    raw = bytearray(sparse_tar(1024)[:512] if sparse else FIRST)
    raw[124:136] = b"\xff" + size.to_bytes(11, "big", signed=True)
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return 2 * FIRST + bytes(raw) + bytes(1024)


def zipped(method: int, content: bytes = ZEROS, declared: int | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("a/b/c.png", content)
    raw = bytearray(buffer.getvalue())
    if declared is not None:  # in the central directory
        at = raw.rindex(b"PK\1\2")
        raw[at + 24 : at + 28] = struct.pack("<I", declared)
    return bytes(raw)


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def mat(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, arrays, do_compression=True)
    return buffer.getvalue()


def peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
    finally:
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: gzip.compress(tar(ZEROS)), id="tgz"),
        pytest.param(lambda: bz2.compress(tar(ZEROS)), id="tar.bz2"),
        pytest.param(lambda: lzma.compress(tar(ZEROS), preset=0), id="tar.xz"),
        pytest.param(lambda: gzip.compress(FIRST + tar(ZEROS, tarfile.XHDTYPE)), id="pax header"),
        pytest.param(lambda: gzip.compress(FIRST + tar(ZEROS, b"L")), id="long name"),
        pytest.param(lambda: gzip.compress(tar(b"")[:512] * (BOMB // 4096)), id="empty members"),
        pytest.param(lambda: sparse_tar(BOMB), id="sparse"),
        pytest.param(lambda: zipped(zipfile.ZIP_DEFLATED), id="zip"),
        pytest.param(lambda: zipped(zipfile.ZIP_BZIP2), id="zip with bzip2"),
        pytest.param(lambda: zipped(zipfile.ZIP_LZMA), id="zip with lzma"),
    ],
)
def test_an_archive_that_unpacks_to_too_much(tmp_path: Path, content: Callable[[], bytes]) -> None:
    path = tmp_path / "x.archive"
    path.write_bytes(content())
    assert path.stat().st_size < 40_000

    def load() -> None:
        with pytest.raises(ProtofedError, match=HINT):
            load_task(f"folder:{path}", max_unpacked_gb=0.001)

    assert peak(load) < 4_000_000


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_is_larger_than_the_zip_says(tmp_path: Path, method: int) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(zipped(method, declared=100))

    def load() -> None:
        with pytest.raises(ProtofedError, match=r"x\.zip' is damaged"):
            load_task(f"folder:{path}")

    # zipfile unpacks a step's bytes at once, whatever they become
    assert peak(load) < (4_000_000 if method == zipfile.ZIP_DEFLATED else 4 * BOMB)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(lambda: gzip.compress(b"\0\0\x08\x03" + ZEROS), "idx-images", id="idx.gz"),
        pytest.param(lambda: gzip.compress(b"3 1:1 \n" * (BOMB // 7)), "libsvm", id="libsvm.gz"),
        pytest.param(lambda: b"3 1:1 \n" * 2000, "libsvm", id="short lines"),
        pytest.param(
            lambda: npz(images=np.zeros((BOMB // 1024, 32, 32), np.uint8), labels=[0]), "npz",
            id="npz",
        ),
        pytest.param(
            lambda: mat(X=np.zeros((32, 32, 3, BOMB // 3072), np.uint8), y=[[1]]), "mat", id="mat"
        ),
    ],
)  # fmt: skip
def test_a_file_of_many_images_that_unpacks_to_too_much(
    tmp_path: Path, content: Callable[[], bytes], kind: str
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content())
    assert path.stat().st_size < 40_000
    assert sniff(path) == kind

    def read() -> None:
        with unpacking_at_most(0.001), pytest.raises(ProtofedError, match=HINT):
            read_idx(path) if kind == "idx-images" else read_arrays(path, kind)

    assert peak(read) < 4_000_000


def test_what_is_allowed_is_read(tmp_path: Path, pictures: Any) -> None:
    root = pictures.tree(tmp_path / "x", [f"a/c/{i}.png" for i in range(10)])
    path = pictures.tar(root, tmp_path / "x.tgz", "w:gz")
    with pytest.raises(ProtofedError, match="unpacks to more"):
        load_task(f"folder:{path}", max_unpacked_gb=1e-5)
    assert len(load_task(f"folder:{path}", max_unpacked_gb=1e-4).domains["a"].train) == 8
    plain = pictures.tar(root, tmp_path / "x.tar")  # read in place: nothing is unpacked
    assert len(load_task(f"folder:{plain}", max_unpacked_gb=5e-5).domains["a"].train) == 8
    with pytest.raises(ProtofedError, match="max_unpacked_gb must be a number"):
        load_task(f"folder:{path}", max_unpacked_gb=float("nan"))
    with pytest.raises(ProtofedError, match="max_unpacked_gb must be a number of gigabytes"):
        load_task(f"folder:{path}", max_unpacked_gb=float("inf"))


def nested_cells(depth: int) -> bytes:
    """A MATLAB cell in a cell in a cell."""
    inner = b""
    flags = struct.pack("<4I", 6, 8, 1, 0) + struct.pack("<4I", 5, 8, 1, 1)
    for level in range(depth):
        name = struct.pack("<2I", 1, 1) + b"X" + bytes(7) if level == depth - 1 else bytes(8)
        body = flags + name + inner
        inner = struct.pack("<2I", 14, len(body)) + body
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + inner


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(b"\0\0\x08\x03\0\0", "idx-images", id="an idx of 6 bytes"),
        pytest.param(b"\0\0\x08", "idx-images", id="an idx of 3 bytes"),
        pytest.param(b"\0\0\x08\xff" + bytes(4 * 255), "idx-images", id="255 dimensions"),
        pytest.param(b"1e20 1:1 \n", "libsvm", id="label 1e20"),
        pytest.param(b"inf 1:1 \n", "libsvm", id="label inf"),
        pytest.param(b"3 1e300:1 \n", "libsvm", id="index 1e300"),
        pytest.param(b"3 1:nan \n", "libsvm", id="value nan"),
        pytest.param(b"3 " + b"1:1 " * 100_000 + b"\n", "libsvm", id="a long line"),
        pytest.param(nested_cells(3000), "mat", id="cells in cells"),
        pytest.param(b"MATLAB 5.0".ljust(126) + b"IM" + b"\x0f\0\0\0", "mat", id="a short mat"),
        pytest.param(
            npz(images=np.zeros((1, 2, 2), np.uint8), labels=[0], suggested_split=["train"]), "npz",
            id="a text suggested_split",
        ),
        pytest.param(npz(images=np.zeros((1, 2, 2), np.uint8), labels=0), "npz", id="one label"),
        pytest.param(npz(images=np.zeros((1, 0, 2), np.uint8), labels=[0]), "npz", id="no pixels"),
        pytest.param(npz(images=np.zeros(3, np.uint8), labels=[0] * 3), "npz", id="no images"),
        pytest.param(npz(images=np.zeros((1, 2, 2), "M8[s]"), labels=[0]), "npz", id="dates"),
    ],
)  # fmt: skip
def test_a_file_of_many_images_that_is_nonsense(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ProtofedError, match="cannot read '"):
        read_idx(path) if kind == "idx-images" else read_arrays(path, kind)


def test_archives_that_are_nonsense(tmp_path: Path) -> None:
    secret = bytearray(zipped(zipfile.ZIP_STORED, b"x"))
    for at in (secret.index(b"PK\3\4") + 6, secret.index(b"PK\1\2") + 8):
        secret[at] |= 1  # encrypted
    odd = bytearray(zipped(zipfile.ZIP_STORED, b"x"))
    odd[odd.index(b"PK\1\2") + 10] = 99  # a method that nobody has
    pax = b"".join(tar(b"", tarfile.XHDTYPE)[:512] for _ in range(3000))
    for number, content in enumerate((bytes(secret), bytes(odd))):
        path = tmp_path / f"{number}.zip"
        path.write_bytes(content)
        with pytest.raises(ProtofedError, match="is damaged"):
            list_files(path)
    for content in (pax, gzip.compress(pax), b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"", b"x"):
        (tmp_path / "x").write_bytes(content)
        assert not is_archive(tmp_path / "x")


@pytest.mark.parametrize(("size", "sparse"), [(-3, False), (-1024, False), (-1024, True)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_members_of_negative_size(
    tmp_path: Path, pack: Callable[[bytes], bytes], size: int, sparse: bool
) -> None:
    """The next header is then an earlier one: listing them would never end."""
    path = tmp_path / "images.tar"
    path.write_bytes(pack(negative_tar(size, sparse)))
    with unpacking_at_most(0.001), pytest.raises(ProtofedError, match="damaged: the size of"):
        list_files(path)


def trapped(root: Path, pictures: Any) -> Path:
    pictures.tree(root, [f"a/{c}/{i}.png" for c in "cd" for i in range(10)])
    at = root / "a" / "c"
    os.mkfifo(at / "1-pipe.png")
    (at / "2-zero.png").symlink_to("/dev/zero")
    (at / "3-broken.png").symlink_to("nowhere.png")
    (at / "4-circle.png").symlink_to("5-circle.png")
    (at / "5-circle.png").symlink_to("4-circle.png")
    (at / "6-up").symlink_to(root, target_is_directory=True)
    (at / "7-linked-pipe.png").symlink_to(at / "1-pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(at)  # a socket's path is short
        try:
            server.bind("8-socket.png")
        finally:
            os.chdir(here)
    return root


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_traps_among_the_images(tmp_path: Path, pictures: Any) -> None:
    root = trapped(tmp_path / "x", pictures)
    with pytest.raises(ProtofedError, match=r"cannot decode 8 of 28 images.*--skip-bad") as told:
        load_task(f"folder:{root}")
    assert "1-pipe.png': it is a named pipe" in str(told.value)
    for _ in range(2):  # decoded, then from the cache
        task = load_task(f"folder:{root}", skip_bad=True)
        problems = sorted(line.partition("/a/c/")[2] for line in task.skipped)
        assert problems == [
            "1-pipe.png: it is a named pipe",
            "2-zero.png: it is a device",
            "3-broken.png: it is a broken link",
            "4-circle.png: it is a broken link",
            "5-circle.png: it is a broken link",
            "6-up: it is a link to a folder that contains it",
            "7-linked-pipe.png: it is a named pipe",
            "8-socket.png: it is a socket",
        ]
    assert len(verify(f"folder:{root}").bad) == 8


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_traps_among_the_files_of_a_published_task(tmp_path: Path) -> None:
    root = tmp_path / "digits"
    root.mkdir()
    for name in ("mnist_train.npz", "train-images-idx3-ubyte", "usps", "x_train_kfold.txt"):
        os.mkfifo(root / name)
    for task in ("digits", "pacs"):
        with pytest.raises(ProtofedError, match=r"is missing|found no data"):
            load_task(task, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProtofedError, match="there is no folder"):
        load_task(f"folder:{tmp_path / 'pipe'}")


def test_folders_that_are_all_linked_to_each_other(tmp_path: Path, pictures: Any) -> None:
    """Without a limit they have more paths than anyone can walk."""
    folders = [f"f{i}" for i in range(9)]
    root = pictures.tree(tmp_path / "x", [f"{f}/c/{i}.png" for f in folders for i in range(1)])
    for f in folders:
        for other in folders:
            if other != f:
                (root / f / other).symlink_to(root / other, target_is_directory=True)
    found, _ = list_files(root)
    assert len(found) < 10_000


def test_a_tree_deeper_than_the_stack(tmp_path: Path, pictures: Any) -> None:
    (tmp_path / Path(*"d" * 200)).mkdir(parents=True)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert len(list_files(tmp_path)[1]) == 200
    finally:
        sys.setrecursionlimit(before)


def test_an_unreadable_folder_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ProtofedError, match="Permission denied"):
        load_task("pacs", tmp_path)


def test_a_zlib_stream_is_read_to_its_end() -> None:
    from protofed.data.unpack import Allowance, unzipped

    content = os.urandom(3_000_000)
    assert b"".join(unzipped(zlib.compress(content), Allowance(Path("x")))) == content
