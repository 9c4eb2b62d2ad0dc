"""A command, option or module that users had is still there, or CHANGELOG.md names it.

``interface.json`` has those of the last release. ``python -m tests.test_changelog`` writes it
again: do that once a release is out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import protofed
from tests.cli.commands import whole

INTERFACE = Path(__file__).parent / "interface.json"
CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text("utf-8")
BEFORE = json.loads(INTERFACE.read_text("utf-8"))


def commands(command: Any = None, name: str = "protofed") -> Iterator[tuple[str, list[str]]]:
    """Every command with its options, as they are typed."""
    command = command or whole()
    options = [p for p in command.params if p.param_type_name == "option"]
    names = {n for option in options for n in (*option.opts, *option.secondary_opts)}
    yield name, sorted(names - {"--help", "-h"})
    for own, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {own}")


def modules() -> Iterator[str]:
    """Every module of the package, by its import path."""
    root = Path(protofed.__file__).parents[1]
    for path in sorted((root / "protofed").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__")


def named(thing: str) -> bool:
    """Whether the changelog names it, in code quotes."""
    return f"`{thing}`" in CHANGELOG


@pytest.mark.parametrize("command", BEFORE["commands"])
def test_no_option_is_lost_without_a_word(command: str) -> None:
    now = dict(commands())
    if command not in now:
        assert named(command)
        return
    gone = set(BEFORE["commands"][command]) - set(now[command])
    assert [option for option in sorted(gone) if not named(f"{command} {option}")] == []


def test_no_module_is_lost_without_a_word() -> None:
    gone = set(BEFORE["modules"]) - set(modules())
    assert [module for module in sorted(gone) if not named(module)] == []


def test_modules_moved_to_where_the_changelog_says() -> None:
    moves = re.findall(r"^\| `(protofed[\w.]*)` \| (.+) \|$", CHANGELOG, re.MULTILINE)
    assert moves
    now = set(modules())
    for old, new in moves:
        assert old in BEFORE["modules"], old
        for target in re.findall(r"`(protofed[\w.]*)`", new):
            assert target in now, f"{old} moved to {target}, which does not exist"


if __name__ == "__main__":
    interface = {"modules": list(modules()), "commands": dict(commands())}
    INTERFACE.write_text(json.dumps(interface, indent=1) + "\n", "utf-8")
