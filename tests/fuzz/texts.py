"""Fuzzers of what people write: configs, studies, ``--set`` and whole command lines."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from pathlib import Path
from typing import Any

import typer

from protofed.cli import app as app_module
from protofed.cli.parse import (
    assignments,
    by_method,
    parse_over,
    parse_setting,
    parse_shard,
    words,
)
from protofed.config import PROTOCOLS, SETTINGS, Config, make_config, merged_config
from protofed.data.info import TASKS
from protofed.errors import ProtofedError
from protofed.methods import METHODS
from protofed.studies.definition import SETTINGS as STUDY_SETTINGS
from protofed.studies.definition import builtin, load
from protofed.studies.plan import Selection, check_domains, plan
from tests.fuzz import mutate
from tests.fuzz.harness import Choices, Wrong, inputs

GOOD: dict[str, tuple[str, ...]] = {
    "task": tuple(f'"{t}"' for t in TASKS),
    "method": tuple(f'"{m}"' for m in METHODS),
    "protocol": tuple(f'"{p}"' for p in PROTOCOLS),
    "seed": ("0", "1", "77"),
    "rounds": ("1", "20"),
    "epochs": ("1", "5"),
    "batch": ("8", "64"),
    "lr": ("0.01", "1"),
    "momentum": ("0", "0.9"),
    "weight_decay": ("0", "1e-5"),
    "step_every": ("1", "5"),
    "step_factor": ("0.1",),
    "warmup_rounds": ("0", "2"),
    "label_smoothing": ("0", "0.1"),
    "clip_norm": ("1", "0.5"),
    "model": ('"cnn2"', '"cnn3"', '"resnet10"', '"cnn3,cnn2"', '{"scan-0" = "cnn2"}'),
    "width": ("4", "16"),
    "participation": ("0.5", "1"),
    "clients": ("1", "{scan = 2, print = 1}", '"skewed"', '"one"', '"random"'),
    "samples": ("10", "0.2", "{scan = 5}"),
    "leave_out": ('"scan"', '"mnist"'),
    "dirichlet": ("0.1", "100"),
    "quantity": ("0.5",),
    "image_size": ("32", "8"),
    "workers": ("1", "2"),
    "checkpoint_every": ("1", "3"),
    "keep_rounds": ("[1, 2]", '"last"', '"none"', '["last", 1]'),
    "data": ('"somewhere"',),
    "test_split": ('"mod10"', '"auto"'),
    **{n: ("true", "false") for n, s in SETTINGS.items() if s.kind == "bool"},
    **{n: tuple(f'"{c}"' for c in s.choices) for n, s in SETTINGS.items() if s.choices},
}
HYPERS = tuple(sorted({h for cls in METHODS.values() for h in cls.hypers()}))
NUMBERS = ("0", "1", "0.5", "2", "-1", "0.02", "10", "1e-3")


# ---- config ---------------------------------------------------------------------------------

_CONFIG_KEYS = ("task", "method", *SETTINGS)


def _config(choices: Choices) -> bytes:
    lines = [f"{key} = {choices.pick(GOOD[key])}" for key in ("task", "method")]
    for _ in range(choices.number(6)):
        key = choices.pick(list(GOOD))
        lines.append(f"{key} = {choices.pick(GOOD[key])}")
    if choices.chance(3):
        lines[1] = ""
        lines += ["[method]", f'name = "{choices.pick(list(METHODS))}"']
        for _ in range(choices.number(4)):
            value = choices.pick(NUMBERS if choices.chance(2) else mutate.TOKENS)
            lines.append(f"{choices.pick(HYPERS)} = {value}")
    return mutate.toml(lines, (*_CONFIG_KEYS, "format", "x", '""', "a.b"), choices, GOOD)


def _try_config(text: bytes, folder: Path) -> None:
    same_again(_read_config(text, folder), folder)


def _read_config(text: bytes, folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_bytes(text)
    return merged_config(path, None, None, None, {})


def same_again(config: Config, folder: Path) -> None:
    """A config that is accepted can be written, and read again as it was."""
    text = config.toml()
    again = _read_config(text.encode(), folder)
    if again.toml() != text or again.hash != config.hash:
        raise Wrong("a config changes when it is written and read")


inputs("config", _config, _try_config)


# ---- --set and the other options that are text --------------------------------------------------

_TYPED = (
    "", "scan=1", "scan=1,print=2", "=", ",", "a==b", "scan=", "=1", "scan=1,", "1,2", "all",
    "none", "last", "1,last", "cnn3,cnn2", "scan-0=cnn2", "0.2", "1e26", "scan=99999999999", "nan",
    "scan=nan", "9" * 5000, "scan=" + "9" * 5000, "1/4", "4/1", "0/0", "1/" + "9" * 5000, "²/³",
    "tau=0.02,0.05", "tau", "tau=", "=,", "a b", "\n", "1\nv = 2", "[" * 1500, "{a = " * 500, "é",
    "\x00", "x" * 30_000,
)  # fmt: skip


def _set(choices: Choices) -> tuple[str, list[str], str, str]:
    method = choices.pick(list(METHODS))
    own = tuple(METHODS[method].hypers()) or HYPERS
    texts = []
    for _ in range(1 + choices.number(3)):
        odd = (*HYPERS, "", "x", "fpl.tau", "é", "a.b.c")
        name = choices.pick(odd if choices.chance(4) else own)
        value = choices.pick(mutate.TOKENS if choices.chance(2) else NUMBERS)
        text = f"{name}={value}"
        if choices.chance(5):
            text = mutate.mutated(text.encode(), choices).decode("utf-8", "replace")
        texts.append(text)
    setting = choices.pick([n for n, s in SETTINGS.items() if s.kind in ("table", "rounds")])
    typed = choices.pick(_TYPED)
    if choices.chance(4):
        typed = mutate.mutated(typed.encode(), choices).decode("utf-8", "replace")
    return method, texts, setting, typed


def _try_set(given: tuple[str, list[str], str, str], folder: Path) -> None:
    method, texts, setting, typed = given
    for attempt in (parse_shard, parse_over, words):
        with contextlib.suppress(ProtofedError):
            attempt(typed)
    values = assignments(texts)
    with contextlib.suppress(ProtofedError):
        by_method(values, {method: method})
    with contextlib.suppress(ProtofedError):
        same_again(make_config(method=method, **{setting: parse_setting(setting, typed)}), folder)
    same_again(make_config(method=method, options=values), folder)


inputs("set", _set, _try_set)


# ---- command lines ------------------------------------------------------------------------------

_MISSING = "folder:there/is/none"
_OPTIONS = tuple(f"--{n.replace('_', '-')}" for n in SETTINGS)
_OTHER_OPTIONS = (
    "--set", "--methods", "--method", "--seeds", "--jobs", "--shard", "--over", "--config", "-h",
    "--protocol", "--out", "--runs", "--tasks", "--format", "--images", "--against",
)  # fmt: skip
_ARGUMENTS = (
    "0", "1", "-1", "0.5", "nan", "inf", "1e26", "9" * 5000, "1000000", "99999999999", "", "auto",
    "each", "cpu", "scan=99999999999", "scan=1,scan=2", "fpl", "all", ",", "[bold]", "\x1b[31m",
    "x" * 5000, "../../up", "/dev/null", ".", "é",
)  # fmt: skip
_COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("--task", _MISSING),
    "compare": ("--task", _MISSING),
    "sweep": ("--task", _MISSING),
    "study run": ("--on", _MISSING),
    "study show": (),
    "study table": (),
    "show": (),
    "report": (),
    "methods": (),
    "data show": ("--task", _MISSING),
}
"""Commands with what keeps them from training anything."""


def _command(choices: Choices) -> list[str]:
    name = choices.pick(tuple(_COMMANDS))
    argv = name.split()
    if name.startswith("study") or choices.chance(4):
        argv.append(choices.pick((*builtin(), *_ARGUMENTS)))
    if name == "sweep":
        argv += ["--over", choices.pick(("tau=0.02,0.05", "rounds=1,2", *_TYPED))]
    for _ in range(choices.number(5)):
        option = choices.pick(_OPTIONS if choices.chance(2) else _OTHER_OPTIONS)
        argv.append(option)
        argv.append(choices.pick((*_ARGUMENTS, *_TYPED)))
    return [word.replace("\0", "") for word in (*argv, *_COMMANDS[name])]  # no system passes it on


def _try_command(argv: list[str], folder: Path) -> None:
    before, out, code = sys.argv, io.StringIO(), 0
    _build_once()
    sys.argv = ["protofed", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            app_module.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        sys.argv = before
    if code:
        raise ProtofedError(f"exit code {code}", out.getvalue()[-1000:])


@functools.cache
def _build_once() -> None:
    """The command line as ``main`` finds it; typer would build it again for every call."""
    command: Any = typer.main.get_command(app_module.app)
    app_module.app = command


inputs("command line", _command, _try_command)


# ---- studies ------------------------------------------------------------------------------------

_STUDY = (
    'title = "T"', 'kind = "table"', "seeds = 2", 'baseline = "FedAvg"', 'notes = ["n"]',
    "[settings]", "rounds = 1", "epochs = 1", "clients = 1", "samples = 10",
    "[tasks.glyphs]", "lr = 0.1",
    "[rows]", 'FedAvg = "fedavg"', 'FPL = {method = "fpl", options = {tau = 0.05}}',
    "[[sweep]]", 'rows = ["FPL"]', "over = {tau = [0.02, 0.1], lr = [0.1, 0.2]}",
    "[printed.glyphs]", 'columns = ["scan", "print", "photo", "inverse", "average"]',
    "FedAvg = [1, 2, 3, 4, 2.5]", '"FPL, tau=0.02, lr=0.1" = {values = [1, 2, 3, 4, 5], std = 0.1}',
    "[tsne]", 'domains = ["scan"]', "rounds = [1]",
    "[override.settings]", "rounds = 2", "[override.options.fpl]", "tau = 0.07",
)  # fmt: skip
_STUDY_KEYS = (
    "title", "kind", "paper", "protocol", "notes", "seeds", "settings", "tasks", "rows", "sweep",
    "printed", "baseline", "tsne", "override", "pool", "images", "like", "format", "name", "on",
    "over", "columns", "task", "method", "options", "values", "FedAvg", "FPL", "x", *STUDY_SETTINGS,
)  # fmt: skip
_STUDY_GOOD = {
    **GOOD,
    "kind": ('"table"', '"curves"', '"bars"', '"sweep"', '"tsne"'),
    "like": ('"fpl-table1"', '"i2pfl-table1"'),
    "seeds": ("1", "[0, 3]"),
    "FPL": ('"fpl"', '{method = "moon", settings = {lr = 0.5}}', f'"{mutate.EVIL}:Evil"'),
    "on": ('"glyphs"', '"digits"'),
}


def _study(choices: Choices) -> bytes:
    return mutate.toml(_STUDY, _STUDY_KEYS, choices, _STUDY_GOOD)


def _try_study(text: bytes, folder: Path) -> None:
    (folder / "mine").mkdir(exist_ok=True)
    path = folder / "mine" / "study.toml"
    path.write_bytes(text)
    study = load(str(path))
    path.write_text(study.toml(), "utf-8")
    again = load(str(path))
    if (again.hash, again.lines, again.seeds) != (study.hash, study.lines, study.seeds):
        raise Wrong("a study changes when it is written and read")
    if len(study.lines) * len(study.seeds) * len(study.tasks) <= 60:
        plan(study)
        check_domains(study, Selection())


inputs("study", _study, _try_study)
