"""A run on a node of a Ray cluster: the process that does it, and the news from its folder.

Ray carries this module to the nodes by value, and it imports the standard library alone: the actor
starts at once, and only the run's own process loads torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PREFIX, ALIVE = "protofed-ray-", ".alive"
PR_SET_PDEATHSIG = 1


class RunProcess:
    """The actor: it starts a run in a scratch folder, and reports what is new there when asked.

    ``files`` are what there is of the run so far, in the folder ``name``; ``code`` are the files of
    methods and models, by their paths where the study was started.
    """

    def __init__(
        self,
        version: str,
        arguments: Sequence[str],
        config: str,
        code: Mapping[str, bytes],
        name: str,
        files: Mapping[str, bytes],
        place: str,
        gpu: bool,
    ) -> None:
        import ray

        self._where = (ray.get_runtime_context().get_node_id(), socket.gethostname())
        _sweep()
        self._scratch, self._alive = _make_scratch()
        self._pool, self._name = self._scratch / "runs", name
        for file, content in files.items():
            _write(self._pool / name / file, content)
        self._sent = self._look()[1]
        copies = {}
        for number, (path, content) in enumerate(code.items()):
            copies[path] = str(self._scratch / "code" / str(number) / Path(path).name)
            _write(Path(copies[path]), content)
        _write(self._scratch / "config.toml", config.encode())
        command = [sys.executable, "-m", "protofed.studies.ray_process"]
        command += [str(os.getpid()), version, json.dumps(copies), *arguments]
        command += ["--config", str(self._scratch / "config.toml"), "--runs", str(self._pool)]
        with (self._scratch / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=place if Path(place).is_dir() else self._scratch,
                env=os.environ if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def news(self) -> dict[str, Any]:
        """What changed since the last time, and the exit code if the process has ended."""
        code = self._process.poll()
        if code is None:
            # Stopped at any moment, the folder is what a crash would leave: it can be resumed from.
            os.kill(self._process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            name, there = self._look()
            moved = {mark: file for file, mark in self._sent.items()}
            changed = {
                file: moved.get(mark) or (self._pool / name / file).read_bytes()
                for file, mark in there.items()
                if self._sent.get(file) != mark
            }
        finally:
            if code is None:
                os.kill(self._process.pid, signal.SIGCONT)
        self._sent = there
        news: dict[str, Any] = {"where": self._where, "code": code, "errors": ""}
        news |= {"name": name, "changed": changed, "names": list(there)}
        if code is not None:
            news["errors"] = (self._scratch / "errors").read_text("utf-8", errors="replace")
            shutil.rmtree(self._scratch, ignore_errors=True)
        return news

    def stop(self) -> dict[str, Any]:
        """Let the run write a checkpoint and end; returns the last news."""
        self._process.terminate()
        self._process.wait()
        return self.news()

    def _look(self) -> tuple[str, dict[str, tuple[int, int, int]]]:
        """The run's folder, and what tells one version of each of its files from another.

        The process names the folder after what it finds on this machine, so it may not be the one
        that was sent.
        """
        for folder in self._pool.glob("*/facts.json"):
            if folder.parent.name != self._name:
                self._name, self._sent = folder.parent.name, {}
                break
        root, found = self._pool / self._name, {}
        for path in root.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                stat = path.stat()
                mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                found[str(path.relative_to(root))] = mark
        return self._name, found


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(content)


def _make_scratch() -> tuple[Path, int]:
    """A new folder, and a lock in it that ends with this process, however the process ends."""
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(scratch / f"{ALIVE}.new", os.O_CREAT | os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    (scratch / f"{ALIVE}.new").rename(scratch / ALIVE)
    return scratch, handle


def _sweep() -> None:
    """Remove what killed runs have left on this machine."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{ALIVE}"):
        with suppress(OSError):  # it is in use, or another user's
            handle = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(handle)


def main() -> None:
    """The run's process: ``protofed`` with these arguments, as long as the actor lives."""
    parent, version, copies = sys.argv[1:4]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("error: the actor has died")
    from protofed.user_code import use_copies
    from protofed.version import __version__

    if __version__ != version:
        sys.exit(
            f"error: {socket.gethostname()} has protofed {__version__}, and the study was started "
            f"with {version} (install the same version on all machines)"
        )
    use_copies(json.loads(copies))
    sys.argv[:] = ["protofed", *sys.argv[4:]]
    runpy.run_module("protofed", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
