"""What is known of tasks without their images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protofed.data import TASKS, describe, load_task
from protofed.data.sources import PUBLISHED
from protofed.errors import ProtofedError


@pytest.mark.parametrize("name", TASKS)
def test_descriptions_are_complete(name: str) -> None:
    info = describe(name)
    assert info.name == name and info.about and info.image_size == 32
    assert info.domains and info.classes and info.clients and info.samples
    assert tuple(info.clients) == tuple(info.samples) == info.domains
    if name in PUBLISHED:
        task = PUBLISHED[name]
        assert tuple(task.counts) == info.domains
        assert set(task.aliases) <= {*info.domains, *info.classes}
        assert all(len(counts) == len(info.domains) for counts in task.distributions.values())
        downloads = {f.domain for f in task.files} | {d for m in task.manual for d in m.domains}
        assert downloads == set(info.domains)
        for found, names in (
            (task.domain_names(), task.domains),
            (task.class_names(), task.classes),
        ):
            assert len(found) == sum(1 + len(task.aliases.get(name, ())) for name in names)


def test_a_loaded_task_is_what_was_described() -> None:
    assert load_task("glyphs").info == describe("glyphs")


def test_a_folder_is_described_without_looking_at_it(
    tmp_path: Path, pictures: Any, own_cache: Path
) -> None:
    name = f"folder:{tmp_path / 'pets'}"
    info = describe(name)
    assert (info.domains, info.classes, info.clients, info.samples) == (None,) * 4
    pictures.tree(tmp_path / "pets", [f"a/{c}/{i}.png" for c in "xy" for i in range(5)])
    found = load_task(name).info
    assert found.domains == ("a",) and found.classes == ("x", "y")
    unread = {"domains": None, "classes": None, "clients": None, "samples": None, "about": ""}
    assert replace(found, **unread) == info


def test_unknown_tasks() -> None:
    with pytest.raises(ProtofedError, match="did you mean pacs"):
        describe("pasc")
    for name in ("folder", "folder:"):
        with pytest.raises(ProtofedError, match="folder:PATH"):
            describe(name)
