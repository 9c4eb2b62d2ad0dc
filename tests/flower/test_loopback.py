"""Real processes over loopback, with TLS and authenticated sites; nothing here is a stand-in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from protofed.config import Config, merged_config
from protofed.federation import tree
from protofed.federation.records import read_records
from protofed.federation.run import run
from protofed.flower.certificates import Authority, node_key

SITES = ("scan-0", "print-0", "photo-0")
TINY = ("--epochs", "1", "--batch", "8", "--width", "4", "--seed", "3")
SAMPLES = ("--samples", "scan=30,print=24,photo=20")
PROTOFED = str(Path(sys.executable).parent / "protofed")


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
    """Passes a site's connections on and counts their bytes: TLS, HTTP and all."""

    def __init__(self, to: int) -> None:
        self.to, self.up, self.down = to, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            for a, b, word in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(a, b, word), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, word: str) -> None:
        try:
            while data := a.recv(1 << 16):
                setattr(self, word, getattr(self, word) + len(data))
                b.sendall(data)
        except OSError:
            pass
        finally:
            for s in (a, b):
                s.close()

    def close(self) -> None:
        self.listener.close()


class Deployment:
    """A federation on this machine, run by the commands a person would type."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, {}  # type: Path, dict[str, subprocess.Popen[bytes]]
        self.known: set[int] = set()
        self.home, self.port = folder / "federation", free_port()

    def cli(self, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROTOFED, "deploy", *words],
            capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def init(self, *more: str) -> None:
        done = self.cli(
            "init", str(self.home), "--task", "glyphs", "--sites", ",".join(SITES),
            "--address", f"127.0.0.1:{self.port}", *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def begin(self, name: str, *words: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [PROTOFED, "deploy", *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()

    def server(self) -> None:
        said = self.text("server").count("is ready at")
        self.begin("server", "server", "--dir", str(self.home))
        self.until(lambda: self.text("server").count("is ready at") > said, 120, "the server")

    def site(self, name: str, *more: str) -> None:
        self.begin(name, "site", "--dir", str(self.home), "--site", name, *more)

    def start(self, *words: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        return self.cli("start", "--dir", str(self.home), *words, seconds=seconds)

    def text(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def log(self) -> str:
        return "".join(p.read_text() for p in (self.home / "server" / "runs").glob("*.log"))

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"waited {seconds} s for {what}\n{self.log()[-3000:]}")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """SIGKILL to a site or server and to all it started, at once."""
        pids = family(self.processes[name].pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(name).wait(30)

    def close(self) -> None:
        for p in self.processes.values():
            self.known |= set(family(p.pid))
        order = sorted(self.processes, key=lambda n: n == "server")  # sites first
        for name in order:
            self.processes[name].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(45)
        left = [pid for pid in self.known if alive(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes outlived their command: {left}"


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    try:
        yield made
    finally:
        made.close()


def run_of(deployment: Deployment, method: str) -> tuple[Path, Config]:
    (path,) = (deployment.home / "server" / "runs").glob(f"*-{method}-*/config.toml")
    return path.parent, merged_config(path, None, None, None, {})


def assert_simulators(deployment: Deployment, method: str, tmp_path: Path) -> list[Any]:
    """The model, and what was recorded, are the simulator's to the bit."""
    out, config = run_of(deployment, method)
    oracle = run(config=config, out=tmp_path / f"oracle-{method}")
    assert tree.equal(tree.load(out / "model.safetensors")[0], {"model": oracle.model})
    records = read_records(out / "rounds.jsonl")
    for mine, other in zip(records, oracle.rounds, strict=True):
        assert mine["loss"] == other["loss"]
        assert mine["bytes_up"] == other["bytes_up"]
        assert mine["bytes_down"] == other["bytes_down"]
        for domain in ("scan", "print", "photo"):
            assert mine["accuracy"][domain] == other["accuracy"][domain]
    return list(records)


def test_three_sites_over_loopback_are_the_simulator(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.init("--gather-seconds", "200", "--minimum", "3")
    relay = Relay(deployment.port)
    file = deployment.home / "sites" / "scan-0" / "federation.toml"
    direct = f"127.0.0.1:{deployment.port}"
    file.write_text(file.read_text().replace(direct, f"127.0.0.1:{relay.port}"))
    deployment.server()
    for name in SITES:
        deployment.site(name)
    done = deployment.start("--method", "fpl", "--rounds", "2", *TINY, *SAMPLES, "--wait")
    relay.close()
    assert done.returncode == 0, done.stdout + done.stderr + deployment.log()
    records = assert_simulators(deployment, "fpl", tmp_path)
    assert all("problems" not in r for r in records)
    status = deployment.cli("status", "--dir", str(deployment.home)).stdout
    assert status.count("): connected") == 3 and "finished:completed" in status
    # bytes of one site: the run's account, Flower's objects, and what really passed the wire
    account = records[0]["bytes_up"] // 3
    objects = sum(r["wire"]["scan-0"]["up"] for r in records)
    assert 2 * account < objects < 2 * account * 1.05 + 20_000
    assert objects < relay.up < 1.3 * objects + 300_000
    down = sum(r["wire"]["scan-0"]["down"] for r in records)
    assert 1.5 * down < relay.down < 1.3 * 1.5 * down + 300_000  # and the last evaluation's


@pytest.mark.drill
def test_drill_equality_and_a_killed_server(deployment: Deployment, tmp_path: Path) -> None:
    deployment.init("--gather-seconds", "200", "--minimum", "3")
    deployment.server()
    for name in SITES:
        deployment.site(name)
    words = ("--rounds", "3", *TINY, *SAMPLES, "--wait")
    done = deployment.start("--method", "i2pfl", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_simulators(deployment, "i2pfl", tmp_path)
    # FedSeProto keeps private entries at the sites; the server dies after the first round
    words = ("--method", "fedseproto", "--rounds", "3", *TINY, *SAMPLES)
    assert deployment.start(*words).returncode == 0
    deployment.until(lambda: "round 1/3: 3 of 3" in _log(deployment, "fedseproto"), 200, "round 1")
    deployment.kill("server")
    assert not list((deployment.home / "server/runs").glob("*-fedseproto-*/summary.json"))
    deployment.server()
    done = deployment.start(*words, "--resume", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed after round" in _log(deployment, "fedseproto")
    assert_simulators(deployment, "fedseproto", tmp_path)


def _log(deployment: Deployment, method: str) -> str:
    found = (deployment.home / "server" / "runs").glob(f"*-{method}-*.log")
    return "".join(p.read_text() for p in found)


@pytest.mark.drill
def test_drill_a_site_joins_late_is_killed_and_comes_back(deployment: Deployment) -> None:
    deployment.init("--gather-seconds", "20", "--wait-seconds", "200", "--round-seconds", "300")
    deployment.server()
    for name in ("scan-0", "print-0"):
        deployment.site(name)
    deployment.until(
        lambda: deployment.cli("status", "--dir", str(deployment.home)).stdout.count(
            "): connected"
        ) == 2, 120, "two sites",
    )  # fmt: skip
    words = ("--method", "fpl", "--rounds", "12", *TINY, *SAMPLES)
    assert deployment.start(*words).returncode == 0
    deployment.until(lambda: "round 1/12: 2 of 3" in deployment.log(), 200, "round 1")
    deployment.site("photo-0")
    deployment.until(lambda: "round" in deployment.log() and ": 3 of 3" in deployment.log(), 200,
                     "the late site")  # fmt: skip
    asked = deployment.text("print-0").count("Receiving: train message")
    deployment.until(
        lambda: deployment.text("print-0").count("Receiving: train message") > asked, 120, "a round"
    )
    deployment.kill("print-0")
    killed = time.monotonic()
    deployment.until(lambda: "site print-0: error" in deployment.log(), 150, "the lost site")
    lost = time.monotonic() - killed
    deployment.until(lambda: deployment.log().count(": 2 of 3") >= 2, 60, "the round without it")
    assert lost < 120, lost
    before = deployment.log().count(": 3 of 3")
    deployment.site("print-0")
    deployment.until(lambda: deployment.log().count(": 3 of 3") > before, 200, "its return")
    deployment.until(lambda: "the run is complete" in deployment.log(), 400, "the end")
    out, _ = run_of(deployment, "fpl")
    records = read_records(out / "rounds.jsonl")
    assert len(records) == 12
    assert records[0]["problems"] == {"photo-0": "not connected"}
    assert any("error 5" in r.get("problems", {}).get("print-0", "") for r in records)
    assert records[-1]["clients"] == 3


@pytest.mark.drill
def test_drill_wrong_certificates_unknown_keys_and_too_few(deployment: Deployment) -> None:
    deployment.init("--gather-seconds", "3", "--wait-seconds", "5")
    sites = deployment.home / "sites"
    deployment.server()
    other, (key, _) = Authority("other"), node_key()
    from cryptography.hazmat.primitives.serialization import Encoding

    home = str(deployment.home)
    right = (sites / "scan-0" / "ca.crt").read_bytes()
    (sites / "scan-0" / "ca.crt").write_bytes(other.certificate.public_bytes(Encoding.PEM))
    done = deployment.cli("site", "--dir", home, "--site", "scan-0", "--patience", "1")
    assert done.returncode == 2 and "CERTIFICATE_VERIFY_FAILED" in done.stdout + done.stderr
    (sites / "scan-0" / "ca.crt").unlink()
    done = deployment.cli("site", "--dir", home, "--site", "scan-0", "--patience", "1")
    assert done.returncode == 2 and "ca.crt" in done.stderr
    (sites / "scan-0" / "ca.crt").write_bytes(right)
    (sites / "print-0" / "node.key").write_bytes(key)
    done = deployment.cli("site", "--dir", home, "--site", "print-0", "--patience", "1")
    assert done.returncode == 2 and "cannot join" in done.stderr
    assert "2004" in done.stdout + done.stderr
    deployment.site("scan-0")  # one site, and two are needed
    done = deployment.start("--method", "fpl", "--rounds", "2", *TINY, *SAMPLES, "--wait")
    assert done.returncode == 2
    assert "waiting for sites" in done.stdout and "a round needs 2" in deployment.log()
    done = deployment.cli("stop", "--dir", home)
    assert done.returncode == 2 and "no run is running" in done.stderr
