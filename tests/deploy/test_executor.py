"""Server and sites run protofed's app and refuse any other."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk, build_fab_from_files
from flwr.supercore.fab import Fab

from protofed.deploy import executor
from protofed.deploy.templating import render

APP = render("app.toml")
EVIL = "import pathlib; pathlib.Path('pwned').touch()"


def fab_of(files: dict[str, str]) -> bytes:
    content: bytes = build_fab_from_files({k: v.encode() for k, v in files.items()})[0]
    return content


def test_the_app_of_every_run_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """As ``flwr run`` builds it from the folder that ``deploy start`` writes."""
    (tmp_path / "pyproject.toml").write_text(APP)
    assert build_fab_from_disk(tmp_path) == executor.own_app()
    with zipfile.ZipFile(io.BytesIO(executor.own_app())) as app:
        assert not [name for name in app.namelist() if name.endswith(".py")]


@pytest.mark.parametrize(
    "content",
    [
        fab_of({"pyproject.toml": APP, "protofed/__init__.py": EVIL}),
        fab_of({"pyproject.toml": APP.replace("protofed.deploy.client_app:app", "os:system")}),
        fab_of({"pyproject.toml": APP.replace("false", "true")}),
        executor.own_app() + b"\0",
        b"",
    ],
    ids=["with code", "other module", "other settings", "a byte more", "empty"],
)
def test_a_site_answers_another_app_with_its_name_and_runs_nothing(
    content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    message = Message(RecordDict({"x": ConfigRecord({"y": 1})}), 7, "train")
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(1, 7, {}, RecordDict(), {})
    run = SimpleNamespace(run_id=5, fab_id="evil/app\n", fab_version="6.6.6")
    sent: list[Message] = []
    ended: list[str] = []
    fakes: dict[str, Any] = {
        "HeartbeatSender": lambda beat: SimpleNamespace(start=lambda: None),
        "pull_task_input": lambda api: (message, context, run, Fab("", content, {})),
        "push_message": lambda api, reply, context: sent.append(reply),
        "push_task_output": lambda api, context, status, why: ended.append(status),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(executor, name, fake)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    executor.run_site_task(executor.Runtime("127.0.0.1:1", None), "token")
    (reply,) = sent
    assert reply.has_error() and ended == ["failed"]
    assert "refused: run 5 brings the app 'evil/app\\n' '6.6.6'" in reply.error.reason
    assert reply.error.reason in caplog.text
    assert not list(tmp_path.iterdir())


def test_tasks_run_in_a_copy_of_the_warm_process() -> None:
    def work() -> None:
        os._exit(7 if "torch" in executor.sys.modules else 8)

    def fails() -> None:
        raise ValueError("on purpose")

    for what, code in ((work, 7), (lambda: None, 0), (fails, 1)):
        child = executor.run_forked(what)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
