from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("flwr") is not None:  # without it, the tests here skip themselves
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when Flower is imported
    sys.path.insert(0, str(Path(__file__).parent))
    from flower_world import grid, task_identity, through, world
    from loopback_world import deployment

    __all__ = ["deployment", "grid", "task_identity", "through", "world"]
