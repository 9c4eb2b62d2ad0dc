"""Runs of a study without processes: what ``protofed run`` would do is done in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from protofed.errors import ProtofedError
from protofed.runs import RunFolder
from protofed.runs.run import run
from protofed.studies import execution


class InProcess:
    """Stands for the process of a ``protofed run``; it has ended when it has been made."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], *, stderr: Any, **_: Any) -> None:
        self.started.append(command)
        config, out = (Path(command[command.index(flag) + 1]) for flag in ("--config", "--out"))
        self.code = 0
        try:
            again = "--overwrite" in command
            if again or not RunFolder(out).is_finished():
                run(config=config, out=out, resume="--resume" in command, overwrite=again)
        except ProtofedError as error:
            stderr.write(f"error: {error}\n".encode())
            self.code = error.exit_code

    def poll(self) -> int:
        return self.code


def run_in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let studies do their runs in this process; the commands they start are in the list."""
    monkeypatch.setattr(execution.subprocess, "Popen", InProcess)
    monkeypatch.setattr(execution, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(execution, "RETRY_SECONDS", 0.05)
    started: list[list[str]] = []
    monkeypatch.setattr(InProcess, "started", started)
    return started


def start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error if a process is started."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(execution.subprocess, "Popen", never)
