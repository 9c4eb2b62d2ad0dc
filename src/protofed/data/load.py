"""Loading images: found on the disk, decoded once, and put together as a task."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median_high
from typing import Any

from torch import Tensor

from protofed.data import cache, choose
from protofed.data.augment import AUGMENTS
from protofed.data.cache import Decoded
from protofed.data.choose import Survey
from protofed.data.decode import decode_all, decoders, measure_all, parse_range
from protofed.data.glyphs import load_glyphs
from protofed.data.info import FOLDER, describe
from protofed.data.listing import content_key, stamp
from protofed.data.locate import locate
from protofed.data.sources import PUBLISHED
from protofed.data.sources.folder import (
    TEST_SPLITS,
    class_warnings,
    folder_path,
    folder_plan,
    public_plan,
)
from protofed.data.task import MAX_IMAGE_PIXELS, Plan, Reading, Task
from protofed.data.unpack import MAX_UNPACKED_GB, unpacking_at_most
from protofed.errors import ProtofedError, unknown

_OPTIONS: dict[str, tuple[Any, str]] = {
    "data": (str | Path, "a folder"),
    "image_size": (int, "a whole number from 8 to 1024"),
    "flip": (bool, "true or false"),
    "test_split": (str, "a name"),
    "skip_bad": (bool, "true or false"),
    "augment": (str, "a name"),
    "max_image_pixels": (int, "a whole number of at least 1"),
    "max_unpacked_gb": (int | float, "a number of gigabytes, above 0 and at most 10000"),
    "pixel_range": (str, "LOW:HIGH"),
}
"""The type that an option of ``load_task`` must have, and how to say it."""
_RANGES = {"image_size": (8, 1024), "max_image_pixels": (1, inf), "max_unpacked_gb": (1e-9, 1e4)}


def load_task(
    name: str,
    data: str | Path | None = None,
    image_size: int | None = None,
    flip: bool | None = None,
    test_split: str | None = None,
    skip_bad: bool = False,
    augment: str | None = None,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    max_unpacked_gb: float = MAX_UNPACKED_GB,
    pixel_range: str | None = None,
) -> Task:
    """The named task, or ``folder:PATH`` for your own tree ``domain/class/image``.

    Args:
        name: one of ``TASKS``, or ``folder:PATH``.
        data: the folder of the published tasks; default ``PROTOFED_DATA``, else the cache folder.
        image_size: the side that images are resized to, in pixels; for a folder, by default about
            the size of its images, and at most 224.
        flip: whether training images are flipped at random.
        test_split: another way to divide the images, e.g. ``kfold_leaky`` for pacs.
        skip_bad: leave out files that cannot be decoded.
        augment: ``crop``, ``color`` or ``large``; for a folder, by default ``large`` from 96
            pixels on.
        max_image_pixels: images with more pixels are bad; no more pixels are decoded at a time.
        max_unpacked_gb: what a compressed file or an archive may unpack to, in gigabytes.
        pixel_range: the values ``LOW:HIGH`` that become black and white in images with more than
            8 bits; for a folder, by default the lowest and highest in its images.

    Warns about classes that are probably misspelled.
    """
    info = describe(name)
    _check(data=data, image_size=image_size, flip=flip, test_split=test_split, skip_bad=skip_bad,
           augment=augment, max_image_pixels=max_image_pixels,
           max_unpacked_gb=max_unpacked_gb, pixel_range=pixel_range)  # fmt: skip
    if pixel_range is not None:
        parse_range(pixel_range)
    if augment is not None and augment not in AUGMENTS:
        raise unknown("augmentation", augment, AUGMENTS)
    if name == "glyphs":
        if image_size not in (None, info.image_size):
            raise ProtofedError(f"glyphs have {info.image_size} pixels, not {image_size}")
        if test_split is not None:
            raise ProtofedError("glyphs have only one test split", "leave out --test-split")
        if augment not in (None, "crop"):
            raise ProtofedError("glyphs have only one augmentation", "leave out --augment")
        task = load_glyphs()
        return task if flip is None else replace(task, augment=replace(task.augment, flip=flip))
    split = test_split or info.test_splits[0]
    if split not in info.test_splits:
        raise unknown(f"test split of {name}", split, info.test_splits)
    reading = Reading(skip_bad, max_image_pixels, max_unpacked_gb, pixel_range)
    paths, make_plan = task_files(name, data, split, reading)
    plan = lru_cache(make_plan)
    published = PUBLISHED.get(name)
    size, survey, kind = image_size or info.image_size, None, name.partition(":")[0]
    if published is None:
        survey = _survey(paths, reading, plan)
        size = size or choose.image_size(survey).value
        reading = replace(reading, pixel_range=pixel_range or survey.pixel_range)
    assert size is not None
    images = _decoded(kind, paths, size, split, reading, plan)
    notes = [*filter(None, [info.about]), *images.notes]
    if published is None:
        augment = augment or choose.augment(size).value
        for text in class_warnings(images.classes, images.domains):
            warnings.warn(f"{name}: {text}", stacklevel=2)
        if reading.pixel_range:
            more = "In images with more than 8 bits, values"
            notes.append(f"{more} from {reading.pixel_range} became 0 to 255.")
    if images.skipped:
        notes.append(f"Left out {len(images.skipped)} files that are not images.")
    return Task(
        name=name,
        classes=images.classes,
        domains=images.domains,
        augment=AUGMENTS[augment or "crop"](info.flip if flip is None else flip),
        clients=info.clients or dict.fromkeys(images.domains, 1),
        samples=info.samples or dict.fromkeys(images.domains, 1.0),
        note=" ".join(notes),
        leftover=info.leftover,
        repair=info.repair,
        # the leaky test images are already all of the domain's
        whole_unseen=split != "kfold_leaky" and (published is None or published.whole_unseen),
        digest=images.digest,
        test_split=split,
        skipped=images.skipped,
        survey=survey,
        pixel_range=reading.pixel_range,
    )


def site_images(path: Path, size: int, reading: Reading) -> Decoded:
    """The images of one site, ``class/image`` or ``{train,test}/class/image``, as one domain."""
    plan = _limited(reading, partial(folder_plan, path, one_domain=True))
    return _decoded("site", [path], size, TEST_SPLITS[0], reading, plan)


def public_images(path: Path, size: int, reading: Reading) -> Tensor:
    """All images in a folder or archive, without labels: uint8 [N, 3, size, size]."""
    plan = _limited(reading, partial(public_plan, path))
    found = _decoded("public", [path], size, TEST_SPLITS[0], reading, plan)
    (domain,) = found.domains.values()
    return domain.train.x


def task_files(
    name: str, data: str | Path | None, test_split: str, reading: Reading
) -> tuple[list[Path], Callable[[], Plan]]:
    """Where a task's files are, and what reads them into a plan."""
    if name.startswith(FOLDER):
        path = folder_path(name)
        return [path], _limited(reading, partial(folder_plan, path))
    paths = locate(PUBLISHED[name], data)
    return paths, _limited(reading, partial(PUBLISHED[name].plan, paths, test_split))


def _limited(reading: Reading, plan: Callable[[], Plan]) -> Callable[[], Plan]:
    def limited() -> Plan:
        with unpacking_at_most(reading.max_unpacked_gb):
            return plan()

    return limited


def _check(**options: Any) -> None:
    for name, value in options.items():
        kind, words = _OPTIONS[name]
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        least, most = _RANGES.get(name, (value, value))
        if value is not None and not (right and least <= value <= most):
            raise ProtofedError(f"{name} must be {words}, got {value!r}")


def _decoded(
    kind: str,
    paths: list[Path],
    size: int,
    test_split: str,
    reading: Reading,
    plan: Callable[[], Plan],
) -> Decoded:
    """The images of files, from the cache if it has them.

    Cache entries are named after the files' content, so that a copy of the data is not decoded
    again. The content is hashed once: afterwards names, sizes and times stand for it, as in git.
    """
    # try without skip_bad first: that entry has no bad images, so it serves both
    skips = (False, reading.max_image_pixels) if reading.skip_bad else (False,)
    pillow, *pydicom = decoders()
    made = (kind, size, test_split)
    asked = [(pillow, *made, skip, reading.pixel_range, *pydicom) for skip in skips]
    before = stamp(paths)
    for options in asked:
        known = cache.recall(before, *options)
        if known and (found := cache.load(known)):
            return found
    content = content_key(paths)
    for options in asked:
        entry = cache.entry_name(kind, size, content, *options)
        if found := cache.load(entry):
            cache.remember(entry, before, *options)
            return found
    result = _decode_plan(entry, plan(), kind, size, reading, [str(p) for p in paths])
    if stamp(paths) == before:  # else a file changed while it was read
        cache.remember(entry, before, *options)
    return result


def _survey(paths: list[Path], reading: Reading, plan: Callable[[], Plan]) -> Survey:
    """What the images of a folder are like: measured once for each state of its files."""
    key = (stamp(paths), *decoders(), reading.max_image_pixels, "survey")
    with suppress(ValueError, TypeError):
        return Survey(*json.loads(cache.recall(*key)))
    parts = plan().parts
    samples = [s for part in parts.values() for s in part]
    found = measure_all(samples, FOLDER.rstrip(":"), reading.max_image_pixels)
    left, sides = iter(found), dict[str, list[int]]()
    for (domain, _), part in parts.items():
        measured = (m for m in islice(left, len(part)) if m is not None)
        sides.setdefault(domain, []).extend(m.side for m in measured)
    deep = [m for m in found if m is not None and m.low is not None]
    pixel_range = None
    if not all(m.window for m in deep):
        low, high = min(m.low or 0.0 for m in deep), max(m.high or 0.0 for m in deep)
        pixel_range = f"{low:.9g}:{high if high > low else low + 1:.9g}"
    every = [side for own in sides.values() for side in own]
    middle = {domain: median_high(own) for domain, own in sides.items() if own}
    survey = Survey(median_high(every or [choose.SMALL]), middle, pixel_range)
    cache.remember(json.dumps(survey), *key)
    return survey


def _decode_plan(
    entry: str, plan: Plan, title: str, size: int, reading: Reading, source: list[str]
) -> Decoded:
    """Decode all images of the plan and store them in the cache."""
    samples = [s for part in plan.parts.values() for s in part]
    with ExitStack() as at_end:
        shape = (3, size, size)
        pixels = at_end.enter_context(cache.scratch(entry, (len(samples), *shape)))
        bad = decode_all(samples, pixels, title, reading.max_image_pixels, reading.pixel_range)
        skipped = [f"{samples[i].name}: {why}" for i, why in bad.items()]
        if bad and not reading.skip_bad:
            shown = "; ".join(f"'{samples[i].name}': {why}" for i, why in list(bad.items())[:5])
            more = f"; and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise ProtofedError(
                f"cannot decode {len(bad)} of {len(samples)} images: {shown}{more}",
                "fix or remove them, or leave them out with --skip-bad",
            )
        if bad:
            good = [i for i in range(len(samples)) if i not in bad]
            kept = at_end.enter_context(cache.scratch(entry, (len(good), *shape)))
            for row, i in enumerate(good):  # one at a time: all of them may not fit into memory
                kept[row] = pixels[i]
            pixels = kept
        parts = []
        row_of = itertools.count()
        for (domain, split), own in plan.parts.items():
            labels = [s.label for s in own if next(row_of) not in bad]
            if not labels:
                raise ProtofedError(f"no image for {split} is left in domain '{domain}'")
            parts.append((domain, split, labels))
        return cache.store(entry, pixels, plan.classes, parts, plan.notes, skipped, source)
