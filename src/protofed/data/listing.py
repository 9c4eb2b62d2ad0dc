"""The files in folders and archives, listed and read in the same way.

Members of an archive are read into memory. Nothing is ever written to a path from an archive.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from protofed.errors import ProtofedError

FileParts = tuple[str, ...]
Stamp = list[tuple[str, int, int, int]]
Member = tuple[str, Callable[[], bytes] | None]  # of an archive: its name; None for a folder

_JUNK = {"thumbs.db", "desktop.ini", "__macosx"}


@dataclass(frozen=True)
class File:
    """A file: the parts of its path in the tree, its name in messages, and its content."""

    parts: FileParts
    name: str
    read: Callable[[], bytes]


def hidden(name: str) -> bool:
    """Whether a desktop left it behind (.DS_Store, Thumbs.db) or it is a partial download."""
    return name.startswith(".") or name.lower() in _JUNK or name.endswith(".part")


def walk(folder: Path) -> Iterator[tuple[FileParts, os.DirEntry[str]]]:
    """All files and folders below, sorted by name, without hidden ones; links are followed."""

    def inside(
        path: str, parts: FileParts, above: frozenset[str]
    ) -> Iterator[tuple[FileParts, os.DirEntry[str]]]:
        with os.scandir(path) as entries:
            found = sorted((e for e in entries if not hidden(e.name)), key=lambda e: e.name)
        for entry in found:
            own = (*parts, entry.name)
            yield own, entry
            if entry.is_dir():
                real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if real not in above:  # a link to a folder that contains it would never end
                    yield from inside(entry.path, own, above | {real})

    try:
        yield from inside(str(folder), (), frozenset({str(folder), os.path.realpath(folder)}))
    except OSError as error:
        raise ProtofedError(f"cannot read '{error.filename}': {error.strerror}") from None


def _entries(paths: Iterable[Path]) -> Iterator[tuple[str, Path, bool]]:
    """Name, path, and whether it is a folder, of all files and folders below ``paths``."""
    for path in paths:
        if path.is_dir():
            for parts, entry in walk(path):
                yield "/".join((path.name, *parts)), Path(entry.path), entry.is_dir()
        else:
            yield path.name, path, False


def stamp(paths: Iterable[Path]) -> Stamp:
    """Name, size and times of every file; they change whenever a file is written."""
    rows: Stamp = []
    for name, path, is_folder in _entries(paths):
        s = path.stat()
        times = (-1, 0, 0) if is_folder else (s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        rows.append((name, *times))
    return rows


def content_key(paths: Iterable[Path]) -> str:
    """A hash of all names and all bytes."""
    digest = hashlib.sha256()
    for name, path, is_folder in _entries(paths):
        kind = "folder" if is_folder else "file"
        digest.update(f"{kind} {name}\0".encode(errors="surrogateescape"))
        if not is_folder:
            try:
                with path.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    return digest.hexdigest()


def is_archive(path: Path) -> bool:
    """Whether the content of the file is a tar (perhaps compressed) or a zip archive."""
    try:
        return path.is_file() and (zipfile.is_zipfile(path) or tarfile.is_tarfile(path))
    except (OSError, EOFError, ValueError):
        return False


def list_files(path: Path) -> tuple[list[File], set[FileParts]]:
    """The files and the folders of a tree.

    The paths of a folder's files start with its own name; those of an archive are as it has them.
    Names are composed (NFC): macOS writes é as two characters, and it is the same class.
    """
    listed, folders = [], set()
    if path.is_dir():
        for parts, entry in walk(path):
            own = _composed((path.name, *parts))
            if entry.is_dir():
                folders.add(own)
            else:
                # a name that is not valid text can be read but not printed
                name = os.fsencode(entry.path).decode("utf-8", "replace")
                listed.append(File(own, name, Path(entry.path).read_bytes))
        return listed, folders
    try:
        for member, read in (_zip if zipfile.is_zipfile(path) else _tar)(path):
            own = _composed(p for p in member.split("/") if p not in ("", "."))
            if not own or any(map(hidden, own)):
                continue
            if read is None:
                folders.add(own)
            else:
                listed.append(File(own, f"{path}: {'/'.join(own)}", read))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ProtofedError(f"'{path}' is damaged: {error}", "download or copy it again") from None
    return sorted(listed, key=lambda f: f.parts), folders


def _composed(parts: Iterable[str]) -> FileParts:
    return tuple(unicodedata.normalize("NFC", p) for p in parts)


def _tar(path: Path) -> Iterator[Member]:
    with tarfile.open(path) as archive:
        # Members of a plain tar are read in place; a compressed one has to be read whole.
        plain = archive.fileobj is not None and type(archive.fileobj).__name__ == "BufferedReader"
        for member in archive:
            if member.isdir():
                yield member.name, None
            elif plain and member.isreg() and not member.issparse():
                yield member.name, partial(_slice, path, member.offset_data, member.size)
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, partial(bytes, content.read())


def _slice(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"'{path}' is truncated")
    return content


def _zip(path: Path) -> Iterator[Member]:
    # All of it in memory, as threads must not share an open zip file.
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for info in archive.infolist():
            yield info.filename, None if info.is_dir() else partial(bytes, archive.read(info))
