from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("flwr") is not None:  # without it, the tests here skip themselves
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when Flower is imported
    from tests.deploy.flower_world import grid, own_cache, task_identity, world
    from tests.deploy.loopback_world import deployment

    __all__ = ["deployment", "grid", "own_cache", "task_identity", "world"]
