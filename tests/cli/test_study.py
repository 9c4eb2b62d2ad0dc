"""``protofed study``, ``sweep`` and ``show``: with few real runs, and many made-up ones."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from protofed.studies.claims import me
from protofed.studies.compare import _elsewhere, default_jobs
from rich.console import Console

from protofed.studies import folder as folders
from protofed.studies import plan
from protofed.studies.definition import dumps, parse
from protofed.studies.execution import Job, display, time_left
from protofed.studies.show import sparkline

SMALL = ["--set", "epochs=1", "--set", "clients=1", "--set", "samples=10", "--set", "width=4",
         "--set", "model=cnn2", "--rounds", "1", "--device", "cpu"]  # fmt: skip


def flat(cell):
    return dict.fromkeys(("scan", "print", "photo", "inverse"), 40.0 + cell.seed)


def no_processes(monkeypatch):
    monkeypatch.setattr(folders, "_figures", lambda *_: [])

    def never(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)


# ---- list, show, table --------------------------------------------------------------------------


def test_list_names_all_and_says_what_is_missing(protofed):
    code, out, _ = protofed("study", "list")
    assert code == 0
    for name in ("fpl-table2", "i2pfl-fig11", "fedseproto-table3"):
        assert re.search(rf"^\s*{name}\b", out, re.M)


def test_show_has_the_paper_s_numbers_and_the_notes(protofed):
    code, out, _ = protofed("study", "show", "fpl-table2")
    assert code == 0
    plain = " ".join(out.split())
    for part in ("FPL 98.31 92.71 80.27 61.20 83.12 +2.98", "variant=reference", "6/4/3/7",
                 "48 runs in all"):  # fmt: skip
        assert part in plain
    assert "tau = 0.01, 0.02" in protofed("study", "show", "fpl-fig4")[1]
    code, _, err = protofed("study", "show", "fpl-table9")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("form", ["terminal", "markdown", "csv", "latex"])
def test_table_prints_what_is_there(protofed, study, make_runs, form):
    make_runs(study, Path("there"), flat, skip={("FPL", 0), ("FPL", 1)})
    code, out, err = protofed("study", "table", "mine", "--out", "there", "--format", form)
    assert (code, err) == (0, "")
    assert "40.5" in out
    assert "—" in out or "---" in out or form == "csv"
    code, _, err = protofed("study", "table", "mine", "--out", "there", "--format", "word")
    assert code == 2
    assert "terminal" in err or "markdown" in err
    assert protofed("study", "table", "nowhere")[0] == 2


# ---- run ----------------------------------------------------------------------------------------


def test_a_table_of_what_was_tried_on_another_task_is_found(protofed, study, make_runs):
    make_runs(study, Path("runs/fpl-table2-on-glyphs"), flat)
    code, _, err = protofed("study", "table", "fpl-table2")
    assert code == 2
    assert "'runs/fpl-table2' holds no study (there is runs/fpl-table2-on-glyphs)" in err
    assert protofed("study", "table", "fpl-table2-on-glyphs")[0] == 0
    assert "protofed study run NAME" in protofed("study", "table", "fpl-table1")[2]


def test_runs_that_are_there_are_not_done_again(protofed, study, make_runs, monkeypatch):
    make_runs(study, Path("out/mine"), flat)
    Path("mine.toml").write_text(dumps(study.raw))
    no_processes(monkeypatch)
    code, out, err = protofed("study", "run", "mine.toml", "--out", "out/mine")
    assert (code, err) == (0, "")
    assert "4 of 4 runs are already complete" in out
    assert Path("out/mine/table.tex").is_file()
    # nor those of another study beside it
    code, out, _ = protofed("study", "run", "mine.toml", "--out", "out/other", "--methods", "fpl")
    assert code == 0
    assert "2 of 2 runs are already complete" in out
    assert [p for p in Path("out/other").iterdir() if p.is_dir()] == []
    assert "41.0" not in out  # seeds 0 and 1
    assert "40.5" in out


def test_runs_of_other_images_or_defaults_are_done_again(
    protofed, study, make_runs, monkeypatch, digests
):
    """A run's hash says what it was of; that it answered the same question does not suffice."""
    folder = Path("runs") / study.name
    make_runs(study, folder, flat)
    no_processes(monkeypatch)
    first, second, *_ = sorted(folder.glob("*/"))
    about = json.loads((first / "summary.json").read_text())
    (first / "summary.json").write_text(json.dumps({**about, "hash": "0123456789"}))
    stale = first.rename(folder / first.name.replace(about["hash"], "0123456789"))
    for file in folder.glob("index-*.json"):
        file.write_text(file.read_text().replace(first.name, stale.name))
    # another machine's choice of device and precision is no reason
    other = json.loads((second / "summary.json").read_text())
    config = next(c.config() for c in plan.cells(study) if c.config().hash == other["hash"])
    elsewhere = replace(config, device="cuda", precision="bf16")
    other |= {"device": "cuda", "precision": "bf16", "hash": elsewhere.hash}
    (second / "summary.json").write_text(json.dumps(other))
    before = digests(stale)
    asked = []
    monkeypatch.setattr(
        "protofed.studies.compare.run_all", lambda jobs, *_: asked.extend(jobs) or []
    )
    Path("own.toml").write_text(dumps(study.raw))
    code, out, _ = protofed("study", "run", "own.toml", "--out", folder)
    assert code == 0
    assert "1 of the runs" in " ".join(out.split())
    assert [job.folder.name for job in asked if job.state == "waiting"] == [first.name]
    assert digests(stale) == before, "it stays"
    index = folders.read_index(folder)
    assert stale not in [run for runs in index.values() for run in runs]


def test_a_t_sne_over_rounds_takes_no_run_that_kept_no_models(raw, make_runs, tmp_path):
    plain = parse(raw(seeds=1), "plain")
    make_runs(plain, tmp_path / "plain", flat)
    drawn = parse(raw(seeds=1, kind="tsne", tsne={"rounds": [1]}), "drawn")
    config = plan.configs(plan.cells(drawn))
    for keeps in (False, True):
        for c in config.values():
            run = tmp_path / "plain" / c.label
            if keeps:
                (run / "snapshots").mkdir()
                (run / "snapshots" / "1.safetensors").write_text("")
            found = _elsewhere(tmp_path / "drawn", c)
            assert found == (run if keeps else None)
            assert _elsewhere(tmp_path / "drawn", replace(c, keep_rounds=None)) == run
            assert _elsewhere(tmp_path / "plain", c) == run, "its own is as it is"
    # where both are, a study's own run is the one that is shown
    key, c = next(iter(config.items()))
    folders.write_study(drawn, tmp_path / "drawn", {key: tmp_path / "plain" / c.label})
    folders.write_study(drawn, tmp_path / "drawn", {key: tmp_path / "drawn" / c.label})
    assert folders.read_index(tmp_path / "drawn")[key][0] == tmp_path / "drawn" / c.label


def test_other_seeds_and_tasks_leave_the_tables_of_what_is_there(
    protofed, raw, make_runs, monkeypatch
):
    study = parse(raw(tasks={"glyphs": {}, "more": {"task": "glyphs", "lr": 0.02}}), "mine")
    make_runs(study, Path("out/mine"), flat)
    Path("mine.toml").write_text(dumps(study.raw))
    no_processes(monkeypatch)
    given = ["study", "run", "mine.toml", "--out", "out/mine", "--tasks", "more", "--seeds", "1"]
    code, out, err = protofed(*given)
    assert (code, err) == (0, "")
    assert "2 of 2 runs are already complete" in out
    assert folders.open_study(Path("out/mine")).seeds == (0, 1)
    # nor does a process beside this one, whose --seeds were others
    other = parse(raw(seeds=[0]), "mine")
    folders.write_study(other, Path("out/mine"), {})
    assert folders.open_study(Path("out/mine")).seeds == (0, 1)
    assert "asked for with other settings" not in out
    # the same runs, asked for in another way, are another question
    monkeypatch.setattr("protofed.studies.compare.run_all", lambda *_: [])
    code, out, _ = protofed(*given, "--precision", "fp64")
    assert "8 finished runs in out/mine were asked for with other settings" in out


def test_device_and_precision_reach_the_runs(protofed, monkeypatch):
    found = []

    def never(jobs, at_once, console):
        found.extend(jobs)
        found.append(at_once)
        return []

    monkeypatch.setattr("protofed.studies.compare.run_all", never)
    args = ["study", "run", "fpl-table2", "--on", "glyphs", "--rounds", "3", "--seeds", "2"]
    code, _, err = protofed(*args, "--device", "cpu", "--precision", "fp64", "--jobs", "8")
    assert (code, err) == (0, "")
    *jobs, at_once = found
    assert (len(jobs), at_once) == (16, 8)
    for job in jobs:
        assert (job.config.device, job.config.precision, job.config.rounds) == ("cpu", "fp64", 3)
        assert 'precision = "fp64"' in job.config.toml()  # which is what a run's process gets


def test_runs_at_a_time(monkeypatch):
    free = {"bytes": 100 << 30}
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (free["bytes"], 140 << 30))
    assert default_jobs(gpu=False) == 16
    assert default_jobs(gpu=True) == 2
    free["bytes"] = 20 << 30
    assert default_jobs(gpu=True) == 1
    free["bytes"] = 8 << 30
    assert default_jobs(gpu=True) == 1


def test_a_diverged_run_is_not_tried_again(protofed, study, make_runs, monkeypatch):
    make_runs(study, Path("out/mine"), flat, skip={("FPL", 1)})
    Path("mine.toml").write_text(dumps(study.raw))
    cell = next(c for c in plan.cells(study) if c.line.label == "FPL" and c.seed == 1)
    run = folders.read_index(Path("out/mine"))[cell.key][0]
    run.with_name(f"{run.name}.diverged").write_text("'ce' is nan")
    no_processes(monkeypatch)
    code, out, err = protofed("study", "run", "mine.toml", "--out", "out/mine")
    assert code == 2
    assert "FPL seed 1" in err
    assert "'ce' is nan" in err
    assert "FPL (diverged)" in out  # and the table is there nonetheless


BAD = {
    "no such study": (["fpl-tabel2"], ["fpl-table2"]),
    "no such task": (["fpl-table2", "--tasks", "pacs"], ["'pacs'"]),
    "no such row": (["fpl-table2", "--methods", "fedprotto"], ["fedproto"]),
    "seeds 0": (["fpl-table2", "--on", "glyphs", "--seeds", "0"], ["--seeds"]),
    "jobs 0": (["fpl-table2", "--on", "glyphs", "--jobs", "0"], ["--jobs"]),
    "on nothing": (["fpl-table2", "--on", "glyph"], ["glyphs"]),
    "bad setting": (["fpl-table2", "--on", "glyphs", "--set", "epoch=1"], ["epochs"]),
    "bad value": (["fpl-table2", "--on", "glyphs", "--set", "lr=-1"], ["lr", "above 0"]),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(protofed, tmp_path, case):
    given, words = BAD[case]
    code, out, err = protofed("study", "run", *given, "--out", "made")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err, err
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_is_not_there_is_an_error_before_anything_runs(protofed, raw, monkeypatch):
    no_processes(monkeypatch)
    Path("new.toml").write_text(dumps(raw(rows={"Base": "fedavgg", "FPL": "fpl"})))
    code, out, err = protofed("study", "run", "new.toml", "--out", "made")
    assert (code, out) == (2, "")
    assert "study 'new': unknown method of row Base: 'fedavgg' (did you mean fedavg" in err
    assert "--methods runs other rows alone" in err
    assert not Path("made").exists()
    assert "needs method fedavgg" in protofed("study", "show", "new.toml")[1]


COUNTED = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from protofed.method import Method, hyper

@dataclass(frozen=True)
class Counted(Method):
    name: ClassVar[str] = "counted"
    number: int = hyper(0, "", "tells the rows apart")

    def init_server(self, model, sizes):
        with Path(__file__).with_name("log").open("a") as file:
            file.write(f"{self.number}\\n")
        return {}
"""


def start(folder, study):
    """``protofed study run`` in a process of its own."""
    command = [sys.executable, "-m", "protofed", "study", "run", str(study), "--out", str(folder)]
    return subprocess.Popen(
        [*command, "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # tests that run in the background of a shell inherit a SIGINT that is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_two_processes_share_a_folder_and_no_run_is_done_twice(raw, tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    method = f"{tmp_path / 'counted.py'}:Counted"
    rows = {f"row{i}": {"method": method, "options": {"number": i}} for i in range(2)}
    study = parse(raw(seeds=1, rows=rows), "two")
    (tmp_path / "two.toml").write_text(dumps(study.raw))
    # a claim left by a process that is dead: taken over, not waited for
    labels = [c.config().label for c in plan.cells(study)]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{labels[0]}.claim").write_text(json.dumps({**vars(me()), "pid": dead.pid}))
    processes = [start(out, tmp_path / "two.toml") for _ in range(2)]
    for process in processes:
        text, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        for row in rows:  # both waited for all, and both show the whole table
            assert re.search(rf"^ *{row} +\d", text, re.M)
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "1"]
    assert list(out.glob("*.claim*")) == []
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == sorted(labels)


def test_a_run_killed_before_its_first_checkpoint_starts_over(protofed, raw):
    Path("mine.toml").write_text(dumps(raw(rows={"FedAvg": "fedavg"}, seeds=1)))
    (cell,) = plan.cells(parse(raw(rows={"FedAvg": "fedavg"}, seeds=1), "mine"))
    config = plan.configs([cell])[cell.key]
    run = Path("runs/mine") / config.label
    run.mkdir(parents=True)
    # as another machine left it: other workers, and a round without a checkpoint
    (run / "config.toml").write_text(replace(config, workers=7, engine="workers").toml())
    (run / "rounds.jsonl").write_text('{"round": 0, "accuracy": {}, "average": 1.0}\n')
    code, out, err = protofed("study", "run", "mine.toml", "--jobs", 1)
    assert (code, err) == (0, "")
    assert "FedAvg seed 0: starts over, there is no checkpoint in its folder" in out
    assert (run / "summary.json").is_file()
    # of really another configuration it is not touched
    text = (run / "config.toml").read_text().replace("lr = 0.01", "lr = 0.5")
    (run / "config.toml").write_text(text)
    for name in ("summary.json", "checkpoint.safetensors"):
        (run / name).unlink()
    code, out, err = protofed("study", "run", "mine.toml", "--jobs", 1)
    assert code != 0
    assert "starts over" not in out
    assert "another configuration" in err
    assert "lr = 0.5" in (run / "config.toml").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_what_can_be_gone_on_with(raw, tmp_path, sent):
    settings = {**raw()["settings"], "rounds": 300}
    study = raw(seeds=1, rows={"FedAvg": "fedavg"}, settings=settings)
    (tmp_path / "one.toml").write_text(dumps(study))
    out = tmp_path / "out"
    process = start(out, tmp_path / "one.toml")
    for _ in range(1200):
        if any(f.read_text().count("\n") >= 2 for f in out.glob("*/rounds.jsonl")):
            break
        time.sleep(0.05)
    (claim,) = out.glob("*.claim")
    holder = json.loads(claim.read_text())["pid"]
    assert holder != process.pid  # the run's own process holds it
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not Path(f"/proc/{holder}").exists()
    (run,) = (p for p in out.iterdir() if p.is_dir())
    assert 2 <= (run / "rounds.jsonl").read_text().count("\n") < 300
    assert (run / "checkpoint.safetensors").is_file()
    assert list(out.glob("*.claim*")) == []


def test_a_built_in_study_small_and_a_sweep(protofed):
    """Through real runs: the study writes its tables, and the sweep takes FedAvg's run from it."""
    args = ["study", "run", "fpl-table1", "--on", "glyphs", "--methods", "neither (FedAvg)",
            "--seeds", "1", "--out", "runs/s", *SMALL]  # fmt: skip
    code, out, err = protofed(*args)
    assert (code, err) == (0, "")
    assert "table.md, table.csv, table.tex, curves.png, curves.pdf" in out
    assert re.search(r"both \(FPL\) +— +— +— +— +—", out)
    saved = folders.open_study(Path("runs/s"))
    assert saved.override["on"] == "glyphs"
    assert saved.override["settings"]["samples"] == 10
    code, out, err = protofed(
        "sweep", "--task", "glyphs", "--method", "fpl", "--over", "tau=0.1", "--against", "fedavg",
        "--out", "runs/w", "--set", "upcr=0", *SMALL,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "1 of 2 runs are already complete" in out
    (run,) = (p for p in Path("runs/w").iterdir() if p.is_dir())
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["hyper_parameters"]["tau"], summary["hyper_parameters"]["upcr"]) == (0.1, 0)
    with Image.open("runs/w/sweep.png") as image:
        image.load()
    code, out, _ = protofed("show", run)
    assert code == 0
    assert "1 of 1 rounds" in out
    assert "fpl on glyphs" in out


@pytest.mark.parametrize("over", ["tau", "tau=", "tao=1", "tau=-1"])
def test_bad_sweeps(protofed, tmp_path, over):
    code, out, err = protofed("sweep", "--method", "fpl", "--over", over, "--out", "made")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "ta" in err
    assert list(tmp_path.iterdir()) == []


# ---- what a person sees -------------------------------------------------------------------------


def test_the_display_counts_and_estimates(study, make_runs, tmp_path):
    configs = list(plan.configs(plan.cells(study)).values())
    jobs = [Job(f"job {i}", c, tmp_path / str(i)) for i, c in enumerate(configs)]
    assert time_left(jobs, 2) is None
    jobs[0].state = "done"
    jobs[1].state, jobs[1].message = "elsewhere", "far, process 7"
    jobs[0].records.append(
        {"accuracy": {"scan": 1.0}, "average": 1.0, "seconds": {"train": 3.0, "evaluate": 1.0}}
    )
    assert time_left(jobs, 2) == 3 * 4 / 2  # three runs of one round, two at a time
    table = display(jobs, time.perf_counter(), 2, Console(width=120))
    rows = list(zip(*(c.cells for c in table.columns), strict=True))
    assert rows[0][3] == "scan 1.0  average 1.0"
    assert rows[1][2] == "on far, process 7"
    assert rows[-1][0] == "1 of 4 done, 1 elsewhere, 0 s so far"
    assert rows[-1][2] == "6 s left"


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_the_display_of_a_narrow_terminal_keeps_what_matters(study, width, tmp_path):
    (config, *_) = plan.configs(plan.cells(study)).values()
    job = Job("glyphs  FPL, a=1.0, b=2.0  seed 0", config, tmp_path, "running")
    accuracy = dict.fromkeys(("scan", "print", "photo", "inverse"), 50.0)
    job.records.append({"accuracy": accuracy, "average": 50.0, "seconds": {"train": 3.0}})
    job.started = time.perf_counter() - 600
    job.config = replace(config, rounds=100)
    file = io.StringIO()
    console = Console(width=width, file=file)
    console.print(display([job], time.perf_counter() - 600, 2, console))
    said = file.getvalue()
    assert "1/100" in said and " h" in said and "…" not in said
    assert ("inverse 50.0" in said) == (width == 200)
    assert ("50.0" in said) == (width >= 80)
    assert "a=1.0," in said and "b=2.0" in said


def test_sparklines():
    assert sparkline([0, 50, 100], 0, 100) == "▁▅█"
    assert sparkline([5, 5], 5, 5) == "▁▁"
    long = sparkline([float(i) for i in range(1000)], 0, 999)
    assert (len(long), long[0], long[-1]) == (48, "▁", "█")
    assert list(long) == sorted(long)
    assert sparkline([float("nan"), 1.0], 0, 1) == " █"


def test_show_of_unfinished_runs_and_of_none(protofed, study, make_runs):
    make_runs(study, Path("s"), flat, rounds=1)
    run = next(p for p in Path("s").iterdir() if p.is_dir())
    (run / "summary.json").unlink()
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rounds = 1", "rounds = 9"))
    code, out, _ = protofed("show", run)
    assert code == 0
    assert "1 of 9 rounds (not finished" in out
    assert protofed("show", "s")[2].count("study table") == 1
    shutil.rmtree("s")
    assert protofed("show", "s")[0] == 2
    Path("t").mkdir()
    assert protofed("show", "t")[0] == 2
