"""The configuration of a run: complete, checked, written as TOML and read back from it.

What is not given comes from the task and its protocol; what is given always wins. A run's
``config.toml`` has everything filled in, so that it can be repeated from that file alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from protofed.data import Task, load_task
from protofed.errors import ProtofedError, unknown
from protofed.methods import Method, create, fingerprint, reference
from protofed.protocols import TASK_PROTOCOL, protocol

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Config:
    """One run: a method, a task, a seed, and all that can change its numbers."""

    task: str
    method: Method
    protocol: str
    seed: int
    rounds: int
    epochs: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    model: str
    width: int | None
    norm: str | None
    clients: Mapping[str, int]
    samples: Mapping[str, float]
    participation: float
    average: str
    precision: str
    device: str
    checkpoint_every: int

    @property
    def hash(self) -> str:
        """Ten hexadecimal digits of all that can change a number (a method file's text too)."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        del parts["checkpoint_every"]
        parts["method"] = [self.method.name, fingerprint(self.method), self.method.options()]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()

    @property
    def label(self) -> str:
        """A folder's name for this run."""
        return f"{self.task}-{self.method.name}-{self.seed}-{self.hash}"

    def toml(self) -> str:
        """The configuration as TOML."""
        tables = {
            "method": {"name": reference(self.method), **self.method.options()},
            "clients": self.clients,
            "samples": self.samples,
        }
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tables}
        lines = [f"{k} = {_toml(v)}" for k, v in flat.items() if v is not None]
        for table, values in tables.items():
            lines += ["", f"[{table}]"] + [f"{_key(k)} = {_toml(v)}" for k, v in values.items()]
        return "\n".join(lines) + "\n"


_LIMITS: dict[str, tuple[str, Any]] = {
    "seed": ("a whole number of at least 0", lambda v: _whole(v) and v >= 0),
    "rounds": ("a whole number of at least 1", lambda v: _whole(v) and v >= 1),
    "epochs": ("a whole number of at least 1", lambda v: _whole(v) and v >= 1),
    "batch": ("a whole number of at least 1", lambda v: _whole(v) and v >= 1),
    "checkpoint_every": ("a whole number of at least 1", lambda v: _whole(v) and v >= 1),
    "width": ("a whole number of at least 1", lambda v: v is None or (_whole(v) and v >= 1)),
    "lr": ("a number above 0", lambda v: _number(v) and v > 0),
    "momentum": ("a number in [0, 1)", lambda v: _number(v) and 0 <= v < 1),
    "weight_decay": ("a number of at least 0", lambda v: _number(v) and v >= 0),
    "participation": ("a number in (0, 1]", lambda v: _number(v) and 0 < v <= 1),
}
_CHOICES = {
    "average": ("samples", "uniform"),
    "precision": tuple(DTYPES),
    "device": ("auto", "cpu", "cuda"),
    "norm": ("batch", "group", "none"),
}
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "participation": 1.0,
    "average": "samples",
    "precision": "fp32",
    "device": "auto",
    "checkpoint_every": 5,
}


def make_config(
    task: str | Task = "glyphs",
    method: str | Method = "fedavg",
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Config:
    """A complete configuration from what is given; ``None`` values count as not given."""
    if isinstance(method, Method):
        if options:
            raise ProtofedError("hyper-parameters belong into the method object here")
    else:
        method = create(method, options)
    task = load_task(task) if isinstance(task, str) else task
    given = {k: v for k, v in given.items() if v is not None}
    names = [f.name for f in fields(Config)]
    for name in given:
        if name not in names:
            raise unknown("setting", name, names)
    base = protocol(given.get("protocol") or TASK_PROTOCOL.get(task.name, "glyphs"))
    values: dict[str, Any] = {
        **DEFAULTS,
        **{k: v for k, v in asdict(base).items() if k in names},
        "protocol": base.name,
        **given,
        "task": task.name,
        "method": method,
        "clients": _per_domain("clients", given.get("clients", task.clients), task),
        "samples": _per_domain("samples", given.get("samples", task.samples), task),
    }
    for name, (words, holds) in _LIMITS.items():
        if not holds(values[name]):
            raise ProtofedError(f"{name} must be {words}, got {values[name]!r}")
    for name, choices in _CHOICES.items():
        if values[name] is not None and values[name] not in choices:
            raise unknown(f"value for {name}", values[name], choices)
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    elif values["device"] == "cuda" and not torch.cuda.is_available():
        raise ProtofedError("device cuda is asked for, but torch sees no GPU", "use --device cpu")
    return Config(**values)


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML file as ``make_config`` takes them."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ProtofedError(f"cannot read config '{path}': {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProtofedError(f"config '{path}' is not valid TOML: {error}") from None
    valid = [f.name for f in fields(Config)]
    for name in raw:
        if name not in valid:
            raise unknown(f"key in '{path}':", name, valid)
    method = raw.pop("method", "fedavg")
    if isinstance(method, Mapping):
        options = dict(method)
        if "name" not in options:
            raise ProtofedError(f"[method] in '{path}' has no name", 'add name = "fpl"')
        raw |= {"method": options.pop("name"), "options": options}
    else:
        raw["method"] = method
    return raw


def _per_domain(name: str, value: Any, task: Task) -> dict[str, Any]:
    """A number for each domain, in the task's order; one number alone is meant for all."""
    each = dict(value) if isinstance(value, Mapping) else dict.fromkeys(task.domains, value)
    for domain, number in each.items():
        if domain not in task.domains:
            raise unknown(f"domain of {task.name}", domain, task.domains)
        whole = _whole(number) and number >= (0 if name == "clients" else 1)
        fraction = name == "samples" and isinstance(number, float) and 0 < number <= 1
        if not (whole or fraction):
            words = "a whole number" if name == "clients" else "a count or a fraction like 0.2"
            raise ProtofedError(f"{name} of {domain} must be {words}, got {number!r}")
    return {d: each[d] for d in task.domains if d in each}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's, except that TOML knows no bare 1e400
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").isalnum() else json.dumps(name)
