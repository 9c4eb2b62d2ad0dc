"""Downloading a task's files from their homes, in the formats the homes serve.

A file is put in place only after it was checked: against the checksum that its home or a public
loader publishes, by the number of images in it, and, where no checksum is published, against the
hash that was recorded at its first download (``SHA256SUMS.json`` beside the files). What was
downloaded of a file is kept as ``.NAME.part``, and the next try goes on from there.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

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

from protofed.data.find import DataMissing, find
from protofed.data.homes import Manual, Source
from protofed.data.readers import read_arrays, read_idx, sniff
from protofed.data.specs import SPECS, plain
from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.version import __version__

SUMS = "SHA256SUMS.json"
_BLOCK = 1 << 16
_ENTRY = re.compile(r"\S.* \d+")  # a line of a list: an image's path and its label
_NAMED = 4  # errors told in full
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a later try may cure: too many requests, and whatever ails the server itself.
_PASSING = {408, 425, 429, 500, 502, 503, 504}


# ---- fetching ----------------------------------------------------------------------------------


class _Failed(Exception):
    """This URL does not give the file; another may."""


class _Cut(Exception):
    """The connection broke, or the server is not well: worth another try."""


def _http_only() -> urllib.request.OpenerDirector:
    """An opener that knows http and https only, also after a redirection: no file:, no ftp:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


@dataclass
class Fetcher:
    """Downloads files. ``attempts`` is how often in a row a URL may fail without a byte gained."""

    console: Console
    attempts: int = 5
    timeout: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    opener: urllib.request.OpenerDirector = field(default_factory=_http_only)
    # Hosts that gave nothing in all attempts: without a network, one file waits, not every one.
    silent: set[str] = field(default_factory=set)

    def fetch(self, files: Sequence[Source], folder: Path) -> None:
        """Bring every file to its place below ``folder``; those that are there are only checked.

        A file that cannot be had does not keep the others from being fetched; the error at the
        end names all of them. A full disk ends it at once.
        """
        errors = []
        for source in files:
            try:
                self._one(source, folder / source.path)
            except DiskFull:
                raise
            except ProtofedError as error:
                errors.append(error)
            except OSError as error:
                if error.errno in _FULL:
                    raise DiskFull(f"the disk is full: no room for {source.path}") from None
                errors.append(ProtofedError(f"cannot write {folder / source.path}: {error}"))
        if len(errors) == 1:
            raise errors[0]
        if errors:
            more = [f"  and {len(errors) - _NAMED} more"] if len(errors) > _NAMED else []
            raise ProtofedError(
                f"{len(errors)} of {len(files)} files could not be fetched:\n"
                + "\n".join([*(f"  {e}" for e in errors[:_NAMED]), *more])
            )

    def _one(self, source: Source, target: Path) -> None:
        if target.exists():
            check(source, target, target)
            remember(source, target)
            self._say(f"{source.path}: already there, {_checked(source)}")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _beside(target, "part")
        reasons = []
        for url in source.urls:
            with _locked(part) as file:
                try:
                    self._download(source, url, file, part)
                    # Checked and named while it is locked: nobody else writes into it meanwhile.
                    check(source, part, target)
                    os.fsync(file.fileno())
                    part.replace(target)
                except (_Failed, Mismatch) as reason:
                    if isinstance(reason, Mismatch):
                        part.replace(_beside(target, "bad"))
                        _note(part).unlink(missing_ok=True)
                    reasons.append(f"{url}: {reason}")
                    continue
            _note(part).unlink(missing_ok=True)
            remember(source, target)
            size = decimal(target.stat().st_size)
            self._say(f"{source.path}: {size} from {urlsplit(url).netloc}, {_checked(source)}")
            return
        if part.exists() and not part.stat().st_size:
            part.unlink()
        raise ProtofedError(f"cannot fetch {source.path}: " + "; ".join(reasons))

    def _say(self, line: str) -> None:
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def _download(self, source: Source, url: str, file: IO[bytes], part: Path) -> None:
        """Complete ``part``, going on from what is there, over as many connections as it takes."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise _Failed("only http and https are fetched")
        host = urlsplit(url).netloc
        if host in self.silent:
            raise _Failed(f"{host} did not answer before")
        furthest, failures, gained = _size(file), 0, False
        with self._bar(source) as progress:
            while True:
                try:
                    self._connect(source, url, file, part, progress)
                    return
                except _Cut as cut:
                    if _size(file) > furthest:
                        furthest, failures, gained = _size(file), 0, True
                    failures += 1
                    if failures >= self.attempts:
                        if not gained:
                            self.silent.add(host)
                        raise _Failed(f"{cut} ({failures} tries)") from None
                    self.sleep(min(30.0, 0.5 * 2**failures))

    def _connect(
        self,
        source: Source,
        url: str,
        file: IO[bytes],
        part: Path,
        progress: Callable[[int, int | None], None],
    ) -> None:
        """One connection: returns when the file is complete, raises ``_Cut`` when it is not."""
        have = self._resumable(source, url, file, part)
        headers = {"User-Agent": f"protofed/{__version__}", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            # The rest of another version of the file is worse than all of it once more.
            validator = _read_note(part).get("validator")
            if validator and _read_note(part).get("url") == url:
                headers["If-Range"] = validator
        try:
            response = self.opener.open(
                urllib.request.Request(url, headers=headers), timeout=self.timeout
            )
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and have:  # nothing after what we have: complete, or not it
                    if _total(error.headers.get("Content-Range", "")) == have:
                        return
                    file.truncate(0)
                    raise _Cut("the server has less than was downloaded before") from None
                kind = _Cut if error.code in _PASSING else _Failed
                raise kind(f"HTTP {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Cut(_reason(error)) from None
        with response:
            total = _announced(response)
            # Before anything is written: an error page served as 200 must not cost the part.
            if source.size is not None and total not in (None, source.size):
                raise _Failed(f"the server has {total} bytes, expected {source.size}")
            self._begin(response, have, file)
            tag = response.headers.get("ETag", "")
            # A weak tag names equal meaning, not equal bytes: it cannot join two parts.
            strong = tag if not tag.startswith("W/") else ""
            validator = strong or response.headers.get("Last-Modified")
            write_atomic(_note(part), json.dumps({"url": url, "validator": validator}))
            self._receive(response, file, part, total, progress)

    def _resumable(self, source: Source, url: str, file: IO[bytes], part: Path) -> int:
        """How much of ``part`` can be kept when going on from this URL."""
        if source.md5 is None and _read_note(part).get("url") != url:
            # Without a checksum nothing would tell that two homes' halves do not fit.
            file.truncate(0)
        return file.seek(0, 2)

    @staticmethod
    def _begin(response: Any, have: int, file: IO[bytes]) -> None:
        """Set the file to where the response starts."""
        if response.status != 206:  # no Range support, or the file has changed: from the beginning
            file.seek(0)
            file.truncate()
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            file.truncate(0)
            raise _Cut("the server answered with another range than it was asked for")

    def _receive(
        self,
        response: Any,
        file: IO[bytes],
        part: Path,
        total: int | None,
        progress: Callable[[int, int | None], None],
    ) -> None:
        have = file.tell()
        if total is not None and shutil.disk_usage(part.parent).free < total - have:
            raise DiskFull.at(part, have, total)
        while True:
            try:
                block = response.read(_BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise _Cut(_reason(error)) from None
            if not block:
                break
            try:
                _write(file, block)
            except OSError as error:
                if error.errno in _FULL:
                    raise DiskFull.at(part, _size(file), total) from None
                raise
            have += len(block)
            progress(have, total)
        if total is not None and have < total:
            raise _Cut(f"the connection was cut after {have} of {total} bytes")

    @contextmanager
    def _bar(self, source: Source) -> Iterator[Callable[[int, int | None], None]]:
        """Size, speed and time left while the file comes; nothing where there is no terminal."""
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        ) as bar:
            task = bar.add_task(escape(source.path), total=source.size)
            yield lambda have, total: bar.update(task, completed=have, total=total)


class DiskFull(ProtofedError):
    """No room for the file. What was downloaded is kept."""

    @classmethod
    def at(cls, part: Path, have: int, total: int | None) -> DiskFull:
        """The error, after ``have`` of ``total`` bytes."""
        of, more = ("", "room") if total is None else (f" of {total}", decimal(total - have))
        return cls(
            f"the disk is full: {have}{of} bytes are in {part}",
            f"make room for {more} more and run the command again: it goes on from there",
        )


class Mismatch(ProtofedError):
    """A file is not what it should be."""


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """The partial file, open for writing by this process only."""
    part.touch()
    with part.open("r+b", buffering=0) as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has none; there, two downloads at once are the user's care
            pass
        except BlockingIOError:
            raise ProtofedError(f"another process is downloading {part}") from None
        if not part.exists():  # the other process has finished between our opening and locking
            raise ProtofedError(f"another process has just downloaded {part.stem[1:]}")
        yield file


def _beside(target: Path, ending: str) -> Path:
    # Hidden: readers tell files by their content and must not take these for the real one.
    return target.with_name(f".{target.name}.{ending}")


def _write(file: IO[bytes], block: bytes) -> None:
    while block:  # an unbuffered file may take a part of it only
        block = block[file.write(block) :]


def _size(file: IO[bytes]) -> int:
    return file.seek(0, 2)


def _note(part: Path) -> Path:
    """Beside a partial file: the URL that it comes from, and the version of the file there."""
    return part.with_name(part.name + ".json")


def _read_note(part: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        note = json.loads(_note(part).read_text())
        if isinstance(note, dict):
            return note
    return {}


def _announced(response: Any) -> int | None:
    """The size of the whole file, where the server tells it."""
    if response.status == 206:
        return _total(response.headers.get("Content-Range", ""))
    return _total(response.headers.get("Content-Length", ""))


def _total(content_range: str) -> int | None:
    total = content_range.rpartition("/")[2]  # "bytes 5-9/10", "bytes */10", or a plain length
    return int(total) if total.isdigit() else None


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner) or type(inner).__name__


# ---- checking ----------------------------------------------------------------------------------


def check(source: Source, path: Path, target: Path) -> None:
    """Raise ``Mismatch`` unless ``path`` holds the file that belongs at ``target``."""
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        raise Mismatch(
            f"{target.name} has {size} bytes, expected {source.size}", _again(path, target)
        )
    if source.md5 is not None:
        found = _digest(path, "md5")
        if found != source.md5:
            raise Mismatch(
                f"{target.name} has MD5 {found}, {source.cited} publishes {source.md5}",
                _again(path, target),
            )
    else:
        known, found = recorded(target), _digest(path, "sha256")
        if known is not None and found != known:
            raise Mismatch(
                f"{target.name} has SHA-256 {found}, at the first download it was {known}",
                f"{_again(path, target)}; if the home has a new version, delete the line of "
                f"{target.name} in {target.parent / SUMS}",
            )
    if source.count is not None:
        number = count(path)
        if number != source.count:
            raise Mismatch(
                f"{target.name} has {number} entries, expected {source.count}",
                _again(path, target),
            )


def recorded(target: Path) -> str | None:
    """The SHA-256 that was recorded when the file was first downloaded."""
    value = _sums(target.parent / SUMS).get(target.name)
    return None if value is None else str(value)


def remember(source: Source, target: Path) -> None:
    """Record the hash of a file for which nobody publishes one."""
    if source.md5 is None and recorded(target) is None:
        path = target.parent / SUMS
        sums = {**_sums(path), target.name: _digest(target, "sha256")}
        write_atomic(path, json.dumps(dict(sorted(sums.items())), indent=2) + "\n")


def count(path: Path) -> int:
    """The images, labels or lines in a file of an official format, read to its end."""
    kind = sniff(path)
    try:
        if kind is not None:
            return len(read_idx(path) if kind.startswith("idx") else read_arrays(path, kind).labels)
    except ProtofedError as error:
        raise Mismatch(error.message) from None
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not all(_ENTRY.fullmatch(line.strip()) for line in lines):
        raise Mismatch(f"{path.name} is neither a file of images nor a list of them")
    return len(lines)


def _sums(path: Path) -> dict[str, Any]:
    try:
        sums = json.loads(path.read_text())
        assert isinstance(sums, dict)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AssertionError):
        # Taking it for empty would accept whatever is there now.
        raise ProtofedError(f"{path} cannot be read", "mend or delete it") from None
    return sums


def _digest(path: Path, name: str) -> str:
    with path.open("rb") as file:
        # MD5 is what is published; it guards against accidents, not against an attacker.
        return hashlib.file_digest(
            file, lambda: hashlib.new(name, usedforsecurity=False)
        ).hexdigest()


def _checked(source: Source) -> str:
    if source.md5 is None:
        return f"as recorded in {SUMS}"
    return f"MD5 as {source.cited} publishes it"


def _again(path: Path, target: Path) -> str:
    return (
        "move it away and fetch it again"
        if path == target
        else f"kept as {_beside(target, 'bad').name}"
    )


# ---- homes that need a person ------------------------------------------------------------------


def instructions(task: str, manual: Manual, root: Path) -> str:
    """What a person has to download, from where, and where to put it."""
    return (
        f"To be downloaded by hand ({', '.join(manual.domains)}): {manual.what}.\n"
        + "".join(f"  from   {home}\n" for home in manual.homes)
        + f"  into   {root / task}\n"
        f"  as     {manual.layout}\n"
        f"  then   protofed data verify {task} --data {root}"
    )


def missing(task: str, manual: Manual, root: Path) -> bool:
    """Whether a person still has to put these files into the folder of all data."""
    try:
        paths = find(SPECS[task], root)
    except DataMissing:
        return True
    if task != "digits":
        return False
    # The folder of digits is there as soon as one domain is: look for this one.
    names = [plain(f.name) for p in paths for f in (p.iterdir() if p.is_dir() else [p])]
    return not all(any(n.startswith(d) for n in names) for d in manual.domains)
