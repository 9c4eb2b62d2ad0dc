"""Tasks of real images: found on the disk, decoded once, and put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from protofed.data import decoded
from protofed.data.augment import AUGMENTS
from protofed.data.digits import digits_plan
from protofed.data.find import DataMissing, find
from protofed.data.info import FOLDER, IMAGE_SIZE
from protofed.data.specs import SPECS, Plan
from protofed.data.task import Task
from protofed.data.tree_tasks import folder_plan, public_plan, tree_plan
from protofed.data.trees import content_key, is_archive, stamp
from protofed.errors import ProtofedError, unknown

SITE = "site:"
PUBLIC = "public:"
FOLDER_SPLITS = ("auto",)


def real_task(
    name: str,
    data: str | Path | None = None,
    image_size: int | None = None,
    flip: bool | None = None,
    test_split: str | None = None,
    skip_bad: bool = False,
    augment: str | None = None,
) -> Task:
    """A published task by its name, or ``folder:PATH``; see ``load_task``."""
    size = IMAGE_SIZE if image_size is None else image_size
    if isinstance(size, bool) or not isinstance(size, int) or not 8 <= size <= 1024:
        raise ProtofedError(f"image_size must be a whole number from 8 to 1024, got {size!r}")
    spec = SPECS.get(name)
    splits = spec.test_splits if spec else FOLDER_SPLITS
    chosen = test_split or splits[0]
    if chosen not in splits:
        raise unknown(f"test split of {name}", chosen, splits)
    paths = find(spec, data) if spec else [own_folder(name)]
    own = _images(name, paths, size, chosen, skip_bad)
    kind = augment or "crop"
    if kind not in AUGMENTS:
        raise unknown("augmentation", kind, AUGMENTS)
    notes = [spec.about if spec else f"Images of {paths[0]}.", *own.notes]
    if own.skipped:
        notes.append(f"{len(own.skipped)} files that are no images were left out.")
    clients: Mapping[str, int] = spec.clients if spec else dict.fromkeys(own.domains, 1)
    samples: Mapping[str, float] = spec.samples if spec else dict.fromkeys(own.domains, 1.0)
    return Task(
        name=name,
        classes=own.classes,
        domains=own.domains,
        augment=AUGMENTS[kind](True if flip is None else flip),
        clients=clients,
        samples=samples,
        note=" ".join(notes),
        leftover=spec.leftover if spec else False,
        repair=spec.repair if spec else False,
        # the leaky test images are all of a domain already
        whole_unseen=chosen != "kfold_leaky" and (spec is None or spec.whole_unseen),
        digest=own.digest,
        test_split=chosen,
        skipped=own.skipped,
    )


def own_folder(
    name: str,
    hint: str = "write --task folder:PATH, where PATH has folders domain/class with images",
) -> Path:
    """The folder (or archive) of ``folder:PATH``."""
    path = Path(name.removeprefix(FOLDER)).expanduser()
    if name == FOLDER or not (path.is_dir() or is_archive(path)):
        raise DataMissing(
            f"there is no folder '{path}'" if name != FOLDER else "folder: which folder?", hint
        )
    return path.resolve()  # a name of its own also for "." and ".."


def _images(
    name: str, paths: list[Path], size: int, test_split: str, skip_bad: bool
) -> decoded.Decoded:
    short = name.partition(":")[0]
    options = [short, size, test_split]
    # without skip_bad first: what it holds has no bad images, so both ask for the same
    asked = [[*options, skip] for skip in ([False, True] if skip_bad else [False])]
    before = stamp(paths)
    for opts in asked:
        known = decoded.remembered(before, opts)
        cached = decoded.load(known) if known else None
        if cached is not None:
            return cached
    content = content_key(paths)
    for opts in asked:
        file = decoded.cache_name(short, size, content, opts)
        cached = decoded.load(file)
        if cached is not None:
            decoded.remember(before, opts, file)
            return cached
    result = decoded.build(file, plan(name, paths, test_split), size, skip_bad)
    if stamp(paths) == before:  # else a file changed while it was read
        decoded.remember(before, opts, file)
    return result


def site_images(path: Path, size: int, skip_bad: bool) -> decoded.Decoded:
    """The images of one site, a tree ``class/image`` or ``{train,test}/class/image``.

    They come as one domain with the folder's name; classes are those of its folders.
    """
    return _images(f"{SITE}{path}", [path], size, FOLDER_SPLITS[0], skip_bad)


def public_images(path: Path, size: int, skip_bad: bool) -> Tensor:
    """All images below a folder (or in an archive), without labels: uint8 [N, 3, size, size]."""
    found = _images(f"{PUBLIC}{path}", [path], size, FOLDER_SPLITS[0], skip_bad)
    (domain,) = found.domains.values()
    return domain.train.x


def plan(name: str, paths: list[Path], test_split: str) -> Plan:
    """Which images a task has, from the files that were found for it."""
    if name.startswith(PUBLIC):
        return public_plan(paths[0])
    if name.startswith((FOLDER, SITE)):
        return folder_plan(paths[0], test_split, one=name.startswith(SITE))
    if name == "digits":
        return digits_plan(paths)
    return tree_plan(SPECS[name], paths, test_split)
