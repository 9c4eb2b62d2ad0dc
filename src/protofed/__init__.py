"""Federated learning when the clients' domains differ.

A public name is imported when it is first used: ``import protofed`` takes no time, and the command
line answers ``--help`` without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from protofed.version import __version__

if TYPE_CHECKING:  # what _HOME says, for type checkers and editors
    from protofed import analysis, engines, methods
    from protofed.api import compare, run, sweep, tune
    from protofed.config import Config, make_config
    from protofed.errors import Diverged, ProtofedError
    from protofed.federation.simulation import Federation, Observer
    from protofed.inference import TrainedModel, load_model
    from protofed.runs import Result, load_run
    from protofed.studies.folder import StudyFolder

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

_HOME = {
    "Config": "config",
    "Diverged": "errors",
    "Federation": "federation.simulation",
    "Observer": "federation.simulation",
    "ProtofedError": "errors",
    "Result": "runs",
    "StudyFolder": "studies.folder",
    "TrainedModel": "inference",
    "compare": "api",
    "load_model": "inference",
    "load_run": "runs",
    "make_config": "config",
    "run": "api",
    "sweep": "api",
    "tune": "api",
}
"""The module of each public name; the other public names are modules themselves."""


if not TYPE_CHECKING:  # they would take any misspelled name for one that exists

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = found
            return found
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")  # which makes it an attribute
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
