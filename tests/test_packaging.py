"""What pyproject.toml says about the package is true of the files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import protofed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "protofed"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_data_file_is_in_the_wheel() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["protofed"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data - packaged == set()


def test_every_package_has_an_init() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_version_has_one_source() -> None:
    assert "version" in PYPROJECT["project"]["dynamic"]
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "protofed.version.__version__"
    assert protofed.version.__version__ == protofed.__version__


def test_contributing_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert [name for name in packages if f"\n  {name}/ " not in text] == []
