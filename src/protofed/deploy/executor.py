"""Runs the tasks of this machine's SuperNode or SuperLink, with installed code only.

Flower's own executor unpacks the app that a run brings along, and imports it. This one compares the
app byte for byte with protofed's, refuses any other, and unpacks none. It has imported all it needs
before the first task, and forks for each: no message waits for torch to be imported.

``python -m protofed.deploy.executor site|server HOST:PORT SECRET_FILE [CA_FILE]``
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from protofed.deploy import client_app, server_app
from protofed.deploy.audit import AuditLog
from protofed.deploy.messages import SITE_FAILED
from protofed.deploy.templating import render
from protofed.federation.cpu import die_with_parent

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
POLL_SECONDS = 0.25
log = logging.getLogger("flwr")


def refusal(run: Run, fab: Fab) -> str:
    """Why a run is not run here; empty if its app is protofed's."""
    if fab.content == own_app():
        return ""
    digest = hashlib.sha256(fab.content).hexdigest()
    return (
        f"refused: run {run.run_id} brings the app {run.fab_id!r:.100} {run.fab_version!r:.40} "
        f"(sha256 {digest}); only the installed protofed runs here"
    )


def own_app() -> bytes:
    """The app of every run, as this installation would submit it."""
    content: bytes = build_fab_from_files({"pyproject.toml": render("app.toml").encode()})[0]
    return content


class Runtime:
    """The interface of a SuperNode or a SuperLink to those who run its tasks."""

    def __init__(self, address: str, ca: bytes | None) -> None:
        self.address, self.ca = address, ca

    def client(self, credentials: Any) -> RuntimeHttpClient:
        """A connection; a task's token or the machine's secret are its credentials."""
        return RuntimeHttpClient.from_server_address(
            self.address,
            self.ca is None,
            self.ca,
            [RuntimeVersionHttpInterceptor(component_name="SuperExec"), credentials],
            retry_invoker=make_simple_http_retry_invoker(),
        )


def run_site_task(runtime: Runtime, token: str) -> None:
    """Answer one message."""
    api = runtime.client(RuntimeTokenHttpInterceptor(token))
    HeartbeatSender(make_task_heartbeat_fn_http(api)).start()  # ends with this process
    message, context, run, fab = pull_task_input(api)
    problem = refusal(run, fab)
    if problem:
        log.error("protofed: %s", problem)
        AuditLog(Path(str(context.node_config["site-folder"]))).append("refused", why=problem)
        reply = Message(Error(SITE_FAILED, problem), reply_to=message)
    else:
        reply = client_app.handle(message, context)
    push_message(api, reply, context)
    push_task_output(api, context, SubStatus.FAILED if problem else SubStatus.COMPLETED, problem)


def run_server_task(runtime: Runtime, token: str) -> None:
    """Run all rounds of one run."""
    grid = HttpGrid(runtime.address, runtime.ca is None, runtime.ca, token=token)
    api = grid._runtime_client
    HeartbeatSender(make_task_heartbeat_fn_http(api)).start()  # ends with this process
    found = api.PullTaskInput(PullTaskInputRequest())
    context, run, fab = (
        context_from_proto(found.context), run_from_proto(found.run), fab_from_proto(found.fab)
    )  # fmt: skip
    TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, run.run_id
    TaskIdentity.node_id = context.node_id
    problem = refusal(run, fab)
    try:
        if problem:
            log.error("protofed: %s", problem)
        else:
            grid.set_run(run)
            context.run_config = get_fused_config_from_fab(fab.content, run)
            server_app.main(grid, context)
    except BaseException as error:  # also a signal: the run's state is on the disk by now
        problem = f"{type(error).__name__}: {error}"
        log.error("protofed: the run ended: %s", problem)
    grid._retry_invoker.max_tries = 1  # a server that is going down no longer responds
    push_task_output(api, None, SubStatus.FAILED if problem else SubStatus.COMPLETED, problem)


def run_forked(work: Callable[[], None]) -> int:
    """Start ``work`` in a copy of this process, which ends with it; returns the copy's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent()
        work()
        code = 0
    except BaseException:
        log.exception("protofed: a task could not be run")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Take tasks until this process is ended."""
    kind, address, secret, *rest = sys.argv[1:]
    runtime = Runtime(address, Path(rest[0]).read_bytes() if rest else None)
    sign = SuperExecAuthHttpInterceptor(
        master_secret=Path(secret).read_bytes(), protected_methods={ACQUIRE}
    )
    api = runtime.client(sign)
    run_task = {"site": run_site_task, "server": run_server_task}[kind]
    # every type of task: one that nobody takes would block all others at a site
    request = AcquireTaskRequest(supported_task_types=[str(type) for type in TaskType])
    children: set[int] = set()
    while True:
        task = api.AcquireTask(request)
        if task.token:
            children.add(run_forked(partial(run_task, runtime, task.token)))
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
