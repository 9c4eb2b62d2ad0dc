"""The pages about methods: generated ones are up to date, links resolve, commands can be typed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from protofed.cli.app import app
from protofed.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    DOCS / "choosing-a-method.md",
    DOCS / "models.md",
    DOCS / "methods-of-your-own.md",
    *sorted((DOCS / "methods").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(single_thread: None) -> None:
    pages = generator().pages()
    assert {p.stem for p in pages} == {*METHODS, "README", "settings"}
    assert set(pages) == {*(DOCS / "methods").glob("*.md"), DOCS / "settings.md"}
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, f"run python docs/generate.py: {path.name} differs"


@pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])
def test_links_resolve(path: Path) -> None:
    links = LINK.findall(FENCE.sub("", path.read_text("utf-8")))
    assert links
    for target in links:
        assert (path.parent / target.partition("#")[0]).exists(), target


def test_commands_can_be_typed() -> None:
    text = "\n".join(path.read_text("utf-8") for path in PAGES)
    blocks = [body for kind, body in FENCE.findall(text) if kind in ("", "bash")]
    lines = [line for body in blocks for line in body.splitlines() if line.startswith("protofed ")]
    assert lines
    for line in lines:
        command, rest = typer.main.get_command(app), shlex.split(line)[1:]
        context = command.make_context("protofed", list(rest), resilient_parsing=True)
        while hasattr(command, "resolve_command"):
            _, command, rest = command.resolve_command(context, list(rest))
            context = command.make_context(command.name, list(rest), parent=context)
        for name in (context.params.get("methods") or "").split(","):
            assert name in ("", *METHODS) or ".py:" in name


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run([*command, DOCS, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "methods" / "fpl.html").is_file()
