"""``protofed compare`` and ``sweep``: one real comparison, and many made-up ones."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import pytest
from PIL import Image
from tests.cli.commands import DIVERGES, MINE, TINY, Done, call, succeed
from tests.studies.in_process import run_in_process, start_nothing
from tests.studies.made_runs import DOMAINS, image_folder, make_runs, rising

import protofed
from protofed.cli import compare as commands
from protofed.methods import METHODS
from protofed.studies.adhoc import adhoc
from protofed.studies.folder import StudyFolder
from protofed.studies.launch import Asked
from protofed.studies.plan import PlannedRun

Protofed = Callable[..., Done]
SETTINGS = {"rounds": 1, "epochs": 1, "clients": 1, "samples": 10, "device": "cpu",
            "model": "cnn2", "width": 4}  # fmt: skip
"""What TINY says."""


def files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def runs_in(pool: Path) -> list[Path]:
    return [path.parent for path in pool.glob("*/config.toml")]


def test_all_methods_are_those_that_need_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    monkeypatch.setattr(commands, "run_and_print", lambda found, *_: asked.extend(found))
    succeed("compare", *TINY)
    succeed("compare", *TINY, "--methods", "all")
    by_default = inspect.signature(protofed.compare).parameters["methods"].default
    for rows in (by_default, *(one.study.rows for one in asked)):
        assert {*METHODS} - {*rows} == {"ccst"}


# ---- one comparison, with processes -------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[object], Path, str]:
    """Two methods, one from a file, and two seeds; FedAvg's runs are there before compare."""
    place = tmp_path_factory.mktemp("compared")
    (place / "mine.py").write_text(MINE)
    pool = place / "runs"
    for seed in (5, 6):
        succeed("run", *TINY, "--quiet", "--seed", seed, "--runs", pool)
    args = [
        "compare", *TINY, "--methods", f"fedavg,{place / 'mine.py'}:Mine", "--seeds", "2",
        "--seed", "5", "--set", "mine.scale=4", "--jobs", "2", "--runs", pool,
    ]  # fmt: skip
    return args, pool, succeed(*args)


@pytest.fixture(scope="module")
def folder(compared: tuple[Sequence[object], Path, str]) -> Path:
    """The folder of its tables."""
    (found,) = compared[1].glob("compare-*")
    return found


def test_every_method_is_run_with_every_seed(
    compared: tuple[Sequence[object], Path, str], folder: Path
) -> None:
    _, pool, out = compared
    assert sorted(run.name.rsplit("-", 1)[0] for run in runs_in(pool)) == [
        "glyphs-fedavg-5", "glyphs-fedavg-6", "glyphs-mine-5", "glyphs-mine-6",
    ]  # fmt: skip
    assert "2 of 4 runs are already complete" in out
    assert "2 runs, 2 at a time" in out
    for name in ("mine seed 5", "mine seed 6"):
        assert f"{name}  round 1/1" in out
    assert "fedavg seed" not in out
    assert re.fullmatch(r"compare-glyphs-[0-9a-f]{10}", folder.name)
    assert {p.name for p in folder.iterdir()} == {
        "study.toml", "table.md", "table.csv", "table.tex", "curves.png", "curves.pdf",
    }  # fmt: skip
    assert "…" not in out, "where there is no terminal nothing of a table is cut off"


def test_the_table_is_right(compared: tuple[Sequence[object], Path, str], folder: Path) -> None:
    _, pool, out = compared
    accuracy = {}
    for run in runs_in(pool):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
        mean = {d: fmean(r["accuracy"][d] for r in lines) for d in lines[0]["accuracy"]}
        mean["average"] = fmean(r["average"] for r in lines)
        accuracy[summary["method"], summary["seed"]] = mean
    header, _, *body = (folder / "table.md").read_text().split("\n\n")[1].splitlines()
    columns = [c.strip() for c in header.strip("|").split("|")]
    assert columns == ["method", *DOMAINS, "average", "worst", "spread", "Δ FedAvg"]
    cells = {}
    for line in body:
        row = [re.sub(r"\*\*|</?u>", "", c).strip() for c in line.strip("|").split("|")]
        cells[row[0]] = dict(zip(columns, row, strict=True))
    assert list(cells) == ["fedavg", "mine"]
    for method, shown in cells.items():
        for column in columns[1:6]:
            both = [accuracy[method, seed][column] for seed in (5, 6)]
            assert shown[column] == f"{fmean(both):.1f} ± {stdev(both):.1f}"
    pairs = [accuracy["mine", s]["average"] - accuracy["fedavg", s]["average"] for s in (5, 6)]
    assert any(pairs)  # otherwise the next line shows nothing
    # 12.706: Student's t with one degree of freedom
    half = 12.706 * stdev(pairs) / math.sqrt(2)
    noise = ", noise" if half >= abs(fmean(pairs)) else ""
    error = stdev(pairs) / math.sqrt(2)
    delta = f"{round(fmean(pairs), 1) + 0:+.1f} ± {error:.1f} (±{half:.1f}{noise})"
    assert cells["mine"]["Δ FedAvg"] == delta
    assert cells["fedavg"]["Δ FedAvg"] == ""
    assert cells["mine"]["average"] in out
    with Image.open(folder / "curves.png") as image:
        image.load()
        assert min(image.size) > 300


@pytest.mark.usefixtures("no_drawing")
def test_again_nothing_is_run(
    compared: tuple[Sequence[object], Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, pool, _ = compared
    start_nothing(monkeypatch)
    before = {p: c for p, c in files(pool).items() if not p.parent.name.startswith("compare")}
    assert "4 of 4 runs are already complete" in succeed(*args)
    after = {p: c for p, c in files(pool).items() if not p.parent.name.startswith("compare")}
    assert after == before


@pytest.mark.usefixtures("no_drawing")
def test_another_comparison_has_a_folder_of_its_own(
    compared: tuple[Sequence[object], Path, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, pool, _ = compared
    start_nothing(monkeypatch)
    before = files(folder)
    fewer = [*args[: args.index("--methods")], "--methods", "fedavg", "--seed", 5, "--runs", pool]
    assert "1 of 1 runs are already complete" in succeed(*fewer)
    assert len(list(pool.glob("compare-*/table.md"))) == 2
    assert files(folder) == before
    # not even where it is asked for
    done = call(*fewer, "--out", folder)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "holds another study" in done.err and "choose another --out" in done.err
    assert files(folder) == before


# ---- made-up ones -------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_drawing")
def test_parts_write_runs_only_and_the_whole_its_tables(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    args = ["compare", *TINY, "--methods", "fedavg,fpl", "--jobs", 1]
    for part in ("1/2", "2/2"):
        done = protofed(*args, "--shard", part, "--runs", f"pool{part[0]}")
        assert (done.code, done.err) == (0, "")
        pool = Path(f"pool{part[0]}")
        assert f"part {part[0]} of 2: its runs are in pool" in " ".join(done.out.split())
        assert runs_in(pool) == list(pool.iterdir()), "nothing but runs"
    assert len(started) == 2
    Path("all").mkdir()
    for run in (*Path("pool1").iterdir(), *Path("pool2").iterdir()):
        run.rename(Path("all") / run.name)
    start_nothing(monkeypatch)
    done = protofed(*args, "--runs", "all")
    assert done.code == 0 and "2 of 2 runs are already complete" in done.out
    (table,) = Path("all").glob("compare-glyphs-*/table.md")
    assert "| fpl |" in table.read_text()


@pytest.mark.usefixtures("no_drawing")
def test_a_run_that_diverged_is_named_and_the_table_made_of_the_others(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch)
    Path("nan.py").write_text(DIVERGES)
    args = ["compare", *TINY, "--methods", "nan.py:Nanny,fedavg", "--seed", 7]
    done = protofed(*args)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "nanny seed 7" in done.err and "'ce' is nan" in done.err
    assert "nanny (diverged)" in done.out
    start_nothing(monkeypatch)  # it would diverge again
    done = protofed(*args)
    assert done.code == 2 and "to try again, delete" in done.err
    # alone there is nothing to show
    done = protofed("compare", *TINY, "--methods", "nan.py:Nanny", "--seed", 7, "--out", "none")
    assert done.code == 2 and not Path("none/table.md").exists()


@pytest.mark.usefixtures("no_drawing")
def test_the_same_method_twice_is_one_row(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    assert protofed("compare", *TINY, "--methods", "fedavg,fedavg", "--jobs", 2).code == 0
    assert len(started) == 1


def without_clients() -> list[str]:
    at = TINY.index("--clients")
    return [*TINY[:at], *TINY[at + 2 :]]


def unseen_runs(pool: Path, methods: Sequence[str]) -> None:
    def score(run: PlannedRun) -> dict[str, float]:
        better = 5.0 * (run.line.label == "fpl")
        return {d: a + better + (d == run.unseen) for d, a in rising(run).items()}

    rows = {name: (name, {}) for name in methods}
    settings = {k: v for k, v in SETTINGS.items() if k != "clients"} | {"leave_out": "each"}
    make_runs(adhoc("compare", "", "glyphs", rows, range(1), settings), pool, score)


@pytest.mark.usefixtures("no_drawing")
def test_each_domain_is_left_out_in_turn(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen_runs(Path("runs"), ["fedavg", "fpl"])
    start_nothing(monkeypatch)
    given = without_clients()
    done = protofed("compare", "--methods", "fedavg,fpl", "--leave-out", "each", *given)
    assert (done.code, done.err) == (0, "")
    assert "8 of 8 runs are already complete" in done.out
    text = " ".join(done.out.split())
    assert "fedavg 11.0 21.0 31.0 41.0 26.0" in text
    assert "fpl 16.0 26.0 36.0 46.0 31.0 16.0 11.2 +5.0" in text
    assert done.out.count("unseen average") == 1  # one table
    (definition,) = Path("runs").glob("compare-glyphs-*/study.toml")
    assert "Methods on glyphs, unseen domains" in definition.read_text("utf-8")


@pytest.mark.usefixtures("no_drawing")
def test_each_domain_is_left_out_for_real(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    done = protofed("compare", "--methods", "copa", "--leave-out", "each", *without_clients())
    assert (done.code, done.err) == (0, "")
    assert "unseen average" in done.out and len(started) == 4
    summaries = [json.loads(p.read_text("utf-8")) for p in Path("runs").glob("*/summary.json")]
    assert {s["unseen"] for s in summaries} == set(DOMAINS)


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_of_images(protofed: Protofed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", "cache")
    image_folder(Path("a/pets"))
    image_folder(Path("b/pets"), start=100)
    started = run_in_process(monkeypatch)
    given = [w for w in TINY if w not in ("--samples", "10")]
    tables = []
    for where in "ab":
        args = ["compare", *given, "--methods", "fedavg", "--task", f"folder:{where}/pets"]
        done = protofed(*args)
        assert (done.code, done.err) == (0, "")
        assert "already complete" not in done.out
        assert "differ in" not in done.out
        tables.append(done.out)
    assert len(started) == 2 and len(runs_in(Path("runs"))) == 2
    folders = sorted(Path("runs").glob("compare-folder-pets-*"))
    assert len(folders) == 2
    # reading needs no images
    Path("a").rename("gone")
    for folder in folders:
        assert StudyFolder.open(folder).tables()[0].columns == ("day", "night", "average")
        assert protofed("study", "table", folder).code == 0


BAD: dict[str, tuple[list[str], list[str]]] = {
    "unknown method": (["--methods", "fedavg,fedprotto"], ["'fedprotto'", "fedproto"]),
    "no method": (["--methods", ""], ["there is no method to run"]),
    "unknown task": (["--task", "glyph"], ["'glyph'", "glyphs"]),
    "seeds 0": (["--seeds", "0"], ["seeds must be a whole number from 1 to"]),
    "set without method": (
        ["--methods", "fpl", "--set", "tau=0.1"],
        ["which method", "METHOD.tau"],
    ),
    "set of a setting": (["--set", "fedavg.lr=0.1"], ["lr"]),
    "set of a method that is not there": (
        ["--methods", "fpl", "--set", "fedproto.weight=1"],
        ["fedproto"],
    ),
    "set of an unknown name": (["--methods", "fpl", "--set", "fpl.tao=1"], ["'tao'", "tau"]),
    "set of a bad value": (["--methods", "fpl", "--set", "fpl.tau=-1"], ["tau", "above 0"]),
    "jobs -1": (["--jobs", "-1"], ["--jobs '-1'", "--jobs auto"]),
    "MPS without a GPU": (["--mps"], ["--mps is for runs on a GPU"]),
    "MPS and Ray": (["--mps", "--ray", "local"], ["--mps is for runs on this machine"]),
    "no such part": (["--shard", "3/2"], ["--shard '3/2'", "1/4"]),
    "part of nothing": (["--shard", "one"], ["--shard 'one'"]),
    "no such domain": (["--leave-out", "eachh"], ["unknown domain of glyphs 'eachh'"]),
    "different models": (
        ["--methods", "local,fedavg", "--model", "cnn3,cnn2"],
        ["fedavg", "methods that can"],
    ),
    "two of one name": (["--methods", "a.py:Mine,b.py:Mine"], ["both named mine", "name"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    start_nothing(monkeypatch)
    Path("a.py").write_text(MINE)
    Path("b.py").write_text(MINE.replace("3.0", "5.0"))
    given, words = BAD[case]
    done = protofed("compare", "--methods", "fedavg", *TINY, *given, "--out", "made")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err, done.err
    assert {p.name for p in tmp_path.iterdir()} <= {"a.py", "b.py", "__pycache__"}


# ---- protocols ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_drawing")
def test_the_protocol_is_said_before_the_first_run(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_nothing(monkeypatch)
    rows = {name: (name, {}) for name in ("fedavg", "i2pfl")}
    for protocol in ("fpl", "glyphs"):
        settings = {**SETTINGS, "protocol": protocol}
        make_runs(adhoc("compare", "", "glyphs", rows, [0], settings), Path("runs"), rising)
    args = ["compare", *TINY, "--methods", "fedavg,i2pfl"]
    done = protofed(*args, "--protocol", "fpl")
    assert (done.code, done.err) == (0, "")
    line = "glyphs, protocol fpl: cnn2, 32×32 pixels, batch 64, epochs 1, rounds 1"
    assert done.out.index(line) < done.out.index("warning:") < done.out.index("2 of 2 runs")
    said = " ".join(done.out.split())
    assert "train differently: i2pfl: model resnet10 (here cnn2), batch 32 (here 64)" in said
    (table,) = Path("runs").glob("compare-*/table.md")
    assert "- Some methods' papers train differently: i2pfl" in table.read_text()
    assert "warning" not in protofed(*args).out, "the protocol of glyphs is no paper's"


# ---- sweeps -------------------------------------------------------------------------------------


def test_a_sweep_takes_what_is_there_and_draws_it(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    assert protofed("run", *TINY, "--quiet").code == 0
    done = protofed(
        "sweep", *TINY, "--method", "fpl", "--over", "tau=0.1", "--over", "tau=0.2",
        "--against", "fedavg", "--set", "upcr=0",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "1 of 3 runs are already complete" in done.out
    assert len(started) == 2
    (folder,) = Path("runs").glob("sweep-*")
    assert re.fullmatch(r"sweep-glyphs-fpl-tau-[0-9a-f]{10}", folder.name)
    with Image.open(folder / "sweep.png") as image:
        image.load()
    study = StudyFolder.open(folder).study
    assert [line.label for line in study.lines] == ["fedavg", "fpl, tau=0.1", "fpl, tau=0.2"]
    summaries = [json.loads(p.read_text()) for p in Path("runs").glob("*-fpl-*/summary.json")]
    assert sorted(s["hyper_parameters"]["tau"] for s in summaries) == [0.1, 0.2]
    assert {s["hyper_parameters"]["upcr"] for s in summaries} == {0}


@pytest.mark.usefixtures("no_drawing")
def test_a_sweep_says_what_validation_chooses(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_nothing(monkeypatch)
    over, settings = {"lr": [0.1, 0.2]}, {**SETTINGS, "validate": "unused"}
    swept = [{"over": over, "rows": ["fedavg"]}]
    study = adhoc("sweep", "", "glyphs", {"fedavg": ("fedavg", {})}, [0], settings, swept)
    make_runs(study, Path("runs"), rising, validation=lambda run: 9 - run.config.lr)
    args = ["sweep", *TINY, "--over", "lr=0.1,0.2", "--validate"]
    done = protofed(*args, "unused")
    assert (done.code, done.err) == (0, "")
    assert "validation average" in done.out
    assert "note: Chosen by validation accuracy: fedavg, lr=0.1." in " ".join(done.out.split())
    done = protofed(*args, "0.2")
    assert done.code == 2 and "too few images to validate on: 1 of domain 'scan', 2" in done.err
    assert "(raise --validate, or" in done.err


def test_over_takes_hyper_parameters_and_settings(
    protofed: Protofed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofed.api.run_all", lambda jobs, *_: [])
    given = ("--method", "fpl", "--over", "tau=0.1,0.2", "--over", "lr=0.01,0.1")
    assert protofed("sweep", *TINY, *given).code == 0
    (folder,) = Path("runs").glob("sweep-glyphs-fpl-tau-lr-*")
    first = StudyFolder.open(folder).study.lines[0].row
    assert (first.options, first.settings) == ({"tau": 0.1}, {"lr": 0.01})


@pytest.mark.parametrize("over", ["tau", "tau=", "tao=1", "tau=-1"])
def test_bad_sweeps(protofed: Protofed, tmp_path: Path, over: str) -> None:
    done = protofed("sweep", "--method", "fpl", "--over", over, "--out", "made")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "ta" in done.err
    assert list(tmp_path.iterdir()) == []
