"""Digits: handwritten (MNIST, USPS), of house numbers (SVHN) and synthetic (SYN).

MNIST, USPS and SVHN come as files that hold many images each, SYN as such files or as folders of
images. Files are recognized by their content, so that copies under other names work too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from protofed.data.listing import File, is_archive, list_files
from protofed.data.readers import Arrays, pair, read_arrays, sniff
from protofed.data.sources.published import ManualDownload, PublishedTask, RemoteFile, plain
from protofed.data.task import SPLITS, DataMissing, Parts, Plan, Sample, TaskInfo
from protofed.errors import ProtofedError

# Sets in MNIST's format that are not MNIST.
_OTHERS = ("fashion", "emnist", "kmnist", "qmnist")
_SPLIT_FOLDERS = {
    "train": "train", "imgstrain": "train", "training": "train",
    "val": "test", "valid": "test", "imgsvalid": "test", "imgsval": "test", "validation": "test",
    "test": "test", "imgstest": "test",
}  # fmt: skip
_DOMAIN_OF_FORMAT = {"libsvm": "usps", "mat": "svhn", "mat-hdf5": "svhn"}
_LOOKED_FOR = {
    "mnist": "train-images-idx3-ubyte(.gz), t10k-images-idx3-ubyte(.gz) and their labels, or "
    "mnist_train.npz and mnist_test.npz",
    "usps": "usps(.bz2) and usps.t(.bz2) from libsvm, or usps_train.npz and usps_test.npz",
    "svhn": "train_32x32.mat and test_32x32.mat, or svhn_*.npz",
    "syn": "folders train and val (imgs_train and imgs_valid) with folders 0 to 9, or syn_*.npz",
}


def plan(paths: Sequence[Path], test_split: str) -> Plan:
    """The images of the four domains; ``standard`` is the only test split."""
    arrays, folders = _sort_files(paths)
    parts: Parts = {}
    notes: list[str] = []
    for domain in TASK.domains:
        chosen = {role: arrays[domain, role] for role in SPLITS if (domain, role) in arrays}
        if len(chosen) == 2:
            for role, sources in chosen.items():
                read = _read(sources)
                parts[domain, role] = _samples(sources[0], read, range(len(read.labels)))
            if any("recreat" in plain(p.name) for sources in chosen.values() for p in sources):
                notes.append(f"{domain} is a re-creation, not the published set.")
        elif domain == "syn" and {role for role, _ in folders} == set(SPLITS):
            for role in SPLITS:
                parts[domain, role] = [f.sample(int(f.parts[-2])) for r, f in folders if r == role]
        elif (domain, "pool") in arrays:
            parts |= _pool(domain, arrays[domain, "pool"][0], notes)
        else:
            state = f"has only its {next(iter(chosen))} part" if chosen else "is missing"
            where = sorted({str(p if p.is_dir() else p.parent) for p in paths})
            raise DataMissing(
                f"the data of domain '{domain}' of task 'digits' {state}; looked for "
                f"{_LOOKED_FOR[domain]} in {', '.join(where)}",
                TASK.fetch_hint,
            )
    return Plan(TASK.classes, parts, notes)


def owns(path: Path) -> bool:
    """Whether a file or folder has the name of one that belongs to the task."""
    name = plain(path.name)
    if path.is_dir():
        return name.startswith(tuple(TASK.domain_names()))
    official = ("train-images", "train-labels", "t10k-images", "t10k-labels", "train_32x32",
                "test_32x32")  # fmt: skip
    return name.startswith(TASK.domains) or path.name.startswith(official)


def _sort_files(
    paths: Sequence[Path],
) -> tuple[dict[tuple[str, str], list[Path]], list[tuple[str, File]]]:
    """Files of arrays by domain and role (train, test, or a pool of both), and SYN's images.

    Of several copies, the first by name is used.
    """
    arrays: dict[tuple[str, str], list[Path]] = {}
    labels: dict[str, Path] = {}
    images: list[tuple[str, File]] = []
    for path in paths:
        one = [File((path.name,), str(path), path.read_bytes)]
        for file in list_files(path)[0] if path.is_dir() else one:
            if part := _syn_part(file):
                images.append((part, file))
                continue
            place = Path(file.name)
            kind = sniff(place)
            if kind is None:
                members = list_files(place)[0] if is_archive(place) else []
                images += [(part, f) for f in members if (part := _syn_part(f))]
                continue
            domain, role = _identity(place, file.parts, kind)
            if domain is None or role is None:
                continue
            if kind == "idx-labels":
                labels.setdefault(role, place)
            else:
                arrays.setdefault((domain, role), [place])
    for role in SPLITS:
        if ("mnist", role) in arrays and sniff(arrays["mnist", role][0]) == "idx-images":
            if role not in labels:
                raise ProtofedError(f"there is no file of labels for '{arrays['mnist', role][0]}'")
            arrays["mnist", role].append(labels[role])
    return arrays, images


def _syn_part(file: File) -> str | None:
    """``train`` or ``test`` for an image of a digit's folder, e.g. imgs_train/7/x.png."""
    if len(file.parts) < 3 or file.parts[-2] not in TASK.classes:
        return None
    return _SPLIT_FOLDERS.get(plain(file.parts[-3]))


def _identity(path: Path, parts: Sequence[str], kind: str) -> tuple[str | None, str | None]:
    """The domain that a file belongs to and its role: train, test, or a pool of both."""
    name = path.name.lower()
    if any(other in plain(p) for p in parts for other in _OTHERS) or "extra" in name:
        return None, None
    domain = "mnist" if kind.startswith("idx") else _DOMAIN_OF_FORMAT.get(kind)
    if domain is None:  # .npz: the file's own name, else the folder's
        named = (d for p in reversed(parts) for d in TASK.domains if plain(p).startswith(d))
        domain = next(named, None)
    if "pool" in name:
        return domain, "pool"
    if "t10k" in name or "test" in name or ".t" in path.suffixes[:1] or path.suffix == ".t":
        return domain, "test"
    if "train" in name or kind == "libsvm":
        return domain, "train"
    return domain, "pool" if kind == "npz" else None


def _read(sources: list[Path]) -> Arrays:
    """A file of images and labels, or one of each."""
    if len(sources) == 2:
        return pair(*sources)
    kind = sniff(sources[0])
    assert kind is not None, f"{sources[0]} was recognized before"
    return read_arrays(sources[0], kind)


def _samples(path: Path, arrays: Arrays, rows: Iterable[int]) -> list[Sample]:
    labels = arrays.labels.tolist()
    return [Sample(f"{path}[{i}]", labels[i], partial(arrays.images.__getitem__, i)) for i in rows]


def _pool(domain: str, path: Path, notes: list[str]) -> Parts:
    arrays = _read([path])
    if arrays.split is None:
        raise ProtofedError(
            f"'{path}' is neither a training nor a test part and has no 'suggested_split'",
            f"name it {domain}_train.npz or {domain}_test.npz",
        )
    train, test = (np.flatnonzero(arrays.split == s) for s in (0, 1))
    notes.append(
        f"{domain.upper()} is partial (a pool of {len(arrays.labels)} images, "
        f"{len(train)} for training and {len(test)} for test), not the official split."
    )
    rows = zip(SPLITS, (train, test), strict=True)
    return {(domain, split): _samples(path, arrays, own) for split, own in rows}


# ---- the task --------------------------------------------------------------------------------

_HOMES = {
    "mnist": [
        "http://yann.lecun.com/exdb/mnist/",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ],
    "usps": ["https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"],
    "svhn": ["http://ufldl.stanford.edu/housenumbers/"],
}


def _file(path: str, md5: str, count: int, size: int | None = None) -> RemoteFile:
    # MD5: torchvision/datasets/{mnist,usps,svhn}.py. Sizes: MNIST's home page lists its files.
    domain, name = path.split("/")
    urls = tuple(home + name for home in _HOMES[domain])
    return RemoteFile(
        path, urls, domain, md5, f"torchvision.datasets.{domain.upper()}", size, count
    )


TASK = PublishedTask(
    info=TaskInfo(
        name="digits",
        domains=("mnist", "usps", "svhn", "syn"),
        classes=tuple("0123456789"),
        clients={"mnist": 6, "usps": 4, "svhn": 3, "syn": 7},
        # 1 % of the official training sets, as counts, so that they hold for partial data too
        samples={"mnist": 600, "usps": 72, "svhn": 732, "syn": 100},
        test_splits=("standard",),
        about="Digits: handwritten (MNIST, USPS), of house numbers (SVHN), synthetic (SYN).",
    ),
    plan=plan,
    counts={
        "mnist": (60000, 10000),
        "usps": (7291, 2007),
        "svhn": (73257, 26032),
        "syn": (10000, 2000),
    },
    folders=("digits",),
    aliases={"syn": ("synthetic", "synthdigits", "syndigits")},
    # FPL's paper prints 3, 7, 6, 4; its code and results and I2PFL have the clients above
    distributions={"printed": (3, 7, 6, 4), "fedseproto": (2, 3, 4, 1)},
    random_covers_domains=False,
    whole_unseen=False,
    owns=owns,
    files=(
        _file(
            "mnist/train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 60000, 9912422
        ),
        _file("mnist/train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 60000, 28881),
        _file(
            "mnist/t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 10000, 1648877
        ),
        _file("mnist/t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 10000, 4542),
        _file("usps/usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197", 7291),
        _file("usps/usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118", 2007),
        _file("svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 73257),
        _file("svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 26032),
    ),
    manual=(
        ManualDownload(
            domains=("syn",),
            what="Synthetic Digits (Roy et al. 2018, 12000 images); Kaggle asks for a login",
            pages=("https://www.kaggle.com/datasets/prasunroy/synthetic-digits",),
            layout="syn/imgs_train/<0-9>/*.png and syn/imgs_valid/<0-9>/*.png, as the archive has "
            "them, or the archive itself in syn/",
        ),
    ),
)
