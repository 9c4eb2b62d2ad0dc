"""The connection to a Ray cluster: several machines that work on one study or one federation.

Ray executes whatever code it is sent, on ports that are open to the network. So nothing here talks
to a cluster that does not ask for a token, and a cluster that is started here has a token of its
own. Ray's usage statistics are off.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from protofed.errors import ProtofedError

LOCAL, AUTO = "local", "auto"
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster on this machine; what does not fit is kept on disk."""

CONNECT_SECONDS = 5.0
"""How long a cluster's machine may take to accept a connection."""

_ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
except AuthenticationError:
    sys.exit("token")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def require_ray() -> Any:
    """Ray, or an error that says how to get it."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 starves on a busy machine
    try:
        import ray
    except ImportError:
        raise ProtofedError("Ray is not installed", "pip install 'protofed[cluster]'") from None
    if not ray.is_initialized():  # otherwise it keeps the values that these variables had first
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    return ray


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster: ``local``, ``auto`` (a running one, or else local), HOST:PORT.

    If this process is already connected, that connection is used and kept.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": False, "logging_level": "error"}
    if address == AUTO:
        address = _running(ray)
    with ExitStack() as stack:
        if address == LOCAL:
            stack.enter_context(_new_token())
            ray = require_ray()
        stack.callback(ray.shutdown)
        if address == LOCAL:
            _start(ray, options)
        else:
            _require_token(address)
            _join(ray, address, options)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
        yield ray


def _running(ray: Any) -> str:
    """The cluster that RAY_ADDRESS names; else one that runs on this machine; else ``local``."""
    if (named := os.environ.get("RAY_ADDRESS") or AUTO) != AUTO:
        return named
    try:
        found: str = ray._private.services.canonicalize_bootstrap_address(AUTO)
        _require_listener(found)  # it may be Ray's note of a cluster that has ended
    except (ConnectionError, ProtofedError):
        return LOCAL
    return found


@contextmanager
def _new_token() -> Iterator[None]:
    before = os.environ.get("RAY_AUTH_TOKEN")
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
        if before is not None:
            os.environ["RAY_AUTH_TOKEN"] = before


def _start(ray: Any, options: dict[str, Any]) -> None:
    store = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    try:
        ray.init(LOCAL, **store, **options)
    except Exception as error:  # Ray has no narrower one
        raise ProtofedError(
            f"Ray does not start on this machine: {error}", "if the machine is busy, try again"
        ) from error


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ProtofedError(
            f"cannot join the Ray cluster at {address}: {str(error).splitlines()[0]}",
            "this machine must be one of its nodes: ray start --address HOST:PORT",
        ) from None


def _require_listener(address: str) -> None:
    """Raise an error unless someone listens there: Ray itself would try for 40 seconds."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise _no_cluster(address, "that is not HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise _no_cluster(address, str(error)) from None


def _require_token(address: str) -> None:
    """Raise an error unless a cluster is there that accepts our token, and nobody without one."""
    _require_listener(address)
    refusal = _ask(address, "disabled")
    if not refusal:
        raise ProtofedError(
            f"the Ray cluster at {address} is open: it executes anyone's code",
            "stop it, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every machine before "
            "ray start",
        )
    if refusal != "token":
        raise _no_cluster(address, refusal)
    if _ask(address, "token"):
        raise ProtofedError(
            f"the Ray cluster at {address} asks for a token that this machine does not have",
            "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the one it was started with",
        )


def _ask(address: str, mode: str) -> str:
    """Ask a cluster for its nodes, in a process of its own; the reason if it gives none."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, address],
        env={**os.environ, "RAY_AUTH_MODE": mode},
        capture_output=True,
        text=True,
    )
    said = asked.stderr.strip().rpartition("\n")[2]
    return said or f"exit code {asked.returncode}" if asked.returncode else ""


def _no_cluster(address: str, why: str) -> ProtofedError:
    return ProtofedError(
        f"no Ray cluster answers at {address}: {why}",
        "give the address that ray start --head printed; see docs/cluster.md",
    )
