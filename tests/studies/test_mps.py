"""The MPS daemon of a study: started in private, stopped whatever happens, or not started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.studies.fake_mps import CLIENT, FakeMps, install

import protofed
from protofed.errors import ProtofedError
from protofed.studies import mps
from protofed.studies.mps import mps_daemon

GPUS = ("GPU-a", "GPU-b")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    return install(tmp_path, monkeypatch)


def test_a_daemon_in_a_private_folder(fake: FakeMps) -> None:
    with mps_daemon(GPUS) as variables:
        pipe = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipe.is_dir() and Path(variables["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
        assert fake.started == ["GPU-a,GPU-b", "700"]
        assert fake.is_running()
        session = int((fake.folder / "session").read_text())
        assert session != os.getsid(0), "Ctrl-C in a terminal does not reach it"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert fake.has_ended()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_stops_it(fake: FakeMps, error: type[BaseException]) -> None:
    with pytest.raises(error), mps_daemon(GPUS):
        raise error
    assert fake.has_ended()


def test_it_does_not_outlive_a_process_that_is_killed(fake: FakeMps) -> None:
    script = f"""
import sys, time, types
package = sys.modules["protofed"] = types.ModuleType("protofed")
package.__path__ = {protofed.__path__!r}  # without its __init__, which imports torch
from protofed.studies import mps
mps._PROBE = {CLIENT!r}
with mps.mps_daemon(["GPU-a"]):
    print("up", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert fake.is_running()
        process.send_signal(signal.SIGKILL)
    assert fake.has_ended()


def test_a_daemon_that_is_running_is_used_and_stays(fake: FakeMps) -> None:
    (fake.folder / "default" / "control").write_text("1")
    with mps_daemon(GPUS) as variables:
        assert variables == {}
    assert fake.started == [] and (fake.folder / "default" / "control").exists()


def test_why_there_is_none(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        with pytest.raises(ProtofedError) as error, mps_daemon(GPUS):
            pass
        return error.value.message

    monkeypatch.setattr(mps, "_PROBE", "import sys; print('x'); sys.exit('CUDA error 807')")
    assert why() == "a GPU cannot be used through it: CUDA error 807"
    assert fake.has_ended()
    monkeypatch.setattr(mps, "_PROBE", "pass")  # as where CUDA goes on without MPS
    assert why() == "processes do not connect to it: its log is empty"
    assert fake.has_ended()


def test_why_it_did_not_start(fake: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake.folder / "hang").touch()
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(mps, "ANSWER_SECONDS", 0.1)
        with pytest.raises(ProtofedError, match="mps-control did not start in 0 s"):
            mps_daemon(GPUS).__enter__()
    (fake.folder / "hang").rename(fake.folder / "refuse")  # it starts after all
    assert fake.has_ended()
    with pytest.raises(ProtofedError, match="mps-control did not start: no permission"):
        mps_daemon(GPUS).__enter__()
    monkeypatch.setenv("PATH", str(fake.folder))
    with pytest.raises(ProtofedError, match="nvidia-cuda-mps-control is not on PATH"):
        mps_daemon(GPUS).__enter__()
