"""How the server's process ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

import pytest

from protofed.flower.server_app import _told_when_stopped


def test_a_stop_is_logged_before_flower_ends_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("protofed.flower"), "propagate", True)
    told: list[str] = []

    def flowers(number: int, frame: FrameType | None) -> None:
        told.append(caplog.text)  # may take so long that nothing after it runs
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, flowers)
    try:
        with pytest.raises(SystemExit), _told_when_stopped():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert len(told) == 1 and "the run ends: stopped" in told[0]
        assert signal.getsignal(signal.SIGTERM) is flowers
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_there_are_no_signals() -> None:
    worked: list[bool] = []

    def work() -> None:
        with _told_when_stopped():
            worked.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert worked == [True]
