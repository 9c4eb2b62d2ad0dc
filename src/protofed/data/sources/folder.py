"""Images of one's own: a task as a tree of folders, the images of one site, public images.

A domain whose folders do not name its splits is divided by ``mod10``, as the papers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from protofed.data.listing import File, FileParts, is_archive, list_files
from protofed.data.sources.image_tree import (
    SPLIT_FOLDERS,
    TreeImage,
    is_side_file,
    missing_classes,
    mod10,
)
from protofed.data.sources.published import plain
from protofed.data.task import SPLITS, DataMissing, Parts, Plan, Sample
from protofed.errors import ProtofedError

FOLDER = "folder:"
"""The prefix of a task whose images are in a folder of one's own."""

TEST_SPLITS = ("auto",)

_VALIDATION = ("val", "valid", "validation")
_SPLIT_NAMES = {*SPLIT_FOLDERS, *_VALIDATION}

# The files of a domain by class and folder of the split, None if it has no such folders.
_Found = dict[tuple[str, str | None], list[File]]


def folder_path(
    name: str,
    hint: str = "write --task folder:PATH, where PATH has folders domain/class with images",
) -> Path:
    """The folder or archive of ``folder:PATH``."""
    path = Path(name.removeprefix(FOLDER)).expanduser()
    if name == FOLDER or not (path.is_dir() or is_archive(path)):
        raise DataMissing(
            f"there is no folder '{path}'" if name != FOLDER else "folder: which folder?", hint
        )
    return path.resolve()  # gives "." and ".." a name


def folder_plan(path: Path, one_domain: bool = False) -> Plan:
    """The images of a tree ``domain/class/image`` or ``domain/{train,test}/class/image``.

    With ``one_domain`` the folder itself is the only domain: ``class/image``.
    """
    listed, folders = list_files(path)
    if one_domain:
        folders = {f for f in folders if len(f) > 1}
    top = 1 if not one_domain and (path.is_dir() or _is_wrapped(listed)) else 0
    split_names = _split_names(folders | {f.parts[:-1] for f in listed}, top)
    found = _by_domain(listed, folders, top, split_names)
    if not any(found.values()):
        raise DataMissing(f"'{path}' has no images", "the tree has to be domain/class/image")
    classes = _classes(path, found, folders, top, split_names)
    parts: Parts = {}
    notes: list[str] = []
    for domain in sorted(found):
        if not found[domain]:
            raise ProtofedError(f"domain '{domain}' in '{path}' has no images")
        if domain in split_names:
            parts |= _by_folder(domain, found[domain], classes, split_names[domain], notes)
        else:
            images = [
                TreeImage(c, classes.index(c), None, (classes.index(c), ""), f)
                for (c, _), files in sorted(found[domain].items())
                for f in sorted(files, key=lambda f: f.parts)
            ]
            parts |= mod10(domain, images)
    for (domain, split), samples in parts.items():
        if not samples:
            raise ProtofedError(
                f"domain '{domain}' in '{path}' has too few images: none for {split}"
            )
    return Plan(classes, parts, [*notes, *missing_classes(classes, parts)])


def public_plan(path: Path) -> Plan:
    """All images below a folder, in any tree; they have no classes and no split."""
    listed = [f for f in list_files(path)[0] if not is_side_file(f.parts[-1])]
    if not listed:
        raise DataMissing(f"'{path}' has no images", "any tree of images will do")
    return Plan((), {("public", "train"): [Sample(f.name, 0, f.read) for f in listed]})


def _is_wrapped(listed: Sequence[File]) -> bool:
    """Whether an archive has one folder around the domains."""
    tops = {f.parts[0] for f in listed}
    second = {plain(f.parts[1]) for f in listed if len(f.parts) > 1}
    return len(tops) == 1 and not second <= _SPLIT_NAMES and all(len(f.parts) > 3 for f in listed)


def _split_names(folders: set[FileParts], top: int) -> dict[str, set[str]]:
    """The names of the split folders of each domain that has only such folders."""
    below: dict[str, set[str]] = {}
    for parts in folders:
        if len(parts) > top + 1:
            below.setdefault(parts[top], set()).add(plain(parts[top + 1]))
    return {domain: names for domain, names in below.items() if names <= _SPLIT_NAMES}


def _by_domain(
    listed: Sequence[File], folders: set[FileParts], top: int, split_names: Mapping[str, set[str]]
) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for parts in [*folders, *(f.parts for f in listed)]:
        if len(parts) > top + (0 if parts in folders else 1):
            found.setdefault(parts[top], {})
    for file in listed:
        rest = file.parts[top:]
        if is_side_file(rest[-1]):
            continue
        split = None
        if rest[0] in split_names:
            split = plain(rest[1]) if len(rest) > 1 else None
            rest = (rest[0], *rest[2:])
        if len(rest) < 3:
            raise ProtofedError(
                f"'{file.name}' is not in a class folder", "the tree has to be domain/class/image"
            )
        found[rest[0]].setdefault((rest[1], split), []).append(file)
    return found


def _classes(
    path: Path,
    found: Mapping[str, _Found],
    folders: set[FileParts],
    top: int,
    split_names: Mapping[str, set[str]],
) -> tuple[str, ...]:
    """The sorted classes of all domains, each of which has an image somewhere."""
    named: set[str] = set()
    for parts in folders:
        depth = top + (2 if parts[top : top + 1] and parts[top] in split_names else 1)
        if len(parts) == depth + 1:
            named.add(parts[depth])
    used = {c for domain in found.values() for c, _ in domain}
    classes = tuple(sorted(used | named))
    for name in (*found, *classes):
        if not name.isprintable():
            raise ProtofedError(f"the folder {name!r} in '{path}' has an unprintable name")
    if empty := [c for c in classes if c not in used]:
        raise ProtofedError(
            f"the folders of class '{empty[0]}' in '{path}' are empty in all domains"
        )
    return classes


def _by_folder(
    domain: str, found: _Found, classes: Sequence[str], names: set[str], notes: list[str]
) -> Parts:
    """The split that a domain's folders give."""
    test = "test" if "test" in names else next((v for v in _VALIDATION if v in names), None)
    if not names & {"train", "training"} or test is None:
        raise ProtofedError(
            f"domain '{domain}' has the folder {', '.join(sorted(names))}, not train and test"
        )
    unused = sorted(n for n in names if n in _VALIDATION and n != test)
    if unused:
        notes.append(f"The images of {domain}/{unused[0]} are left out.")
    folders = {"train": {"train", "training", "crossval"}, "test": {test}}
    return {
        (domain, split): [
            Sample(f.name, classes.index(c), f.read)
            for (c, s), files in sorted(found.items(), key=lambda item: item[0][0])
            if s in folders[split]
            for f in sorted(files, key=lambda f: f.parts)
        ]
        for split in SPLITS
    }
