"""What is known of a task before any image is read."""

from __future__ import annotations

from protofed.data.glyphs import CLASSES, CLIENTS, DOMAINS, SAMPLES, SIDE
from protofed.data.specs import SPECS
from protofed.data.task import IMAGE_SIZE, TaskInfo
from protofed.errors import ProtofedError, unknown

FOLDER = "folder:"
"""How the name of a task begins whose images lie in a folder of one's own."""
TASKS: tuple[str, ...] = ("glyphs", *SPECS)
"""The tasks by name; ``folder:PATH`` is one too."""


def describe(name: str) -> TaskInfo:
    """The task of that name; nothing on the disk is looked at."""
    if name == "glyphs":
        return TaskInfo(name, DOMAINS, CLASSES, CLIENTS, SAMPLES, SIDE, flip=False)
    if spec := SPECS.get(name):
        return TaskInfo(
            name,
            tuple(spec.domains),
            tuple(spec.classes),
            spec.clients,
            spec.samples,
            test_splits=spec.test_splits,
            leftover=spec.leftover,
            repair=spec.repair,
            about=spec.about,
        )
    if name in (FOLDER, FOLDER.rstrip(":")):
        raise ProtofedError("task folder: which folder?", "write --task folder:PATH")
    if name.startswith(FOLDER):
        return TaskInfo(name, None, None, None, None, test_splits=("auto",))
    raise unknown("task", name, (*TASKS, "folder:PATH"))


__all__ = ["FOLDER", "IMAGE_SIZE", "TASKS", "TaskInfo", "describe"]
