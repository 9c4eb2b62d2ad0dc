"""Runs of a study: what is started, waited for, stopped, and what a person sees of it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.studies.in_process import InProcess, run_in_process, start_nothing
from tests.studies.made_runs import DOMAINS, TINY, make_runs, study

from protofed.cores import core_count
from protofed.errors import Busy, ProtofedError
from protofed.methods import method_class
from protofed.runs.folder import RunFolder
from protofed.studies import execution
from protofed.studies.definition import Study
from protofed.studies.execution import (
    Job,
    LocalRunner,
    display,
    expected_seconds,
    raise_failures,
    run_all,
    starting_order,
    time_left,
)
from protofed.studies.launch import prepare
from protofed.studies.plan import plan


def jobs_of(made: Study, pool: Path) -> list[Job]:
    return prepare(made, pool)[1]


def run_quietly(jobs: list[Job], at_once: int = 1) -> tuple[list[Job], str]:
    out = io.StringIO()
    return run_all(jobs, LocalRunner(at_once), Console(file=out, width=200)), out.getvalue()


def one(**more: Any) -> Study:
    return study(rows={"FedAvg": "fedavg"}, seeds=1, **more)


# ---- runs ---------------------------------------------------------------------------------------


def test_what_is_missing_is_run_with_plain_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    make_runs(study(seeds=1), tmp_path, skip={("FPL", 0)})
    failed, out = run_quietly(jobs_of(study(seeds=1), tmp_path))
    assert failed == []
    assert "1 of 2 runs are already complete" in out and "1 run, 1 at a time" in out
    assert "FPL seed 0  round 1/1  scan" in out
    (command,) = started
    assert command[:6] == [sys.executable, "-m", "protofed", "run", "--quiet", "--resume"]
    folder = Path(command[command.index("--out") + 1])
    assert folder.parent == tmp_path and folder.name.startswith("glyphs-fpl-0-")
    # side by side, runs share the cores
    assert command[command.index("--workers") + 1] == str(core_count())
    start_nothing(monkeypatch)
    failed, out = run_quietly(jobs_of(study(seeds=1), tmp_path))
    assert failed == [] and "2 of 2 runs are already complete" in out


def test_the_last_runs_share_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, two at a time: the third would otherwise leave half of the cores idle."""
    monkeypatch.setattr("protofed.studies.execution.core_count", lambda: 4)
    started = run_in_process(monkeypatch)
    jobs = jobs_of(study(seeds=3, rows={"FedAvg": "fedavg"}), tmp_path)
    assert run_quietly(jobs, at_once=2)[0] == []
    workers = [command[command.index("--workers") + 1] for command in started]
    assert workers == ["2", "2", "4"]


def timed_jobs(tmp_path: Path, seconds: dict[str, float]) -> list[Job]:
    """Three seeds of three methods with ten rounds each, seed by seed; rounds of seed 0 are known.

    Seed 0 has done five of them.
    """
    rows = {"FedAvg": "fedavg", "FPL": "fpl", "MOON": "moon"}
    made = study(rows=rows, seeds=3, settings={**TINY, "rounds": 10})
    jobs = []
    for run in sorted(plan(made), key=lambda run: run.seed):
        method = run.config.method.name
        folder = RunFolder(tmp_path / f"{method}-{run.seed}")
        job = Job(f"{method} {run.seed}", run.config, folder, "")
        if run.seed == 0 and method in seconds:
            job.state = "running"
            took = {"train": seconds[method], "evaluate": 1.0}
            job.records.extend([{"seconds": took}] * 5)
        jobs.append(job)
    return jobs


def test_what_a_run_takes_is_known_from_runs_of_its_kind(tmp_path: Path) -> None:
    jobs = timed_jobs(tmp_path, {"fedavg": 1.0, "moon": 5.0})
    by_name = {job.name: expected_seconds(jobs)[id(job)] for job in jobs}
    assert by_name["fedavg 0"] == 5 * 2 and by_name["fedavg 2"] == 10 * 2
    assert by_name["moon 0"] == 5 * 6 and by_name["moon 1"] == 10 * 6
    assert by_name["fpl 0"] == by_name["fpl 2"] == 10 * 4, "the mean of the others"
    assert expected_seconds(timed_jobs(tmp_path, {})) == {}
    jobs[0].state, jobs[1].state = "done", "failed"
    assert {id(job) for job in jobs[2:]} == expected_seconds(jobs).keys()


def test_a_complete_run_of_the_pool_tells_what_another_seed_takes(tmp_path: Path) -> None:
    two = study(rows={"FedAvg": "fedavg"}, seeds=2)
    make_runs(two, tmp_path, skip={("FedAvg", 1)})
    done, other = jobs_of(two, tmp_path)
    done.state = "done"
    seconds = done.folder.summary()["seconds"]
    assert seconds > 0
    assert expected_seconds([done, other]) == {id(other): seconds}, "of the one round it has"
    (done.folder.path / "summary.json").write_text("{")
    del done.seconds_before
    assert expected_seconds([done, other]) == {}


def order(jobs: list[Job], at_once: int) -> list[str]:
    left = [job for job in jobs if job.state == "waiting"]
    return [job.name for job in starting_order(left, jobs, at_once)]


def test_runs_that_would_end_last_are_started_first(tmp_path: Path) -> None:
    in_turn = ["fedavg 1", "fpl 1", "moon 1", "fedavg 2", "fpl 2", "moon 2"]
    known = {"fedavg": 1.0, "fpl": 1.0, "moon": 5.0}  # 20, 20 and 60 s a run
    jobs = timed_jobs(tmp_path, known)
    assert order(jobs, 1) == order(jobs, 4) == in_turn, "250 s of work in four places: 62 s"
    assert order(jobs, 5) == ["moon 1", "moon 2", "fedavg 1", "fpl 1", "fedavg 2", "fpl 2"]
    assert order(timed_jobs(tmp_path, {}), 5)[3:] == in_turn, "nothing is known yet"
    for job in jobs[:5]:
        job.state = "done"
    assert order(jobs, 2) == ["moon 1", "fedavg 2", "fpl 2", "moon 2"], "160 s in two: 80 s"
    assert order(jobs, 3) == ["moon 1", "moon 2", "fedavg 2", "fpl 2"]


def test_a_round_to_keep_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProtofedError, match="seed 0: keep_rounds names round 99, but the run has"):
        jobs_of(one(settings={**TINY, "keep_rounds": [99]}), tmp_path)
    # of those that a study draws, some may not be there when it is tried small
    (job,) = jobs_of(one(kind="tsne", tsne={"rounds": [1, 99]}), tmp_path)
    assert job.config.keep_rounds == (1, "last")


def test_a_run_that_kept_too_little_is_done_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    make_runs(one(), tmp_path)
    drawn = one(kind="tsne", tsne={"rounds": [1]})
    assert run_quietly(jobs_of(drawn, tmp_path))[0] == []
    assert "--overwrite" in started[0]
    (job,) = jobs_of(drawn, tmp_path)
    assert job.is_complete() and job.folder.artifact_rounds("snapshots") == [1]


def test_a_failing_run_is_named_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch)
    made = study(seeds=1)
    first, _ = jobs = jobs_of(made, tmp_path)
    first.folder.path.mkdir(parents=True)
    (first.folder.path / "letter").write_text("not a run's")
    failed, _ = run_quietly(jobs)
    assert failed == [first]
    assert [job.state for job in jobs] == ["failed", "done"]
    with pytest.raises(ProtofedError, match=r"run FedAvg seed 0 failed: .*is not a run's folder"):
        raise_failures(failed)
    with pytest.raises(ProtofedError, match=r"4 runs failed: .*; and 1 more$"):
        raise_failures([first] * 4)


def test_an_exception_in_a_run_is_told_with_its_notes_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FAILS)
    method_class(f"{file}:Mine")
    _, job = jobs_of(study(seeds=1, rows={"FedAvg": "fedavg", "Mine": f"{file}:Mine"}), tmp_path)
    with LocalRunner(1) as runner:
        runner.start(job)
        while job.state not in ("done", "failed"):
            time.sleep(0.1)
            runner.poll(job, Console(quiet=True))
    assert job.message.startswith("mine.py:8: IndexError: index 99 is out of bounds")
    assert job.message.endswith("; in the loss of mine, client scan-0, batch x [10, 3, 32, 32]")


FAILS = """from dataclasses import dataclass
from protofed.method import Method
@dataclass(frozen=True)
class Mine(Method):
    name = "mine"
    def loss(self, client, batch):
        logits = client.forward(batch.x).logits
        return {"ce": logits[0, 99]}
"""


def test_a_diverged_run_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_nothing(monkeypatch)
    runs = make_runs(study(seeds=1), tmp_path)
    (runs["FPL", 0] / "summary.json").unlink()
    (runs["FPL", 0] / "diverged.txt").write_text("'ce' is nan\n")
    failed, out = run_quietly(jobs_of(study(seeds=1), tmp_path))
    assert [job.name for job in failed] == ["FPL seed 0"]
    assert failed[0].message == f"'ce' is nan (to try again, delete {runs['FPL', 0]})"
    assert "1 of 2 runs are already complete" in out


def test_a_run_without_a_checkpoint_starts_over_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch)
    (job,) = jobs = jobs_of(one(), tmp_path)
    job.folder.path.mkdir(parents=True)
    # as another machine left it: other workers, and a round without a checkpoint
    job.folder.config_file.write_text(replace(job.config, workers=7, engine="workers").toml())
    job.folder.rounds_file.write_text('{"round": 0, "accuracy": {"scan": 1.0}, "average": 1.0}\n')
    failed, out = run_quietly(jobs)
    assert failed == []
    assert "FedAvg seed 0: starts over, there is no checkpoint in its folder" in out
    # of really another configuration it is not touched
    text = job.folder.config_file.read_text().replace("lr = 0.01", "lr = 0.5")
    job.folder.config_file.write_text(text)
    for name in ("summary.json", "checkpoint.safetensors"):
        (job.folder.path / name).unlink()
    (failure,), out = run_quietly(jobs_of(one(), tmp_path))
    assert "starts over" not in out
    assert "another configuration" in failure.message
    assert "lr = 0.5" in job.folder.config_file.read_text()


def test_two_studies_share_a_pool_at_once_and_do_no_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)
    made = study(settings={**TINY, "rounds": 3})
    outcomes: list[tuple[list[Job], list[Job]]] = []

    def work() -> None:
        jobs = jobs_of(made, tmp_path)
        outcomes.append((jobs, run_quietly(jobs)[0]))

    with _first_round_slow():
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(outcomes) == 2
    for jobs, failed in outcomes:
        assert failed == [] and all(job.state == "done" for job in jobs)
    folders = sorted(p.parent for p in tmp_path.glob("*/summary.json"))
    assert len(folders) == 4
    for folder in folders:  # rounds of one run, not of two mixed
        assert [r["round"] for r in RunFolder(folder).records()] == [1, 2, 3]
    # a run that was found locked is a command that came to nothing, at most
    assert 4 <= len(started) <= 8


class _first_round_slow:
    """Makes runs take long enough for two studies to meet."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        append = RunFolder.append_record

        def slowly(folder: RunFolder, record: Any) -> None:
            time.sleep(0.05)
            append(folder, record)

        self.patch.setattr(RunFolder, "append_record", slowly)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def test_a_run_of_another_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the other process takes it between the look and the start."""
    run_in_process(monkeypatch)
    start_nothing(monkeypatch)
    (job,) = jobs = jobs_of(one(), tmp_path)
    monkeypatch.setattr(RunFolder, "is_locked", lambda _: True)
    seen: list[str] = []

    def sleep(_: float) -> None:
        seen.append(job.state)
        if len(seen) == 3:  # the other process is done
            make_runs(one(), tmp_path)

    monkeypatch.setattr(execution.time, "sleep", sleep)
    monkeypatch.setattr(execution, "RETRY_SECONDS", 0)
    assert run_quietly(jobs)[0] == []
    assert job.state == "done" and set(seen) == {"elsewhere"}


def test_a_run_that_found_its_folder_locked_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_in_process(monkeypatch)

    class LosesTheRace(InProcess):
        def __init__(self, command: list[str], **more: Any) -> None:
            if started:
                super().__init__(command, **more)
            else:
                started.append(command)
                self.code = Busy.exit_code

    monkeypatch.setattr(execution.subprocess, "Popen", LosesTheRace)
    assert run_quietly(jobs_of(one(), tmp_path))[0] == []
    assert len(started) == 2


class Forever:
    """A run that goes on until it is terminated."""

    def __init__(self, *_: object, **__: object) -> None:
        self.done: list[str] = []
        FOREVER.append(self)

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.done.append("terminated")

    def wait(self) -> None:
        self.done.append("waited for")


FOREVER: list[Forever] = []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs_and_waits_for_their_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    FOREVER.clear()
    monkeypatch.setattr(execution.subprocess, "Popen", Forever)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal
    monkeypatch.setattr(execution.time, "sleep", lambda _: os.kill(os.getpid(), number))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_quietly(jobs_of(study(seeds=1), tmp_path), at_once=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [p.done for p in FOREVER] == [["terminated", "waited for"]] * 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_sigterm_interrupts_neither_the_runs_nor_the_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``timeout`` sends it to the process and then to its group."""

    class Impatient(Forever):
        def terminate(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().terminate()

        def wait(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().wait()

    FOREVER.clear()
    monkeypatch.setattr(execution.subprocess, "Popen", Impatient)
    monkeypatch.setattr(execution.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_quietly(jobs_of(study(seeds=1), tmp_path), at_once=2)
    assert [p.done for p in FOREVER] == [["terminated", "waited for"]] * 2


def test_sigterm_leaves_runs_that_can_be_resumed(tmp_path: Path) -> None:
    """With real processes: of the study, and of its run."""
    made = one(settings={**TINY, "rounds": 500})
    (tmp_path / "one.toml").write_text(made.toml())
    command = [sys.executable, "-m", "protofed", "study", "run", str(tmp_path / "one.toml")]
    process = subprocess.Popen(
        [*command, "--runs", str(tmp_path / "runs"), "--jobs", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(2400):
        rounds = list((tmp_path / "runs").glob("*/rounds.jsonl"))
        if rounds and rounds[0].read_text().count("\n") >= 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command resumes" in err
    (job,) = jobs_of(made, tmp_path / "runs")
    assert not job.folder.is_locked(), "the run has ended too"
    checkpoint = job.folder.checkpoint()
    # the signal may come between a round's record and the moment it counts as complete
    assert checkpoint is not None and 2 <= checkpoint.round < 500
    assert len(job.folder.records()) - checkpoint.round in (0, 1)
    assert not job.folder.starts_over(job.config)


# ---- what a person sees -------------------------------------------------------------------------


def some_jobs(tmp_path: Path) -> list[Job]:
    return [
        Job(f"job {i}", run.config, RunFolder(tmp_path / str(i)), "")
        for i, run in enumerate(plan(study()))
    ]


def test_the_display_counts_and_estimates(tmp_path: Path) -> None:
    jobs = some_jobs(tmp_path)
    assert time_left(jobs, 2) is None
    jobs[0].state, jobs[1].state = "done", "elsewhere"
    jobs[0].records.append(
        {"accuracy": {"scan": 1.0}, "average": 1.0, "seconds": {"train": 3.0, "evaluate": 1.0}}
    )
    assert time_left(jobs, 2) == 3 * 4 / 2  # three runs of one round, two at a time
    table = display(jobs, time.perf_counter(), 2, Console(width=120))
    rows = list(zip(*(c.cells for c in table.columns), strict=True))
    assert rows[0][3] == "scan 1.0  average 1.0"
    assert rows[1][2] == "in another process"
    assert rows[-1][0] == "1 of 4 done, 1 elsewhere, 0 s so far"
    assert rows[-1][2] == "6 s left"
    many = [replace(jobs[0], name=f"job {i}") for i in range(30)]
    many[7].state, many[7].before = "running", 1  # it was resumed after a round
    table = display(many, time.perf_counter(), 2, Console(width=120))
    names, _, left, _ = (list(column.cells) for column in table.columns)
    assert names[:-1] == ["job 7"], "of many, only those under way"
    assert left[0] == "in round 2"


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_the_display_of_a_narrow_terminal_keeps_what_matters(tmp_path: Path, width: int) -> None:
    config = replace(plan(study())[0].config, rounds=100)
    job = Job("glyphs  FPL, a=1.0, b=2.0  seed 0", config, RunFolder(tmp_path), "", "running")
    accuracy = dict.fromkeys(DOMAINS, 50.0)
    job.records.append({"accuracy": accuracy, "average": 50.0, "seconds": {"train": 3.0}})
    job.started = time.perf_counter() - 600
    file = io.StringIO()
    console = Console(width=width, file=file)
    console.print(display([job], time.perf_counter() - 600, 2, console))
    said = file.getvalue()
    assert "1/100" in said and " h" in said and "…" not in said
    assert ("inverse 50.0" in said) == (width == 200)
    assert ("50.0" in said) == (width >= 80)
    assert "a=1.0," in said and "b=2.0" in said


def test_a_long_silence_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal: by a line after 10 seconds, and one after 40."""

    class Slow(LocalRunner):
        def start(self, job: Job) -> None:
            pass

        def poll(self, job: Job, console: Console) -> None:
            clock.append(clock[-1] + 9)
            job.state = "done" if clock[-1] > 60 else "running"

    clock, out = [0], io.StringIO()
    monkeypatch.setattr("protofed.silence.monotonic", lambda: clock[-1])
    monkeypatch.setattr(execution, "POLL_SECONDS", 0)
    jobs = jobs_of(study(seeds=1), tmp_path)[:1]
    run_all(jobs, Slow(1), Console(file=out, width=200))
    lines = [line for line in out.getvalue().splitlines() if "so far" in line]
    assert lines == ["0 of 1 done, 1 running, 0 s so far"] * 2


def test_a_terminal_gets_the_table_and_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(monkeypatch)
    file = io.StringIO()
    console = Console(file=file, width=150, force_terminal=True)
    assert run_all(jobs_of(one(), tmp_path), LocalRunner(1), console) == []
    assert "1 of 1 done" in file.getvalue() and "round 1/1" not in file.getvalue()
