"""Your own images: a task as a tree of folders, the images of one site, public images.

A domain whose folders do not name its splits is divided class by class: the last fifth of a class,
by name, is for testing. Neighbors by name are often neighbors in time (frames of a video, scans of
a patient), and in one piece fewer of them end up on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from protofed.data.listing import File, FileParts, is_archive, list_files
from protofed.data.sources.image_tree import (
    TreeImage,
    is_side_file,
    missing_classes,
)
from protofed.data.sources.published import plain
from protofed.data.split import VAL_FOLDERS
from protofed.data.task import SPLITS, DataMissing, Domain, Parts, Plan
from protofed.errors import ProtofedError
from protofed.files import expand_user

FOLDER = "folder:"
"""The prefix of a task whose images are in a folder of your own."""

TEST_SPLITS = ("auto",)

VALIDATION = "validation"

_TRAINING, _TESTING = ("train", "training", "crossval"), ("test", "testing")
_VALIDATION = ("val", "valid", "validation", "dev")
_SPLIT_NAMES = {*_TRAINING, *_TESTING, *_VALIDATION}
_TEST_PART = 5  # one in five

_TREE = "the tree has to be domain/class/image, with a folder for each site or camera"
_SPLIT_TREE = "domain/{train,test}/class/image"


def folder_path(
    name: str,
    hint: str = "write --task folder:PATH (for a study: --on folder:PATH), where PATH has folders "
    "domain/class with images",
) -> Path:
    """The folder or archive of ``folder:PATH``."""
    path = expand_user(name.removeprefix(FOLDER))
    if name == FOLDER:
        raise DataMissing("folder: which folder?", hint)
    if not (path.is_dir() or is_archive(path)):
        raise DataMissing(f"there is no folder '{path}'", hint)
    return path.resolve()  # gives "." and ".." a name


def folder_plan(path: Path, one_domain: bool = False) -> Plan:
    """The images of a tree ``domain/class/image``, in which folders may name the splits.

    Split folders (train, test, val) are above the domains, above the classes, or below them. With
    ``one_domain`` the folder itself is the only domain: ``class/image``.
    """
    listed, folders = list_files(path)
    if one_domain:
        folders = {f for f in folders if len(f) > 1}
    top = 1 if not one_domain and (path.is_dir() or _is_wrapped(listed)) else 0
    # from here on, paths start with the domain, and the split comes next if there is one
    images = [f for f in listed if not is_side_file(f.parts[-1])]
    move, read_as = _splits_second([f.parts[top:] for f in images], path, one_domain)
    folders = {moved for f in folders if (moved := move(f[top:]))}
    files = [(move(f.parts[top:]), f) for f in images]
    split_names = _split_names(folders | {parts[:-1] for parts, _ in files})

    def inside(parts: FileParts) -> FileParts:
        """The path below the domain, and below the split if it has one."""
        return parts[2:] if parts[0] in split_names else parts[1:]

    domains = {f[0] for f in folders} | {parts[0] for parts, _ in files if len(parts) > 1}
    found: dict[str, list[tuple[str, FileParts, File]]] = {d: [] for d in sorted(domains)}
    for parts, file in files:
        if len(inside(parts)) < 2:
            raise ProtofedError(f"'{file.name}' is not in a class folder", _TREE)
        found[parts[0]].append((inside(parts)[0], parts, file))
    if not any(found.values()):
        raise DataMissing(f"'{path}' has no images", _TREE)
    used = {name for own in found.values() for name, _, _ in own}
    classes = tuple(sorted(used | {inside(f)[0] for f in folders if len(inside(f)) == 1}))
    for name in (*found, *classes):
        if not name.isprintable():
            raise ProtofedError(f"the folder {name!r} in '{path}' has an unprintable name")
    for name in classes:
        if name not in used:
            raise ProtofedError(
                f"the folders of class '{name}' in '{path}' are empty in all domains"
            )
    plan = Plan(classes, {})
    for domain, own in found.items():
        if not own:
            raise ProtofedError(f"domain '{domain}' in '{path}' has no images")
        named = [
            TreeImage(name, classes.index(name), plain(parts[1]), (0, ""), file)
            for name, parts, file in sorted(own, key=lambda image: image[:2])
        ]
        if domain in split_names:
            plan.parts.update(_by_folder(domain, named, split_names[domain]))
            read_as.setdefault(domain, _SPLIT_TREE)
        else:
            plan.parts.update(_last_fifth(domain, named))
    for (domain, split), samples in plan.parts.items():
        if not samples:
            raise ProtofedError(
                f"domain '{domain}' in '{path}' has too few images: none for {split}",
                "a class needs two images or more, so that one of them can be for testing",
            )
    divided = [domain for domain in found if domain not in read_as]
    trees = sorted({read_as.get(domain, "domain/class/image") for domain in found})
    if not one_domain:
        plan.notes.append(f"Read as {' and '.join(trees)}.")
    if divided:
        whose = "" if len(divided) == len(found) else f" of {', '.join(divided)}"
        plan.notes.append(f"The last fifth of each class{whose}, by file name, is for testing.")
    for domain in found:
        if held := plan.parts.get((domain, VALIDATION)):
            plan.notes.append(f"{domain} has {len(held)} images for --validate {VAL_FOLDERS}.")
    plan.notes.extend(missing_classes(classes, plan.parts))
    plan.notes.extend(_untested(classes, plan.parts))
    return plan


def class_warnings(classes: Sequence[str], domains: Mapping[str, Domain]) -> Iterator[str]:
    """What is probably a mistake in the names of folders."""
    for what, names in (("classes", classes), ("domains", domains)):
        same: dict[str, list[str]] = {}
        for name in names:
            same.setdefault(name.casefold(), []).append(f"'{name}'")
        for found in same.values():
            if len(found) > 1:
                yield f"the {what} {' and '.join(found)} differ only in case"
    have = {d: {*i.train.y.tolist(), *i.test.y.tolist()} for d, i in domains.items()}
    owners = [[d for d in have if label in have[d]] for label in range(len(classes))]
    if none := [f"'{c}'" for c, own in zip(classes, owners, strict=True) if not own]:
        yield f"classes without an image that can be read: {', '.join(none)}"
    alone = [f"'{c}' ({own[0]})" for c, own in zip(classes, owners, strict=True) if len(own) == 1]
    if alone and len(domains) > 1:
        shown = ", ".join(alone[:5]) + (f" and {len(alone) - 5} more" if len(alone) > 5 else "")
        yield f"classes with images in one domain only: {shown}"


def public_plan(path: Path) -> Plan:
    """All images below a folder, in any tree; they have no classes and no split."""
    listed = [f for f in list_files(path)[0] if not is_side_file(f.parts[-1])]
    if not listed:
        raise DataMissing(f"'{path}' has no images", "any tree of images will do")
    return Plan((), {("public", "train"): [f.sample(0) for f in listed]})


def _is_wrapped(listed: Sequence[File]) -> bool:
    """Whether an archive has one folder around the domains."""
    tops = {f.parts[0] for f in listed}
    second = {plain(f.parts[1]) for f in listed if len(f.parts) > 1}
    folders = 4 if second <= _SPLIT_NAMES else 3  # and the file
    return len(tops) == 1 and all(len(f.parts) > folders for f in listed)


def _split_names(folders: set[FileParts]) -> dict[str, set[str]]:
    """The names of the split folders of each domain that has only such folders."""
    below: dict[str, set[str]] = {}
    for parts in folders:
        if len(parts) > 1:
            below.setdefault(parts[0], set()).add(parts[1])
    return {d: {*map(plain, names)} for d, names in below.items() if _are_splits(names, d)}


def _are_splits(names: Iterable[str], where: str) -> bool:
    """Whether all of these folders are splits; an error if there are others beside train and test.

    They would be domains or classes, or be trained on together. ``""`` stands for images.
    """
    folders = {plain(n): n for n in names}
    splits, others = folders.keys() & _SPLIT_NAMES, folders.keys() - _SPLIT_NAMES
    if others and splits & {*_TRAINING} and splits - {*_TRAINING}:
        beside = ", ".join(f"'{folders[n]}'" if n else "images" for n in sorted(others)[:5])
        raise ProtofedError(
            f"'{where}' has {', '.join(sorted(splits))} and beside them {beside}: it is unclear "
            "which images are for training",
            "move what belongs to no split out of the tree",
        )
    return bool(splits) and not others


def _splits_second(
    paths: Sequence[FileParts], path: Path, one_domain: bool
) -> tuple[Callable[[FileParts], FileParts], dict[str, str]]:
    """A function that moves a split from above the domain, or below the class, to between the two.

    It makes nothing of a folder that then has no place. Also returns the domains for which it does
    this, and how their trees are read. Split folders are above all domains, or below all classes of
    a domain.
    """
    if not one_domain and _are_splits((p[0] for p in paths), str(path)):
        if any(len(p) < 4 for p in paths):
            raise ProtofedError(
                f"'{path}' has classes in its folders {', '.join(sorted({p[0] for p in paths}))}, "
                "and no domains",
                f"put the images of each domain into a folder of its own: {_SPLIT_TREE}",
            )
        above = dict.fromkeys((p[1] for p in paths), "{train,test}/domain/class/image")
        return lambda p: (p[1], p[0], *p[2:]) if len(p) > 1 else (), above
    by_domain: dict[str, list[FileParts]] = {}
    for p in paths:
        by_domain.setdefault(p[0], []).append(p)
    below = {
        domain: "domain/class/{train,test}/image"
        for domain, own in by_domain.items()
        if _are_splits((p[2] if len(p) > 3 else "" for p in own), f"{domain}/CLASS")
    }

    def up(p: FileParts) -> FileParts:
        if len(p) < 2 or p[0] not in below:
            return p
        return (p[0], p[2], p[1], *p[3:]) if len(p) > 2 else ()

    return up, below


def _by_folder(domain: str, images: Sequence[TreeImage], names: set[str]) -> Parts:
    """The split that a domain's folders give. Without a test folder, that of validation is used."""
    test = next((some for some in (_TESTING, _VALIDATION) if names & {*some}), None)
    if not names & {*_TRAINING} or test is None:
        raise ProtofedError(
            f"domain '{domain}' has the folder {', '.join(sorted(names))}, not train and test"
        )
    folders = {"train": _TRAINING, "test": test}
    if test is not _VALIDATION and names & {*_VALIDATION}:
        folders[VALIDATION] = _VALIDATION
    return {
        (domain, split): [i.sample for i in images if i.split in own]
        for split, own in folders.items()
    }


def _last_fifth(domain: str, images: Sequence[TreeImage]) -> Parts:
    """The last fifth of each class for testing, at least one of two."""
    parts: Parts = {(domain, split): [] for split in SPLITS}
    for _, own in groupby(images, key=lambda image: image.label):
        samples = [image.sample for image in own]
        tested = max(len(samples) > 1, round(len(samples) / _TEST_PART))
        parts[domain, "train"] += samples[: len(samples) - tested]
        parts[domain, "test"] += samples[len(samples) - tested :]
    return parts


def _untested(classes: Sequence[str], parts: Parts) -> Iterator[str]:
    """A note for each domain with classes that are trained on and not tested, or vice versa."""
    for domain in dict.fromkeys(d for d, _ in parts):
        train, test = ({s.label for s in parts[domain, split]} for split in SPLITS)
        for names, lack in ((train - test, "test"), (test - train, "training")):
            if names:
                listed = ", ".join(classes[label] for label in sorted(names))
                yield f"{domain} has no {lack} images of {listed}."
