"""A study's runs on a simulated cluster of three nodes, which is broken in several ways."""

from __future__ import annotations

import io
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.simulated_cluster import freeze, is_alive, simulated_cluster, thaw
from tests.studies.made_runs import TINY, study

from protofed import tree
from protofed.federation.cpu import one_thread
from protofed.methods import method_class
from protofed.runs.folder import RunFolder
from protofed.runs.records import without_times
from protofed.runs.run import run
from protofed.studies.definition import Study
from protofed.studies.execution import Job, run_all
from protofed.studies.launch import prepare
from protofed.studies.plan import plan
from protofed.studies.ray_process import ALIVE, PREFIX
from protofed.studies.ray_runner import RayRunner, RemoteRun

pytest.importorskip("ray")

LONG = {**TINY, "rounds": 60, "checkpoint_every": 1}
OWN = """
import os
from dataclasses import dataclass
from pathlib import Path
from protofed.method import Method

with Path({seen!r}).open("a") as file:
    print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)

@dataclass(frozen=True)
class Own(Method):
    name = "own"
"""

Fault = Callable[[RayRunner, RemoteRun], object]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with simulated_cluster({"num_cpus": 2, "num_gpus": 1}, {"num_cpus": 2}) as found:
        yield found


class Faulty(RayRunner):
    """Breaks something once a run has two rounds; faults happen once, in their order.

    On a node that is frozen already, nobody would answer where to make the next one.
    """

    faults: dict[str, Fault]

    def poll(self, job: Job, console: Console) -> None:
        super().poll(job, console)
        remote = self._remote.get(id(job))
        its_turn = job.name == next(iter(self.faults), None) and len(job.records) >= 2
        if its_turn and job.state == "running" and remote and remote.node:
            self.faults.pop(job.name)(self, remote)


def run_on(
    cluster: Any, made: Study, pool: Path, faults: dict[str, Fault] | None = None, **more: Any
) -> tuple[list[Job], list[Job], str]:
    """All jobs, those that failed, and what was printed."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    runner = Faulty(cluster.address, pool, console, **{"gpus": 0, **more})
    runner.faults = faults or {}
    jobs = prepare(made, pool, elsewhere=True)[1]
    return jobs, run_all(jobs, runner, console), out.getvalue()


def pids(remote: RemoteRun) -> tuple[int, int]:
    """The processes of the actor and of the run."""
    import ray

    asked = remote.actor.__ray_call__.remote(lambda self: (os.getpid(), self._process.pid))
    return ray.get(asked)


def assert_as_in_this_process(made: Study, jobs: list[Job], tmp_path: Path) -> None:
    for planned, job in zip(plan(made), jobs, strict=True):
        out = tmp_path / "here" / job.folder.path.name
        with one_thread():
            run(config=planned.config, out=out)
        here = RunFolder(out)
        assert job.folder.path.name.startswith(f"glyphs-{planned.config.method.name}-")
        assert without_times(job.folder.records()) == without_times(here.records())
        for file in (
            "checkpoint.safetensors",
            "checkpoint.previous.safetensors",
            "model.safetensors",
        ):
            (ours, _), (theirs, _) = (tree.load(f.path / file) for f in (here, job.folder))
            assert tree.equal(ours, theirs)
        assert here.contents().keys() == job.folder.contents().keys()


def test_code_reaches_the_nodes_and_runs_share_a_gpu(cluster: Any, tmp_path: Path) -> None:
    """A GPU that is only declared: what stands for its use is what the run's process sees."""
    own, seen = tmp_path / "own.py", tmp_path / "seen"
    own.write_text(OWN.format(seen=str(seen)))
    made = study(rows={"Own": f"{own}:Own"}, settings={**TINY, "device": "auto"})
    trusted = method_class(f"{own}:Own")
    seen.unlink()
    jobs = prepare(made, tmp_path / "runs", elsewhere=True)[1]

    class WithoutFile(RayRunner):
        def start(self, job: Job) -> None:
            assert self.at_once == 2
            super().start(job)
            if job is jobs[-1]:
                own.rename(tmp_path / "gone.py")

    console = Console(file=io.StringIO())
    runner = WithoutFile(cluster.address, tmp_path / "runs", console, gpus=0.5)
    assert run_all(jobs, runner, console) == []
    assert seen.read_text().split() == ["0", "0"]
    assert all(f'name = "{own}:Own"' in job.folder.config_file.read_text() for job in jobs)
    assert {job.config.method.name for job in jobs} == {trusted.name}


def test_ctrl_c_brings_checkpoints_home_and_leaves_nothing_running(
    cluster: Any, tmp_path: Path
) -> None:
    made = study(seeds=[0], settings={**LONG, "rounds": 500, "checkpoint_every": 100})
    left: list[int] = []

    def stop(_: RayRunner, remote: RemoteRun) -> None:
        left.extend(pids(remote))
        if len(left) == 4:  # both runs have rounds to keep
            raise KeyboardInterrupt

    names = [job.name for job in prepare(made, tmp_path / "runs", elsewhere=True)[1]]
    with pytest.raises(KeyboardInterrupt):
        run_on(cluster, made, tmp_path / "runs", dict.fromkeys(names, stop))
    assert len(left) == 4
    for _ in range(100):
        if not any(map(is_alive, left)):
            break
        time.sleep(0.1)
    assert not any(map(is_alive, left))
    jobs = prepare(made, tmp_path / "runs", elsewhere=True)[1]
    assert all(job.folder.has_checkpoint and not job.folder.is_locked() for job in jobs)
    assert not [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{ALIVE}")]


@pytest.mark.slow
def test_lost_actors_runs_and_nodes_change_nothing(cluster: Any, tmp_path: Path) -> None:
    """One run loses its actor, one its process, and one is on a node that freezes."""
    made = study(rows={"FedBN": "fedbn"}, seeds=[0, 1, 2], settings=LONG)
    frozen: list[int] = []

    def kill(which: int) -> Fault:
        return lambda _, remote: os.kill(pids(remote)[which], signal.SIGKILL)

    def freeze_its_node(_: RayRunner, remote: RemoteRun) -> None:
        (node,) = (n for n in cluster.worker_nodes if n.node_id == remote.node)
        frozen.extend(freeze(node))

    names = [job.name for job in prepare(made, tmp_path / "runs", elsewhere=True)[1]]
    faults = dict(zip(names, (kill(0), kill(1), freeze_its_node), strict=True))
    jobs, failed, out = run_on(cluster, made, tmp_path / "runs", faults, silence=5)
    assert failed == [] and faults == {}
    assert (
        f"Ray cluster at {cluster.address}: 3 machines, 4 cores, 1 GPUs\n3 runs, 3 at a time" in out
    )
    assert f"{names[0]}: lost on" in out
    assert f"{names[1]}: killed by signal 9" in out
    assert "has not answered in 5 s; another actor takes over" in out
    before = {job.name: job.folder.contents() for job in jobs}
    thaw(*frozen)
    time.sleep(1)
    assert {job.name: job.folder.contents() for job in jobs} == before
    assert_as_in_this_process(made, jobs, tmp_path)
