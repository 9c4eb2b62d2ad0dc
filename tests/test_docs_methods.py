"""The pages about methods: generated ones are up to date, links resolve, commands can be typed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from protofed.cli.app import app
<<<<<<< HEAD
from protofed.cli.parse import value
from protofed.config import Config
from protofed.data.task import Augment, Images
from protofed.federation.client_round import train_client
from protofed.federation.public_images import ImagePool, PublicSampler
from protofed.federation.server import Server
from protofed.federation.setup import ClientData, Setup, Training
from protofed.method import Sizes
from protofed.methods import METHODS, create
from protofed.models import build
from protofed.studies.definition import builtin
=======
from protofed.methods import METHODS
>>>>>>> methods

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    DOCS / "choosing-a-method.md",
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
    assert {p.stem for p in pages} == {*METHODS, "README"}
    assert set(pages) == set((DOCS / "methods").glob("*.md"))
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, f"run python docs/generate.py: {path.name} differs"


@pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])
def test_links_resolve(path: Path) -> None:
    links = LINK.findall(FENCE.sub("", path.read_text("utf-8")))
    assert links
    for target in links:
        assert (path.parent / target.partition("#")[0]).exists(), target


<<<<<<< HEAD
def each_page(test):
    return pytest.mark.parametrize("path", PAGES, ids=[p.stem for p in PAGES])(test)


def each_method(test):
    return pytest.mark.parametrize("name", METHODS)(test)


def test_there_is_a_page_for_every_method_and_none_for_others():
    assert {p.stem for p in PAGES} == {*METHODS, "README"}


@each_method
def test_the_index_lists_the_method_with_its_paper(name):
    cells = next(
        (row.split(" | ") for row in page("README").splitlines() if row.startswith(f"| [{name}](")),
        None,
    )
    assert cells is not None, "no row in the table of all methods"
    assert cells[0] == f"| [{name}]({name}.md)"
    assert cells[1] == METHODS[name].paper
    assert len(cells) == 6


@each_method
def test_sections_are_there_in_order(name):
    titles = re.findall(r"^## (.*)$", page(name), re.MULTILINE)
    assert tuple(titles) == SECTIONS


@each_method
def test_every_hyper_parameter_has_a_row_with_its_default(name):
    cls = METHODS[name]
    rows = {}
    for line in section(page(name), "Symbols").splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if len(cells) == 5 and (named := re.fullmatch(r"`(\w+)`", cells[2])):
            rows[named[1]] = cells
    assert rows.keys() == cls.hypers().keys()
    for n, hyper in cls.hypers().items():
        default = cls.defaults()[n]
        word = str(default).lower() if isinstance(default, bool) else str(default)
        assert rows[n][3] == f"`{word}`", n
        per_task = ", ".join(f"{task} `{v}`" for task, v in hyper.per_task.items())
        assert rows[n][4].rstrip(" |") == per_task, n
        for choice in hyper.choices or ():
            assert choice in rows[n][1], n


@each_method
def test_excerpts_are_verbatim_in_the_file_that_is_named_above_them(name):
    root = DOCS.parents[1]
    where, lines = None, 0
    for part in re.split(r"(^```python\n.*?^```$)", page(name), flags=re.DOTALL | re.MULTILINE):
        if not part.startswith("```python"):
            named = re.findall(r"^From \[(\S+)\]\(\.\./\.\./(\S+)\):$", part, re.MULTILINE)
            where = root / named[-1][1] if named else where
            assert all(shown == target for shown, target in named)
            continue
        assert where is not None, "an excerpt without a file"
        excerpt = FENCE.search(part)[2]
        source = where.read_text("utf-8")
        found = any(textwrap.indent(excerpt, indent) in source for indent in ("", "    "))
        assert found, f"not in {where.name} any more:\n{excerpt}"
        lines += excerpt.count("\n")
    assert lines >= 15


@each_page
def test_links_resolve(path):
    text = prose(path.read_text("utf-8"))
    assert LINK.findall(text)
    for target in LINK.findall(text):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


@each_page
def test_fences_are_closed(path):
    text = path.read_text("utf-8")
    assert "```" not in prose(text)
    assert {language for language, _ in FENCE.findall(text)} <= {"math", "python", "bash"}


def unbalanced(math: str) -> list[str]:
    """What is wrong with a formula."""
    wrong = []
    depth = 0
    for sign in re.findall(r"(?<!\\)[{}]", math):
        depth += 1 if sign == "{" else -1
        if depth < 0:
            break
    if depth:
        wrong.append("braces")
    if len(re.findall(r"\\left\b", math)) != len(re.findall(r"\\right\b", math)):
        wrong.append("\\left and \\right")
    opened, closed = (re.findall(rf"\\{w}\{{(\w+)\}}", math) for w in ("begin", "end"))
    if sorted(opened) != sorted(closed):
        wrong.append("environments")
    if "$" in math:
        wrong.append("a dollar")
    # GitHub refuses this macro
    if "\\operatorname" in math:
        wrong.append("\\operatorname")
    return wrong


@each_page
def test_math_blocks_are_balanced(path):
    blocks = [body for kind, body in FENCE.findall(path.read_text("utf-8")) if kind == "math"]
    assert blocks or path.stem == "README"
    for body in blocks:
        assert body.strip()
        assert unbalanced(body) == [], body
        # a blank line ends a formula in TeX
        assert "\n\n" not in body


@each_page
def test_inline_math_is_balanced_and_renders_on_github(path):
    for paragraph in prose(path.read_text("utf-8")).split("\n\n"):
        # code spans are not math, but $`...`$ is
        text = re.sub(r"(\$`[^`]*`\$)|`[^`]*`", r"\1", paragraph)
        for cell in re.split(r"\n(?=\|)|\|", text):
            assert cell.count("$") % 2 == 0, cell
            for match in INLINE.finditer(cell):
                code, plain = match.groups()
                math = code if code is not None else plain
                assert math and math == math.strip(), cell
                assert unbalanced(math) == [], math
                if plain is not None:  # Markdown reads it first: no escapes, no emphasis
                    assert not re.search(r"\\[^A-Za-z]|[})]_|[*<>]", plain), plain
                before, after = cell[: match.start()][-1:], cell[match.end() :][:1]
                assert before in ("", " ", "\n", "("), cell
                assert after in ("", " ", "\n", ".", ",", ";", ":", ")", "?"), cell


def commands() -> list[tuple[str, str]]:
    return [
        (path.stem, line.partition("#")[0].strip())
        for path in PAGES
        for kind, body in FENCE.findall(path.read_text("utf-8"))
        if kind == "bash"
        for line in body.splitlines()
    ]


@pytest.mark.parametrize(("stem", "line"), commands())
def test_commands_can_be_typed(stem, line):
    words = shlex.split(line)
    assert words[0] == "protofed"
    group, rest = typer.main.get_command(app), words[1:]
    context = group.make_context("protofed", list(rest), resilient_parsing=True)
    while hasattr(group, "resolve_command"):
        _, group, rest = group.resolve_command(context, list(rest))
        context = group.make_context(group.name, list(rest), parent=context)
    given = context.params
    if group.name == "run" and words[1] == "study":
        assert given["name"] in builtin()
        return
    if group.name == "compare":
        assert {*given["methods"].split(",")} <= {*METHODS}
        return
    name = given["method"]
    assert stem in ("README", name) or words[1] == "run"
    assigned = [text.partition("=") for text in given.get("set_") or given.get("set") or ()]
    swept = [text.partition("=") for text in given.get("over") or ()]
    assert (len(assigned), len(swept)) == (words.count("--set"), words.count("--over"))
    settings = {f.name for f in dataclasses.fields(Config)}
    for n, _, text in (*assigned, *swept):
        for v in text.split(","):
            if n in METHODS[name].hypers():
                create(name, {n: value(v)})
            else:
                assert n in settings, n


def bytes_of(name: str) -> dict[str, int]:
    """Bytes of a client's round with ResNet-10, K = 10, d = 512, ten clients."""
    method, sizes = create(name), Sizes(10, 512, 32)
    network = method.network(build("resnet10", 10, 32), sizes)
    sizes = sizes._replace(parameters=tuple(n for n, _ in network.named_parameters()))
    server = Server(method, network, sizes, [f"c{m}" for m in range(10)], rounds=3, seed=0)
    setup = Setup(method, sizes, Augment(), Training(20, 1, 0.01, 0.9, 0.0), rounds=3, seed=0)
    if (asked := method.public_images) is not None:  # sizes count, not what the network says
        N = asked.images
        pool = ImagePool(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(N).long(), N)
        setup = dataclasses.replace(setup, public=PublicSampler({"": pool}, seed=0))
    # two images a class: one is held out by GA, and FINCH makes one cluster of two
    x = torch.arange(20)[:, None, None, None].expand(20, 3, 32, 32).to(torch.uint8)
    site = ClientData("c0", "only", Images(x, torch.arange(20) % 10))
    mine = server.initial_client(dict(network.state_dict()))
    reply = train_client(setup, network, site, server.broadcast(), mine, 0)
    server.accept("c0", reply)
    server.finish()
    beside = {slot: t for slot, t in server.state.items() if slot != "model"}
    return {
        "up": tree.nbytes(reply.message),
        "down": tree.nbytes(server.broadcast()),
        "kept by the client": tree.nbytes(reply.mine),
        "kept by the server, beside the model": tree.nbytes(beside),
    }


@each_method
def test_bytes_are_those_of_a_round(name, single_thread):
    rows = {}
    for line in section(page(name), "What travels").splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if len(cells) == 3 and re.fullmatch(r"[\d,]+", cells[2].rstrip(" |")):
            rows[cells[0]] = int(cells[2].rstrip(" |").replace(",", ""))
    assert rows == bytes_of(name)
=======
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
>>>>>>> methods
