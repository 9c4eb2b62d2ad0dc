"""Every command and every Python block of the documentation runs, the long ones at small size."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import protofed
from protofed.cli import app as app_module

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAKE = re.compile(r"^([a-z]+):.*##", re.MULTILINE)

TRAINS = ("run", "compare", "sweep", "tune", "study run")
SMALL = {"--rounds": "1", "--epochs": "1", "--samples": "20", "--batch": "16", "--model": "cnn2",
         "--width": "4"}  # fmt: skip
"""What a command that trains is given unless the page says otherwise."""
FEWER = {"--rounds": 20, "--seeds": 2, "--budget": 10}
"""Numbers on the pages are divided by these."""
DOWNLOADED = ("digits", "office_caltech", "pacs", "vlcs")
NOT_RUN = {
    "data fetch": "needs the network",
    "data cache NAME": "the name is the reader's own",
    "deploy": "needs several processes: tests/deploy does it",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(kind, body) for kind, body in FENCE.findall(page.read_text("utf-8"))]


def shown(page: Path) -> bool:
    return bool(commands(page)) or any(kind == "python" for kind, _ in blocks(page))


def commands(page: Path) -> list[str]:
    """The lines of a page that start a program; those of one block that continue are joined."""
    bodies = [body for kind, body in blocks(page) if kind in ("", "sh", "bash")]
    lines = [line for body in bodies for line in body.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(("protofed ", "make ", "python "))]


def small(argv: list[str]) -> list[str]:
    """The command as it is run here: the same words, on less."""
    argv = ["glyphs" if word in DOWNLOADED else word for word in argv]
    if argv[0] == "report":
        return [*argv, "--images", "10"]
    if not " ".join(argv).startswith(TRAINS):
        return argv
    for at, word in enumerate(argv):
        if word in FEWER:
            argv[at + 1] = str(max(1, int(argv[at + 1]) // FEWER[word]))
    if argv[:2] == ["study", "run"] and "--on" not in argv:
        argv += ["--on", "glyphs"]
    more = SMALL if argv[0] == "run" else {**SMALL, "--jobs": "1"}
    return argv + [word for name in more if name not in argv for word in (name, more[name])]


def typed(argv: list[str]) -> None:
    before, out = sys.argv, io.StringIO()
    sys.argv = ["protofed", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            app_module.main()
    except SystemExit as end:
        if end.code:
            pytest.fail(f"protofed {shlex.join(argv)}: exit code {end.code}\n{out.getvalue()}")
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of: ``PATH``, ``photos/``, ``a.png``, ``runs/RUN`` and the examples."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "examples", folder / "examples")
    rng = np.random.default_rng(0)
    names = [f"PATH/{s}/{c}/{i}.png" for s in ("north", "south") for c in range(10) for i in range(5)]
    for name in (*names, "photos/1.png", "photos/2.png", "a.png", "b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    protofed.run(
        task="glyphs", method="fpl", out=folder / "runs" / "RUN", rounds=2, epochs=1, samples=20,
        batch=16, model="cnn2", width=4, keep_rounds="all",
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if shown(p)], ids=lambda page: page.stem)
def test_a_page(
    page: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    shutil.copytree(workplace, place)
    monkeypatch.chdir(place)
    for line in commands(page):
        program, *argv = shlex.split(line, comments=True)
        if program == "make":
            targets = MAKE.findall((ROOT / "Makefile").read_text())
            assert argv[0] in targets, line
        elif program == "python":
            script = next(word for word in argv if word != "-m")
            assert any((ROOT / f).exists() for f in (script, script.replace(".", "/"))) or (
                script == "pytest"
            ), line
        elif not any(" ".join(argv).startswith(prefix) for prefix in NOT_RUN):
            typed(small(argv))
    names: dict[str, object] = {}
    for kind, body in blocks(page):
        if kind == "python":
            body = re.sub(r"rounds=\d+", "rounds=1, epochs=1, samples=20, model='cnn2'", body)
            exec(compile(body, f"{page.name}", "exec"), names)
