"""Tasks, their images, and how they are split into clients."""

from __future__ import annotations

from protofed.data.info import TASKS, describe, distribution, distributions
from protofed.data.load import load_task
from protofed.data.split import Share, split
from protofed.data.task import Augment, DataMissing, Domain, Images, Task, TaskInfo

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
    "load_task",
    "split",
]
