"""The official formats, in small files made here; every value is checked by hand."""

from __future__ import annotations

import bz2
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from protofed.data.readers import pair, read_arrays, read_idx, sniff
from protofed.errors import ProtofedError


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def test_idx_plain_and_gzipped_whatever_the_name(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    a, b, labels = tmp_path / "a", tmp_path / "b.dat", tmp_path / "c"
    a.write_bytes(idx(images))
    b.write_bytes(gzip.compress(idx(images)))
    labels.write_bytes(idx(np.array([7, 0])))
    assert sniff(a) == sniff(b) == "idx-images"
    assert sniff(labels) == "idx-labels"
    np.testing.assert_array_equal(read_idx(b), images)
    both = pair(a, labels)
    assert both.images[1, 2, 3] == 23
    assert both.labels.tolist() == [7, 0]


def test_idx_that_is_cut_or_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(idx(np.zeros((2, 3, 4)))[:-1])
    with pytest.raises(ProtofedError, match="23 bytes where its header says 24"):
        read_idx(path)
    whole = tmp_path / "whole.gz"
    whole.write_bytes(gzip.compress(idx(np.zeros((2, 3, 4))))[:-9])
    with pytest.raises(ProtofedError, match=r"whole\.gz"):
        read_idx(whole)
    path.write_bytes(idx(np.zeros((2, 3, 4))))
    labels = tmp_path / "labels"
    labels.write_bytes(idx(np.zeros(3)))
    with pytest.raises(ProtofedError, match="2 images but 3 labels"):
        pair(path, labels)


def test_usps_in_libsvm_format(tmp_path: Path) -> None:
    # label 1 is the digit 0 and label 10 the digit 9; -1 is black and 1 white
    first = "1 " + " ".join(f"{i}:-1" for i in range(1, 257)) + " \n"
    second = "10 1:1 17:0.5 256:-0.5 \n"  # what is left out is 0
    path = tmp_path / "anything"
    path.write_bytes(bz2.compress((first + second).encode()))
    assert sniff(path) == "libsvm"
    images, labels, split = read_arrays(path, "libsvm")
    assert labels.tolist() == [0, 9]
    assert split is None
    assert images.shape == (2, 16, 16)
    assert not images[0].any()
    assert images[1, 0, 0] == 255  # (1 + 1) / 2 * 255
    assert images[1, 1, 0] == 191  # 191.25
    assert images[1, 15, 15] == 63  # 63.75, cut off as torchvision does
    assert images[1, 5, 5] == 127  # 127.5
    plain = tmp_path / "plain"
    plain.write_text(first)
    assert sniff(plain) == "libsvm"


@pytest.mark.parametrize(
    "line",
    ["3 257:1 ", "3 0:1 ", "3 1:2 ", "12 1:1 ", "0 1:1 ", "3 1:x ", ":", "3 1:1 2", "3 1:1 2 4:1"],
)
def test_usps_that_is_not(tmp_path: Path, line: str) -> None:
    path = tmp_path / "usps"
    path.write_text(line + "\n")
    with pytest.raises(ProtofedError, match="usps"):
        read_arrays(path, "libsvm")


def test_svhn(tmp_path: Path) -> None:
    x = np.zeros((32, 32, 3, 3), np.uint8)
    x[1, 2, :, 1] = (10, 20, 30)
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": x, "y": np.array([[1], [10], [9]], np.uint8)})
    assert sniff(path) == "mat"
    images, labels, _ = read_arrays(path, "mat")
    assert images.shape == (3, 32, 32, 3)
    assert images[1, 1, 2].tolist() == [10, 20, 30]
    assert images.sum() == 60
    assert labels.tolist() == [1, 0, 9]  # 10 stands for 0
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ProtofedError, match=r"train_32x32\.mat"):
        read_arrays(path, "mat")
    path.write_bytes(b"MATLAB 7.3 MAT-file")
    with pytest.raises(ProtofedError, match=r"7\.3"):
        read_arrays(path, str(sniff(path)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("labels", [np.uint8, np.float64, np.int32])
def test_svhn_as_scipy_reads_it(tmp_path: Path, packed: bool, labels: type) -> None:
    path = tmp_path / "test_32x32.mat"
    x = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 7), np.uint8)
    given = {"other": "text", "cells": np.array([{}, 1], object), "X": x}
    savemat(path, {**given, "y": np.arange(1, 8, dtype=labels)}, do_compression=packed)
    images, found, _ = read_arrays(path, "mat")
    np.testing.assert_array_equal(images, np.moveaxis(loadmat(path)["X"], 3, 0))
    assert found.tolist() == [1, 2, 3, 4, 5, 6, 7] and images.flags.writeable


@pytest.mark.parametrize(
    ("at", "value"),
    [(132, 2**31), (144, 1), (160, 2**32 - 1), (176, 2**17), (184, 255), (188, 0)],
)
def test_a_wrong_number_in_a_mat_file(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": np.zeros((2, 2, 3, 1), np.uint8), "y": np.ones((1, 1), np.uint8)})
    content = path.read_bytes()
    path.write_bytes(content[:at] + value.to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ProtofedError, match=r"train_32x32\.mat"):
        read_arrays(path, "mat")


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "x.bin.npz"
    images = np.arange(2 * 4).reshape(2, 2, 2).astype(np.uint8)
    np.savez(path, images=images, labels=np.array([3, 4], np.uint8), suggested_split=[0, 1])
    assert sniff(path) == "npz"
    got = read_arrays(path, "npz")
    np.testing.assert_array_equal(got.images, images)
    assert got.labels.tolist() == [3, 4]
    assert got.split is not None and got.split.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((2, 2, 2)), "labels": np.zeros(2, int)}, "float64"),
        ({"images": np.zeros((2, 2, 2), np.uint8), "labels": np.zeros(3, int)}, "3 labels"),
        ({"images": np.zeros((1, 2, 2), np.uint8), "labels": np.array([10])}, "0 to 9"),
        ({"images": np.array([None]), "labels": np.zeros(1, int)}, "pickle"),
        ({"images": np.zeros((1, 2, 2), np.uint8), "labels": [1.5]}, "labels does not hold whole"),
        (
            {"images": np.zeros((2, 2, 2), np.uint8), "labels": [1, 2], "suggested_split": [0, 2]},
            "0 .training. and 1 .test.",
        ),
    ],
)
def test_npz_that_does_not_fit(tmp_path: Path, arrays: dict, words: str) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **arrays)
    with pytest.raises(ProtofedError, match=words):
        read_arrays(path, "npz")


def test_unknown_content(tmp_path: Path) -> None:
    for name, content in {"a.npz": b"PK\3\4", "b.gz": b"\x1f\x8b", "c": b"", "d": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        assert sniff(tmp_path / name) is None
