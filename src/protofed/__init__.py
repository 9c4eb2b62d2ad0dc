"""Federated learning when the clients' domains differ."""

from __future__ import annotations

from protofed import analysis, methods
from protofed.config import Config, make_config
from protofed.errors import Diverged, ProtofedError
from protofed.runs.run import Federation, Observer, Result, load_run, run
from protofed.version import __version__

__all__ = [
    "Config",
    "Diverged",
    "Federation",
    "Observer",
    "ProtofedError",
    "Result",
    "__version__",
    "analysis",
    "load_run",
    "make_config",
    "methods",
    "run",
]
