"""How the server's process ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

import pytest

from protofed.deploy.server_app import log_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_logged_before_flower_ends_the_process(
    number: signal.Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("protofed.deploy"), "propagate", True)
    told: list[str] = []

    def flowers(got: int, frame: FrameType | None) -> None:
        told.append(caplog.text)  # may take so long that nothing after it runs
        raise SystemExit(0)

    before = signal.signal(number, flowers)
    try:
        with pytest.raises(SystemExit), log_signals():
            os.kill(os.getpid(), number)
            time.sleep(5)
        assert len(told) == 1 and "the run ended: stopped" in told[0]
        assert signal.getsignal(number) is flowers
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_there_are_no_signals() -> None:
    worked: list[bool] = []

    def work() -> None:
        with log_signals():
            worked.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert worked == [True]
