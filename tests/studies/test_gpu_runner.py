"""How many runs share a GPU, and which GPU each of them has. The GPUs are made up."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.studies.fake_mps import install
from tests.studies.made_runs import study

from protofed.config import Config
from protofed.federation.facts import MANY_QUEUES, WORK_QUEUES
from protofed.federation.memory import Memory
from protofed.runs.folder import RunFolder
from protofed.studies import execution, gpu_runner
from protofed.studies.execution import Job, run_all
from protofed.studies.gpu_runner import GpuRunner, RunsPerGpu, visible_gpus
from protofed.studies.plan import plan

CONFIG = plan(study())[0].config
GB = 1 << 30


def config(task: str = "glyphs", lr: float = 0.01, rounds: int = 40) -> Config:
    return replace(CONFIG, task=task, lr=lr, rounds=rounds)


class Simulated:
    """Runs on a GPU whose speed is known, second by second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: RunsPerGpu) -> None:
        self.count, self.now, self.said, self.highest = count, 0.0, list[str](), 0
        monkeypatch.setattr(gpu_runner, "perf_counter", lambda: self.now)

    def run(
        self,
        configs: list[Config],
        speed: Callable[[int], float],
        start: int = 10,
        fit: Callable[[int], bool] = lambda _: True,
        gigabytes: float = 1,
    ) -> None:
        """Do runs that take ``start`` seconds to start.

        ``speed`` is how many rounds n runs do in a second, all together; with a learning rate of
        0.02 a round takes twice as long.
        """
        named = enumerate(configs)
        memory = Memory(int(gigabytes * GB), 0, 0, 0, None, True)
        waiting = [
            Job(f"{i}", c, RunFolder(f"{i} {self.now}"), "", memory=memory) for i, c in named
        ]
        done: dict[str, float] = {}
        running: list[Job] = []
        while waiting or running:
            while waiting and len(running) < self.count.at_once:
                job = waiting.pop(0)
                job.state, job.started = "running", self.now
                running.append(job)
                self.count.started(job)
            self.highest = max(self.highest, len(running))
            self.now += 1
            training = [job for job in running if self.now - job.started > start]
            for job in training:
                each = speed(len(training)) / len(training) / (2 if job.config.lr == 0.02 else 1)
                done[job.name] = done.get(job.name, 0) + each
                while len(job.records) < min(int(done[job.name] + 1e-9), job.config.rounds):
                    job.records.append({"seconds": {"train": 1 / each}, "steps": 10})
                self.count.observe(job)
                if len(job.records) == job.config.rounds:
                    running.remove(job)
                    self.count.ended(job)
                if line := self.count.judge(fit):
                    self.said.append(line)


def grows_to(most: int) -> Callable[[int], float]:
    """A GPU that so many runs fill: what each adds is the same up to there."""
    return lambda n: 1 + 0.2 * (min(n, most) - 1)


@pytest.mark.parametrize(("rounds", "start"), [(20, 3), (40, 3), (100, 15)])
def test_runs_are_added_while_that_gains(
    monkeypatch: pytest.MonkeyPatch, rounds: int, start: int
) -> None:
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=16, rounds=rounds))
    gpu.run([config(rounds=rounds)] * 60, grows_to(6), start)
    assert gpu.said == [
        "4 runs at a time do 1.33 times the work of 2",
        "8 runs at a time do 1.25 times the work of 4",
        "16 runs at a time do 1.00 times the work of 8: back to 8",
    ]
    assert (gpu.count.at_once, gpu.highest) == (8, 16)


class Fixed(RunsPerGpu):
    """Always as many runs as at first."""

    def judge(self, fit: Callable[[int], bool]) -> str:
        return ""


@pytest.mark.parametrize("runs", [45, 109])
def test_a_study_takes_no_longer_than_with_the_best_number(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """As measured on an H200: a quarter of the runs start at any time, and others train faster."""
    shared = [1, 2, 4, 6, 8, 10, 12, 14, 20]
    milliseconds = [0.45, 0.36, 0.30, 0.265, 0.25, 0.238, 0.229, 0.227, 0.226]

    def speed(n: int) -> float:
        return 1 / (0.34 * float(np.interp(n, shared, milliseconds)))

    took = {}
    for n, kind in ((2, RunsPerGpu), (6, Fixed), (12, Fixed), (16, Fixed)):
        gpu = Simulated(monkeypatch, kind(1, first=n, most=16, rounds=100))
        gpu.run([config(rounds=100)] * runs, speed, start=15)
        took[kind, n] = gpu.now
    assert took[RunsPerGpu, 2] <= 1.03 * min(took.values()) < 0.9 * took[Fixed, 6]


def test_a_gpu_that_one_run_fills_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as fast as before while the second run starts, which is no gain."""
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=1, most=16, rounds=400))
    gpu.run([config(rounds=400)] * 4, lambda _: 1.0, start=10)
    assert gpu.said == ["2 runs at a time do 1.03 times the work of 1: back to 1"]
    assert gpu.count.at_once == 1


def test_short_runs_overlap_their_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of their time a GPU would be idle, however fully a run that trains uses it."""
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=5))
    gpu.run([config(rounds=5)] * 60, lambda _: 1.0, start=60)
    assert gpu.count.at_once == 8
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=40))
    gpu.run([config(rounds=40)] * 20, lambda _: 1.0, start=1)
    assert gpu.count.at_once == 2


def test_fast_methods_do_not_look_like_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slow runs are measured first, and fast ones join them."""
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=40))
    gpu.run([config(lr=0.02)] * 2 + [config()] * 8, lambda _: 1.0, start=1)
    assert gpu.count.at_once == 2
    assert [line.split(" do ")[0] for line in gpu.said] == ["4 runs at a time"]


def test_the_first_round_of_a_run_belongs_to_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runner, "perf_counter", lambda: 0.0)
    count, said = RunsPerGpu(1, first=1, most=2, rounds=40), ""
    while not said:
        jobs = [Job(n, config(), RunFolder(n), "") for n in "ab"[: count.at_once]]
        for job in jobs:
            count.started(job)
        for seconds in (50.0, float(len(jobs))):
            for job in jobs:
                job.records.append({"seconds": {"train": seconds}, "steps": 10})
                count.observe(job)
        for job in jobs:
            count.ended(job)
        said = count.judge(lambda _: True)
    assert said == "2 runs at a time do 1.00 times the work of 1: back to 1"


def test_another_number_of_runs_is_no_measurement() -> None:
    """When a study starts from few again, the runs that are under way are more than that."""
    count = RunsPerGpu(1, first=2, most=8, rounds=40)
    first, second, third = (Job(n, config(), RunFolder(n), "") for n in "abc")

    def do_rounds(*jobs: Job) -> str:
        for _ in range(10):
            for job in jobs:
                job.records.append({"seconds": {"train": 1.0}, "steps": 10})
                count.observe(job)
        return f"{count.judge(lambda _: True)}{count.at_once}"

    for job in (first, second, third):
        count.started(job)
    assert do_rounds(first, second, third) == "2"
    count.ended(third)
    assert do_rounds(first, second) == "4"


def test_memory_and_cores_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fit(more: int) -> bool:
        asked.append(more)
        return more == 1

    gpu = Simulated(monkeypatch, RunsPerGpu(2, first=2, most=3, rounds=40))
    gpu.run([config()] * 40, grows_to(16), fit=fit)
    assert asked == [1], "two more on each GPU are more than the cores allow"
    assert gpu.count.at_once == gpu.highest == 6
    assert [line.split(" do ")[0] for line in gpu.said] == ["6 runs at a time"]
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=16, rounds=40))
    gpu.run([config()] * 10, grows_to(16), fit=lambda _: False)
    assert gpu.count.at_once == 2 and gpu.said == []


def test_another_task_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=40))
    gpu.run([config()] * 10, lambda _: 1.0, start=1)
    gpu.run([config()] * 10, grows_to(8))
    assert gpu.count.at_once == 2
    gpu.run([config("digits")] * 20, grows_to(8))
    assert gpu.count.at_once == 8


def test_larger_runs_start_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=40))
    gpu.run([config()] * 20, grows_to(8), gigabytes=1)
    gpu.highest = 0
    gpu.run([config()] * 10, lambda _: 1.0, gigabytes=1.4)
    assert gpu.highest == 8
    gpu.run([config("digits")] * 10, lambda _: 1.0, start=1, gigabytes=2)
    assert gpu.count.at_once == 2


def test_runs_that_fail_at_once_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulated(monkeypatch, RunsPerGpu(1, first=2, most=8, rounds=40))
    gpu.run([config()] * 2 + [config(rounds=0)] * 40, grows_to(8), start=1)
    assert gpu.count.at_once == 4 and gpu.said == []


# ---- the runner ---------------------------------------------------------------------------------


class Gpus:
    """What the machine says about its GPUs."""

    def __init__(self, count: int) -> None:
        self.free = [100 * GB] * count
        self.host = 100 * GB


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gpus]:
    def make(count: int) -> Gpus:
        found = Gpus(count)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (found.free[i], 140 * GB))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"uuid-{i}")
        )
        monkeypatch.setattr(gpu_runner, "free_memory", lambda: found.host)
        monkeypatch.setattr(gpu_runner, "core_count", lambda: 16)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return found

    return make


class Process:
    """A run's process: it has done nothing, and is done when it is asked for the third time."""

    started: ClassVar[list[dict[str, str]]] = []

    def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
        self.started.append(env)
        self.asked = 0

    def poll(self) -> int | None:
        self.asked += 1
        return 0 if self.asked == 3 else None


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Those of the runs that are started."""
    monkeypatch.setattr(execution, "POLL_SECONDS", 0)
    monkeypatch.setattr(execution.subprocess, "Popen", Process)
    monkeypatch.setattr(Process, "started", [])
    return Process.started


def do(pool: Path, count: int, most: int | None = None, mps: bool | None = False) -> str:
    jobs = [Job(f"{i}", config(), RunFolder(pool / f"{i}"), "") for i in range(count)]
    out = io.StringIO()
    console = Console(file=out, width=200)
    assert run_all(jobs, GpuRunner(jobs, console, most, mps), console) == []
    return out.getvalue()


def test_several_gpus_are_filled_evenly(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]]
) -> None:
    gpus(2)
    out = do(tmp_path, 6, most=3)
    assert "2 GPUs\n6 runs, 3 at a time" in out
    named = [env["CUDA_VISIBLE_DEVICES"] for env in environments]
    assert named[:3] == ["GPU-uuid-0", "GPU-uuid-1", "GPU-uuid-0"]
    assert sorted(named[1:3]) == ["GPU-uuid-0", "GPU-uuid-1"]
    assert environments[0]["PATH"] == os.environ["PATH"]


def test_one_gpu_is_left_as_it_is_named(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]]
) -> None:
    gpus(1)
    assert "1 GPU\n2 runs, 2 at a time" in do(tmp_path, 2)
    assert all("CUDA_VISIBLE_DEVICES" not in env for env in environments)


def test_runs_that_share_a_gpu_take_few_of_its_work_queues(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A process that has found its device asks for many of them, and passes that on."""
    gpus(1)
    monkeypatch.setenv(WORK_QUEUES, MANY_QUEUES)
    monkeypatch.setattr(gpu_runner, "mps_daemon", lambda gpus: nullcontext({"MPS": "1"}))
    do(tmp_path / "a", 2, mps=True)
    assert all(WORK_QUEUES not in env and env["MPS"] == "1" for env in environments)
    environments.clear()
    do(tmp_path / "b", 2, mps=False)
    assert all(env[WORK_QUEUES] == MANY_QUEUES for env in environments)
    environments.clear()
    monkeypatch.setenv(WORK_QUEUES, "4")
    do(tmp_path / "c", 2, mps=True)
    assert all(env[WORK_QUEUES] == "4" for env in environments), "what a user says is kept"


def test_two_runs_start_only_where_there_is_room(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]]
) -> None:
    found = gpus(2)
    found.free[1] = 20 * GB
    assert "4 runs, 2 at a time" in do(tmp_path / "a", 4)
    found.free[1] = 40 * GB
    assert "4 runs, 4 at a time" in do(tmp_path / "b", 4)


class Large(Process):
    """A run that takes memory of the only GPU while it runs, and does a round whenever asked."""

    gpus: Gpus
    size: ClassVar[int]
    running: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
        super().__init__(env=env)
        self._take(1)

    def poll(self) -> int | None:
        self.asked += 1
        if self.asked < 20:
            return None
        self._take(-1)
        return 0

    def _take(self, runs: int) -> None:
        Large.running += runs
        Large.most = max(Large.most, Large.running)
        self.gpus.free[0] -= runs * Large.size


@pytest.mark.parametrize(("size", "most"), [(2 * GB, 16), (20 * GB, 4)])
def test_memory_limits_how_many_are_added(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch, size: int, most: int,
) -> None:  # fmt: skip
    """On a GPU with 100 GB, twice what is added must be free."""

    def refresh(job: Job) -> None:
        seconds = {"train": 1.0, "evaluate": 0.1}
        accuracy = {"accuracy": {"scan": 1.0}, "average": 1.0}
        job.records.append({**accuracy, "seconds": seconds, "steps": 10})

    for name, value in {"gpus": gpus(1), "size": size, "running": 0, "most": 0}.items():
        monkeypatch.setattr(Large, name, value, raising=False)
    monkeypatch.setattr(execution.subprocess, "Popen", Large)
    monkeypatch.setattr(Job, "refresh", refresh)
    out = do(tmp_path, 40)
    assert Large.most == most
    said = [line.split(" do ")[0] for line in out.splitlines() if " do " in line]
    assert said == [f"{n} runs at a time" for n in ((4, 8, 16) if most == 16 else (3, 4))]


def test_no_run_is_started_without_memory_for_it(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The runs are larger than those by which a number was found."""
    for name, value in {"gpus": gpus(1), "size": 40 * GB, "running": 0, "most": 0}.items():
        monkeypatch.setattr(Large, name, value, raising=False)
    monkeypatch.setattr(execution.subprocess, "Popen", Large)
    monkeypatch.setattr(RunsPerGpu, "at_once", property(lambda _: 4 if Large.running else 1))
    do(tmp_path, 6)
    assert Large.most == 2


def test_gpus_by_name(gpus: Callable[[int], Gpus], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    for given, names in (
        ("2,3", ["GPU-uuid-0", "GPU-uuid-1"]),
        ("", ["GPU-uuid-0", "GPU-uuid-1"]),
        ("MIG-1, MIG-2,MIG-9", ["MIG-1", "MIG-2"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert visible_gpus() == names


# ---- with MPS -----------------------------------------------------------------------------------


def test_runs_share_a_gpu_through_mps(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpus(1)
    monkeypatch.setattr(gpu_runner, "mps_daemon", lambda gpus: FakeDaemon(gpus))
    assert "1 GPU, shared through MPS\n2 runs" in do(tmp_path / "a", 2, mps=None)
    assert environments[0]["CUDA_MPS_PIPE_DIRECTORY"] == "private"
    assert "MPS" not in do(tmp_path / "b", 1, mps=None), "nobody to share it with"
    assert "MPS" not in do(tmp_path / "c", 2, most=1, mps=None)
    assert "MPS" not in do(tmp_path / "d", 2, mps=False)
    assert "shared through MPS" in do(tmp_path / "e", 1, mps=True)
    assert FakeDaemon.events == ["start GPU-uuid-0", "stop"] * 2


class FakeDaemon:
    """Stands for ``mps_daemon``."""

    events: list[str] = []  # noqa: RUF012

    def __init__(self, gpus: list[str]) -> None:
        self.gpus = gpus

    def __enter__(self) -> dict[str, str]:
        self.events.append(f"start {','.join(self.gpus)}")
        return {"CUDA_MPS_PIPE_DIRECTORY": "private", "CUDA_VISIBLE_DEVICES": self.gpus[0]}

    def __exit__(self, *_: object) -> None:
        self.events.append("stop")


def test_without_mps_it_says_why(
    tmp_path: Path, gpus: Callable[[int], Gpus], environments: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpus(1)
    monkeypatch.setenv("PATH", "")
    out = do(tmp_path, 2, mps=True)
    assert "1 GPU, without MPS: nvidia-cuda-mps-control is not on PATH\n2 runs, 2 at a" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_and_then_mps(
    tmp_path: Path, gpus: Callable[[int], Gpus], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    gpus(1)
    fake = install(tmp_path, monkeypatch)
    seen: list[bool] = []
    start = execution.subprocess.Popen

    class Forever:
        def poll(self) -> None:
            os.kill(os.getpid(), number)

        def terminate(self) -> None:
            pass

        def wait(self) -> None:
            seen.append(fake.is_running())

    def popen(command: list[str], **more: Any) -> Any:
        return Forever() if "protofed" in command else start(command, **more)

    monkeypatch.setattr(execution.subprocess, "Popen", popen)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            do(tmp_path / "runs", 2, mps=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [True, True], "the runs could write their checkpoints"
    assert fake.started == ["GPU-uuid-0", "700"] and fake.has_ended()
