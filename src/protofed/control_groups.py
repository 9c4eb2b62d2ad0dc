"""The control groups of Linux, by which containers and batch systems limit a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that may limit this process: its own, and those that contain it.

    A folder has the files of version 2 or those of version 1, whichever the system has.
    """
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base = groups
        elif controller in controllers.split(","):  # version 1
            base = groups / controller
        else:
            continue
        group = base / path.strip("/")
        while group.is_relative_to(base):
            yield group
            group = group.parent
