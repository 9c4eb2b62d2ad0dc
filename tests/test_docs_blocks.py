"""Every command and Python block of the documentation is executed, at small size.

A block that cannot run here says why in a comment right above it, which readers do not see::

    <!-- not run: needs a GPU -->

Its commands are still parsed. A block below ``<!-- file: NAME -->`` is saved under that name.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pytest
import safetensors.torch
from PIL import Image

import protofed
from tests.cli.commands import call, whole
from tests.models.test_weights import public_state
from tests.studies.in_process import run_in_process

ROOT = Path(__file__).parents[1]
GENERATED = [ROOT / "docs/settings.md", *sorted((ROOT / "docs/methods").glob("*.md"))]
PAGES = [
    p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if p not in GENERATED
]
FENCE = re.compile(
    r"(?:^<!-- (not run|file): (\S[^\n]*) -->\n)?^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
INLINE = re.compile(r"`(protofed [^`]+)`")
TARGET = re.compile(r"^([a-z]+):.*##", re.MULTILINE)

SMALL = {"rounds": 1, "epochs": 1, "samples": 20, "batch": 16, "model": "cnn2", "width": 4}
"""What a run is given unless the page says otherwise."""
FEWER = {"rounds": 20, "seeds": 5, "budget": 10, "warmup_rounds": 2, "image_size": 2}
"""Numbers of the pages are divided by these."""
WIDTH = 90
"""More characters in a line do not fit the site's column."""
LONG = ("studies", "heterogeneous", "unseen", "python", "models")
"""Pages that take ten seconds or more: `make slow` executes them."""
DOWNLOADED = ("digits", "office_caltech", "pacs", "vlcs")


class Block(NamedTuple):
    kind: str
    body: str
    not_run: bool
    file: str

    @property
    def commands(self) -> list[str]:
        if self.kind != "bash":
            return []
        lines = self.body.replace("\\\n", " ").splitlines()
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    found = FENCE.findall(page.read_text("utf-8"))
    return [
        Block(kind, body, mark == "not run", said if mark == "file" else "")
        for mark, said, kind, body in found
    ]


def small(argv: list[str]) -> list[str]:
    """The command as it is run here: the same words, on less."""
    argv = ["glyphs" if word in DOWNLOADED else word for word in argv]
    if argv[0] == "report" or argv[:2] == ["study", "pack"]:
        return [*argv, "--images", "10"]
    if argv[0] not in ("run", "compare", "sweep", "tune") and argv[:2] != ["study", "run"]:
        return argv
    if argv[0] == "study" and "--on" not in argv and not argv[2].endswith(".toml"):
        several = len(argv) > 3 and not argv[3].startswith("-")
        argv += ["--on", "glyphs", *([] if several else ["--out", f"runs/{argv[2]}"])]
    for name, divisor in FEWER.items():
        if (option := f"--{name.replace('_', '-')}") in argv:
            at = argv.index(option) + 1
            argv[at] = str(max(1, int(argv[at]) // divisor))
    if "glyphs" in argv and "--augment" in argv:  # which they have only one of
        at = argv.index("--augment")
        del argv[at : at + 2]
    more = {f"--{name}": str(value) for name, value in SMALL.items()}
    more |= {"tune": {"--budget": "2"}, "study": {"--seeds": "1"}}.get(argv[0], {})
    if "--weights" in argv or re.search(r"--model \S+\.py:", " ".join(argv)):
        del more["--model"], more["--width"]
    return argv + [word for name in more if name not in argv for word in (name, more[name])]


def smaller(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of ``protofed``, called with less."""

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        fewer = {name: max(1, given[name] // FEWER[name]) for name in FEWER if name in given}
        return function(*args, **{**SMALL, **given, **fewer})

    return called


def execute(line: str) -> None:
    program, *argv = shlex.split(line, comments=True)
    if program == "make":
        assert argv[0] in TARGET.findall((ROOT / "Makefile").read_text()), line
        return
    assert program == "protofed", f"{line}: say '<!-- not run: WHY -->' above its block"
    done = call(*small(argv))
    assert done.code == 0, f"{line}\n{done.out[-2000:]}{done.err}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of: ``PATH``, ``photos/``, ``a.png``, ``runs/RUN`` and the examples."""
    folder, rng = tmp_path_factory.mktemp("docs"), np.random.default_rng(0)
    shutil.copytree(ROOT / "examples", folder / "examples")
    tree = [f"{d}/{c}/{i}.png" for d in ("north", "south") for c in range(10) for i in range(5)]
    few = [name for name in tree if name.split("/")[1] < "5"]  # as many as SMALL has samples
    for name in (*(f"PATH/{n}" for n in tree), *(f"photos/{n}" for n in few), "a.png", "b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name)
    weights = public_state("resnet18_imagenet", width=64)
    safetensors.torch.save_file(weights, folder / "resnet18.safetensors")
    protofed.run("glyphs", "fpl", out=folder / "runs/RUN", keep_rounds="all", **SMALL)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow) if p.stem in LONG else p for p in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page(
    page: Path, workplace: Path, tmp_path: Path, no_drawing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    for name in ("run", "compare", "sweep", "tune"):
        monkeypatch.setattr(protofed, name, smaller(getattr(protofed, name)))
    shutil.copytree(workplace, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    names: dict[str, object] = {}
    for block in blocks(page):
        assert block.kind in ("bash", "python", "toml", "text") or block.kind.startswith("{"), block
        assert max(map(len, block.body.splitlines())) <= WIDTH or block.kind[0] == "{", block
        if block.file:
            Path(block.file).write_text(block.body, encoding="utf-8")
        if block.not_run:
            continue
        if block.kind == "toml":
            tomllib.loads(block.body)
        elif block.kind == "python":
            exec(compile(block.body, page.name, "exec"), names)
        for line in block.commands:
            execute(line)


def commands() -> Iterator[tuple[Path, str]]:
    """Every ``protofed`` command of all pages, also inside of sentences and in blocks not run."""
    for page in (*PAGES, *GENERATED):
        lines = [line for block in blocks(page) for line in block.commands]
        lines += INLINE.findall(FENCE.sub("", page.read_text("utf-8")))
        yield from ((page, line) for line in lines if line.startswith("protofed "))


def test_commands_and_options_exist() -> None:
    protofed = whole()
    for page, line in commands():
        command: Any = protofed
        words = shlex.split(line, comments=True)[1:]
        while words and isinstance(command, click.Group) and words[0] != "-h":
            assert words[0] in command.commands, f"{page.name}: {line}"
            command = command.commands[words.pop(0)]
        known = {"-h", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
        unknown = {word for word in words if re.match("--?[a-z]", word)} - known
        assert not unknown, f"{page.name}: {line}"
