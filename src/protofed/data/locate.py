"""Where the files of a published task are on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from protofed.data.cache import cache_folder
from protofed.data.listing import hidden, is_archive
from protofed.data.sources.published import PublishedTask, plain
from protofed.data.task import DataMissing
from protofed.errors import ProtofedError
from protofed.files import expand_user

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LIST = re.compile(r".+_(train|crossval|val|test)(_kfold)?\.txt", re.IGNORECASE)


def data_root(data: str | Path | None = None) -> Path:
    """The folder of all data: as given, else ``PROTOFED_DATA``, else in the cache folder."""
    own = data or os.environ.get("PROTOFED_DATA")
    return expand_user(own) if own else cache_folder() / "data"


def locate(task: PublishedTask, data: str | Path | None = None) -> list[Path]:
    """The files and folders that belong to the task, or an error that says where it looked."""
    try:
        return _locate(task, data_root(data))
    except OSError as error:
        raise ProtofedError(f"cannot read '{error.filename}': {error.strerror}") from None


def _locate(task: PublishedTask, root: Path) -> list[Path]:
    name = task.info.name
    tried = [str(root)]
    if root.is_file():
        if is_archive(root):
            return [root, *_lists(root.parent)]
    elif root.is_dir():
        names = sorted(p.name for p in root.iterdir() if not hidden(p.name))
        folders = [root / n for n in names if plain(n) in task.folders and (root / n).is_dir()]
        lists = [p for f in (root, *folders) for p in _lists(f)]
        for path in folders:
            if task.owns or _has_domain(task, path):
                return [path, *_lists(root)]
        for file in names:
            stem = next((file[: -len(e)] for e in _ARCHIVES if file.lower().endswith(e)), None)
            if stem and plain(stem) in task.folders and is_archive(root / file):
                return [root / file, *lists]
        tried += [str(root / f"{name}{end}") for end in ("", *_ARCHIVES[:2], ".zip")]
        if inside := _inside(task, root, names):
            return inside
    wanted = ", ".join(task.domains)
    raise DataMissing(
        f"found no data for task '{name}'; looked for {', '.join(tried)}"
        + (f", and for {wanted} in {root}" if root.is_dir() else " (there is no such folder)"),
        task.fetch_hint,
    )


def _has_domain(task: PublishedTask, folder: Path) -> bool:
    """Whether the folder contains a domain's folder, at most two levels down."""
    near = [p for p in folder.iterdir() if p.is_dir() and not hidden(p.name)]
    below = (q for p in near for q in p.iterdir() if q.is_dir())
    return any(plain(p.name) in task.domain_names() for p in (*near, *below))


def _inside(task: PublishedTask, root: Path, names: list[str]) -> list[Path]:
    """The task's files in the root itself, in case that is the task's own folder."""
    if task.owns:
        own = [n for n in names if task.owns(root / n)]
    else:
        # PACS's archive has its domains in a folder named kfold
        known = (*task.domain_names(), "kfold")
        own = [n for n in names if plain(n) in known and (root / n).is_dir()]
    return [root / n for n in own] + (_lists(root) if own else [])


def _lists(folder: Path) -> list[Path]:
    """Lists of images (photo_train_kfold.txt, CALTECH_test.txt), here or one folder below."""
    below = sorted(p for p in folder.iterdir() if p.is_dir() and not hidden(p.name))
    wanted = [p for p in below if plain(p.name) in ("lists", "txtlists", "splits", "kfold")]
    texts = [p for f in (folder, *wanted) for p in sorted(f.glob("*.txt"))]
    return [p for p in texts if _LIST.fullmatch(p.name) and p.is_file()]
