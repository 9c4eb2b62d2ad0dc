"""Downloading a task's files from their home pages, in the formats that these serve.

A file is put in place only after it was checked: against the checksum that its home page or a
public loader publishes, by the number of images in it, and, if nobody publishes a checksum, against
the hash recorded at its first download (``SHA256SUMS.json``, next to the files).

Only ``protofed data fetch`` imports this module; loading a task never downloads anything.
"""

from __future__ import annotations

import errno
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pooch
import requests
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from protofed.data.locate import locate
from protofed.data.readers import read_arrays, read_idx, sniff
from protofed.data.sources import PUBLISHED
from protofed.data.sources.published import ManualDownload, RemoteFile, plain
from protofed.data.task import DataMissing
from protofed.errors import ProtofedError, unknown
from protofed.files import write_atomic
from protofed.silence import Silence
from protofed.version import __version__

SUMS = "SHA256SUMS.json"
_CHUNK = 1 << 16
_LIST_LINE = re.compile(r"\S.* \d+")  # an image's path and its label
_SILENT = (requests.ConnectionError, requests.Timeout)
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # HTTP errors that a later try may not have


class Mismatch(ProtofedError):
    """A file is not what it should be."""


class DiskFull(ProtofedError):
    """There is no room for a file."""


class _Unavailable(Exception):
    """A URL does not serve the file; another one may."""


def select(
    task: str, domain: str | None = None
) -> tuple[tuple[RemoteFile, ...], tuple[ManualDownload, ...]]:
    """The files of a task, or of one of its domains, to download automatically and by hand."""
    if task == "glyphs":
        raise ProtofedError("glyphs needs no download", "protofed run --task glyphs makes it")
    if task not in PUBLISHED:
        raise unknown("task with files to fetch", task, PUBLISHED)
    whole = PUBLISHED[task]
    if domain is None:
        return whole.files, whole.manual
    if domain not in whole.domains:
        raise unknown(f"domain of {task}", domain, whole.domains)
    files = tuple(f for f in whole.files if f.domain == domain)
    return files, tuple(m for m in whole.manual if domain in m.domains)


# ---- downloading -------------------------------------------------------------------------------


@dataclass
class Downloader:
    """Downloads files. ``attempts`` is how often a URL is tried if its server has a problem."""

    console: Console
    attempts: int = 3
    timeout: tuple[float, float] = (5.0, 30.0)  # to connect, and between two blocks
    sleep: Callable[[float], None] = time.sleep
    asked: set[str] = field(default_factory=set)
    """Hosts that were named to the user, who waits for their answer."""
    unreachable: set[str] = field(default_factory=set)
    """Hosts that did not answer, so that not every file waits for them again."""

    def fetch(self, files: Sequence[RemoteFile], folder: Path) -> None:
        """Download every file to its place below ``folder``; existing files are only checked.

        A file that fails does not stop the others; the error at the end names all of them. A full
        disk stops at once.
        """
        errors = []
        for file in files:
            try:
                self._fetch_one(file, folder / file.path)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    message = f"the disk is full: no room for {file.path}"
                    raise DiskFull(message, "free some space and run the command again") from None
                errors.append(ProtofedError(f"cannot write {folder / file.path}: {error}"))
            except ProtofedError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            more = f"\n  and {len(errors) - 4} more" if len(errors) > 4 else ""
            shown = "".join(f"\n  {error}" for error in errors[:4]) + more
            raise ProtofedError(
                f"{len(errors)} of {len(files)} files could not be downloaded:{shown}"
            )

    def _fetch_one(self, file: RemoteFile, target: Path) -> None:
        checked = f"MD5 as published by {file.cited}" if file.md5 else f"as recorded in {SUMS}"
        if target.exists():
            check(file, target, target)
            record(file, target)
            self._say(f"{file.path}: already there, {checked}")
            return
        new = [p for p in (target.parent, *target.parent.parents) if not p.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fetch_new(file, target, checked)
        finally:
            if not target.exists():
                with suppress(OSError):  # not empty: other files are there
                    for folder in new:
                        folder.rmdir()

    def _fetch_new(self, file: RemoteFile, target: Path, checked: str) -> None:
        reasons = []
        for url in file.urls:
            # A hidden folder of its own: readers ignore it, and so does another process.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
                try:
                    path = self._download(file, url, Path(scratch))
                    check(file, path, target)
                except (_Unavailable, Mismatch) as reason:
                    reasons.append(f"{url}: {reason}")
                    continue
                path.replace(target)
            record(file, target)
            size = decimal(target.stat().st_size)
            self._say(f"{file.path}: {size} from {urlsplit(url).netloc}, {checked}")
            return
        raise ProtofedError(f"cannot download {file.path}: " + "; ".join(reasons))

    def _download(self, file: RemoteFile, url: str, folder: Path) -> Path:
        """Download the file into the folder, in as many attempts as allowed."""
        host, path = urlsplit(url).netloc, folder / Path(file.path).name
        if urlsplit(url).scheme not in ("http", "https"):
            raise _Unavailable("only http and https are supported")
        if host in self.unreachable:
            raise _Unavailable(f"{host} did not answer before")
        if host not in self.asked:
            self.asked.add(host)
            self._say(f"asking {host}")
        # identity: a .gz file must arrive as it is, not unpacked on the way
        headers = {"User-Agent": f"protofed/{__version__}", "Accept-Encoding": "identity"}
        for attempt in range(1, self.attempts + 1):
            bar = _Bar(self.console, file.path)
            with bar.progress:
                get = pooch.HTTPDownloader(
                    progressbar=bar, chunk_size=_CHUNK, timeout=self.timeout, headers=headers
                )
                try:
                    get(url, str(path), None)
                    return path
                except requests.RequestException as error:
                    reason = _reason(error)
                    if isinstance(error, _SILENT) and not bar.started:
                        self.unreachable.add(host)
                        self._say(f"{host} does not answer")
                        raise _Unavailable(f"{host} does not answer: {reason}") from None
                    if not _is_transient(error):
                        raise _Unavailable(reason) from None
            if attempt < self.attempts:
                self.sleep(float(2 ** (attempt - 1)))
        raise _Unavailable(f"{reason} ({self.attempts} attempts)")

    def _say(self, line: str) -> None:
        self.console.print(escape(line), highlight=False, soft_wrap=True)


class _Bar:
    """A bar with size, speed and remaining time (if there is a terminal), as pooch expects it."""

    def __init__(self, console: Console, title: str) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self.progress.add_task(escape(title), total=None)
        self._console, self._title = console, title
        self._got, self._silence = 0, Silence()
        self.started, self.total = False, 0  # pooch sets the total if the server reports it

    def update(self, n: int) -> None:
        self.started = True
        self.progress.update(self._task, total=self.total or None, advance=n)
        self._got += n
        if self.progress.disable and self._silence.too_long():
            of = f" of {decimal(self.total)}" if self.total else ""
            text = escape(f"{self._title}: {decimal(self._got)}{of}")
            self._console.print(text, highlight=False, soft_wrap=True)

    def reset(self) -> None:
        self.progress.update(self._task, completed=0)
        self._got = 0

    def close(self) -> None:
        self.progress.refresh()


def _is_transient(error: requests.RequestException) -> bool:
    """Whether the server has a problem that may pass, or the transfer was cut."""
    if error.response is not None:
        return error.response.status_code in _TRANSIENT
    return isinstance(error, (*_SILENT, requests.exceptions.ChunkedEncodingError))


def _reason(error: requests.RequestException) -> str:
    """What happened, without the URL and the class names that requests puts around it."""
    if error.response is not None:
        return f"HTTP {error.response.status_code} {error.response.reason}"
    cause: Any = error.args[0] if error.args else error
    cause = getattr(cause, "reason", None) or cause
    text = cause.args[0] if isinstance(cause, Exception) and cause.args else cause
    return str(text).rpartition(": ")[2]


# ---- checking ----------------------------------------------------------------------------------


def check(file: RemoteFile, path: Path, target: Path) -> None:
    """Raise ``Mismatch`` unless ``path`` is the file that belongs at ``target``."""
    name, again = target.name, "move it away and fetch it again" if path == target else ""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise Mismatch(f"{name} has {size} bytes, expected {file.size}", again)
    if file.md5 is not None:
        found = pooch.file_hash(str(path), "md5")
        if found != file.md5:
            raise Mismatch(f"{name} has MD5 {found}, {file.cited} publishes {file.md5}", again)
    elif known := _sums(target.parent).get(name):
        found = pooch.file_hash(str(path), "sha256")
        if found != known:
            sums = target.parent / SUMS
            newer = f"if a new version was published, delete the line of {name} in {sums}"
            raise Mismatch(
                f"{name} has SHA-256 {found}, at the first download it was {known}",
                f"{again}; {newer}" if again else newer,
            )
    if file.count is not None and (number := count(path)) != file.count:
        raise Mismatch(f"{name} has {number} entries, expected {file.count}", again)


def record(file: RemoteFile, target: Path) -> None:
    """Record the hash of a file for which nobody publishes one."""
    if file.md5 is None and target.name not in (sums := _sums(target.parent)):
        sums[target.name] = pooch.file_hash(str(target), "sha256")
        write_atomic(target.parent / SUMS, json.dumps(sums, indent=2, sort_keys=True) + "\n")


def count(path: Path) -> int:
    """The number of images, labels or lines in a file of an official format, read to its end."""
    kind = sniff(path)
    try:
        if kind is not None:
            return len(read_idx(path) if kind.startswith("idx") else read_arrays(path, kind).labels)
    except ProtofedError as error:
        raise Mismatch(error.message) from None
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not all(_LIST_LINE.fullmatch(line.strip()) for line in lines):
        raise Mismatch(f"{path.name} is neither a file of images nor a list of them")
    return len(lines)


def _sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of files at their first download."""
    path = folder / SUMS
    try:
        sums = json.loads(path.read_text())
        assert isinstance(sums, dict)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AssertionError):
        # Treating it as empty would accept whatever is there now.
        raise ProtofedError(f"{path} cannot be read", "fix or delete it") from None
    return sums


# ---- what a person has to download -------------------------------------------------------------


def instructions(task: str, manual: ManualDownload, root: Path) -> str:
    return (
        f"To download by hand ({', '.join(manual.domains)}): {manual.what}.\n"
        + "".join(f"  from   {page}\n" for page in manual.pages)
        + f"  into   {root / task}\n"
        f"  as     {manual.layout}\n"
        f"  then   protofed data verify {task} --data {root}"
    )


def is_missing(task: str, manual: ManualDownload, root: Path) -> bool:
    """Whether the user still has to put these files into the folder of all data."""
    try:
        paths = locate(PUBLISHED[task], root)
    except DataMissing:
        return True
    if not PUBLISHED[task].owns:
        return False
    # Such a task is found as soon as one of its domains is: look for these.
    names = [plain(f.name) for p in paths for f in (p.iterdir() if p.is_dir() else [p])]
    return not all(any(n.startswith(d) for n in names) for d in manual.domains)
