"""Client distributions, skews and a domain that is left out: in configurations and in runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from tests.data.made_tasks import balanced, made
from typer.testing import CliRunner

from protofed.cli.app import app
from protofed.config import Config, make_config, read_config
from protofed.data import Task, describe
from protofed.errors import ProtofedError
from protofed.federation.evaluation import evaluate
from protofed.federation.simulation import Federation
from protofed.method import Entry
from protofed.methods.fedavg import FedAvg
from protofed.observers.progress import client_lines
from protofed.runs.result import load_run
from protofed.runs.run import run
from protofed.studies.tables import caption
from protofed.testing.checks import TINY, tiny_task

# ---- configuration ------------------------------------------------------------------------------


def config_of(tmp_path: Path, task: Task, **settings: Any) -> tuple[Config, Config]:
    """A configuration, and what is read back from its TOML."""
    config = make_config(task, device="cpu", **settings)
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), encoding="utf-8")
    return config, make_config(**{**read_config(path), "task": task})


def test_round_trip_of_all_settings(tmp_path: Path) -> None:
    info = describe("digits")
    assert info.domains is not None and info.clients is not None
    task = made(dict.fromkeys(info.domains, range(5)), "digits", clients=info.clients, side=8)
    config, again = config_of(
        tmp_path,
        task,
        clients="equal",
        leave_out="svhn",
        dirichlet=0.5,
        quantity=2.0,
        leftover=True,
        repair=True,
    )
    assert again == config
    assert again.hash == config.hash
    assert config.clients == {"mnist": 5, "usps": 5, "svhn": 0, "syn": 5}
    assert 'leave_out = "svhn"' in config.toml()
    plain, again = config_of(tmp_path, task)
    assert again == plain
    assert (plain.leave_out, plain.dirichlet, plain.quantity) == (None, None, None)
    assert (plain.leftover, plain.repair) == (False, False)


def test_a_name_in_toml_becomes_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('task = "glyphs"\nclients = "equal"\nleave_out = "photo"\n', encoding="utf-8")
    config = make_config(**read_config(path))
    assert config.clients == {"scan": 3, "print": 3, "photo": 0, "inverse": 3}
    assert "[clients]\nscan = 3\nprint = 3\nphoto = 0\ninverse = 3\n" in config.toml()


def test_label_skew_turns_repair_off_unless_asked_for() -> None:
    task = balanced(100, repair=True, side=8)
    assert make_config(task, device="cpu").repair
    assert not make_config(task, device="cpu", dirichlet=0.1).repair
    assert make_config(task, device="cpu", dirichlet=0.1, repair=True).repair


def test_glyphs_have_enough_for_every_distribution() -> None:
    for name, counts in {"skewed": [4, 3, 2, 1], "equal": [3, 3, 3, 3], "one": [1] * 4}.items():
        config = make_config("glyphs", clients=name)
        assert list(config.clients.values()) == counts
        assert len(Federation(config).shares) == sum(counts)


def test_every_setting_changes_the_hash() -> None:
    task = tiny_task()
    settings: list[dict[str, Any]] = [
        {},
        {"leave_out": "left"},
        {"dirichlet": 0.5},
        {"quantity": 0.5},
        {"leftover": True},
        {"repair": True},
        {"clients": "one"},
    ]
    assert len({make_config(task, device="cpu", **s).hash for s in settings}) == len(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dirichlet": 0.0}, r"a number from 1e-06 to 1,000,000, got 0.0"),
        ({"dirichlet": float("nan")}, "dirichlet must be"),
        ({"quantity": -1.0}, "quantity must be"),
        ({"leftover": "yes"}, "leftover must be true or false, got 'yes'"),
        ({"repair": 1}, "repair must be true or false"),
        ({"leave_out": "lft"}, r"unknown domain of tiny 'lft' \(did you mean left"),
        (
            {"leave_out": "left", "clients": {"left": 2, "right": 1}},
            "left out, but has clients: 2",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtofedError, match=words):
        make_config(tiny_task(), device="cpu", **settings)


def test_clients_with_a_domain_left_out() -> None:
    task = tiny_task()

    def clients(**settings: Any) -> Mapping[str, int]:
        return make_config(task, device="cpu", leave_out="left", **settings).clients

    assert clients() == {"left": 0, "right": 1}
    assert clients(clients="skewed") == {"left": 0, "right": 2}
    assert clients(clients=2) == {"left": 0, "right": 2}
    assert clients(clients={"right": 2}) == {"left": 0, "right": 2}
    assert clients(clients={"left": 0, "right": 2}) == {"left": 0, "right": 2}


# ---- in a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_left_out_domain_is_only_tested_on(tmp_path: Path, whole: bool) -> None:
    plain = tiny_task()
    task = Task(**{**plain.__dict__, "whole_unseen": whole})
    result = run(task, leave_out="right", clients="skewed", out=tmp_path / "run", **TINY)
    assert {row["domain"] for row in result.summary["clients"]} == {"left"}
    assert result.summary["unseen"] == "right"
    assert result.summary["tested"] == {"left": 20, "right": 64 if whole else 20}
    assert all(set(r["accuracy"]) == {"left", "right"} for r in result.rounds)
    assert set(result.summary["accuracy"]) == {"left", "right", "average"}
    tested = 64 if whole else 20
    assert f"right left out of training and tested on {tested} images" in caption([result])
    assert f"tested on, with {tested} images" in client_lines(Federation(result.config, task))[1]
    # it trains as if the domain were not there
    other = run(task, clients={"left": 2, "right": 0}, **TINY)
    assert all(torch.equal(result.model[n], other.model[n]) for n in result.model)


def test_the_unseen_test_set_is_the_whole_domain() -> None:
    task = Task(**{**tiny_task().__dict__, "whole_unseen": True})
    config = make_config(task, leave_out="right", **TINY)
    tests, right = Federation(config, task).tests, task.domains["right"]
    assert torch.equal(tests["right"].x, torch.cat([right.test.x, right.train.x]))
    assert torch.equal(tests["right"].y, torch.cat([right.test.y, right.train.y]))
    assert torch.equal(tests["left"].x, task.domains["left"].test.x)


@dataclass(frozen=True)
class OwnNorm(FedAvg):
    """FedAvg whose clients keep their BatchNorm: there is no global model to test."""

    name: ClassVar[str] = "ownnorm"

    @property
    def evaluates(self) -> str:
        return "clients"

    def shared(self, entry: Entry) -> Literal["both", "no"]:
        return "no" if entry.kind == "bn" else "both"


def test_own_models_of_all_clients_are_tested_on_an_unseen_domain() -> None:
    task = tiny_task()
    result = run(task, OwnNorm(), leave_out="right", clients="skewed", **TINY)
    assert result.summary["evaluated"] != "global"
    assert all(list(r["accuracy"]) == ["left", "right"] for r in result.rounds)
    federation = Federation(result.config, task)
    federation.run_round()
    received = federation.server.broadcast()
    network = federation.make_network()
    scores = [
        evaluate(federation.setup, network, received, federation.store.get(name), federation.tests)
        for name in federation.clients
    ]
    mean = sum(s["accuracy"]["right"] for s in scores) / len(scores)
    assert federation.evaluate()["accuracy"]["right"] == pytest.approx(mean)


def test_clients_table_is_stored_and_shown(tmp_path: Path) -> None:
    labels = [0] * 10 + [1] * 10 + [2] * 4
    task = made({"a": labels, "b": labels}, samples=9, leftover=True, side=8)
    config = make_config(
        task, clients={"a": 3, "b": 1}, model="cnn2", width=4, device="cpu", rounds=1, epochs=1
    )
    federation = Federation(config, task)
    table = federation.table()
    assert [row["samples"] for row in table] == [9, 9, 6, 9]
    for row in table:
        assert sum(row["per_class"].values()) == row["samples"]
        assert len(row["per_class"]) == row["classes"]
    totals = sum((Counter(r["per_class"]) for r in table if r["domain"] == "a"), Counter[str]())
    assert totals == {"class 0": 10, "class 1": 10, "class 2": 4}
    lines = client_lines(federation)
    assert lines[0].startswith("  a  3 clients × 6–9 samples, ")
    assert lines[1].startswith("  b  1 client × 9 samples, ")
    assert lines[2] == "  a-2 gets 6 of 9 samples: what was left"

    result = run(tiny_task(), out=tmp_path / "run", dirichlet=0.1, **TINY)
    stored = json.loads((tmp_path / "run" / "clients.json").read_text("utf-8"))["clients"]
    assert stored == result.summary["clients"]
    assert stored[0].keys() == {"client", "domain", "model", "samples", "classes", "per_class"}
    assert "label skew Dirichlet(0.1)" in caption([result])


def test_clients_json_is_there_from_the_start(tmp_path: Path) -> None:
    from protofed.testing.checks import _Interrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), out=tmp_path / "run", observers=[_Interrupt(after=0)], **TINY)
    stored = json.loads((tmp_path / "run" / "clients.json").read_text("utf-8"))
    assert len(stored["clients"]) == 4


def test_skewed_runs_resume_to_the_same_numbers(tmp_path: Path) -> None:
    from protofed.testing.checks import _Interrupt, _same

    settings = {**TINY, "dirichlet": 0.3, "quantity": 0.5, "repair": True}
    whole = run(tiny_task(), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_task(), out=tmp_path / "r", observers=[_Interrupt(after=1)], **settings)
    assert _same(whole, run(tiny_task(), out=tmp_path / "r", resume=True, **settings))


def test_command_line_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = "run --task glyphs --leave-out inverse --rounds 1 --epochs 1 --samples 20 --width 4"
    result = CliRunner().invoke(
        app, [*command.split(), "--dirichlet", "0.5", "--no-repair", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "3 clients" in result.output
    assert "inverse  left out: only tested on, with 450 images" in result.output
    loaded = load_run(out)
    assert loaded.config.clients == {"scan": 1, "print": 1, "photo": 1, "inverse": 0}
    assert loaded.config.dirichlet == 0.5
    assert loaded.summary["unseen"] == "inverse"
    assert (out / "clients.json").is_file()


def test_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for words, command in {
        "unknown domain of glyphs 'invers' (did you mean inverse": "--leave-out invers",
        "unknown client distribution of glyphs 'equl' (did you mean equal": "--clients equl",
        "domain 'photo' has 350 training images: too few for 5 clients with 80": "--clients 5",
    }.items():
        result = CliRunner().invoke(app, ["run", "--out", str(out), *command.split()])
        assert result.exit_code
        assert words in str(result.exception)
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_has_every_option(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"])
    for option in ("leave-out", "dirichlet", "quantity", "leftover", "no-leftover", "repair"):
        assert f"--{option}" in result.output
