"""Imports go one way: a package imports only packages that stand above it in ``ORDER``."""

from __future__ import annotations

import ast
from pathlib import Path

import protofed

ROOT = Path(protofed.__file__).parent

ORDER = (
    "version errors control_groups cores fused keys files shape silence toml tree user_code "
    "cluster",
    "prototypes models",
    "augmix styles",
    "adain",
    "method",
    "methods",
    "data",
    "config",
    "federation",
    "engines",
    "runs",
    "observers analysis testing",
    "inference",
    "studies",
    "report",
    "deploy",
    "api",
    "cli __main__",
)
"""The packages and modules of ``protofed``, one line a layer, the lowest first."""


def layer_of() -> dict[str, int]:
    """The layer of each package."""
    return {name: n for n, names in enumerate(ORDER) for name in names.split()}


def imports() -> set[tuple[str, str]]:
    """Every pair (package, package it imports), wherever in its files the import stands."""
    found = set()
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "protofed":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                names = parts[1:2] if parts[0] == "protofed" else []
            elif isinstance(node, ast.Import):
                parts = [alias.name.split(".") for alias in node.names]
                names = [p[1] for p in parts if p[0] == "protofed" and len(p) > 1]
            found |= {(own, name) for name in names if name != own}
    return found


def test_every_package_has_its_place() -> None:
    there = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert there - {"__init__"} <= layer_of().keys()


def test_imports_go_downwards() -> None:
    layer = layer_of()
    against = {
        (own, other) for own, other in imports() if other in layer and layer[other] > layer[own]
    }
    assert against == set()


def test_no_two_packages_import_each_other() -> None:
    pairs = imports()
    assert {(a, b) for a, b in pairs if (b, a) in pairs} == set()


def test_engines_and_federation_know_methods_by_their_hooks_only() -> None:
    for package in ("engines", "federation"):
        for path in (ROOT / package).rglob("*.py"):
            assert "isinstance(method" not in path.read_text("utf-8"), path
