"""Help: every option of every command, made from the settings, in the order of a person's path."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Done, call, whole

from protofed.cli import app
from protofed.cli.deploy import DEPLOYED
from protofed.cli.options import COMMON
from protofed.config import PANELS, SETTINGS
from protofed.version import __version__

Protofed = Callable[..., Done]
COMMANDS: dict[str, Any] = whole().commands
WHOLE = {  # those of groups too
    (name, *more): command
    for name, one in COMMANDS.items()
    for more, command in [((), one), *(((n,), c) for n, c in getattr(one, "commands", {}).items())]
}
CONFIGURED = {
    ("run",): set(SETTINGS),
    ("compare",): set(SETTINGS),
    ("sweep",): set(SETTINGS),
    ("study", "run"): set(SETTINGS) - {"seed"},
    ("deploy", "start"): set(DEPLOYED),
}
"""The commands that take settings, and which."""


@pytest.fixture(scope="module")
def pages() -> dict[tuple[str, ...], str]:
    """The help of every command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return {command: call(*command, "--help").out for command in WHOLE}


def plain(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def panels(page: str) -> list[str]:
    return re.findall(r"^╭─ (.*?) ─", page, re.M)


def test_a_narrow_terminal_breaks_lines_only_at_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in WHOLE:
        described = call(*command, "--help").out.partition("╭")[0].splitlines()
        for line, after in itertools.pairwise(line.strip() for line in described[3:]):
            fits = len(line) + 1 + len(after.partition(" ")[0]) <= 77
            assert not (line and after and fits), f"{' '.join(command)}: {line}"


@pytest.mark.parametrize("command", list(WHOLE), ids=" ".join)
def test_help_names_and_explains_every_option_and_argument(
    pages: dict[tuple[str, ...], str], command: tuple[str, ...]
) -> None:
    page = plain(pages[command])
    listed = re.findall(r"^│ (?:\*  )?\s*(--[\w-]+)", pages[command], re.M)
    assert len(listed) == len(set(listed)), "an option is listed twice"
    for parameter in WHOLE[command].params:
        for option in parameter.opts:
            text = getattr(parameter, "help", None)
            assert text, f"{option} has no help"
            if option.startswith("--"):
                assert re.search(rf"{option}\b", page), f"{option} is not in the help"
            assert " ".join(text.split()[:3]) in page, f"{option}: {text}"


@pytest.mark.parametrize("command", list(CONFIGURED), ids=" ".join)
def test_every_setting_is_an_option_with_its_help(
    pages: dict[tuple[str, ...], str], command: tuple[str, ...]
) -> None:
    options = {p.name: p for p in WHOLE[command].params}
    assert CONFIGURED[command] == SETTINGS.keys() & options.keys()
    for name in CONFIGURED[command]:
        setting, option = SETTINGS[name], options[name]
        assert option.opts == [f"--{name.replace('_', '-')}"]
        assert option.help.startswith(setting.help)
        assert option.rich_help_panel == setting.panel
        assert option.default is None, "not given is not the default's value"
        if setting.default is not None and setting.kind != "bool":
            assert f"[default: {setting.default}]" in plain(pages[command]), name
        if setting.kind == "bool":
            assert option.secondary_opts == [f"--no-{name.replace('_', '-')}"]


def test_panels_are_in_order_and_the_common_options_first(
    pages: dict[tuple[str, ...], str],
) -> None:
    order = ["Options", *PANELS[:2], "Method", *PANELS[2:]]
    for command in CONFIGURED:
        found = [panel for panel in panels(pages[command]) if panel != "Arguments"]
        assert found == [panel for panel in order if panel in found], command
        assert {"Options", "Training", "Output"} <= set(found)
    page = pages["run",]
    places = [page.index(option) for option in ("--task", "--method", "--rounds", "--set", "--out")]
    assert places == sorted(places)


def test_commands_are_in_the_order_of_a_person_s_path() -> None:
    order = [
        "tasks", "data", "methods", "run", "show", "predict", "evaluate", "export", "compare",
        "sweep", "tune", "study", "runs", "report", "deploy",
    ]  # fmt: skip
    page = call("--help").out
    assert set(COMMANDS) == set(order)
    assert re.findall(rf"^│ ({'|'.join(order)}) ", page, re.M) == order
    assert list(COMMANDS["study"].commands) == ["list", "show", "run", "table", "pack", "unpack"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_own_help_says_first(name: str) -> None:
    paragraph = inspect.cleandoc(COMMANDS[name].help).partition("\n\n")[0]
    assert app.COMMANDS[name] == " ".join(paragraph.split())


@pytest.mark.parametrize("command", [(), *WHOLE], ids=" ".join)
def test_h_works_everywhere(command: tuple[str, ...]) -> None:
    done = call(*command, "-h")
    assert done.code == 0 and "Usage: " in done.out


@pytest.mark.parametrize("command", list(CONFIGURED), ids=" ".join)
def test_h_shows_the_common_settings_and_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    brief, whole = call(*command, "-h").out, call(*command, "--help").out
    assert brief.count("\n") < whole.count("\n") / 3
    names = [re.findall(r"^│ (?:\*  )?\s*--([\w-]+)", page, re.M) for page in (brief, whole)]
    shown, listed = ({name.replace("-", "_") for name in found} for found in names)
    rare = CONFIGURED[command] - set(COMMON)
    assert (listed - shown) & SETTINGS.keys() == rare and {"set", "help"} < shown
    name = " ".join(command)
    assert re.search(f" {len(rare)} more settings: .*protofed {name} --help, or docs/", brief)


def test_version_and_nothing(protofed: Protofed) -> None:
    assert protofed("--version")[:2] == (0, f"protofed {__version__}\n")
    done = protofed()
    assert "compare" in done.out + done.err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["run", "--round", "3"], "--round"),
        (["run", "--rounds", "x"], "x"),
        (["runn"], "runn"),
        (["compar"], "Did you mean 'compare'"),
        (["study", "tabel"], "Did you mean 'table'"),
        (["compare", "--participation", "half"], "half"),
    ],
)
def test_a_mistyped_option_or_command(
    protofed: Protofed, tmp_path: Path, args: list[str], word: str
) -> None:
    code, out, err = protofed(*args)
    assert (code, out) == (2, "")
    assert word in err
    assert err.count("Did you mean") <= 1
    assert list(tmp_path.iterdir()) == []
