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


def stamp(paths: Iterable[Path]) -> Stamp:
    """Name, size and times of every file; they change whenever a file is written."""
    rows: Stamp = []
    for path in paths:
        if path.is_dir():
            found = [("/".join((path.name, *p)), e.stat(), e.is_dir()) for p, e in walk(path)]
        else:
            found = [(path.name, path.stat(), False)]
        rows += [
            (name, -1, 0, 0) if is_dir else (name, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
            for name, s, is_dir in found
        ]
    return rows


def content_key(paths: Iterable[Path]) -> str:
    """A hash of all names and all bytes."""
    digest = hashlib.sha256()
    for path in paths:
        listed: list[tuple[str, Path | None]] = [(path.name, path)]
        if path.is_dir():
            listed = [
                ("/".join((path.name, *p)), None if e.is_dir() else Path(e.path))
                for p, e in walk(path)
            ]
        for name, file in listed:
            if file is None:
                digest.update(f"folder {name}\0".encode(errors="surrogateescape"))
                continue
            try:
                with file.open("rb") as stream:
                    own = hashlib.file_digest(stream, "sha256").digest()
            except OSError as error:
                raise ProtofedError(f"cannot read '{file}': {error.strerror}") from None
            digest.update(f"file {name}\0".encode(errors="surrogateescape") + own)
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
    if path.is_dir():
        listed, folders = [], set()
        for parts, entry in walk(path):
            own = _composed((path.name, *parts))
            if entry.is_dir():
                folders.add(own)
            else:
                # a name that is not valid text can be read but not printed
                name = os.fsencode(entry.path).decode("utf-8", "replace")
                listed.append(File(own, name, partial(_read, entry.path)))
        return listed, folders
    try:
        return _zip(path) if zipfile.is_zipfile(path) else _tar(path)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ProtofedError(f"'{path}' is damaged: {error}", "download or copy it again") from None


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _parts(name: str) -> FileParts:
    return _composed(p for p in name.split("/") if p not in ("", "."))


def _composed(parts: Iterable[str]) -> FileParts:
    return tuple(unicodedata.normalize("NFC", p) for p in parts)


def _tar(path: Path) -> tuple[list[File], set[FileParts]]:
    listed, folders = [], set()
    with tarfile.open(path) as archive:
        # Members of a plain tar are read in place; a compressed one has to be read whole.
        plain = archive.fileobj is not None and type(archive.fileobj).__name__ == "BufferedReader"
        for member in archive:
            parts = _parts(member.name)
            if not parts or any(map(hidden, parts)):
                continue
            name = f"{path}: {'/'.join(parts)}"
            if member.isdir():
                folders.add(parts)
            elif member.isreg():
                if plain and not member.issparse():
                    read = partial(_slice, path, member.offset_data, member.size)
                else:
                    content = archive.extractfile(member)
                    assert content is not None
                    read = partial(bytes, content.read())
                listed.append(File(parts, name, read))
    return sorted(listed, key=lambda f: f.parts), folders


def _slice(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise OSError(f"'{path}' is truncated")
    return content


def _zip(path: Path) -> tuple[list[File], set[FileParts]]:
    # All of it in memory, as threads must not share an open zip file.
    listed, folders = [], set()
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for info in archive.infolist():
            parts = _parts(info.filename)
            if not parts or any(map(hidden, parts)):
                continue
            if info.is_dir():
                folders.add(parts)
            else:
                name = f"{path}: {'/'.join(parts)}"
                listed.append(File(parts, name, partial(bytes, archive.read(info))))
    return sorted(listed, key=lambda f: f.parts), folders
