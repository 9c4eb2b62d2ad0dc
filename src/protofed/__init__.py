"""Federated learning when the clients' domains differ."""

from __future__ import annotations

from protofed import analysis, engines, methods
from protofed.api import compare, run, sweep, tune
from protofed.config import Config, make_config
from protofed.errors import Diverged, ProtofedError
from protofed.federation.simulation import Federation, Observer
from protofed.inference import TrainedModel, load_model
from protofed.report import notebook
from protofed.runs import Result, load_run
from protofed.studies.folder import StudyFolder
from protofed.version import __version__

Result.notebook = notebook

__all__ = [
    "Config",
    "Diverged",
    "Federation",
    "Observer",
    "ProtofedError",
    "Result",
    "StudyFolder",
    "TrainedModel",
    "__version__",
    "analysis",
    "compare",
    "engines",
    "load_model",
    "load_run",
    "make_config",
    "methods",
    "run",
    "sweep",
    "tune",
]
