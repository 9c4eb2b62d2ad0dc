"""The connection to a Ray cluster: several machines that work for one study or one federation.

Ray executes whatever code it is sent, on ports that are open to the network. So nothing here talks
to a cluster that does not ask for a token, and a cluster that is started here has a token of its
own. Ray's usage statistics are off.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protofed.errors import ProtofedError

LOCAL, AUTO = "local", "auto"
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster on this machine; what does not fit is kept on disk."""

_ASK_WITHOUT_TOKEN = """
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
    if not ray.is_initialized():
        ray._raylet.Config.initialize("")  # it may have been imported before the mode was set
    return ray


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster: ``local``, ``auto`` (a running one, or else local), HOST:PORT.

    A connection that this process has already is used, and kept.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    options = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address not in (LOCAL, AUTO):
            _require_token(address)
        if address != LOCAL:
            _join(ray, address, options)
        if not ray.is_initialized():
            if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            store = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
            try:
                ray.init(LOCAL, **store, **options)
            except Exception as error:  # Ray has no narrower one
                raise ProtofedError(
                    f"Ray does not start on this machine: {error}",
                    "a busy machine may need a retry",
                ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
        yield ray
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Join a cluster; with ``auto``, if there is one."""
    try:
        ray.init(address, **options)
    except ray.exceptions.AuthenticationError:
        raise _no_token(address) from None
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        if address == AUTO and isinstance(error, ConnectionError):
            return
        raise ProtofedError(
            f"cannot join the Ray cluster at {address}: {str(error).splitlines()[0]}",
            "this machine must be one of its nodes (ray start --address HOST:PORT) and have its "
            "token",
        ) from None
    if address == AUTO:
        _require_token(ray.get_runtime_context().gcs_address)


def _require_token(address: str) -> None:
    """An error unless a cluster is there, and refuses whoever comes without a token."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK_WITHOUT_TOKEN, address],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
    )
    found = asked.stderr.strip().rpartition("\n")[2]
    if asked.returncode == 0:
        raise ProtofedError(
            f"the Ray cluster at {address} is open: it executes anyone's code",
            "stop it, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on every machine before "
            "ray start",
        )
    if found != "token":
        raise ProtofedError(f"no Ray cluster answers at {address}: {found}", "see docs/cluster.md")


def _no_token(address: str) -> ProtofedError:
    return ProtofedError(
        f"the Ray cluster at {address} asks for a token that is not here",
        "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the one it was started with",
    )
