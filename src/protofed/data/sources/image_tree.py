"""Trees of image files ``domain/class/image``, lists of their images, and the split ``mod10``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protofed.data.listing import File, list_files
from protofed.data.sources.published import PublishedTask, plain
from protofed.data.task import SPLITS, DataMissing, Parts, Plan, Sample
from protofed.errors import ProtofedError

SPLIT_FOLDERS = {"train": "train", "training": "train", "crossval": "train", "test": "test"}
"""Folders that may stand between a domain and its classes, and the split of their images."""

# Files that accompany images. All others in a class folder must be images.
_SIDE_FILES = {".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".html", ".yaml", ".yml", ".log",
               ".mat", ".npy", ".npz", ".h5", ".hdf5", ".pdf", ".py"}  # fmt: skip
_OTHER_FOLDERS = {"images", "full", "kfold"}  # may stand there too, but name no split
_SPLIT_PREFIX = re.compile(r"(train|crossval|test)_")
_LIST_NAME = re.compile(r"(.+)_((train|crossval|val|test)(_kfold)?)\.txt")


class TreeImage(NamedTuple):
    """An image of a tree. ``split`` is what its folder or the start of its name says."""

    folder: str  # the name of the class's folder
    label: int
    split: str | None
    key: tuple[int, str]  # its label, and its name with any split in front
    file: File

    @property
    def sample(self) -> Sample:
        return self.file.sample(self.label)


@dataclass(frozen=True)
class ImageTree:
    """The images and lists of a published task.

    ``images`` are sorted by class and name in each domain. ``lists`` are named by domain and part,
    e.g. ("photo", "train_kfold").
    """

    task: PublishedTask
    images: Mapping[str, list[TreeImage]]
    lists: Mapping[tuple[str, str], File]
    notes: list[str]

    def plan(self, split: Callable[[str, Sequence[TreeImage]], Parts]) -> Plan:
        """The task's plan, with each domain's images divided by ``split``."""
        parts: Parts = {}
        for domain, images in self.images.items():
            parts |= split(domain, images)
        notes = [*self.notes, *missing_classes(self.task.classes, parts)]
        return Plan(self.task.classes, parts, list(dict.fromkeys(notes)))


def is_side_file(name: str) -> bool:
    """Whether a file only accompanies images: a list, a license, labels."""
    return Path(name).suffix.lower() in _SIDE_FILES


def read_tree(task: PublishedTask, paths: Sequence[Path]) -> ImageTree:
    """The images of a published task; ``paths`` are its tree and its lists, if any."""
    listed = [file for path in paths for file in _files(path)]
    images, unknown = _by_domain(task, listed)
    notes = []
    if unknown:
        shown = ", ".join(sorted(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        notes.append(f"Skipped folders that are not a class of the task: {shown}.")
    missing = [domain for domain in task.domains if not images[domain]]
    if missing:
        raise DataMissing(
            f"found no images of {', '.join(missing)} of task '{task.info.name}'; looked for "
            f"{missing[0]}/{task.classes[0]}/* and the like in {', '.join(map(str, paths[:3]))}",
            task.fetch_hint,
        )
    ordered = {d: sorted(own, key=lambda i: (i.folder, i.file.parts)) for d, own in images.items()}
    return ImageTree(task, ordered, _lists(task, listed), notes)


def mod10(domain: str, images: Sequence[TreeImage]) -> Parts:
    """The papers' split: of every ten images in order, eight are for training and two for test."""
    train = [image.sample for i, image in enumerate(images) if i % 10 < 8]
    test = [image.sample for i, image in enumerate(images) if i % 10 >= 8]
    return {(domain, "train"): train, (domain, "test"): test}


def missing_classes(classes: Sequence[str], parts: Parts) -> list[str]:
    """A note for each domain that lacks a class."""
    notes = []
    for domain in dict.fromkeys(d for d, _ in parts):
        have = {s.label for split in SPLITS for s in parts[domain, split]}
        lacks = [name for label, name in enumerate(classes) if label not in have]
        if lacks:
            notes.append(f"{domain} has no images of {', '.join(lacks)}.")
    return notes


def read_list(file: File, images: Sequence[TreeImage]) -> list[Sample]:
    """The images that a list names, one 'domain/class/name.jpg label' per line, in its order.

    Empty if the list matches no image at all: it belongs to a copy of the data with other names.
    """
    by_key = {i.key: i for i in images}
    by_name = {(plain(i.folder), i.file.parts[-1].casefold()): i for i in images}
    samples: list[Sample] = []
    label_offsets, missing = set(), ""
    for number, line in enumerate(file.read().decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        parts = [p for p in path.replace("\\", "/").split("/") if p]
        if len(parts) < 2 or not label.isdecimal() or len(label) > 9:
            what = f"'{line:.100}' is not a path and a label"
            raise ProtofedError(f"'{file.name}', line {number}: {what}")
        name = parts[-1].casefold()
        image = by_name.get((plain(parts[-2]), name))
        if image is None:
            # copies of the data name an image differently: full/3/train_x.jpg is train/3/x.jpg
            if len(parts) > 2 and (split := plain(parts[-3])) in SPLIT_FOLDERS:
                name = f"{split}_{name}"
            image = by_key.get((int(label), name)) or by_key.get((int(label) - 1, name))
        if image is None:
            missing = missing or f"'{file.name}', line {number}: there is no image '{path}'"
            continue
        label_offsets.add(int(label) - image.label)
        samples.append(image.sample)
    if samples and missing:
        raise ProtofedError(missing, "the list belongs to another copy of the data")
    if not (label_offsets <= {0} or label_offsets <= {1}):  # VLCS counts from 0, PACS from 1
        raise ProtofedError(f"'{file.name}': the labels do not match the images' folders")
    return samples


def _files(path: Path) -> list[File]:
    if path.is_file() and path.suffix.lower() == ".txt":
        return [File((path.name,), str(path), path.read_bytes)]
    return list_files(path)[0]


def _by_domain(
    task: PublishedTask, listed: Sequence[File]
) -> tuple[dict[str, list[TreeImage]], set[str]]:
    """The images of each domain, and the folders that are not a class of the task."""
    domains, labels = task.domain_names(), task.class_names()
    images: dict[str, list[TreeImage]] = {domain: [] for domain in task.domains}
    unknown: set[str] = set()
    for file in listed:
        names = [plain(p) for p in file.parts]
        at = next((i for i, n in enumerate(names[:-1]) if n in domains), None)
        if at is None or is_side_file(file.parts[-1]):
            continue
        domain, between = domains[names[at]], names[at + 1 : -2]
        if len(names) - at < 3:
            raise ProtofedError(f"'{file.name}' is not in a class folder")
        # Caltech-256 numbers its folders: 003.backpack
        label = labels.get(names[-2], labels.get(names[-2].lstrip("0123456789")))
        if label is None or set(between) - _OTHER_FOLDERS - SPLIT_FOLDERS.keys():
            unknown.add("/".join(file.parts[at:-1]))
            continue
        split = next((n for n in between if n in SPLIT_FOLDERS), None)
        name = file.parts[-1].casefold()
        prefix = _SPLIT_PREFIX.match(name)
        if split is not None:
            name = f"{split}_{name}"
        elif prefix:
            split = prefix[1]
        split = SPLIT_FOLDERS[split] if split else None
        images[domain].append(TreeImage(file.parts[-2], label, split, (label, name), file))
    for domain, own in images.items():
        # VLCS has every image twice, in full/ and in the folder of its split
        outside_full = [i for i in own if not any(plain(p) == "full" for p in i.file.parts)]
        if any(i.split for i in outside_full):
            images[domain] = outside_full
    return images, unknown


def _lists(task: PublishedTask, listed: Sequence[File]) -> dict[tuple[str, str], File]:
    domains = task.domain_names()
    lists: dict[tuple[str, str], File] = {}
    for file in listed:
        match = _LIST_NAME.fullmatch(file.parts[-1].casefold())
        if match and plain(match[1]) in domains:
            lists.setdefault((domains[plain(match[1])], match[2]), file)
    return lists
