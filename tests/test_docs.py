"""The pages: generated ones are up to date, links resolve, the site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from protofed.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted(DOCS.rglob("*.md")),
]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)  # it has a second file
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(single_thread: None, generator: ModuleType) -> None:
    pages = generator.pages()
    measured = {"styles"} if (ROOT / "results" / "styles").is_dir() else set()
    others = {"settings", "results", *measured}
    assert {p.stem for p in pages} == {*METHODS, "README", *others}
    beside = {DOCS / f"{name}.md" for name in others}
    assert set(pages) == {*(DOCS / "methods").glob("*.md"), *beside}
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, f"run python docs/generate.py: {path.name} differs"


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_says_whether_the_server_has_a_model(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text("utf-8")
    has = bool(METHODS[name]().slots.model)
    assert ("The server also keeps the `model` that goes down." in text) == has
    assert ("The server has no model." in text) != has


def anchors(page: Path) -> set[str]:
    """What a link may name after ``#``, as GitHub and the site make it from the headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tests_and_benchmarks_that_pages_name_exist(page: Path) -> None:
    """SECURITY.md's tables, above all: each attack names the test that shows what stops it."""
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    text = page.read_text("utf-8")
    for named in re.findall(r"`((?:tests|benchmarks)/[\w/.-]+\.py|test_\w+\.py)`", text):
        assert (ROOT / named).is_file() if "/" in named else named in known, named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run([*command, DOCS, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "methods" / "fpl.html").is_file()
