"""``import protofed``: its names, which are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import protofed

TREE = ast.parse(Path(protofed.__file__).read_text("utf-8"))


@pytest.mark.parametrize("name", protofed.__all__)
def test_every_public_name_is_there(name: str) -> None:
    space: dict[str, object] = {}
    exec(f"from protofed import {name} as found", space)
    assert space["found"] is getattr(protofed, name)
    assert name in dir(protofed)


def test_type_checkers_see_the_same_names() -> None:
    """Those that they read are imported from where the names are at run time."""
    block, _ = (node for node in TREE.body if isinstance(node, ast.If))
    seen = {"__version__"}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        module = importlib.import_module(node.module)
        for alias in node.names:
            assert getattr(protofed, alias.name) is getattr(module, alias.name)
            seen.add(alias.name)
    assert seen == set(protofed.__all__)


def test_type_checkers_see_no_other_names() -> None:
    """With a ``__getattr__`` in sight, they would take ``protofed.laod_run`` for a name."""
    functions = [node.name for node in TREE.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["__dir__"]
    *_, block = (node for node in TREE.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "not TYPE_CHECKING"


def test_nothing_is_imported_before_it_is_used() -> None:
    code = """
import sys, protofed
assert "torch" not in sys.modules
protofed.ProtofedError
assert "torch" not in sys.modules
protofed.data.load_task
assert "torch" in sys.modules and not hasattr(protofed, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    "name", ["observers.profile.Profile", "observers.tensorboard.TensorBoard", "testing.check"]
)
def test_what_the_docs_name_needs_no_other_import(name: str) -> None:
    code = f"import protofed; protofed.{name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_federation_finds_its_engine_whatever_was_imported_before() -> None:
    code = """
from protofed.federation.engine import engine_factory
assert [engine_factory(name) for name in ("loop", "workers", "lanes", "ray")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'protofed' has no attribute 'rum'"):
        protofed.rum  # noqa: B018
    with pytest.raises(ImportError):
        exec("from protofed import rum")
