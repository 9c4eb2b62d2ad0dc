"""The tasks by name, and what is known about them before any image is read."""

from __future__ import annotations

from protofed.data.glyphs import INFO as GLYPHS
from protofed.data.sources import PUBLISHED
from protofed.data.sources.folder import FOLDER, TEST_SPLITS
from protofed.data.task import IMAGE_SIZE, TaskInfo
from protofed.errors import ProtofedError, unknown

TASKS: tuple[str, ...] = ("glyphs", *PUBLISHED)
"""The names of the tasks; ``folder:PATH`` is a task too."""


def describe(name: str) -> TaskInfo:
    """The static description of a task. Nothing is read from the disk."""
    if name == "glyphs":
        return GLYPHS
    if name in PUBLISHED:
        return PUBLISHED[name].info
    if name in (FOLDER, FOLDER.rstrip(":")):
        raise ProtofedError("task folder: which folder?", "write --task folder:PATH")
    if name.startswith(FOLDER):
        return TaskInfo(name, None, None, None, None, test_splits=TEST_SPLITS)
    raise unknown("task", name, (*TASKS, "folder:PATH"))


__all__ = ["FOLDER", "IMAGE_SIZE", "TASKS", "TaskInfo", "describe"]
