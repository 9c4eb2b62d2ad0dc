"""Seconds of a round over Flower: server and two sites on this machine, a model of a few kB.

    git worktree add ../before COMMIT
    python benchmarks/flower_round.py before=../before/src after=src

compares versions of protofed in one run, in alternating repetitions. Training takes a fraction of a
second, so what is measured is the rest: polling, processes, transport.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROUNDS, REPETITIONS = 6, 2
SITES = ("scan-0", "print-0")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "protofed", "deploy", *words]


@contextlib.contextmanager
def running(log: Path, env: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command(*words), env=env, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def rounds(source: Path, folder: Path) -> list[float]:
    """The seconds of each round, as the run's log has them."""
    env = {**os.environ, "PYTHONPATH": str(source)}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    home = str(folder / "f")
    words = ["init", home, "--task", "glyphs", "--sites", ",".join(SITES)]
    subprocess.run(command(*words, "--address", f"127.0.0.1:{port}"), env=env, check=True,
                   capture_output=True)  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(folder / "server.log", env, "server", "--dir", home))
        while "is ready at" not in (folder / "server.log").read_text():
            time.sleep(0.5)
        for site in SITES:
            words = ["site", "--dir", home, "--site", site]
            stack.enter_context(running(folder / f"{site}.log", env, *words))
        words = ["start", "--dir", home, "--method", "fedavg", "--rounds", str(ROUNDS), "--wait",
                 "--epochs", "1", "--batch", "8", "--width", "4",
                 "--samples", "scan=30,print=24"]  # fmt: skip
        done = subprocess.run(command(*words), env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return [float(s) for s in re.findall(r"round \d+/\d+: 2 of 2 .* ([\d.]+) s", done.stdout)]


def main() -> None:
    versions = dict(word.split("=", 1) for word in sys.argv[1:])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; {ROUNDS} rounds, {REPETITIONS} repetitions")
    seconds: dict[str, list[float]] = {name: [] for name in versions}
    for repetition in range(REPETITIONS):
        for name, source in versions.items():
            with tempfile.TemporaryDirectory() as folder:
                got = rounds(Path(source).resolve(), Path(folder))
            seconds[name] += got
            load = os.getloadavg()[0]
            print(f"{name} {repetition + 1}: {got} (load {load:.1f})", flush=True)
    for name, all_seconds in seconds.items():
        low, *_, high = sorted(all_seconds)
        print(f"{name}: median {statistics.median(all_seconds):.1f} s, {low:.1f} to {high:.1f} s")


if __name__ == "__main__":
    main()
