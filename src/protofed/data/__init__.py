"""Tasks, their images, and how they are split into clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from protofed.data.distributions import distribution, distributions
from protofed.data.find import DataMissing
from protofed.data.glyphs import glyphs
from protofed.data.info import FOLDER, IMAGE_SIZE, TASKS, TaskInfo, describe
from protofed.data.real import real_task
from protofed.data.specs import SPECS
from protofed.data.split import Share, split
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError, unknown


def load_task(
    name: str,
    data: str | Path | None = None,
    image_size: int | None = None,
    flip: bool | None = None,
    test_split: str | None = None,
    skip_bad: bool = False,
    augment: str | None = None,
) -> Task:
    """The task of that name, or ``folder:PATH`` for a tree ``domain/class/image`` of one's own.

    ``data`` is the folder of real images (else ``PROTOFED_DATA``, else in the cache folder),
    ``image_size`` the side that images are resized to, ``flip`` whether training images are
    mirrored, ``test_split`` another way to divide them (pacs: ``kfold_leaky``), ``augment``
    ``crop`` or ``large``. ``skip_bad`` leaves out files that are no images.
    """
    for key, value, kind, words in (
        ("data", data, (str, Path), "a folder"),
        ("flip", flip, bool, "true or false"),
        ("skip_bad", skip_bad, bool, "true or false"),
        ("test_split", test_split, str, "a name"),
        ("augment", augment, str, "a name"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ProtofedError(f"{key} must be {words}, got {value!r}")
    if name.startswith(FOLDER) or name in SPECS:
        return real_task(name, data, image_size, flip, test_split, skip_bad, augment)
    if name == FOLDER.rstrip(":"):
        raise ProtofedError("task folder: which folder?", "write --task folder:PATH")
    if name not in TASKS:
        raise unknown("task", name, (*TASKS, "folder:PATH"))
    task = glyphs()
    if image_size not in (None, task.image_size):
        raise ProtofedError(f"glyphs have {task.image_size} pixels, not {image_size}")
    if test_split is not None:
        raise ProtofedError("glyphs have one test split", "leave out --test-split")
    if augment not in (None, "crop"):
        raise ProtofedError("glyphs have one augmentation", "leave out --augment")
    return task if flip is None else replace(task, augment=replace(task.augment, flip=flip))


def outline(name: str, domains: Iterable[str]) -> Task:
    """A task without its images: what is known of it where its files are not at hand."""
    none = Images(
        torch.empty(0, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8), torch.empty(0).long()
    )
    spec = SPECS.get(name)
    names = tuple(spec.domains if spec else domains)
    return Task(
        name=name,
        classes=tuple(spec.classes) if spec else (),
        domains={d: Domain(none, none) for d in names},
        augment=Augment(),
        clients=spec.clients if spec else dict.fromkeys(names, 1),
        samples=spec.samples if spec else dict.fromkeys(names, 1.0),
        note=spec.about if spec else "",
        leftover=spec.leftover if spec else False,
        repair=spec.repair if spec else False,
        test_split=spec.test_splits[0] if spec else None,
    )


__all__ = [
    "TASKS",
    "Augment",
    "DataMissing",
    "Domain",
    "Images",
    "Share",
    "Task",
    "TaskInfo",
    "describe",
    "distribution",
    "distributions",
    "glyphs",
    "load_task",
    "outline",
    "split",
]
