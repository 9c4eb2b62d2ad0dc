"""``federation.toml`` is checked when it is read."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from protofed.deploy.certificates import node_key
from protofed.deploy.installed import InstalledMethod
from protofed.deploy.members import read_members, write_members
from protofed.deploy.setup import init
from protofed.deploy.wire import Refused
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
        ("image_size = 32", "image_size = 7", "image_size"),
        ("image_size = 32", 'pixel_range = "9:0"', "pixel_range must be LOW:HIGH"),
        ('name = "f"', 'name = ".."', "cannot be a federation's name"),
        ('[sites."b"]', '[sites."../b"]', "cannot be a site's name"),
        ("format = 2", "format = 3", "newer version of protofed"),
        ("ecdsa-sha2-nistp384 ", "rot13 ", "is invalid"),
        ('["x", "y"]', '"xy"', "classes must be a list"),
        ("minimum = 2", 'minimum = 2\nrevoked = "ecdsa"', "revoked must be a list"),
        ("minimum = 2", 'minimum = 2\nrevoked = ["ecdsa"]', "'ecdsa' in revoked is not a key"),
        ("minimum = 2", "minimum = 2\nrevoked = [1]", "1 in revoked is not a key"),
        ("minimum = 2", "minimum = 2\ntask = 5", "task must be text, got 5"),
        ('address = "127.0.0.1:8000"', "address = 8000", "address must be text, got 8000"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(ProtofedError, match=words):
            read_members(path.parent)


def test_all_of_a_federation_file_survives_a_change(tmp_path: Path) -> None:
    """``deploy admit`` and others write it anew."""
    init(tmp_path / "f", ["a", "b"], classes=CLASSES)
    folder = tmp_path / "f" / "server"
    known = read_members(folder)
    method = {"file": "m.py", "class": "M", "sha256": "0" * 64}
    changes: dict[str, Any] = {
        "pixel_range": "0:9",
        "methods": {"mine": InstalledMethod.read(folder, "mine", method)},
        "revoked": (node_key()[1],),
        "minimum": 1,
    }
    for f in fields(known):
        value = getattr(known, f.name)
        if isinstance(value, bool):
            changes.setdefault(f.name, not value)
        elif isinstance(value, int | float):
            changes.setdefault(f.name, value + 1)
    changed = replace(known, **changes)
    write_members(folder, changed)
    assert read_members(folder) == changed


def test_a_run_must_keep_what_the_federation_agreed_on(tmp_path: Path) -> None:
    init(tmp_path / "own", ["a", "b"], classes=CLASSES, image_size=16)
    members = read_members(tmp_path / "own" / "server")
    members.require_own(members.skeleton())
    for changed, words in (
        ({"image_size": 1024}, "1024 pixels, those in federation.toml have 16"),
        ({"pixel_range": "0:9"}, "pixel_range is 0:9, that in federation.toml is None"),
        ({"classes": (*CLASSES, "z")}, "classes differ from those in federation.toml"),
        (
            {"name": "other"},
            "the run is for task 'folder:other', this federation is for 'folder:own'",
        ),
    ):
        with pytest.raises(Refused, match=words):
            members.require_own(replace(members, **changed).skeleton())
