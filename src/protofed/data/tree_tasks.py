"""Tasks from trees of image files: ``domain/class/image``, with or without folders for the splits.

The split without folders or lists is the papers': with a domain's images in the order of their
classes and names, the i-th is for training where i mod 10 is below 8, else for test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from protofed import keys
from protofed.data.find import DataMissing
from protofed.data.specs import SPLITS, Plan, Sample, Spec, plain
from protofed.data.trees import File, Parts, files
from protofed.errors import ProtofedError

# Files that accompany images. All others in a class folder have to be images.
_NO_IMAGES = {".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".html", ".yaml", ".yml", ".log",
              ".mat", ".npy", ".npz", ".h5", ".hdf5", ".pdf", ".py"}  # fmt: skip
_SPLIT_FOLDERS = {"train": "train", "training": "train", "crossval": "train", "test": "test"}
_VALIDATION = ("val", "valid", "validation")
_LAYERS = {"images", "full", "kfold"}
_PREFIX = re.compile(r"(train|crossval|test)_")


class _Image(NamedTuple):
    folder: str  # the name of the class's folder
    label: int
    split: str | None  # what its folder, or the front of its name, says
    key: tuple[int, str]  # by which a list knows it
    file: File


Images = dict[str, list[_Image]]
Parted = dict[tuple[str, str], list[Sample]]


def tree_plan(spec: Spec, paths: Sequence[Path], test_split: str) -> Plan:
    """The images of a published task; ``paths`` are its tree and, if any, its lists."""
    listed = [file for path in paths for file in _files(path)]
    images, strange = _by_domain(spec, listed)
    lists = _lists(spec, listed)
    notes: list[str] = []
    if strange:
        shown = ", ".join(sorted(strange)[:5]) + (", ..." if len(strange) > 5 else "")
        notes.append(f"Folders that are no class of the task are left out: {shown}.")
    missing = [domain for domain in spec.domains if not images[domain]]
    if missing:
        raise DataMissing(
            f"no images of {', '.join(missing)} of task '{spec.name}' are found; looked for "
            f"{missing[0]}/{next(iter(spec.classes))}/* and the like in "
            f"{', '.join(map(str, paths[:3]))}",
            f"protofed data fetch {spec.name}, or say where they are with --data or PROTOFED_DATA",
        )
    parts: Parted = {}
    for domain in spec.domains:
        own = sorted(images[domain], key=lambda i: (i.folder, i.file.parts))
        if test_split == "kfold_leaky":
            parts |= _kfold(spec, domain, own, lists)
        elif test_split == "70_30":
            parts |= _seventy(domain, own, lists, notes, spec)
        else:
            parts |= mod10(domain, own)
    if test_split == "kfold_leaky":
        notes.append("Test images contain the training images (the papers' leaky kfold split).")
    notes += missing_classes(tuple(spec.classes), parts)
    return Plan(tuple(spec.classes), parts, list(dict.fromkeys(notes)))


def folder_plan(path: Path, test_split: str, one: bool = False) -> Plan:
    """Any tree ``domain/class/image`` or ``domain/{train,test}/class/image``.

    With ``one`` the folder itself is the only domain: ``class/image``.
    """
    listed, folders = files(path)
    if one:
        folders = {f for f in folders if len(f) > 1}
    top = 1 if not one and (path.is_dir() or _wrapped(listed)) else 0
    found: dict[str, dict[tuple[str, str | None], list[File]]] = {}
    for parts in [*folders, *(f.parts for f in listed)]:
        if len(parts) > top + (0 if parts in folders else 1):
            found.setdefault(parts[top], {})
    split_domains = _split_domains(folders | {f.parts[:-1] for f in listed}, top)
    empty: set[str] = set()
    for parts in folders:
        depth = top + (2 if parts[top : top + 1] and parts[top] in split_domains else 1)
        if len(parts) == depth + 1:
            empty.add(parts[depth])
    for file in listed:
        rest = file.parts[top:]
        if Path(rest[-1]).suffix.lower() in _NO_IMAGES:
            continue
        split = None
        if rest[0] in split_domains:
            split = plain(rest[1]) if len(rest) > 1 else None
            rest = (rest[0], *rest[2:])
        if len(rest) < 3:
            raise ProtofedError(
                f"'{file.name}' is in no class folder", "the tree has to be domain/class/image"
            )
        found[rest[0]].setdefault((rest[1], split), []).append(file)
    if not any(found.values()):
        raise DataMissing(f"'{path}' has no images", "the tree has to be domain/class/image")
    classes = tuple(sorted({c for domain in found.values() for c, _ in domain} | empty))
    for name in (*found, *classes):
        if not name.isprintable():
            raise ProtofedError(f"the folder {name!r} in '{path}' has a name that is no text")
    none = [c for c in classes if all((c, s) not in d for d in found.values() for s in _splits(d))]
    if none:
        raise ProtofedError(
            f"the folders of class '{none[0]}' in '{path}' are empty in all domains"
        )
    parts_: Parted = {}
    notes: list[str] = []
    for domain in sorted(found):
        if not found[domain]:
            raise ProtofedError(f"domain '{domain}' in '{path}' has no images")
        if domain in split_domains:
            parts_ |= _by_folder(domain, found[domain], classes, split_domains[domain], notes)
        else:
            own = [
                _Image(c, classes.index(c), None, (classes.index(c), ""), f)
                for (c, _), fs in sorted(found[domain].items())
                for f in sorted(fs, key=lambda f: f.parts)
            ]
            parts_ |= mod10(domain, own)
    for (domain, split), samples in parts_.items():
        if not samples:
            raise ProtofedError(
                f"domain '{domain}' in '{path}' has too few images: none for {split}"
            )
    return Plan(classes, parts_, [*notes, *missing_classes(classes, parts_)])


def public_plan(path: Path) -> Plan:
    """All images below a folder, whatever its tree; they have no classes and no split."""
    listed = [f for f in files(path)[0] if Path(f.parts[-1]).suffix.lower() not in _NO_IMAGES]
    if not listed:
        raise DataMissing(f"'{path}' has no images", "any tree of images will do")
    return Plan((), {("public", "train"): [Sample(f.name, 0, f.read) for f in listed]})


def mod10(domain: str, images: Sequence[_Image]) -> Parted:
    """The papers' split: eight of ten images in their order are for training, two for test."""
    return {
        (domain, split): [_sample(im) for i, im in enumerate(images) if (i % 10 < 8) == first]
        for split, first in zip(SPLITS, (True, False), strict=True)
    }


def missing_classes(
    classes: Sequence[str], parts: Mapping[tuple[str, str], list[Sample]]
) -> list[str]:
    """A sentence for each domain that lacks a class."""
    notes = []
    for domain in dict.fromkeys(d for d, _ in parts):
        have = {s.label for split in SPLITS for s in parts[domain, split]}
        lacks = [name for label, name in enumerate(classes) if label not in have]
        if lacks:
            notes.append(f"{domain} has no images of {', '.join(lacks)}.")
    return notes


def _sample(image: _Image) -> Sample:
    return Sample(image.file.name, image.label, image.file.read)


def _files(path: Path) -> list[File]:
    if path.is_file() and path.suffix.lower() == ".txt":
        return [File((path.name,), str(path), path.read_bytes)]
    return files(path)[0]


def _by_domain(spec: Spec, listed: Sequence[File]) -> tuple[Images, set[str]]:
    """The images of each domain, and the folders that are none of the task's classes."""
    domains = {plain(a): d for d, more in spec.domains.items() for a in (d, *more)}
    labels = {
        plain(a): label
        for label, (name, more) in enumerate(spec.classes.items())
        for a in (name, *more)
    }
    images: Images = {domain: [] for domain in spec.domains}
    strange: set[str] = set()
    for file in listed:
        names = [plain(p) for p in file.parts]
        at = next((i for i, n in enumerate(names[:-1]) if n in domains), None)
        if at is None or Path(file.parts[-1]).suffix.lower() in _NO_IMAGES:
            continue
        domain, between = domains[names[at]], names[at + 1 : -2]
        if len(names) - at < 3:
            raise ProtofedError(f"'{file.name}' is in no class folder")
        # Caltech-256 numbers its folders: 003.backpack
        label = labels.get(names[-2], labels.get(names[-2].lstrip("0123456789")))
        if label is None or any(n not in _LAYERS and n not in _SPLIT_FOLDERS for n in between):
            strange.add("/".join(file.parts[at:-1]))
            continue
        split = next((n for n in between if n in _SPLIT_FOLDERS), None)
        name = file.parts[-1].casefold()
        front = _PREFIX.match(name)
        if split is not None:
            name = f"{split}_{name}"
        elif front:
            split = front[1]
        images[domain].append(
            _Image(
                file.parts[-2], label, _SPLIT_FOLDERS[split] if split else None, (label, name), file
            )
        )
    for domain, own in images.items():
        # VLCS comes with its images twice, in full/ and in the folders of its splits
        parted = [i for i in own if not any(plain(p) == "full" for p in i.file.parts)]
        if any(i.split for i in parted):
            images[domain] = parted
    return images, strange


def _lists(spec: Spec, listed: Sequence[File]) -> dict[tuple[str, str], File]:
    """The lists by domain and part, e.g. ("photo", "train_kfold")."""
    domains = {plain(a): d for d, more in spec.domains.items() for a in (d, *more)}
    lists: dict[tuple[str, str], File] = {}
    for file in listed:
        match = re.fullmatch(
            r"(.+)_((train|crossval|val|test)(_kfold)?)\.txt", file.parts[-1].casefold()
        )
        if match and plain(match[1]) in domains:
            lists.setdefault((domains[plain(match[1])], match[2]), file)
    return lists


def _read_list(file: File, images: Sequence[_Image]) -> list[Sample]:
    """The images that a list names, one 'domain/class/name.jpg label' a line, in its order.

    None at all where the list belongs to a copy of the data with other names.
    """
    by_key = {i.key: i for i in images}
    by_name: dict[tuple[str, str], _Image] = {
        (plain(i.folder), i.file.parts[-1].casefold()): i for i in images
    }
    samples: list[Sample] = []
    shifts, lost = set(), ""
    for number, line in enumerate(file.read().decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        parts = [p for p in path.replace("\\", "/").split("/") if p]
        if len(parts) < 2 or not label.isdecimal():
            raise ProtofedError(f"'{file.name}', line {number}: '{line}' is not a path and a label")
        image = by_name.get((plain(parts[-2]), parts[-1].casefold()))
        if image is None:
            # the same image under its folder's other name: full/3/train_x.jpg is train/3/x.jpg
            image = next((by_key[k] for k in _keys(parts, int(label)) if k in by_key), None)
        if image is None:
            lost = lost or f"'{file.name}', line {number}: there is no image '{path}'"
            continue
        shifts.add(int(label) - image.label)
        samples.append(_sample(image))
    if samples and lost:
        raise ProtofedError(lost, "the list belongs to another copy of the data")
    if not (shifts <= {0} or shifts <= {1}):  # PACS counts its classes from 1, VLCS from 0
        raise ProtofedError(f"'{file.name}': its labels do not fit the folders of its images")
    return samples


def _keys(parts: Sequence[str], label: int) -> list[tuple[int, str]]:
    name = parts[-1].casefold()
    split = plain(parts[-3]) if len(parts) > 2 and plain(parts[-3]) in _SPLIT_FOLDERS else None
    return [(label - shift, f"{split}_{name}" if split else name) for shift in (0, 1)]


def _kfold(
    spec: Spec, domain: str, images: Sequence[_Image], lists: Mapping[tuple[str, str], File]
) -> Parted:
    """Training images from the list; test images are all that there are."""
    train, test = (lists.get((domain, f"{split}_kfold")) for split in SPLITS)
    chosen = _read_list(train, images) if train else []
    if not chosen:
        why = f"fits none of the images: '{train.name}'" if train else "is not found"
        raise DataMissing(
            f"test split kfold_leaky needs the list {domain}_train_kfold.txt, which {why}",
            f"protofed data fetch {spec.name} gets the lists; --test-split mod10 needs none",
        )
    everything = [_sample(i) for i in images]
    tested = _read_list(test, images) if test else []
    return {(domain, "train"): chosen, (domain, "test"): tested or everything}


def _seventy(
    domain: str,
    images: Sequence[_Image],
    lists: Mapping[tuple[str, str], File],
    notes: list[str],
    spec: Spec,
) -> Parted:
    """70/30 from lists, else from the folders (or names) of the splits, else drawn by a key."""
    given = {
        (domain, s): _read_list(lists[domain, s], images) for s in SPLITS if (domain, s) in lists
    }
    if len(given) == 2 and all(given.values()):
        notes.append("70/30 split from the lists.")
        return given
    if {i.split for i in images} == set(SPLITS):
        notes.append("70/30 split from the folders.")
        return {(domain, s): [_sample(i) for i in images if i.split == s] for s in SPLITS}
    notes.append("Neither lists nor folders say the 70/30 split: drawn, class by class.")
    parts: Parted = {(domain, s): [] for s in SPLITS}
    for label in range(len(spec.classes)):
        own = [i for i in images if i.label == label]
        order = keys.generator(spec.name, domain, label, "70_30").permutation(len(own))
        first = set(order[: round(0.7 * len(own))].tolist())
        for i, image in enumerate(own):
            parts[domain, "train" if i in first else "test"].append(_sample(image))
    return parts


def _wrapped(listed: Sequence[File]) -> bool:
    """Whether an archive has one folder around the domains."""
    tops = {f.parts[0] for f in listed}
    second = {plain(f.parts[1]) for f in listed if len(f.parts) > 1}
    known = {*_SPLIT_FOLDERS, *_VALIDATION}
    return len(tops) == 1 and not second <= known and all(len(f.parts) > 3 for f in listed)


def _splits(domain: Mapping[tuple[str, str | None], list[File]]) -> set[str | None]:
    return {split for _, split in domain}


def _split_domains(folders: set[Parts], top: int) -> dict[str, set[str]]:
    """Domains whose folders are those of splits, with their names."""
    below: dict[str, set[str]] = {}
    for parts in folders:
        if len(parts) > top + 1:
            below.setdefault(parts[top], set()).add(plain(parts[top + 1]))
    known = {*_SPLIT_FOLDERS, *_VALIDATION}
    return {domain: names for domain, names in below.items() if names <= known}


def _by_folder(
    domain: str,
    found: Mapping[tuple[str, str | None], list[File]],
    classes: Sequence[str],
    names: set[str],
    notes: list[str],
) -> Parted:
    test = "test" if "test" in names else next((v for v in _VALIDATION if v in names), None)
    if not names & {"train", "training"} or test is None:
        raise ProtofedError(
            f"domain '{domain}' has the folder {', '.join(sorted(names))}, not train and test"
        )
    unused = sorted(n for n in names if n in _VALIDATION and n != test)
    if unused:
        notes.append(f"The images of {domain}/{unused[0]} are left out.")
    roles = {"train": {"train", "training", "crossval"}, "test": {test}}
    return {
        (domain, split): [
            Sample(f.name, classes.index(c), f.read)
            for (c, s), fs in sorted(found.items(), key=lambda item: item[0][0])
            if s in roles[split]
            for f in sorted(fs, key=lambda f: f.parts)
        ]
        for split in SPLITS
    }
