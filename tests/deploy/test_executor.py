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
from protofed.deploy.audit import AUDIT_FILE, AuditLog
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
    context = Context(1, 7, {"site-folder": str(tmp_path)}, RecordDict(), {})
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
    assert [path.name for path in tmp_path.iterdir()] == [AUDIT_FILE]
    assert next(AuditLog(tmp_path).entries())["why"] == reply.error.reason


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (executor.own_app(), "completed", ""),
        (executor.own_app() + b"\0", "failed", "refused: run 5 brings the app 'evil/app'"),
        (executor.own_app(), "failed", "KeyboardInterrupt"),
    ],
    ids=["own", "other", "stopped"],
)
def test_the_server_runs_its_own_app_and_says_how_that_ended(
    content: bytes, status: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(
        run_id=5, fab_id="evil/app", fab_version="1", override_config={"spec": "s"}
    )
    context = Context(1, 7, {}, RecordDict(), {})
    found = SimpleNamespace(task_id=1, context=context, run=run, fab=Fab("", content, {}))
    api = SimpleNamespace(PullTaskInput=lambda request: found)
    grid = SimpleNamespace(
        _runtime_client=api, _retry_invoker=SimpleNamespace(), set_run=lambda run: None
    )
    ran: list[Any] = []
    ended: list[tuple[str, str]] = []

    def main(grid: Any, context: Context) -> None:
        ran.append(dict(context.run_config))
        if why == "KeyboardInterrupt":  # deploy stop
            raise KeyboardInterrupt

    fakes: dict[str, Any] = {
        "HeartbeatSender": lambda beat: SimpleNamespace(start=lambda: None),
        "HttpGrid": lambda *args, **more: grid,
        "push_task_output": lambda api, context, status, why: ended.append((status, why)),
        **{f"{name}_from_proto": lambda proto: proto for name in ("context", "run", "fab")},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(executor, name, fake)
    monkeypatch.setattr(executor.server_app, "main", main)
    executor.run_server_task(executor.Runtime("127.0.0.1:1", None), "token")
    ((got, text),) = ended
    assert got == status and text.startswith(why)
    expected = {"spec": "s", "resume": False, "overwrite": False, "confirm": False}
    expected |= {"on-poison": "stop"}
    assert ran == ([] if "refused" in why else [expected])


def test_tasks_run_in_a_copy_of_the_warm_process() -> None:
    def work() -> None:
        os._exit(7 if "torch" in executor.sys.modules else 8)

    def fails() -> None:
        raise ValueError("on purpose")

    for what, code in ((work, 7), (lambda: None, 0), (fails, 1)):
        child = executor.run_forked(what)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
