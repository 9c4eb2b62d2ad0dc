"""Tasks, their images, and how they are split into clients."""

from __future__ import annotations

from collections.abc import Callable

from protofed.data.glyphs import glyphs
from protofed.data.split import Share, split
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import unknown

TASKS: dict[str, Callable[[], Task]] = {"glyphs": glyphs}


def load_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]()


__all__ = [
    "TASKS",
    "Augment",
    "Domain",
    "Images",
    "Share",
    "Task",
    "glyphs",
    "load_task",
    "split",
]
