"""A stand-in for NVIDIA's MPS: a control program on PATH whose daemon is a sleeping process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from protofed.studies import mps

CONTROL = """\
#!/bin/sh
pipe="${CUDA_MPS_PIPE_DIRECTORY:-$FAKE_MPS/default}"
if [ "$1" = -d ]; then
    if [ -e "$FAKE_MPS/refuse" ]; then echo "warming up"; echo "no permission"; exit 1; fi
    while [ -e "$FAKE_MPS/hang" ]; do sleep 0.05; done
    sleep 600 >/dev/null 2>&1 &
    echo $! >"$pipe/control"
    echo "$CUDA_VISIBLE_DEVICES $(stat -c %a "$pipe/..")" >"$FAKE_MPS/started"
    cut -d' ' -f6 /proc/$$/stat >"$FAKE_MPS/session"
    echo $! >"$FAKE_MPS/pid"
    exit 0
fi
[ -e "$pipe/control" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
read -r command
case "$command" in
    get_server_list) cat "$pipe/servers" 2>/dev/null || true ;;
    quit) kill "$(cat "$pipe/control")"; rm "$pipe/control" ;;
esac
"""
CLIENT = "import os; open(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/servers', 'w').write('4711')"
"""What a process that uses the GPU does to the stand-in: it makes the daemon start a server."""


class FakeMps:
    """The stand-in, as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def started(self) -> list[str]:
        """The GPUs that the daemon was given and the mode of its folder; none if not started."""
        file = self.folder / "started"
        return file.read_text().split() if file.exists() else []

    def is_running(self) -> bool:
        """Whether the daemon is running that was started last."""
        pid = (self.folder / "pid").read_text().strip()
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def has_ended(self) -> bool:
        """Whether it ends within ten seconds, and its folder goes."""
        for _ in range(500):
            if not [*(self.folder / "temp").iterdir()] and not self.is_running():
                return True
            time.sleep(0.02)
        return False


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """Put the stand-in on PATH, with a private place for temporary files."""
    folder = tmp_path / "mps"
    for name in ("bin", "temp", "default"):
        (folder / name).mkdir(parents=True)
    program = folder / "bin" / mps.CONTROL
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS", str(folder))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("TMPDIR", str(folder / "temp"))
    monkeypatch.setattr(mps.tempfile, "tempdir", None)
    monkeypatch.setattr(mps, "_PROBE", CLIENT)
    return FakeMps(folder)
