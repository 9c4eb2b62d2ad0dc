"""``protofed run`` and ``show``: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.cli.commands import DIVERGES, MINE, TINY, Done, call, succeed

from protofed import runs

Protofed = Callable[..., Done]
FPL = ("--method", "fpl", "--set", "tau=0.5", "--seed", "3")


def files(folder: str | Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of FPL."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    succeed("run", *TINY, *FPL, "--quiet", "--out", folder)
    return folder


def test_run_prints_a_table_and_writes_a_folder(protofed: Protofed, tmp_path: Path) -> None:
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
    assert abs(time.time() - summary["finished"]) < 600
    assert summary["hyper_parameters"]["tau"] == 0.5
    assert {p.name for p in (tmp_path / "it").iterdir()} >= {
        "config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "curves.png",
        "checkpoint.safetensors",
    }  # fmt: skip
    with Image.open(tmp_path / "it" / "curves.png") as image:
        assert image.format == "PNG"
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_run_again_says_it_is_complete_and_trains_nothing(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run", None)  # would raise
    before = files(finished)
    args = ["--method", "fpl", "--set", "tau=0.5", "--seed", "3", "--out", finished]
    code, out, _ = call("run", *TINY, *args)
    assert code == 0
    assert "complete" in out
    assert "fpl" in out
    assert files(finished) == before


def test_a_used_folder_is_not_touched_without_being_told(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    before = files(folder)
    code, _, err = call("run", *TINY, "--seed", "4", "--out", folder)
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert files(folder) == before
    code, _, _ = call("run", *TINY, "--seed", "4", "--out", folder, "--overwrite", "--quiet")
    assert code == 0
    assert json.loads((folder / "summary.json").read_text())["seed"] == 4


def test_the_config_of_a_run_repeats_it(finished: Path, protofed: Protofed) -> None:
    code, out, err = protofed(
        "run", "--config", finished / "config.toml", "--out", "again", "--quiet"
    )
    assert (code, out, err) == (0, "", "")
    ours, theirs = (load_file(f / "model.safetensors") for f in (Path("again"), finished))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert Path("again/config.toml").read_text() == (finished / "config.toml").read_text()


def test_options_win_over_the_config(finished: Path, protofed: Protofed) -> None:
    args = ("run", "--config", finished / "config.toml", "--quiet", "--out")
    assert protofed(*args, "a", "--seed", "5", "--set", "tau=0.7")[0] == 0
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["seed"] == 5
    assert summary["hyper_parameters"]["tau"] == 0.7
    # another method: the hyper-parameters of the file's method are not its own
    assert protofed(*args, "b", "--method", "fedavg")[0] == 0
    assert json.loads(Path("b/summary.json").read_text())["hyper_parameters"] == {}


def test_the_default_folder_is_named_after_the_run(protofed: Protofed) -> None:
    assert protofed("run", *TINY, "--quiet")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"glyphs-fedavg-0-[0-9a-f]{10}", folder.name)
    facts, summary = (json.loads((folder / f).read_text()) for f in ("facts.json", "summary.json"))
    assert folder.name.endswith(facts["run"]) and facts["run"] == summary["hash"]
    # what a machine finds is what may have been asked for; another precision is another run
    done = protofed("run", *TINY, "--quiet", "--precision", "fp32", "--engine", "loop")
    assert done.code == 0 and list(Path("runs").iterdir()) == [folder]
    assert protofed("run", *TINY, "--quiet", "--precision", "fp64", "--runs", "others").code == 0
    (other,) = Path("others").iterdir()
    assert other.name != folder.name and "glyphs-fedavg-0-" in other.name


def test_run_clients_with_different_models(protofed: Protofed) -> None:
    """Named one by one in a file, or alternating: the same models are the same numbers."""
    table = "[model]\nscan-0 = 'cnn3'\nprint-0 = 'cnn2'\nphoto-0 = 'cnn3'\ninverse-0 = 'cnn2'\n"
    Path("models.toml").write_text("method = 'fedgh'\n" + table)
    tiny = [t for t in TINY if t not in ("--model", "cnn2")]
    code, out, _ = protofed("run", *tiny, "--config", "models.toml", "--out", "named")
    assert code == 0
    assert "cnn3 and cnn2" in " ".join(out.split())
    assert "own domain" in out
    code, _, _ = protofed(
        "run", *tiny, "--method", "fedgh", "--model", "cnn3,cnn2", "--out", "two", "--quiet"
    )
    assert code == 0
    named, two = (load_file(f"{folder}/model.safetensors") for folder in ("named", "two"))
    assert named.keys() == two.keys()
    assert "client/scan-0/encoder.0.weight" in two
    assert {n for n in two if n.startswith("model/")} == {"model/head.weight", "model/head.bias"}
    assert all(torch.equal(t, two[n]) for n, t in named.items())
    code, out, _ = protofed("show", "two")
    assert code == 0
    assert "own domain" in out


def test_keep_rounds(protofed: Protofed) -> None:
    given = ("--method", "fedproto", "--keep-rounds", "1,last", "--rounds", 2, "--out", "x")
    assert protofed("run", *TINY, *given, "--quiet").code == 0
    assert {p.name for p in Path("x/snapshots").iterdir()} == {"1.safetensors", "2.safetensors"}
    assert json.loads(Path("x/summary.json").read_text())["rounds"] == 2


def test_show_prints_what_was_found(finished: Path) -> None:
    out = succeed("show", finished)
    assert "fpl on glyphs, seed 3" in out and "1 of 1 rounds" in out
    assert ("fp32 on cpu" in out and "engine workers" in out) or "engine loop" in out
    done = call("show", finished.parent / "RUN")
    assert done.code == 2 and "runs are in runs/" in " ".join(done.err.split())
    done = call("show", finished.parent)
    assert done.code == 2 and "not a run's folder" in done.err


def test_run_a_method_from_a_file(protofed: Protofed) -> None:
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


def test_a_diverging_run_says_where_and_exits_with_3(protofed: Protofed) -> None:
    Path("nan.py").write_text(DIVERGES)
    code, _, err = protofed("run", *TINY, "--method", "nan.py:Nanny", "--out", "x")
    assert code == 3
    assert err.count("\n") == 1
    for word in ("scan-0", "round 1", "'ce'", "nan"):
        assert word in err


def test_ctrl_c_says_how_to_continue(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", interrupted)
    code, _, err = protofed("run", *TINY, "--out", "x")
    assert code == 130
    assert "--resume" in err


# ---- bad input: exit code 2, one line, nothing written ------------------------------------------


BAD: dict[str, tuple[list[str], list[str]]] = {
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
    "rounds 0": (["--rounds", "0"], ["rounds", "from 1", "0"]),
    "epochs 0": (["--epochs", "0"], ["epochs", "from 1"]),
    "batch 0": (["--batch", "0"], ["batch", "from 1"]),
    "lr 0": (["--lr", "0"], ["lr", "above 0"]),
    "lr nan": (["--lr", "nan"], ["lr", "nan"]),
    "momentum 1": (["--momentum", "1"], ["momentum", "[0, 1)"]),
    "seed -1": (["--seed", "-1"], ["seed", "from 0"]),
    "participation 0": (["--participation", "0"], ["participation", "(0, 1]"]),
    "participation 2": (["--participation", "2"], ["participation", "(0, 1]"]),
    "clients as text": (["--clients", "scan=1=2"], ["--clients 'scan=1=2'", "scan=4"]),
    "clients twice": (["--clients", "scan=1,scan=2"], ["--clients 'scan=1,scan=2'", "scan=4"]),
    "clients a word": (["--clients", "lots"], ["lots"]),
    "clients without a number": (["--clients", "scan="], ["scan"]),
    "clients a fraction": (["--clients", "0.5"], ["clients", "0.5"]),
    "no clients": (["--clients", "0"], ["client"]),
    "unknown domain": (["--clients", "scam=1"], ["'scam'", "scan"]),
    "unknown domain of samples": (["--samples", "scam=1"], ["'scam'", "scan"]),
    "unknown model": (["--model", "resnet11"], ["'resnet11'", "resnet10"]),
    "different models": (["--model", "cnn3,cnn2"], ["fedavg sends whole models", "fedgh"]),
    "different features": (["--model", "cnn3,resnet10"], ["features of the same size", "--width"]),
    "models as text": (["--model", "a=b=c"], ["--model 'a=b=c'", "scan-0=cnn3"]),
    "model of nobody": (
        ["--method", "local", "--model", "scan-0=cnn3,scam-0=cnn2"],
        ["'scam-0'", "scan-0"],
    ),
    "unknown norm": (["--norm", "batchnorm"], ["'batchnorm'", "batch"]),
    "unknown protocol": (["--protocol", "gliphs"], ["'gliphs'", "glyphs"]),
    "unknown device": (["--device", "gpu"], ["'gpu'", "cpu"]),
    "unknown precision": (["--precision", "fp31"], ["'fp31'", "fp32"]),
    "no workers": (["--workers", "0"], ["workers", "from 1"]),
    "rounds to keep": (["--keep-rounds", "first"], ["keep_rounds", "last"]),
    "a round after the last": (["--keep-rounds", "99"], ["round 99", "the run has 1", '"last"']),
    "each domain": (["--leave-out", "each"], ["protofed compare --methods fedavg", "--leave-out"]),
    "no such domain": (["--leave-out", "scam"], ["'scam'", "scan"]),
    "no config": (["--config", "none.toml"], ["none.toml", "No such file"]),
    "config a folder": (["--config", "."], ["cannot read config"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(protofed: Protofed, tmp_path: Path, case: str) -> None:
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
def test_bad_input_never_removes_a_run(finished: Path, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(finished, folder)
    before = files(folder)
    given, _ = BAD[case]
    code, _, _ = call("run", *TINY, *given, "--out", folder, "--overwrite")
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
def test_bad_config(
    protofed: Protofed, tmp_path: Path, text: str | bytes, words: list[str]
) -> None:
    Path("c.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = protofed("run", "--config", "c.toml", "--out", "made")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_cuda_without_a_gpu(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = protofed("run", *TINY, "--device", "cuda", "--out", "made")
    assert code == 2
    assert "no GPU" in err
    assert "--device cpu" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unfinished(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run as if it had been stopped before its summary."""
    folder = tmp_path / "unfinished"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    return folder


RUN = ["run", *TINY, "--method", "fpl", "--set", "tau=0.5", "--resume"]


def test_resume_from_a_checkpoint_of_another_configuration(unfinished: Path) -> None:
    before = files(unfinished)
    code, _, err = call(*RUN, "--seed", 4, "--out", unfinished)
    assert code == 2
    assert err.count("\n") == 1
    assert "another configuration" in err
    assert "seed 3 → 4" in err
    assert files(unfinished) == before


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_resume_from_a_cut_checkpoint(unfinished: Path, size: int) -> None:
    checkpoint = unfinished / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:size])
    before = files(unfinished)
    code, _, err = call(*RUN, "--seed", 3, "--out", unfinished)
    assert code == 2
    assert err.count("\n") == 1
    assert "checkpoint.safetensors" in err
    assert "is damaged: " in err
    assert files(unfinished) == before


def test_resume_a_run_that_was_all_but_finished(unfinished: Path, finished: Path) -> None:
    code, _, err = call(*RUN, "--seed", 3, "--out", unfinished, "--quiet")
    assert (code, err) == (0, "")
    ours, theirs = (load_file(f / "model.safetensors") for f in (unfinished, finished))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_out_that_is_a_file_or_a_strangers_folder(protofed: Protofed, tmp_path: Path) -> None:
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
