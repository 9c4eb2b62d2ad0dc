"""Runs on a Ray cluster: an actor for each, on whichever node has room for it.

No file system is shared. A run works in a scratch folder of its node; this process, the driver,
asks its actor for news, and is the only one that writes the run's folder. An actor that dies or
does not answer is given up, and a new one resumes from the last checkpoint that arrived here. What
the old one still has to say is never read, so it cannot change anything.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from protofed.cluster import connected
from protofed.config import Config
from protofed.errors import Busy, ProtofedError
from protofed.files import expand_user, make_folder
from protofed.methods import reference
from protofed.observers.progress import print_plain
from protofed.runs.folder import RunFolder
from protofed.studies import ray_process
from protofed.studies.execution import Job, note_end, run_arguments
from protofed.user_code import is_file
from protofed.version import __version__

SILENCE_SECONDS = 120.0
"""A started actor that does not answer for this long is given up: its node is frozen or cut off."""
STOP_SECONDS = 60.0
"""How long stopped runs may take to write and send their checkpoints."""
TRIES = 3
"""Actors that a run may lose in a row without completing a round."""


@dataclass
class RemoteRun:
    """A run that an actor has, and what the actor was asked last."""

    job: Job
    actor: Any = None
    answer: Any = None
    heard: float = 0.0
    node: str = ""
    """Empty until the actor has started: it may have to wait for room."""
    host: str = ""
    lost: int = 0
    rounds: int = 0
    """How many rounds there were when an actor was last lost."""
    lock: ExitStack = field(default_factory=ExitStack)
    locked: Path | None = None


class RayRunner:
    """Runs as Ray actors, each with ``cpus`` cores and ``gpus`` GPUs or a part of one.

    By default a run has a whole GPU, if the cluster has any.
    """

    def __init__(
        self,
        address: str,
        pool: Path,
        console: Console,
        most: int | None = None,
        cpus: int = 1,
        gpus: float | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        if gpus is not None and not (0 <= gpus <= 1 or (gpus > 1 and gpus % 1 == 0)):
            raise ProtofedError(
                f"a run cannot have {gpus:g} GPUs",
                "--gpus-per-run takes a fraction such as 0.25, or a whole number",
            )
        self.address, self.pool, self.most = address, pool, most
        self._console = console
        self.cpus, self.gpus, self.silence = cpus, gpus, silence
        self._remote: dict[int, RemoteRun] = {}
        self._suspects: set[str] = set()
        """Nodes that fell silent: no more runs are sent there."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(self.address))
            self._ray.cloudpickle.register_pickle_by_value(ray_process)
            self._actor = self._ray.remote(ray_process.RunProcess)
            there = self._ray.cluster_resources()
            cores, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
            nodes = sum(node["Alive"] for node in self._ray.nodes())
            where = self._ray.get_runtime_context().gcs_address
            said = f"{nodes} machine{'s' * (nodes != 1)}, {cores} cores, {gpus} GPUs"
            print_plain(self._console, f"Ray cluster at {where}: {said}")
            if self.gpus is None:
                self.gpus = 1.0 if gpus else 0.0
            if not self._places():
                raise ProtofedError(
                    f"no machine of the cluster has {self.cpus} cores and {self.gpus:g} GPUs, "
                    "which a run needs",
                    "--gpus-per-run 0 runs on CPUs; --workers is the number of cores",
                )
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Collect the checkpoints, and leave nothing running."""
        with self._open:
            try:
                started = [remote for remote in self._remote.values() if remote.node]
                asked = {remote.actor.stop.remote(): remote for remote in started}
                stopped, _ = self._ray.wait(
                    [*asked], num_returns=max(1, len(asked)), timeout=STOP_SECONDS
                )
                for answer in stopped:
                    with suppress(self._ray.exceptions.RayError, ProtofedError):
                        self._receive(asked[answer], self._ray.get(answer))
            finally:
                for remote in [*self._remote.values()]:
                    self._leave(remote)

    @property
    def at_once(self) -> int:
        return self.most or max(1, self._places())

    def _places(self) -> int:
        """How many runs the nodes have room for; nodes may join and leave."""
        found = 0
        for node in self._ray.nodes():
            there = node["Resources"] if node["Alive"] else {}
            places = int(there.get("CPU", 0) // self.cpus)
            if self.gpus:
                gpus = there.get("GPU", 0)
                shared = int(gpus) * int(1 / self.gpus) if self.gpus < 1 else gpus // self.gpus
                places = min(places, int(shared))
            found += places
        return found

    def start(self, job: Job) -> None:
        remote = self._remote[id(job)] = RemoteRun(job)
        try:
            if job.folder.exists:
                self._lock(remote, job.folder)
        except Busy:
            self._leave(remote, "elsewhere")
        else:
            self._send(remote)

    def _send(self, remote: RemoteRun) -> None:
        """Give the run to a new actor, with what there is of it."""
        job = remote.job
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if alive <= self._suspects:
            self._suspects.clear()
        avoid = {"ray.io/node-id": f"!in({','.join(sorted(self._suspects))})"}
        gpus = self.gpus if job.config.device != "cpu" else 0
        remote.actor = self._actor.options(
            num_cpus=self.cpus,
            num_gpus=gpus,
            scheduling_strategy="SPREAD",
            label_selector=avoid if self._suspects else None,
        ).remote(
            version=__version__,
            arguments=run_arguments(job, self.cpus),
            config=job.config.toml(),
            code=_code(job.config),
            name=job.folder.path.name,
            files={} if job.overwrite else job.folder.contents(),
            place=str(Path.cwd()),
            gpu=bool(gpus),
        )
        remote.node, remote.answer = "", remote.actor.news.remote()

    def poll(self, job: Job, console: Console) -> None:
        remote = self._remote[id(job)]
        if not self._ray.wait([remote.answer], timeout=0)[0]:
            if remote.node and time.perf_counter() - remote.heard > self.silence:
                self._suspects.add(remote.node)
                self._again(
                    remote, f"{remote.host} has not answered in {self.silence:.0f} s", console
                )
            return
        try:
            news = self._ray.get(remote.answer)
        except self._ray.exceptions.RayError as error:
            what = str(error).strip().splitlines()[0]
            self._again(remote, f"lost on {remote.host or 'its node'}: {what}", console)
            return
        remote.heard, (remote.node, remote.host) = time.perf_counter(), news["where"]
        code: int | None = news["code"]
        try:
            self._receive(remote, news)
        except Busy:
            self._leave(remote, "elsewhere")
        except ProtofedError as error:
            self._leave(remote, "failed", str(error))
        else:
            if code is None:
                remote.answer = remote.actor.news.remote()
            elif code < 0:
                self._again(remote, f"killed by signal {-code} on {remote.host}", console)
            else:
                self._leave(remote)
                job.refresh()
                note_end(job, code, news["errors"], console)

    def _receive(self, remote: RemoteRun, news: dict[str, Any]) -> None:
        if not news["names"]:
            return
        job = remote.job
        job.folder = RunFolder(self.pool / news["name"])
        try:
            self._lock(remote, job.folder)
            job.folder.receive(news["changed"], news["names"])
            job.overwrite = False
        finally:  # another process may have the run
            job.hash = str(job.folder.facts().get("run"))

    def _lock(self, remote: RemoteRun, folder: RunFolder) -> None:
        if remote.locked != folder.path:
            remote.lock.close()
            make_folder(folder.path)
            remote.lock.enter_context(folder.locked())
            remote.locked = folder.path

    def _again(self, remote: RemoteRun, why: str, console: Console) -> None:
        """Give up the run's actor, and give the run to a new one, unless that does not help."""
        job = remote.job
        self._ray.kill(remote.actor)
        job.refresh()
        remote.lost = remote.lost + 1 if len(job.records) == remote.rounds else 1
        remote.rounds = len(job.records)
        if remote.lost == TRIES:
            self._leave(remote, "failed", f"{why} (given up after {TRIES} attempts)")
            return
        print_plain(console, f"{job.name}: {why}; another actor takes over")
        self._send(remote)

    def _leave(self, remote: RemoteRun, state: str = "", message: str = "") -> None:
        del self._remote[id(remote.job)]
        if remote.actor is not None:
            self._ray.kill(remote.actor)
        remote.lock.close()
        if state:
            remote.job.state, remote.job.message = state, message


def _code(config: Config) -> dict[str, bytes]:
    """The files of code that a config names, by their absolute paths."""
    names = [name for name in (reference(config.method), *config.models) if is_file(name)]
    files = [expand_user(name.rpartition(":")[0]).absolute() for name in names]
    return {str(file): file.read_bytes() for file in files}
