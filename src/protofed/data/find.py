"""Where the files of a task lie on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from protofed.data.cache import cache_folder
from protofed.data.specs import Spec, plain
from protofed.data.trees import hidden, is_archive
from protofed.errors import ProtofedError

_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_LIST = re.compile(r".+_(train|crossval|val|test)(_kfold)?\.txt", re.IGNORECASE)


class DataMissing(ProtofedError):
    """A task's files are not where they were looked for."""


def data_root(data: str | Path | None = None) -> Path:
    """The folder of all data: as given, else ``PROTOFED_DATA``, else in the cache folder."""
    own = data or os.environ.get("PROTOFED_DATA")
    return Path(own).expanduser() if own else cache_folder() / "data"


def find(spec: Spec, data: str | Path | None = None) -> list[Path]:
    """The files and folders that belong to the task, or an error that says where it looked."""
    root = data_root(data)
    tried = [str(root)]
    if root.is_file():
        if is_archive(root):
            return [root, *_lists(root.parent)]
    elif root.is_dir():
        names = sorted(p.name for p in root.iterdir() if not hidden(p.name))
        folders = [root / n for n in names if plain(n) in spec.folders and (root / n).is_dir()]
        lists = [p for f in (root, *folders) for p in _lists(f)]
        for path in folders:
            if spec.name == "digits" or _holds(spec, path):
                return [path, *_lists(root)]
        for name in names:
            stem = next((name[: -len(e)] for e in _ENDINGS if name.lower().endswith(e)), None)
            if stem and plain(stem) in spec.folders and is_archive(root / name):
                return [root / name, *lists]
        tried += [str(root / f"{spec.name}{end}") for end in ("", *_ENDINGS[:2], ".zip")]
        inside = _inside(spec, root, names)
        if inside:
            return inside
    wanted = ", ".join(spec.domains)
    raise DataMissing(
        f"the data of task '{spec.name}' are not found; looked for {', '.join(tried)}"
        + (f", and for {wanted} in {root}" if root.is_dir() else " (there is no such folder)"),
        f"protofed data fetch {spec.name}, or say where they are with --data or PROTOFED_DATA",
    )


def _holds(spec: Spec, folder: Path) -> bool:
    """Whether a folder of a domain is in there, at most two levels down."""
    aliases = {plain(a) for name, more in spec.domains.items() for a in (name, *more)}
    near = [p for p in folder.iterdir() if p.is_dir() and not hidden(p.name)]
    below = (q for p in near for q in p.iterdir() if q.is_dir())
    return any(plain(p.name) in aliases for p in (*near, *below))


def _inside(spec: Spec, root: Path, names: list[str]) -> list[Path]:
    """What lies in the folder itself, where it is the task's own under another name."""
    if spec.name == "digits":
        own = [n for n in names if _digits(spec, root / n)]
    else:
        aliases = {plain(a) for name, more in spec.domains.items() for a in (name, *more)}
        own = [n for n in names if plain(n) in aliases and (root / n).is_dir()]
        # the official archive of PACS has its domains in a folder of their own
        own += [n for n in names if plain(n) == "kfold" and (root / n).is_dir()]
    return [root / n for n in own] + (_lists(root) if own else [])


def _digits(spec: Spec, path: Path) -> bool:
    name = plain(path.name)
    if path.is_dir():
        return any(name.startswith(plain(a)) for d, m in spec.domains.items() for a in (d, *m))
    official = ("train-images", "train-labels", "t10k-images", "t10k-labels", "train_32x32",
                "test_32x32")  # fmt: skip
    return name.startswith(tuple(spec.domains)) or path.name.startswith(official)


def _lists(folder: Path) -> list[Path]:
    """Lists of images (photo_train_kfold.txt, CALTECH_test.txt), here or one folder below."""
    below = sorted(p for p in folder.iterdir() if p.is_dir() and not hidden(p.name))
    wanted = [p for p in below if plain(p.name) in ("lists", "txtlists", "splits", "kfold")]
    return [
        p for f in (folder, *wanted) for p in sorted(f.glob("*.txt")) if _LIST.fullmatch(p.name)
    ]
