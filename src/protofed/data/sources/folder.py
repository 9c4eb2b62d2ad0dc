"""Images of one's own: a task as a tree of folders, the images of one site, public images.

A domain whose folders do not name its splits is divided by ``mod10``, as the papers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from protofed.data.task import SPLITS, DataMissing, Domain, Parts, Plan
from protofed.errors import ProtofedError

FOLDER = "folder:"
"""The prefix of a task whose images are in a folder of one's own."""

TEST_SPLITS = ("auto",)

_VALIDATION = ("val", "valid", "validation")
_SPLIT_NAMES = {*SPLIT_FOLDERS, *_VALIDATION}

_TREE = "the tree has to be domain/class/image"


def folder_path(
    name: str,
    hint: str = "write --task folder:PATH, where PATH has folders domain/class with images",
) -> Path:
    """The folder or archive of ``folder:PATH``."""
    path = Path(name.removeprefix(FOLDER)).expanduser()
    if name == FOLDER:
        raise DataMissing("folder: which folder?", hint)
    if not (path.is_dir() or is_archive(path)):
        raise DataMissing(f"there is no folder '{path}'", hint)
    return path.resolve()  # gives "." and ".." a name


def folder_plan(path: Path, one_domain: bool = False) -> Plan:
    """The images of a tree ``domain/class/image`` or ``domain/{train,test}/class/image``.

    With ``one_domain`` the folder itself is the only domain: ``class/image``.
    """
    listed, folders = list_files(path)
    if one_domain:
        folders = {f for f in folders if len(f) > 1}
    top = 1 if not one_domain and (path.is_dir() or _is_wrapped(listed)) else 0
    # from here on, paths start with the domain
    folders = {f[top:] for f in folders if len(f) > top}
    files = [(f.parts[top:], f) for f in listed]
    split_names = _split_names(folders | {parts[:-1] for parts, _ in files})

    def inside(parts: FileParts) -> FileParts:
        """The path below the domain, and below the split if it has one."""
        return parts[2:] if parts[0] in split_names else parts[1:]

    domains = {f[0] for f in folders} | {parts[0] for parts, _ in files if len(parts) > 1}
    found: dict[str, list[tuple[str, FileParts, File]]] = {d: [] for d in sorted(domains)}
    for parts, file in files:
        if is_side_file(parts[-1]):
            continue
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
        images = [
            TreeImage(name, classes.index(name), plain(parts[1]), (0, ""), file)
            for name, parts, file in sorted(own, key=lambda image: image[:2])
        ]
        if domain in split_names:
            plan.parts.update(_by_folder(domain, images, split_names[domain], plan.notes))
        else:
            plan.parts.update(mod10(domain, images))
    for (domain, split), samples in plan.parts.items():
        if not samples:
            raise ProtofedError(
                f"domain '{domain}' in '{path}' has too few images: none for {split}"
            )
    plan.notes.extend(missing_classes(classes, plan.parts))
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
    return len(tops) == 1 and not second <= _SPLIT_NAMES and all(len(f.parts) > 3 for f in listed)


def _split_names(folders: set[FileParts]) -> dict[str, set[str]]:
    """The names of the split folders of each domain that has only such folders."""
    below: dict[str, set[str]] = {}
    for parts in folders:
        if len(parts) > 1:
            below.setdefault(parts[0], set()).add(plain(parts[1]))
    return {domain: names for domain, names in below.items() if names <= _SPLIT_NAMES}


def _by_folder(
    domain: str, images: Sequence[TreeImage], names: set[str], notes: list[str]
) -> Parts:
    """The split that a domain's folders give."""
    test = next((name for name in ("test", *_VALIDATION) if name in names), None)
    if not names & {"train", "training"} or test is None:
        raise ProtofedError(
            f"domain '{domain}' has the folder {', '.join(sorted(names))}, not train and test"
        )
    unused = sorted(n for n in names if n in _VALIDATION and n != test)
    if unused:
        notes.append(f"The images of {domain}/{unused[0]} are left out.")
    folders = {"train": ("train", "training", "crossval"), "test": (test,)}
    return {(domain, s): [i.sample for i in images if i.split in folders[s]] for s in SPLITS}
