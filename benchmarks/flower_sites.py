"""What a site more costs the server of a deployment, and what 1,000 sites would need.

    python benchmarks/flower_sites.py measure > benchmarks/records/flower-sites-cpu.jsonl
    python benchmarks/flower_sites.py needs [--sites 1000]     # computed from that record

The server is the real one: SuperLink, gate with TLS, executor and coordinator, each a process of
``protofed deploy server``. The sites are stand-ins, threads of one process: each has its own key
and its own TLS connection, polls every 3 s and sends heartbeats through Flower's own client, and
answers a message at once with the model it got, a little changed (equal tensors would travel only
once). What they take themselves is not counted. CPU seconds and memory are those of the server's
processes in /proc, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from protofed.deploy import wire
from protofed.deploy.messages import Answer, Request, read, write

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "flower-sites-cpu.jsonl"
MODELS = {
    "small": ("--model", "cnn2", "--width", "4"),
    "resnet10": ("--model", "resnet10"),
}
POINTS = [("small", 20), ("resnet10", 6), ("small", 2), ("resnet10", 2)]
ROUNDS, IDLE_SECONDS, SAMPLES, TESTED, LR = 2, 20, 20, 10, 0.01
POLL_SECONDS = 3.0
"""Between two calls of a SuperNode that has nothing to do, as in Flower."""
Point = dict[str, Any]


# ---- the sites ----------------------------------------------------------------------------------


def answer(message: Message, name: str) -> Message:
    """What a site would send back, without training."""
    request = read(message.content, Request)
    received = wire.read_tree(RecordDict(dict(message.content.array_records)))
    said: dict[str, Any] = {"samples": SAMPLES, "tested": TESTED}
    sent = {}
    if request.train or request.evaluate:
        said = {"tested": TESTED if request.evaluate else 0}
    if request.train:
        said |= {"samples": SAMPLES, "steps": 1, "lr": LR, "state": "none", "loss_terms": ["ce"]}
        said |= {"loss_totals": [1.0], "loss_steps": [1]}
        change = 1e-6 * (1 + hash(name) % 1000)
        model = {
            n: t + change if t.is_floating_point() else t for n, t in received["model"].items()
        }
        classes, _, features = received["cluster"]["mean"].shape
        mean = torch.rand(classes, features) + change
        counts = torch.full((classes,), float(SAMPLES // classes))
        sent = {"model": model, "prototypes": {"mean": mean, "count": counts}}
    about = (name, request.run, "fpl", request.round, request.train)
    content = wire.add_tree(write(Answer(*about, **said)), sent)
    return Message(content, reply_to=message)


def site(name: str, home: Path, address: str, ended: threading.Event) -> None:
    """Be a site until the end."""
    folder = home / "sites" / name
    private: Any = load_ssh_private_key((folder / "node.key").read_bytes(), None)
    keys, ca = (private, private.public_key()), (folder / "ca.crt").read_bytes()
    with http_request_response(address, False, ca, keys) as calls:
        _, receive, send, _, _, pull_object, push_object, confirm = calls
        while not ended.is_set():
            got = receive()
            if got is None:
                ended.wait(POLL_SECONDS)
                continue
            about, tree = got
            run, number = about.metadata.run_id, about.metadata.message_id
            TaskIdentity.run_id = run
            wanted = [part.object_id for part in iterate_object_tree(tree)]
            parts = pull_objects(wanted, pull_object_fn=lambda i, run=run: pull_object(run, i))
            confirm(run, number)
            message: Any = inflate_object_from_contents(number, parts)
            message.metadata.__dict__["_message_id"] = number
            reply = answer(message, name)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            missing, session = send(reply, get_object_tree(reply), 0.0)
            for i in missing:
                push_object(run, session, i, objects[i].deflate())


def be_sites(home: Path, address: str, count: int) -> None:
    torch.set_num_threads(1)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    threads = [
        threading.Thread(target=site, args=(f"s{i}", home, address, ended)) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- the server ---------------------------------------------------------------------------------


class Processes:
    """CPU seconds and memory of the server's processes, by what they are."""

    def __init__(self, root: int) -> None:
        self.root = root

    def look(self) -> dict[str, tuple[float, float]]:
        """Of the SuperLink with its gate, and of the coordinator: CPU seconds, MB at the peak."""
        parents, found = {}, dict[str, tuple[float, float]]()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = (int(stat[1]), int(stat[11]) + int(stat[12]))
        mine = {self.root}
        while more := {p for p, (parent, _) in parents.items() if parent in mine} - mine:
            mine |= more
        executors = [p for p in mine if b"deploy.executor" in self._words(p)]
        for pid in mine:
            kind = "superlink" if b"deploy.superlink" in self._words(pid) else ""
            if pid in executors and parents[pid][0] in executors:
                kind = "coordinator"
            if kind:
                with contextlib.suppress(OSError, StopIteration):
                    status = (Path("/proc") / str(pid) / "status").read_text().splitlines()
                    peak = next(int(s.split()[1]) for s in status if s.startswith("VmHWM"))
                    found[kind] = (parents[pid][1] / os.sysconf("SC_CLK_TCK"), peak / 1024)
        return found

    @staticmethod
    def _words(pid: int) -> bytes:
        with contextlib.suppress(OSError):
            return (Path("/proc") / str(pid) / "cmdline").read_bytes()
        return b""


@contextlib.contextmanager
def running(log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def until(what: str, log: Path, count: int = 1) -> None:
    while log.read_text().count(what) < count:
        time.sleep(0.2)


def connections(port: int) -> int:
    """Open connections at the server's side of a port."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = (line.split() for line in lines)
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def measure_point(model: str, count: int, folder: Path) -> Point:
    """A federation with that many sites: idle, then some rounds."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    home, address = folder / "f", f"127.0.0.1:{port}"
    deploy = [sys.executable, "-m", "protofed", "deploy"]
    words = ["--sites", ",".join(f"s{i}" for i in range(count)), "--classes", "a,b"]
    words += ["--image-size", "32", "--address", address]
    subprocess.run([*deploy, "init", str(home), *words], check=True, capture_output=True)
    log, sites_log = folder / "server.log", folder / "sites.log"
    stand_ins = [sys.executable, __file__, "sites", str(home), address, str(count)]
    point: Point = {"model": model, "sites": count}
    with running(log, [*deploy, "server", "--dir", str(home)]) as server:
        until("registering the keys", log)
        began = time.monotonic()
        until("is ready at", log)
        point["register_s"] = time.monotonic() - began
        processes = Processes(server.pid)
        alone = processes.look()["superlink"]
        with running(sites_log, stand_ins):
            while connections(port) < count:
                time.sleep(0.5)
            time.sleep(2 * POLL_SECONDS)
            before, began = processes.look()["superlink"], time.monotonic()
            time.sleep(IDLE_SECONDS)
            after, passed = processes.look()["superlink"], time.monotonic() - began
            point |= {
                "connections": connections(port),
                "alone_mb": alone[1],
                "idle_mb": after[1],
                "idle_cpu": (after[0] - before[0]) / passed,
            }
            words = ["--method", "fpl", "--rounds", str(ROUNDS), "--epochs", "1", "--lr", str(LR)]
            words += [*MODELS[model], "--batch", "32", "--confirm", "--bounds", "off"]
            done = subprocess.run([*deploy, "start", "--dir", str(home), *words],
                                  capture_output=True, text=True, check=False)  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            point |= watch(processes, home / "server" / "runs")
    return point


def watch(processes: Processes, runs: Path) -> Point:
    """What the rounds of a run take, from the end of its first to the end of its last."""
    at: dict[int, dict[str, tuple[float, float]]] = {}
    text = ""
    while f"round {ROUNDS}/{ROUNDS}: " not in text:
        time.sleep(0.1)
        text = "".join(path.read_text() for path in runs.glob("*.log"))
        assert "the run ended" not in text, text[-3000:]
        done = len(re.findall(r"round \d+/\d+: \d+ of \d+ sites trained", text))
        if done and done not in at:
            at[done] = processes.look()
    first, last, rounds = at[min(at)], at[max(at)], max(at) - min(at)
    seconds = [float(s) for s in re.findall(r"sites trained, ([\d.]+) s", text)]
    folder = next(path for path in runs.iterdir() if path.is_dir())
    until("is complete", next(runs.glob("*.log")))
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    one = next(iter(records[-1]["wire"].values()))
    return {
        **{f"{k}_cpu": (last[k][0] - first[k][0]) / rounds for k in last},
        **{f"{k}_mb": last[k][1] for k in last},
        "round_s": statistics.median(seconds[1:]),
        "up_mb": one["up"] / 1e6,
        "down_mb": one["down"] / 1e6,
    }


def measure() -> None:
    """Print a line of JSON for each point, and one before them for the machine."""
    about = {"python": platform.python_version(), "torch": torch.__version__}
    about |= {"machine": platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(about), flush=True)
    for model, count in POINTS:
        with tempfile.TemporaryDirectory() as folder:
            point = measure_point(model, count, Path(folder))
        point = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in point.items()}
        print(json.dumps({**point, "load": round(os.getloadavg()[0], 1)}), flush=True)


# ---- what many sites need -----------------------------------------------------------------------


def needs(sites: int) -> None:
    """Print what a federation of that many sites needs: lines through the record's points."""
    lines = map(json.loads, RECORD.read_text().splitlines())
    points = [point for point in lines if "sites" in point]
    for model in MODELS:
        own = [point for point in points if point["model"] == model]
        x = [point["sites"] for point in own]

        def at(what: str, x: list[int] = x, own: list[Point] = own) -> float:
            slope, start = statistics.linear_regression(x, [point[what] for point in own])
            return start + slope * sites

        up, down = (own[0][f"{way}_mb"] for way in ("up", "down"))
        waits = at("superlink_cpu") + at("coordinator_cpu")
        print(f"{sites:,} sites, {model}, all of them in every round (measured with {x} sites)")
        print(
            f"  bytes a round      {sites * down / 1e3:.1f} GB down, {sites * up / 1e3:.1f} GB up"
        )
        print(f"  connections        {at('connections'):,.0f}, kept open")
        print(f"  idle               {at('idle_cpu'):.1f} cores, {at('idle_mb') / 1e3:.1f} GB")
        print(f"  SuperLink          {at('superlink_cpu'):,.0f} CPU s a round, one process")
        print(f"  coordinator        {at('coordinator_cpu'):,.0f} CPU s a round, one process")
        print(f"  memory in a round  {at('superlink_mb') / 1e3:.1f} GB, SuperLink")
        print(f"  a round takes      {waits / 60:,.0f} min and the sites' training")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("measure", "point", "needs", "sites"))
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "measure":
        measure()
    elif options.what == "point":
        with tempfile.TemporaryDirectory() as folder:
            print(measure_point(options.rest[0], int(options.rest[1]), Path(folder)))
    elif options.what == "needs":
        needs(options.sites)
    elif options.what == "sites":
        home, address, count = options.rest
        be_sites(Path(home), address, int(count))


if __name__ == "__main__":
    main()
