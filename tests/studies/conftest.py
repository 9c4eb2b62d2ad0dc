"""Studies of made-up runs, and tiny real ones."""

import contextlib
import io
import json
import sys

import pytest

from protofed.cli import app as cli
from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import parse

TINY = {"rounds": 1, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu", "model": "cnn2",
        "width": 4}  # fmt: skip


def raw(**more):
    """A small study as its TOML would be read."""
    return {
        "title": "Two methods",
        "seeds": [0, 1],
        "settings": dict(TINY),
        "tasks": {"glyphs": {}},
        "rows": {"FedAvg": "fedavg", "FPL": "fpl"},
        **more,
    }


def make_runs(study, folder, accuracy, skip=(), rounds=3):
    """Write the runs of a study as if they had been done.

    ``accuracy(cell)`` gives a value per domain; ``skip``: (label, seed) left out.
    """
    cells = plan.cells(study)
    configs = plan.configs([c for c in cells if not c.line.row.missing])
    index = {}
    for cell in cells:
        if cell.line.row.missing:
            continue
        config = configs[cell.key]
        run = folder / config.label
        index[cell.key] = run
        if (cell.line.label, cell.seed) in skip:
            continue
        values = accuracy(cell)
        average = sum(values.values()) / len(values)
        record = {
            "accuracy": values, "average": average, "loss": {"ce": 1.0}, "bytes_up": 1_000_000,
            "bytes_down": 2_000_000, "seconds": {"train": 1.0, "evaluate": 0.5},
        }  # fmt: skip
        lines = [json.dumps({"round": t, **record}) + "\n" for t in range(rounds)]
        clients = [
            {"client": f"{d}-0", "domain": d, "samples": 10} for d, n in config.clients.items() if n
        ]
        summary = {
            "method": config.method.name, "hash": config.hash, "seed": config.seed,
            "accuracy": {**values, "average": average}, "bytes_up": 3_000_000,
            "bytes_down": 6_000_000, "seconds": 4.5, "data": "made up", "batchnorm": "averaged",
            "clients": clients, "engine": "loop (made up)", "tested": dict.fromkeys(values, 200),
        }  # fmt: skip
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(config.toml())
        (run / "rounds.jsonl").write_text("".join(lines))
        (run / "summary.json").write_text(json.dumps(summary))
    folders.write_study(study, folder, index)


def call(*args):
    """Exit code, stdout and stderr of ``protofed`` with these arguments."""
    argv, sys.argv = sys.argv, ["protofed", *map(str, args)]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.argv = argv
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def study():
    return parse(raw(), "mine")


@pytest.fixture
def protofed(tmp_path, monkeypatch):
    """``protofed`` called in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return call


@pytest.fixture(name="raw")
def raw_fixture():
    return raw


@pytest.fixture(name="make_runs")
def make_runs_fixture():
    return make_runs
