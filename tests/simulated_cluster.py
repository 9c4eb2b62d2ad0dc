"""A Ray cluster of several nodes on this machine, and ways to break it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from protofed.cluster import require_ray

TOKEN = "a-token-for-tests-of-32-characters"
FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A dead node is noticed within seconds."""


@contextmanager
def simulated_cluster(
    *nodes: dict[str, Any], config: dict[str, int] | None = None
) -> Iterator[Any]:
    """A head without cores, and these nodes."""
    pytest.importorskip("ray")
    os.environ["RAY_AUTH_TOKEN"] = TOKEN
    require_ray()
    from ray.cluster_utils import Cluster

    more = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": config or {}, **more}
    cluster = _started(lambda: Cluster(True, head_node_args=head))
    try:
        for node in nodes:
            _started(lambda own=node: cluster.add_node(**own, **more))
        yield cluster
    finally:
        thaw(*stopped)
        cluster.shutdown()


def _started(start: Callable[[], Any]) -> Any:
    """A raylet gives up if Ray's other processes take 20 s to start, as on a busy machine."""
    for _ in range(4):
        with suppress(Exception, SystemExit):  # Ray has no narrower one
            return start()
    return pytest.skip("Ray does not start: the machine is too busy")


stopped: list[int] = []


def processes(node: Any) -> list[int]:
    """A node's raylet and all that it has started."""
    (raylet,) = node.all_processes["raylet"]
    return [raylet.process.pid, *descendants(raylet.process.pid)]


def descendants(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return [*found, *(deeper for child in found for deeper in descendants(child))]


def freeze(node: Any) -> list[int]:
    """Stop every process of a node, as a machine that hangs."""
    frozen = processes(node)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    stopped.extend(frozen)
    return frozen


def thaw(*frozen: int) -> None:
    for pid in frozen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
