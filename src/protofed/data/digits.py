"""The task ``digits`` from its files: MNIST, USPS and SVHN as arrays, SYN as arrays or folders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.data.find import DataMissing
from protofed.data.readers import Arrays, pair, read_arrays, sniff
from protofed.data.specs import SPECS, Plan, Sample, plain
from protofed.data.trees import File, files, is_archive
from protofed.errors import ProtofedError

# Sets in MNIST's format that are not MNIST.
_OTHERS = ("fashion", "emnist", "kmnist", "qmnist")
_SPLIT_FOLDERS = {
    "train": "train", "imgstrain": "train", "training": "train",
    "val": "test", "valid": "test", "imgsvalid": "test", "imgsval": "test", "validation": "test",
    "test": "test", "imgstest": "test",
}  # fmt: skip
_FORMATS = {"libsvm": "usps", "mat": "svhn", "mat-hdf5": "svhn"}
_LOOKED_FOR = {
    "mnist": "train-images-idx3-ubyte(.gz), t10k-images-idx3-ubyte(.gz) and their labels, or "
    "mnist_train.npz and mnist_test.npz",
    "usps": "usps(.bz2) and usps.t(.bz2) from libsvm, or usps_train.npz and usps_test.npz",
    "svhn": "train_32x32.mat and test_32x32.mat, or svhn_*.npz",
    "syn": "folders train and val (imgs_train and imgs_valid) with folders 0 to 9, or syn_*.npz",
}


def digits_plan(paths: Sequence[Path]) -> Plan:
    """The images of the four domains, found by content among the files."""
    spec = SPECS["digits"]
    arrays, folders = _sorted(paths)
    parts: dict[tuple[str, str], list[Sample]] = {}
    notes: list[str] = []
    for domain in spec.domains:
        chosen = {
            role: arrays[domain, role] for role in ("train", "test") if (domain, role) in arrays
        }
        if len(chosen) == 2:
            for role, sources in chosen.items():
                parts[domain, role] = _samples(_read(domain, sources))
            if any("recreat" in plain(p.name) for sources in chosen.values() for p in sources):
                notes.append(f"{domain} is a re-creation, not the published set.")
        elif domain == "syn" and {role for role, _ in folders} == {"train", "test"}:
            for role in ("train", "test"):
                parts[domain, role] = [
                    Sample(f.name, int(f.parts[-2]), f.read) for r, f in folders if r == role
                ]
        elif (domain, "pool") in arrays:
            parts |= _pool(domain, arrays[domain, "pool"][0], notes)
        else:
            have = f" (found only its {next(iter(chosen))} part)" if chosen else ""
            raise DataMissing(
                f"the data of domain '{domain}' of task 'digits' are not found{have}; looked for "
                f"{_LOOKED_FOR[domain]} in {', '.join(sorted({str(_folder(p)) for p in paths}))}",
                "protofed data fetch digits, or say where they are with --data or PROTOFED_DATA",
            )
    return Plan(tuple(spec.classes), parts, notes)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _sorted(
    paths: Sequence[Path],
) -> tuple[dict[tuple[str, str], list[Path]], list[tuple[str, File]]]:
    """Files of arrays by domain and role, and SYN's images with their role.

    Of several copies the first in the order of names counts.
    """
    arrays: dict[tuple[str, str], list[Path]] = {}
    labels: dict[str, Path] = {}
    images: list[tuple[str, File]] = []
    for path in paths:
        one = [File((path.name,), str(path), path.read_bytes)]
        for file in files(path)[0] if path.is_dir() else one:
            if part := _syn_part(file):
                images.append((part, file))
                continue
            place = Path(file.name)
            kind = sniff(place)
            if kind is None:
                members = files(place)[0] if is_archive(place) else []
                images += [(part, f) for f in members if (part := _syn_part(f))]
                continue
            domain, role = _identity(place, file.parts, kind)
            if domain is None or role is None:
                continue
            if kind == "idx-labels":
                labels.setdefault(role, place)
            else:
                arrays.setdefault((domain, role), [place])
    for role in ("train", "test"):
        if ("mnist", role) in arrays and sniff(arrays["mnist", role][0]) == "idx-images":
            if role not in labels:
                raise ProtofedError(f"'{arrays['mnist', role][0]}' has no file of labels beside it")
            arrays["mnist", role].append(labels[role])
    return arrays, images


def _syn_part(file: File) -> str | None:
    """``train`` or ``test`` for an image of a digit's folder, e.g. imgs_train/7/x.png."""
    if len(file.parts) < 3 or file.parts[-2] not in SPECS["digits"].classes:
        return None
    return _SPLIT_FOLDERS.get(plain(file.parts[-3]))


def _identity(path: Path, parts: Sequence[str], kind: str) -> tuple[str | None, str | None]:
    """Which domain a file belongs to, and which part of it: train, test, or a pool of both."""
    name = path.name.lower()
    if any(other in plain(p) for p in parts for other in _OTHERS) or "extra" in name:
        return None, None
    domain = "mnist" if kind.startswith("idx") else _FORMATS.get(kind)
    if domain is None:  # .npz: the file's own name, else the folder's
        for part in reversed(parts):
            known = [d for d in SPECS["digits"].domains if plain(part).startswith(d)]
            if known:
                domain = known[0]
                break
    if "pool" in name:
        return domain, "pool"
    if "t10k" in name or "test" in name or ".t" in path.suffixes[:1] or path.suffix == ".t":
        return domain, "test"
    if "train" in name or kind == "libsvm":
        return domain, "train"
    return domain, "pool" if kind == "npz" else None


def _read(domain: str, sources: list[Path]) -> tuple[Path, Arrays]:
    if len(sources) == 2:
        return sources[0], pair(*sources)
    kind = sniff(sources[0])
    assert kind is not None, f"{domain} was sniffed before"
    return sources[0], read_arrays(sources[0], kind)


def _samples(read: tuple[Path, Arrays], rows: NDArray[np.int64] | None = None) -> list[Sample]:
    path, arrays = read
    order = np.arange(len(arrays.labels)) if rows is None else rows
    labels = arrays.labels.tolist()
    return [Sample(f"{path}[{i}]", labels[i], partial(arrays.images.__getitem__, i)) for i in order]


def _pool(domain: str, path: Path, notes: list[str]) -> dict[tuple[str, str], list[Sample]]:
    _, arrays = _read(domain, [path])
    if arrays.split is None:
        raise ProtofedError(
            f"'{path}' is neither a training nor a test part, and has no 'suggested_split'",
            f"name it {domain}_train.npz or {domain}_test.npz",
        )
    halves = [np.flatnonzero(arrays.split == s) for s in (0, 1)]
    notes.append(
        f"partial {domain.upper()} (a pool of {len(arrays.labels)} images, {len(halves[0])} for "
        f"training and {len(halves[1])} for test), not the official split."
    )
    read = (path, arrays)
    return {(domain, s): _samples(read, h) for s, h in zip(("train", "test"), halves, strict=True)}
