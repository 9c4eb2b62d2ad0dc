from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


class Pictures:
    """Small images and trees of them."""

    def one(self, seed: int = 0, side: int = 12, kind: str = "PNG") -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 2, 3), np.uint8)
        return self.encoded(Image.fromarray(pixels), kind)

    def encoded(self, image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    def tree(self, root: Path, names: list[str], start: int = 0) -> Path:
        """A different image under each of these names."""
        for seed, name in enumerate(names, start):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.one(seed, kind="JPEG" if name.endswith("jpg") else "PNG"))
        return root

    def tar(self, folder: Path, path: Path, mode: str = "w") -> Path:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, arcname=folder.name)
        return path


@pytest.fixture
def pictures() -> Pictures:
    return Pictures()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and no data elsewhere."""
    cache = tmp_path / "own-cache"
    monkeypatch.setenv("PROTOFED_CACHE", str(cache))
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    return cache
