"""The files in folders and archives, listed and read in the same way.

Members of an archive are read into memory. Nothing is ever written to a path from an archive.
What is in a folder but is neither a file nor a folder (a named pipe, a device, a broken link) is
listed and never opened: reading it is an error that says what it is.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from protofed.data.task import Sample
from protofed.data.unpack import DAMAGE, Allowance, opened_tar, read_member, unpacking_at_most
from protofed.errors import ProtofedError

FileParts = tuple[str, ...]
Stamp = list[tuple[str, int, int, int]]
Reader = Callable[[], bytes]
Member = tuple[str, Reader | None, int]  # of an archive: name, None for a folder, bytes to read

_JUNK = {"thumbs.db", "desktop.ini", "__macosx"}
_HASHED = 1 << 32  # files larger than this are known by size and times alone
_FIRST_HEADER_GB = 0.001
_MEMBER = 1 << 10  # the memory that it takes to list a member of an archive
_LINKS = 2  # folders linked to each other have endless paths without a circle in them
_SPECIAL = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
            stat.S_IFSOCK: "a socket"}  # fmt: skip


@dataclass(frozen=True)
class File:
    """A file: the parts of its path in the tree, its name in messages, and its content.

    ``size`` is the number of bytes that reading it takes; 0 if they are in memory already.
    """

    parts: FileParts
    name: str
    read: Reader
    size: int = 0

    def sample(self, label: int) -> Sample:
        return Sample(self.name, label, self.read, self.size)


@dataclass(frozen=True)
class Entry:
    """Something below a folder. ``problem`` says why it can be neither read nor entered."""

    parts: FileParts
    path: Path
    status: os.stat_result
    problem: str = ""
    above: frozenset[tuple[int, int]] = frozenset()
    """The folders that it is in, by device and number."""
    links: int = 0
    """How many links lead to it."""

    @property
    def is_folder(self) -> bool:
        return not self.problem and stat.S_ISDIR(self.status.st_mode)


def hidden(name: str) -> bool:
    """Whether a desktop left it behind (.DS_Store, Thumbs.db) or it is a partial download."""
    return name.startswith(".") or name.lower() in _JUNK or name.endswith(".part")


def walk(folder: Path) -> Iterator[Entry]:
    """All files and folders below, sorted by name, without hidden ones; links are followed."""
    try:
        pending = _inside(Entry((), folder, folder.stat()))
        while pending:
            yield (entry := pending.pop())
            if entry.is_folder:
                pending += _inside(entry)
    except OSError as error:
        raise ProtofedError(f"cannot read '{error.filename}': {error.strerror}") from None


def _inside(folder: Entry) -> list[Entry]:
    """What is in a folder, the last one first."""
    above = folder.above | {(folder.status.st_dev, folder.status.st_ino)}
    with os.scandir(folder.path) as entries:
        found = sorted((e for e in entries if not hidden(e.name)), key=lambda e: e.name)
    return [_entry(e, (*folder.parts, e.name), above, folder.links) for e in reversed(found)]


def _entry(
    entry: os.DirEntry[str], parts: FileParts, above: frozenset[tuple[int, int]], links: int
) -> Entry:
    path = Path(entry.path)
    try:
        status = path.stat()
    except OSError:
        return Entry(parts, path, path.lstat(), "it is a broken link")
    problem = _SPECIAL.get(stat.S_IFMT(status.st_mode), "")
    if stat.S_ISDIR(status.st_mode) and entry.is_symlink():
        links += 1
        if (status.st_dev, status.st_ino) in above:
            problem = "a link to a folder that contains it"
        elif links > _LINKS:
            problem = f"a link behind {_LINKS} others"
    return Entry(parts, path, status, problem and f"it is {problem}", above, links)


def _entries(paths: Iterable[Path]) -> Iterator[tuple[str, Entry]]:
    """All files and folders below ``paths``, each with its name."""
    for path in paths:
        if path.is_dir():
            for entry in walk(path):
                yield "/".join((path.name, *entry.parts)), entry
        else:
            yield path.name, Entry((), path, path.stat())


def stamp(paths: Iterable[Path]) -> Stamp:
    """Name, size and times of every file; they change whenever a file is written."""
    return [(name, *_times(entry)) for name, entry in _entries(paths)]


def _times(entry: Entry) -> tuple[int, int, int]:
    if entry.problem:
        return -2, 0, 0
    s = entry.status
    return (-1, 0, 0) if entry.is_folder else (s.st_size, s.st_mtime_ns, s.st_ctime_ns)


def content_key(paths: Iterable[Path]) -> str:
    """A hash of all names and all bytes."""
    digest = hashlib.sha256()
    for name, entry in _entries(paths):
        kind = entry.problem or ("folder" if entry.is_folder else "file")
        digest.update(f"{kind} {name}\0".encode(errors="surrogateescape"))
        if kind == "file":
            size, *times = _times(entry)
            if size > _HASHED:
                digest.update(f"{size} {times}\0".encode())
                continue
            try:
                with entry.path.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                raise ProtofedError(f"cannot read '{entry.path}': {error.strerror}") from None
    return digest.hexdigest()


def is_archive(path: Path) -> bool:
    """Whether the content of the file is a tar (perhaps compressed) or a zip archive."""
    try:
        if not path.is_file():
            return False
        if zipfile.is_zipfile(path):
            return True
        with unpacking_at_most(_FIRST_HEADER_GB), opened_tar(path):
            return True
    except (*DAMAGE, ProtofedError):
        return False


def list_files(path: Path) -> tuple[list[File], set[FileParts]]:
    """The files and the folders of a tree.

    The paths of a folder's files start with its own name; those of an archive are as it has them.
    Names are composed (NFC): macOS writes é as two characters, and it is the same class.
    """
    listed, folders = [], set()
    if path.is_dir():
        for entry in walk(path):
            own = _composed((path.name, *entry.parts))
            if entry.is_folder:
                folders.add(own)
            else:
                # a name that is not valid text can be read but not printed
                name = os.fsencode(entry.path).decode("utf-8", "replace")
                size = entry.status.st_size
                refused = entry.problem and partial(_refuse, entry.problem)
                listed.append(
                    File(own, name, refused or partial(_slice, entry.path, 0, size), size)
                )
        return listed, folders
    try:
        for member, read, size in (_zip if zipfile.is_zipfile(path) else _tar)(path):
            own = _composed(p for p in member.split("/") if p not in ("", "."))
            if not own or any(map(hidden, own)):
                continue
            if read is None:
                folders.add(own)
            else:
                listed.append(File(own, f"{path}: {'/'.join(own)}", read, size))
    except DAMAGE as error:
        raise ProtofedError(f"'{path}' is damaged: {error}", "download or copy it again") from None
    return sorted(listed, key=lambda f: f.parts), folders


def _composed(parts: Iterable[str]) -> FileParts:
    return tuple(unicodedata.normalize("NFC", p) for p in parts)


def _refuse(problem: str) -> bytes:
    raise OSError(problem)


def _slice(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"'{path}' is truncated")
    return content


def _tar(path: Path) -> Iterator[Member]:
    listing = Allowance(path)
    with opened_tar(path) as (archive, compressed):
        for member in archive:
            if member.size < 0 or archive.offset < member.offset_data:  # it would be read forever
                raise ValueError(f"the size of {member.name!r:.100} is negative")
            listing.take(_MEMBER)
            if member.isdir():
                yield member.name, None, 0
            elif member.isreg() and not (compressed or member.issparse()):
                # read in place; nothing in a compressed one can be read on its own
                read = partial(_slice, path, member.offset_data, member.size)
                yield member.name, read, member.size
            elif member.isreg():
                listing.take(member.size if member.issparse() else 0)  # its holes are not read
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, partial(bytes, content.read()), 0


def _zip(path: Path) -> Iterator[Member]:
    allowance = Allowance(path)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            allowance.take(_MEMBER)
            if info.is_dir():
                yield info.filename, None, 0
            else:
                yield info.filename, partial(bytes, read_member(archive, info, allowance)), 0
