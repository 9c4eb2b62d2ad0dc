"""The command line, through ``main``: what it prints, what it writes, how it refuses."""

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import load_file

from protofed.cli import app as cli
from protofed.runs import run as run_module
from protofed.version import __version__

TINY = [
    "--rounds", "1", "--epochs", "1", "--clients", "1", "--samples", "10", "--device", "cpu",
    "--model", "cnn2", "--width", "4",
]  # fmt: skip

MINE = '''
"""Cross-entropy with another weight."""
from dataclasses import dataclass
from typing import ClassVar
import torch.nn.functional as F
from protofed.method import Method, hyper

@dataclass(frozen=True)
class Mine(Method):
    name: ClassVar[str] = "mine"
    scale: float = hyper(3.0, "s", "factor of the loss", above=0)

    def loss(self, client, batch):
        return {"ce": self.scale * F.cross_entropy(client.forward(batch.x).logits, batch.y)}
'''
NAN = (
    MINE.replace("Mine", "Nanny").replace('"mine"', '"nanny"').replace("self.scale", "float('nan')")
)


def call(capsys, *args):
    """Exit code, stdout and stderr of ``protofed`` with these arguments."""
    argv, sys.argv = sys.argv, ["protofed", *map(str, args)]
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def protofed(capsys, tmp_path, monkeypatch):
    """``protofed`` called in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: call(capsys, *args)


def files(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


def quietly(*args):
    """Stdout of a call that must succeed, for fixtures of the module."""
    argv, sys.argv = sys.argv, ["protofed", *map(str, args)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            cli.main()
        except SystemExit as end:
            assert not end.code
        finally:
            sys.argv = argv
    return out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of FPL."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    method = ["--method", "fpl", "--set", "tau=0.5", "--seed", "3"]
    quietly("run", *TINY, *method, "--quiet", "--out", folder)
    return folder


# ---- run ----------------------------------------------------------------------------------------


def test_run_prints_a_table_and_writes_a_folder(protofed, tmp_path):
    code, out, err = protofed(
        "run", *TINY, "--method", "fpl", "--set", "tau=0.5", "--seed", 3, "--out", "it"
    )
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    shown = next(
        line for line in out.splitlines() if line.split()[:1] == ["fpl"] and "on" not in line
    )
    expected = [
        f"{summary['accuracy'][d]:.1f}" for d in ("scan", "print", "photo", "inverse", "average")
    ]
    assert shown.split()[1:6] == expected
    assert "round 1/1" in out
    assert "Test accuracy in %" in out
    assert summary["seed"] == 3
    assert summary["hyper_parameters"]["tau"] == 0.5
    assert {p.name for p in (tmp_path / "it").iterdir()} >= {
        "config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "curves.png",
        "checkpoint.safetensors",
    }  # fmt: skip
    with Image.open(tmp_path / "it" / "curves.png") as image:
        assert image.format == "PNG"
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_run_again_says_it_is_complete_and_trains_nothing(finished, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "run", None)  # would raise
    before = files(finished)
    args = ["--method", "fpl", "--set", "tau=0.5", "--seed", "3", "--out", finished]
    code, out, _ = call(capsys, "run", *TINY, *args)
    assert code == 0
    assert "complete" in out
    assert "fpl" in out
    assert files(finished) == before


def test_a_used_folder_is_not_touched_without_being_told(finished, capsys, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    before = files(folder)
    code, _, err = call(capsys, "run", *TINY, "--seed", "4", "--out", folder)
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert files(folder) == before
    code, _, _ = call(
        capsys, "run", *TINY, "--seed", "4", "--out", folder, "--overwrite", "--quiet"
    )
    assert code == 0
    assert json.loads((folder / "summary.json").read_text())["seed"] == 4


def test_the_config_of_a_run_repeats_it(finished, protofed):
    code, out, err = protofed(
        "run", "--config", finished / "config.toml", "--out", "again", "--quiet"
    )
    assert (code, out, err) == (0, "", "")
    ours, theirs = (load_file(f / "model.safetensors") for f in (Path("again"), finished))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert Path("again/config.toml").read_text() == (finished / "config.toml").read_text()


def test_options_win_over_the_config(finished, protofed):
    args = ("run", "--config", finished / "config.toml", "--quiet", "--out")
    assert protofed(*args, "a", "--seed", "5", "--set", "tau=0.7")[0] == 0
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["seed"] == 5
    assert summary["hyper_parameters"]["tau"] == 0.7
    # another method: the hyper-parameters of the file's method are not its own
    assert protofed(*args, "b", "--method", "fedavg")[0] == 0
    assert json.loads(Path("b/summary.json").read_text())["hyper_parameters"] == {}


def test_the_default_folder_is_named_after_the_run(protofed):
    assert protofed("run", *TINY, "--quiet")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"glyphs-fedavg-0-[0-9a-f]{10}", folder.name)


def test_run_clients_with_different_models(protofed):
    """Named one by one in a file, or alternating: the same models are the same numbers."""
    table = "[model]\nscan-0 = 'cnn3'\nprint-0 = 'cnn2'\nphoto-0 = 'cnn3'\ninverse-0 = 'cnn2'\n"
    Path("models.toml").write_text("method = 'fedgh'\n" + table)
    tiny = [t for t in TINY if t not in ("--model", "cnn2")]
    code, out, _ = protofed("run", *tiny, "--config", "models.toml", "--out", "named")
    assert code == 0
    assert "cnn3 and cnn2" in " ".join(out.split())
    assert "own domain" in out
    code, _, _ = protofed("run", *tiny, "--method", "fedgh", "--model", "cnn3,cnn2", "--out", "two")
    assert code == 0
    named, two = (load_file(f"{folder}/model.safetensors") for folder in ("named", "two"))
    assert named.keys() == two.keys()
    assert "client/scan-0/encoder.0.weight" in two
    assert {n for n in two if n.startswith("model/")} == {"model/head.weight", "model/head.bias"}
    assert all(torch.equal(t, two[n]) for n, t in named.items())
    code, out, _ = protofed("show", "two")
    assert code == 0
    assert "own domain" in out


def test_run_a_method_from_a_file(protofed):
    Path("mine.py").write_text(MINE)
    code, out, err = protofed(
        "run", *TINY, "--method", "mine.py:Mine", "--set", "scale=2", "--out", "x"
    )
    assert (code, err) == (0, "")
    assert "mine" in out
    assert json.loads(Path("x/summary.json").read_text())["hyper_parameters"] == {"scale": 2.0}
    assert "mine.py:Mine" in Path("x/config.toml").read_text()
    code, out, _ = protofed(
        "run", *TINY, "--method", "mine.py:Mine", "--set", "scale=2", "--out", "x"
    )
    assert "complete" in out


def test_a_diverging_run_says_where_and_exits_with_3(protofed):
    Path("nan.py").write_text(NAN)
    code, _, err = protofed("run", *TINY, "--method", "nan.py:Nanny", "--out", "x")
    assert code == 3
    assert err.count("\n") == 1
    for word in ("scan-0", "round 1", "'ce'", "nan"):
        assert word in err


def test_ctrl_c_says_how_to_go_on(protofed, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run", interrupted)
    code, _, err = protofed("run", *TINY, "--out", "x")
    assert code == 130
    assert "--resume" in err


def test_a_process_of_its_own():
    command = [sys.executable, "-m", "protofed"]
    done = subprocess.run([*command, "run", "--set", "tau"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: cannot read --set 'tau'")
    assert done.stderr.count("\n") == 1


# ---- bad input: exit code 2, one line, nothing written ------------------------------------------


BAD = {
    "unknown task": (["--task", "glyph"], ["'glyph'", "glyphs"]),
    "unknown method": (["--method", "fedprotto"], ["'fedprotto'", "fedproto"]),
    "no method file": (["--method", "none.py:Mine"], ["none.py"]),
    "method file without class": (["--method", "none.py"], ["none.py", "file.py:Class"]),
    "tau 0": (["--method", "fpl", "--set", "tau=0"], ["tau", "above 0", "0.02"]),
    "tau a word": (["--method", "fpl", "--set", "tau=abc"], ["tau", "a number", "'abc'"]),
    "unknown hyper-parameter": (["--method", "fpl", "--set", "tao=1"], ["'tao'", "tau"]),
    "hyper-parameter of fedavg": (["--set", "tau=1"], ["tau", "fedavg"]),
    "set without =": (["--method", "fpl", "--set", "tau"], ["--set 'tau'", "--set tau=0.05"]),
    "too many samples": (["--samples", "100000"], ["scan", "--samples"]),
    "too many clients": (["--clients", "100000"], ["scan", "--clients"]),
    "samples of nothing": (["--samples", "0"], ["samples", "0"]),
    "rounds 0": (["--rounds", "0"], ["rounds", "at least 1", "0"]),
    "epochs 0": (["--epochs", "0"], ["epochs", "at least 1"]),
    "batch 0": (["--batch", "0"], ["batch", "at least 1"]),
    "lr 0": (["--lr", "0"], ["lr", "above 0"]),
    "lr nan": (["--lr", "nan"], ["lr", "nan"]),
    "momentum 1": (["--momentum", "1"], ["momentum", "[0, 1)"]),
    "seed -1": (["--seed", "-1"], ["seed", "at least 0"]),
    "participation 0": (["--participation", "0"], ["participation", "(0, 1]"]),
    "participation 2": (["--participation", "2"], ["participation", "(0, 1]"]),
    "clients as text": (["--clients", "scan=1=2"], ["--clients 'scan=1=2'", "scan=4"]),
    "clients a word": (["--clients", "lots"], ["lots"]),
    "clients without a number": (["--clients", "scan="], ["scan"]),
    "clients a fraction": (["--clients", "0.5"], ["clients", "0.5"]),
    "no clients": (["--clients", "0"], ["client"]),
    "unknown domain": (["--clients", "scam=1"], ["'scam'", "scan"]),
    "unknown domain of samples": (["--samples", "scam=1"], ["'scam'", "scan"]),
    "unknown model": (["--model", "resnet11"], ["'resnet11'", "resnet10"]),
    "different models": (["--model", "cnn3,cnn2"], ["fedavg sends whole models", "fedgh"]),
    "different features": (["--model", "cnn3,resnet10"], ["features of one size", "--width"]),
    "models as text": (["--model", "a=b=c"], ["--model 'a=b=c'", "scan-0=cnn3"]),
    "model of nobody": (
        ["--method", "local", "--model", "scan-0=cnn3,scam-0=cnn2"],
        ["'scam-0'", "scan-0"],
    ),
    "unknown norm": (["--norm", "batchnorm"], ["'batchnorm'", "batch"]),
    "unknown protocol": (["--protocol", "gliphs"], ["'gliphs'", "glyphs"]),
    "unknown device": (["--device", "gpu"], ["'gpu'", "cpu"]),
    "unknown precision": (["--precision", "fp31"], ["'fp31'", "fp32"]),
    "no config": (["--config", "none.toml"], ["none.toml", "No such file"]),
    "config a folder": (["--config", "."], ["cannot read config"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(protofed, tmp_path, case):
    given, words = BAD[case]
    code, out, err = protofed("run", *TINY, *given, "--out", "made")
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["too many samples", "unknown model", "no clients"])
def test_bad_input_never_removes_a_run(finished, capsys, tmp_path, case):
    folder = tmp_path / "kept"
    shutil.copytree(finished, folder)
    before = files(folder)
    given, _ = BAD[case]
    code, _, _ = call(capsys, "run", *TINY, *given, "--out", folder, "--overwrite")
    assert code == 2
    assert files(folder) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouns = 3", ["'rouns'", "rounds"]),
        ("rounds = ", ["not valid TOML"]),
        (b"\xff\xfe\x00", ["not valid TOML"]),
        ("[method]\ntau = 1", ["has no name"]),
        ("rounds = 1.5", ["rounds", "1.5"]),
        ("[method]\nname = 'fpl'\ntao = 1", ["'tao'", "tau"]),
        ("[model]\nscan-0 = 'cnn4'", ["'cnn4'", "cnn3"]),
        ("model = ['cnn3', 'cnn2']", ["model", "must be a name"]),
    ],
)
def test_bad_config(protofed, tmp_path, text, words):
    Path("c.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = protofed("run", "--config", "c.toml", "--out", "made")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_cuda_without_a_gpu(protofed, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = protofed("run", *TINY, "--device", "cuda", "--out", "made")
    assert code == 2
    assert "no GPU" in err
    assert "--device cpu" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of the run as if it had been stopped before its summary."""
    folder = tmp_path / "unfinished"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    return folder


RUN = ["run", *TINY, "--method", "fpl", "--set", "tau=0.5", "--resume"]


def test_resume_from_a_checkpoint_of_another_configuration(unfinished, capsys):
    before = files(unfinished)
    code, _, err = call(capsys, *RUN, "--seed", 4, "--out", unfinished)
    assert code == 2
    assert err.count("\n") == 1
    assert "another configuration" in err
    assert "seed 3 → 4" in err
    assert files(unfinished) == before


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_resume_from_a_cut_checkpoint(unfinished, capsys, size):
    checkpoint = unfinished / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:size])
    before = files(unfinished)
    code, _, err = call(capsys, *RUN, "--seed", 3, "--out", unfinished)
    assert code == 2
    assert err.count("\n") == 1
    assert "checkpoint.safetensors" in err
    assert "damaged or truncated" in err
    assert files(unfinished) == before


def test_resume_a_run_that_was_all_but_finished(unfinished, finished, capsys):
    code, _, err = call(capsys, *RUN, "--seed", 3, "--out", unfinished, "--quiet")
    assert (code, err) == (0, "")
    ours, theirs = (load_file(f / "model.safetensors") for f in (unfinished, finished))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_out_that_is_a_file_or_a_strangers_folder(protofed, tmp_path):
    Path("file").write_text("mine")
    Path("folder").mkdir()
    Path("folder/letter").write_text("mine")
    before = files(tmp_path)
    for out in ("file", "folder"):
        for flags in ([], ["--overwrite"], ["--resume"]):
            code, _, err = protofed("run", *TINY, "--out", out, *flags)
            assert code == 2
            assert "--out" in err
    assert files(tmp_path) == before


# ---- compare ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods, one from a file, and two seeds; FedAvg's runs are there before compare."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "mine.py").write_text(MINE)
    for seed in (5, 6):
        quietly("run", *TINY, "--quiet", "--seed", seed, "--out", folder / "out" / f"{seed}")
        summary = json.loads((folder / "out" / f"{seed}" / "summary.json").read_text())
        label = f"glyphs-fedavg-{seed}-{summary['hash']}"
        (folder / "out" / f"{seed}").rename(folder / "out" / label)
    args = [
        "compare", *TINY, "--methods", f"fedavg,{folder / 'mine.py'}:Mine", "--seeds", "2",
        "--seed", "5", "--set", "mine.scale=4", "--jobs", "2", "--out", str(folder / "out"),
    ]  # fmt: skip
    return args, folder / "out", quietly(*args)


def test_compare_runs_every_method_with_every_seed(compared):
    _, folder, out = compared
    runs = [p for p in folder.iterdir() if p.is_dir()]
    assert sorted(p.name.rsplit("-", 1)[0] for p in runs) == [
        "glyphs-fedavg-5", "glyphs-fedavg-6", "glyphs-mine-5", "glyphs-mine-6",
    ]  # fmt: skip
    assert "2 of 4 runs are already complete" in out
    assert "2 runs, 2 at a time" in out
    for name in ("mine seed 5", "mine seed 6"):
        assert f"{name}  round 1/1" in out
    assert "fedavg seed" not in out


def test_nothing_of_the_table_is_cut_off_where_there_is_no_terminal(compared):
    assert "…" not in compared[2]


def test_the_table_of_compare_is_right(compared):
    _, folder, out = compared
    accuracy = {}
    for run in folder.iterdir():
        if run.is_dir():
            lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
            summary = json.loads((run / "summary.json").read_text())
            mean = {d: fmean(r["accuracy"][d] for r in lines) for d in lines[0]["accuracy"]}
            mean["average"] = fmean(r["average"] for r in lines)
            accuracy[summary["method"], summary["seed"]] = mean
    header, _, *body = (folder / "table.md").read_text().split("\n\n")[1].splitlines()
    columns = [c.strip() for c in header.strip("|").split("|")]
    assert columns == [
        "method",
        "scan",
        "print",
        "photo",
        "inverse",
        "average",
        "Δ FedAvg",
        "MB",
        "s",
    ]
    cells = {}
    for line in body:
        row = [re.sub(r"\*\*|</?u>", "", c).strip() for c in line.strip("|").split("|")]
        cells[row[0]] = dict(zip(columns, row, strict=True))
    assert list(cells) == ["fedavg", "mine"]
    for method, row in cells.items():
        for column in columns[1:6]:
            both = [accuracy[method, seed][column] for seed in (5, 6)]
            assert row[column] == f"{fmean(both):.1f} ± {stdev(both):.1f}"
    pairs = [accuracy["mine", s]["average"] - accuracy["fedavg", s]["average"] for s in (5, 6)]
    assert any(pairs)  # otherwise the next line shows nothing
    # 12.706: Student's t with one degree of freedom
    half = 12.706 * stdev(pairs) / math.sqrt(2)
    noise = ", noise" if half >= abs(fmean(pairs)) else ""
    error = stdev(pairs) / math.sqrt(2)
    shown = f"{round(fmean(pairs), 1) + 0:+.1f} ± {error:.1f} (±{half:.1f}{noise})"
    assert cells["mine"]["Δ FedAvg"] == shown
    assert cells["fedavg"]["Δ FedAvg"] == ""
    assert cells["mine"]["average"] in out


def test_the_figure_of_compare_is_a_picture(compared):
    with Image.open(compared[1] / "curves.png") as image:
        assert image.format == "PNG"
        image.load()
        assert min(image.size) > 300


def test_compare_again_runs_nothing(compared, capsys, monkeypatch):
    args, folder, _ = compared

    def never(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    before = {p: c for p, c in files(folder).items() if p.parent != folder}
    code, out, _ = call(capsys, *args)
    assert code == 0
    assert "4 of 4 runs are already complete" in out
    assert {p: c for p, c in files(folder).items() if p.parent != folder} == before


def test_a_failing_run_inside_compare_is_named(protofed):
    Path("nan.py").write_text(NAN)
    code, _, err = protofed(
        "compare", *TINY, "--methods", "nan.py:Nanny", "--seed", 7, "--out", "out"
    )
    assert code in (2, 3)
    assert err.count("\n") == 1
    assert "nanny seed 7" in err
    assert "'ce' is nan" in err
    assert not Path("out/table.md").exists()


def starts(monkeypatch):
    """The commands that compare would have started; each 'fails' at once."""
    started = []

    class Fake:
        returncode = 2

        def __init__(self, command, **_):
            started.append(command)

        def poll(self):
            return 2

        def send_signal(self, _):
            pass

        def wait(self):
            pass

    monkeypatch.setattr("protofed.studies.execution.subprocess.Popen", Fake)
    polls = []

    def sleep(_):
        polls.append(1)
        assert len(polls) < 100, "compare waits for ever"

    monkeypatch.setattr("protofed.studies.execution.time.sleep", sleep)
    return started


def test_the_same_run_is_never_started_twice_at_once(protofed, monkeypatch):
    # two processes that write into one folder would spoil each other's records
    started = starts(monkeypatch)
    protofed("compare", *TINY, "--methods", "fedavg,fedavg", "--jobs", "2", "--out", "out")
    folders = [c[c.index("--out") + 1] for c in started]
    assert len(set(folders)) == len(folders)


def test_two_methods_of_one_name_cannot_be_compared(protofed, monkeypatch, tmp_path):
    # their rows in the table would silently become one
    started = starts(monkeypatch)
    Path("a.py").write_text(MINE)
    Path("b.py").write_text(MINE.replace("3.0", "5.0"))
    code, _, err = protofed("compare", *TINY, "--methods", "a.py:Mine,b.py:Mine", "--out", "out")
    assert code == 2
    assert err.count("\n") == 1
    assert "mine" in err
    assert "name" in err
    assert started == []


COMPARE_BAD = {
    "unknown method": (["--methods", "fedavg,fedprotto"], ["'fedprotto'", "fedproto"]),
    "no method": (["--methods", ""], ["method"]),
    "unknown task": (["--task", "glyph"], ["'glyph'", "glyphs"]),
    "seeds 0": (["--seeds", "0"], ["--seeds", "at least 1"]),
    "set without method": (
        ["--methods", "fpl", "--set", "tau=0.1"],
        ["which method", "METHOD.tau"],
    ),
    "set of a method that is not there": (
        ["--methods", "fpl", "--set", "fedproto.weight=1"],
        ["fedproto"],
    ),
    "set of an unknown name": (["--methods", "fpl", "--set", "fpl.tao=1"], ["'tao'", "tau"]),
    "set of a bad value": (["--methods", "fpl", "--set", "fpl.tau=-1"], ["tau", "above 0"]),
    "jobs -1": (["--jobs", "-1"], ["jobs"]),
    "different models": (
        ["--methods", "local,fedavg", "--model", "cnn3,cnn2"],
        ["fedavg", "methods that can"],
    ),
}


@pytest.mark.parametrize("case", list(COMPARE_BAD))
def test_bad_input_to_compare(protofed, monkeypatch, tmp_path, case):
    started = starts(monkeypatch)
    given, words = COMPARE_BAD[case]
    code, out, err = protofed("compare", "--methods", "fedavg", *TINY, *given, "--out", "made")
    assert started == []
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err
    assert list(tmp_path.iterdir()) == []


# ---- methods, tasks, help -----------------------------------------------------------------------


def test_methods_lists_them_all(protofed):
    code, out, _ = protofed("methods")
    assert code == 0
    for name in ("fedavg", "fedproto", "fpl"):
        assert re.search(rf"^\s*{name}\b", out, re.M)
    assert "CVPR 2023" in out


def test_methods_shows_one(protofed):
    code, out, _ = protofed("methods", "fpl")
    assert code == 0
    for part in ("CVPR 2023", "tau", "τ", "0.02", "finch_level", "first | last", "Deviations"):
        assert part in out
    assert "no hyper-parameters" in protofed("methods", "fedavg")[1]
    code, _, err = protofed("methods", "fpll")
    assert code == 2
    assert "fpl" in err
    code, _, err = protofed("methods", "fpl", "fedavg")
    assert code == 2
    assert err.count("\n") == 1


def test_methods_check(protofed):
    Path("mine.py").write_text(MINE)
    code, out, _ = protofed("methods", "check", "mine.py:Mine")
    assert code == 0
    assert re.search(r"all \d+ checks passed", out)
    assert "✓ gradients" in out
    Path("nan.py").write_text(NAN)
    code, out, err = protofed("methods", "check", "nan.py:Nanny")
    assert code == 2
    assert "✗ missing class" in out
    assert re.search(r"\d+ of \d+ checks failed for nan.py:Nanny", err)
    code, _, err = protofed("methods", "check")
    assert code == 2
    assert "file.py:Class" in err


def test_tasks(protofed):
    code, out, _ = protofed("tasks")
    assert code == 0
    assert "glyphs" in out
    for domain in ("scan", "print", "photo", "inverse"):
        assert re.search(rf"^\s*{domain}\s+\d+\s+200\s", out, re.M)


def test_version_and_nothing(protofed):
    assert protofed("--version")[:2] == (0, f"protofed {__version__}\n")
    _, out, err = protofed()
    assert "compare" in out + err


COMMANDS = typer.main.get_command(cli.app).commands
WHOLE = {  # those of groups too
    (name, *more): command
    for name, one in COMMANDS.items()
    for more, command in [((), one), *(((n,), c) for n, c in getattr(one, "commands", {}).items())]
}


@pytest.mark.parametrize("command", list(WHOLE), ids=" ".join)
def test_help_names_and_explains_every_option_and_argument(protofed, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = protofed(*command, "--help")
    assert code == 0
    for parameter in WHOLE[command].params:
        for option in parameter.opts:
            text = getattr(parameter, "help", None)
            assert text, f"{option} has no help"
            if option.startswith("--"):
                assert re.search(rf"{option}\b", out), f"{option} is not in the help"
            assert " ".join(text.split()[:3]) in " ".join(out.split()), f"{option}: {text}"


def test_help_of_the_whole_names_the_commands(protofed):
    code, out, _ = protofed("--help")
    assert code == 0
    assert {"run", "compare", "methods", "tasks"} <= set(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", out)


@pytest.mark.parametrize("args", [["run", "--round", "3"], ["run", "--rounds", "x"], ["runn"]])
def test_a_mistyped_option_or_command(protofed, tmp_path, args):
    code, out, err = protofed(*args)
    assert (code, out) == (2, "")
    assert args[-2 if len(args) > 2 and args[1] == "--round" else -1] in err
    assert list(tmp_path.iterdir()) == []
