"""NVIDIA's Multi-Process Service (MPS): kernels of several processes on one GPU at the same time.

Without it, processes take turns. The daemon that is started here has its pipes and logs in a
private folder, serves nobody but the processes that are given its variables, and is the only one
that is stopped.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from protofed.errors import ProtofedError

CONTROL = "nvidia-cuda-mps-control"
ANSWER_SECONDS = 30.0
"""How long the daemon may take to start, to answer and to stop."""

# `read` ends when the input is closed, even by a SIGKILL of the process that started the keeper,
# and nobody may be there any more to hear how the start went
_KEEPER = f"""\
{CONTROL} -d </dev/null >start.log 2>&1
code=$?
trap '' PIPE
echo $code
read -r _
echo quit | {CONTROL} >/dev/null 2>&1
cd / && rm -rf "$0"
"""
_PROBE = """\
import ctypes, sys
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
for number in range(count.value):
    device, context = ctypes.c_int(), ctypes.c_void_p()
    error = error or cuda.cuDeviceGet(ctypes.byref(device), number)
    error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
sys.exit(f"CUDA error {error}" if error else None)
"""
"""A process that uses every GPU it sees. It needs no torch, whose import takes seconds."""


@contextmanager
def mps_daemon(gpus: Sequence[str]) -> Iterator[dict[str, str]]:
    """The environment variables of processes that are to share ``gpus``, given by their UUIDs.

    There are none if a daemon is running that processes of this environment use anyway. Where MPS
    does not work, a ``ProtofedError`` says why.
    """
    if shutil.which(CONTROL) is None:
        raise ProtofedError(f"{CONTROL} is not on PATH")
    if _servers(os.environ) is not None:
        yield {}
        return
    folder = Path(tempfile.mkdtemp(prefix="protofed-mps-"))
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    environment = {**os.environ, **variables}
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,  # Ctrl-C must not end the daemon before the runs
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    with keeper.stdout:
        try:
            _require_working(keeper.stdout, folder, environment)
            yield variables
        finally:
            keeper.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # then it waits for the daemon without us
                keeper.wait(ANSWER_SECONDS)


def _require_working(said: IO[bytes], folder: Path, environment: Mapping[str, str]) -> None:
    """Raise an error unless the daemon has started, and a process has used the GPUs through it."""
    if not select.select([said], [], [], ANSWER_SECONDS)[0]:
        raise ProtofedError(f"{CONTROL} did not start in {ANSWER_SECONDS:.0f} s")
    if code := int(said.readline()):
        why = _last_line(folder / "start.log") or _last_line(folder / "log" / "control.log")
        raise ProtofedError(f"{CONTROL} did not start: {why or f'exit code {code}'}")
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ProtofedError(f"no GPU answered through it in {ANSWER_SECONDS:.0f} s") from None
    if probe.returncode:
        why = probe.stderr.strip().rpartition("\n")[2]
        raise ProtofedError(f"a GPU cannot be used through it: {why}")
    if not _servers(environment):  # CUDA works without MPS where it cannot connect
        why = _last_line(folder / "log" / "control.log") or "its log is empty"
        raise ProtofedError(f"processes do not connect to it: {why}")


def _servers(environment: Mapping[str, str]) -> list[str] | None:
    """The process ids of the servers of the daemon of an environment; None if there is none."""
    try:
        asked = subprocess.run(
            [CONTROL],
            input="get_server_list\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode or "cannot find" in (asked.stdout + asked.stderr).lower():
        return None
    return asked.stdout.split()


def _last_line(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace").strip().rpartition("\n")[2]
    except OSError:
        return ""
