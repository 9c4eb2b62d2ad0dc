from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protofed.federation.cpu import one_thread
from protofed.report import plot


@pytest.fixture
def single_thread() -> Iterator[None]:
    """One intra-op thread, as in a run: other numbers of threads give other bits."""
    with one_thread():
        yield


@pytest.fixture
def digests() -> Callable[[Path], dict[str, str]]:
    """Every file under a folder with a hash of its content: two equal dicts, nothing changed."""

    def of(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return of


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of figures, and no figures: drawing takes most of the time."""

    def save(drawn: plot.Plot, folder: Path, *_: object, **__: object) -> list[Path]:
        return [folder / f"{drawn.name}.png"]

    monkeypatch.setattr(plot, "save", save)
    monkeypatch.setattr(plot, "svg", lambda panel, prefix: "<svg></svg>")


def flipped(content: bytes, bit: int) -> bytes:
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
