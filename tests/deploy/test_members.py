"""``federation.toml`` is checked when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from protofed.deploy.members import read_members
from protofed.deploy.setup import init
from protofed.deploy.spec import folder_skeleton
from protofed.errors import ProtofedError

CLASSES = ("x", "y")


def test_a_federation_file_is_checked(tmp_path: Path) -> None:
    init(tmp_path / "f", ["a", "b"], classes=CLASSES)
    path = tmp_path / "f" / "server" / "federation.toml"
    good = path.read_text()
    for old, new, words in (
        ("minimum = 2", "minimum = 9", "minimum"),
        ("round_seconds = 3600", "round_seconds = 0", "round_seconds"),
        ('["x", "y"]', '["x", "x"]', "contains a name twice"),
        ("minimum", "minimun", "did you mean minimum"),
        ("ecdsa-sha2-nistp384 ", "rot13 ", "is invalid"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(ProtofedError, match=words):
            read_members(path)


def test_a_run_must_keep_what_the_federation_agreed_on(tmp_path: Path) -> None:
    init(tmp_path / "own", ["a", "b"], classes=CLASSES, image_size=16)
    members = read_members(tmp_path / "own" / "server" / "federation.toml")
    larger = folder_skeleton("own", CLASSES, 1024, members.clients())
    assert "1024 pixels, those of federation.toml 16" in members.mismatch(larger)
    fewer = folder_skeleton("own", CLASSES[:1], 16, members.clients())
    assert "classes differ from those in federation.toml" in members.mismatch(fewer)
    assert members.mismatch(members.skeleton()) == ""
