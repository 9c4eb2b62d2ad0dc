"""A federation of real processes on this machine, run by the commands a person would type."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from protofed import tree
from protofed.config import merged_config
from protofed.runs.records import read_records
from protofed.runs.run import run

SITES = ("scan-0", "print-0", "photo-0")
TINY = ("--epochs", "1", "--batch", "8", "--width", "4", "--seed", "3")
SAMPLES = ("--samples", "scan=30,print=24,photo=20")
PROTOFED = str(Path(sys.executable).parent / "protofed")


def patient(seconds: float) -> float:
    """A time limit for a machine that has other work to do, too."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(root: int) -> list[int]:
    """A process and all it has started, by their ids."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Relay:
    """Passes a site's connections on and notes their bytes and when: TLS, HTTP and all."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.seen: dict[str, list[tuple[float, int]]] = {"up": [], "down": []}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def bytes(self, way: str, since: float, until: float) -> int:
        """Bytes of that direction between two times."""
        return sum(n for at, n in self.seen[way] if since <= at < until)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            for a, b, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(a, b, way), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, way: str) -> None:
        try:
            while data := a.recv(1 << 16):
                self.seen[way].append((time.time(), len(data)))
                b.sendall(data)
        except OSError:
            pass
        finally:
            for s in (a, b):
                s.close()

    def close(self) -> None:
        self.listener.close()


class Deployment:
    """Server and sites as processes, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, {}  # type: Path, dict[str, subprocess.Popen[bytes]]
        self.known: set[int] = set()
        self.relays: dict[str, Relay] = {}
        self.home, self.port = folder / "federation", free_port()

    def cli(self, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROTOFED, "deploy", *words],
            capture_output=True, text=True, timeout=patient(seconds), stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip

    def init(self, *more: str, sites: Sequence[str] = SITES) -> None:
        """Sites that are clients of glyphs; with ``--classes`` they have folders of their own."""
        task = () if "--classes" in more else ("--task", "glyphs")
        done = self.cli(
            "init", str(self.home), *task, "--sites", ",".join(sites),
            "--address", f"127.0.0.1:{self.port}", *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def begin(self, name: str, *words: str, **environment: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [PROTOFED, "deploy", *words],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **environment},
        )  # fmt: skip
        log.close()

    def server(self, *more: str) -> None:
        said = self.text("server").count("is ready at")
        self.begin("server", "server", "--dir", str(self.home), *more)
        self.until(lambda: self.text("server").count("is ready at") > said, 120, "the server")

    def site(self, name: str, *more: str, **environment: str) -> None:
        self.begin(name, "site", "--dir", str(self.home), "--site", name, *more, **environment)

    def relay(self, name: str) -> None:
        """Let a site's connections pass through a relay that counts; before it is started."""
        relay = self.relays[name] = Relay(self.port)
        file = self.home / "sites" / name / "federation.toml"
        file.write_text(file.read_text().replace(f":{self.port}", f":{relay.port}"))

    def start(self, *words: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        return self.cli("start", "--dir", str(self.home), *words, seconds=seconds)

    def status(self) -> str:
        return self.cli("status", "--dir", str(self.home)).stdout

    def text(self, name: str) -> str:
        """What a process has said."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def log(self, method: str = "") -> str:
        """The log of the runs, of all or of one method."""
        found = (self.home / "server" / "runs").glob(f"*-{method}*.log" if method else "*.log")
        return "".join(p.read_text() for p in found)

    def round_times(self) -> list[float]:
        """When each round was complete, by the run's log."""
        lines = re.findall(r"^(\S+ \S+),(\d+) INFO round \d+/\d+: ", self.log(), re.MULTILINE)
        return [
            datetime.strptime(day, "%Y-%m-%d %H:%M:%S").timestamp() + int(ms) / 1000
            for day, ms in lines
        ]

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + (limit := patient(seconds))
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"waited {limit:.0f} s for {what}\n{self.log()[-3000:]}")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """SIGKILL to a site or server and to all it started, at once."""
        pids = family(self.processes[name].pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(name).wait(30)

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        for p in self.processes.values():
            self.known |= set(family(p.pid))
        sites = [n for n in self.processes if n != "server"]
        for names in (sites, ["server"] if "server" in self.processes else []):  # sites first
            for name in names:
                self.processes[name].terminate()
            for name in names:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[name].wait(patient(45))
        deadline = time.monotonic() + patient(
            20
        )  # Flower's children end a moment after their parents
        while (left := [pid for pid in self.known if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes outlived their command: {left}"

    def run_of(self, method: str) -> Path:
        """The folder of a method's run."""
        (path,) = (self.home / "server" / "runs").glob(f"*-{method}-*/config.toml")
        return path.parent

    def assert_simulators(self, method: str, oracle_folder: Path) -> list[Any]:
        """The model, and what was recorded, are the simulator's to the bit."""
        out = self.run_of(method)
        config = merged_config(out / "config.toml", None, None, None, {})
        oracle = run(config=config, out=oracle_folder)
        assert tree.equal(tree.load(out / "model.safetensors")[0], {"model": oracle.model})
        records = read_records(out / "rounds.jsonl")
        for mine, other in zip(records, oracle.rounds, strict=True):
            assert mine["loss"] == other["loss"]
            assert mine["bytes_up"] == other["bytes_up"]
            assert mine["bytes_down"] == other["bytes_down"]
            for domain, accuracy in mine["accuracy"].items():
                assert accuracy == other["accuracy"][domain]
        return list(records)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        made.close()
