from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protofed.errors import ProtofedError
from protofed.files import CannotWrite, Damaged, read_json, write_atomic, write_json
from tests.conftest import flipped


def test_writes_text_and_bytes_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomic(path, "grüße\n")
    assert path.read_bytes() == "grüße\n".encode()
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_atomic(path, "")
    assert path.read_bytes() == b""
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_is_no_file(path: str) -> None:
    with pytest.raises(CannotWrite, match="Is a directory"):
        write_atomic(Path(path), "text")


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0, 0o666, 0o777)]
)
def test_only_private_files_do_not_follow_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int, file: int, folder: int
) -> None:
    umask(mask)
    for _ in range(2):  # a new file and one that is replaced
        write_atomic(tmp_path / "a" / "file", "x")
        write_atomic(tmp_path / "b" / "file", "x", private=True)
        assert (mode(tmp_path / "a" / "file"), mode(tmp_path / "a")) == (file, folder)
        assert (mode(tmp_path / "b" / "file"), mode(tmp_path / "b")) == (0o600, 0o700)
    write_atomic(tmp_path / "a" / "file", "x", private=True)
    assert (mode(tmp_path / "a" / "file"), mode(tmp_path / "a")) == (0o600, folder)


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
def test_nobody_sees_a_private_file_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sync = [], os.fsync

    def look(handle: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        sync(handle)

    monkeypatch.setattr(os, "fsync", look)
    write_atomic(tmp_path / "file", "x", private=True)
    assert seen[0] == 0o600


@pytest.mark.parametrize("broken", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_content_and_no_litter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    error: type[BaseException],
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise error("disk full")

    with monkeypatch.context() as patch:
        if broken == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(os, "replace", fail)
            patch.setattr(Path, "replace", fail)
        with pytest.raises(error):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_first_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose another place")]
)
def test_what_cannot_be_written_is_told_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))  # a write's error does not name the file

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ProtofedError, match=hint) as told:
        write_atomic(tmp_path / "file", "new")
    assert str(told.value).startswith(f"cannot write '{tmp_path / 'file'}': {os.strerror(number)}")
    assert isinstance(told.value, CannotWrite)
    assert (told.value.errno, told.value.filename) == (number, str(tmp_path / "file"))


def test_content_and_then_its_name_are_brought_onto_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    seen: list[tuple[bool, str]] = []
    sync = os.fsync

    def look(handle: int) -> None:
        sync(handle)
        seen.append((stat.S_ISDIR(os.fstat(handle).st_mode), path.read_text()))

    monkeypatch.setattr(os, "fsync", look)
    write_atomic(path, "new")
    assert seen == [(False, "old"), (True, "new")]
    assert path.read_text() == "new"


def test_something_that_is_no_bytes_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_carries_its_format(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": "ü"})
    assert json.loads(path.read_text("utf-8")).items() >= {"format": 2, "a": "ü"}.items()
    assert read_json(path, ["a"]) == {"a": "ü"}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}, "from before there were formats"
    path.write_text('{"format": 1, "a": 1}')
    assert read_json(path) == {"a": 1}, "from before there were checksums"
    path.write_text('{"format": 3}')
    with pytest.raises(ProtofedError, match=r"newer version of protofed \(format 3;.*upgrade"):
        read_json(path, ["a"])


@pytest.mark.parametrize("content", [{}, {"a": "ü"}, {"n": 1.5, "b": {"c": [1, None, math.nan]}}])
def test_no_bit_of_a_json_file_can_be_lost(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "file.json"
    write_json(path, content)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        try:
            assert repr(read_json(path)) == repr(content), bit
        except ProtofedError as error:
            assert "file.json" in str(error)


@pytest.mark.parametrize("text", ["", "x", "[]", '{"b": 1}', '{"a": 1, "format": "one"}', "\xff"])
def test_damaged_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(Damaged, match=r"file\.json' is damaged: "):
        read_json(path, ["a"])
