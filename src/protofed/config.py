"""The configuration of a run: complete, checked, written as TOML and read back from it.

What is not given comes from the task and its protocol; what is given always wins. A run's
``config.toml`` has everything filled in, so that it can be repeated from that file alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from protofed.data import Task, distribution, distributions, load_task
from protofed.data.real import FOLDER
from protofed.engines import ENGINES, choose
from protofed.errors import ProtofedError, unknown
from protofed.federation.public_images import of_task, public_digest
from protofed.method import Method
from protofed.methods import create, fingerprint, reference
from protofed.models import NORMS
from protofed.models.mixed import Models, checked_models, model_names, require_fit
from protofed.protocols import Protocol, protocol

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "tf32": torch.float32,
    "bf16": torch.float32,
}
"""The precision of weights; tf32 and bf16 are what convolutions and matrix products compute in."""


UNHASHED = ("checkpoint_every", "engine", "workers", "data", "skip_bad", "keep_rounds")
"""Settings that cannot change a number (to the last bit on a CPU, to rounding on a GPU).

Where images lie cannot, as ``digest`` says what they are.
"""

EACH = "each"
"""``leave_out = "each"`` of a comparison: a run for each domain, which it does not train on."""


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
    model: Models
    width: int | None
    norm: str | None
    clients: Mapping[str, int]
    samples: Mapping[str, float]
    leave_out: str | None
    dirichlet: float | None
    quantity: float | None
    leftover: bool
    repair: bool
    participation: float
    average: str
    precision: str
    device: str
    engine: str
    workers: int | None
    checkpoint_every: int
    keep_rounds: tuple[int | str, ...] | None
    image_size: int
    flip: bool
    augment: str
    test_split: str | None
    skip_bad: bool
    data: str | None
    digest: str | None
    public_digest: str | None
    """Of public images from other files than the task's: how many, and a hash of their pixels."""

    @property
    def hash(self) -> str:
        """Ten hexadecimal digits of all that can change a number (a method file's text too)."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in UNHASHED:
            del parts[name]
        if self.public_digest is None:  # runs without such images keep the hash they had before
            del parts["public_digest"]
        parts["task"] = short_task(self.task)
        options = {
            # as with ``data``: where the images lie cannot change a number
            name: FOLDER if isinstance(value, str) and value.startswith(FOLDER) else value
            for name, value in self.method.options().items()
        }
        parts["method"] = [self.method.name, fingerprint(self.method), options]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()

    @property
    def models(self) -> tuple[str, ...]:
        """The different models of the clients."""
        return model_names(self.model)

    @property
    def label(self) -> str:
        """A folder's name for this run."""
        return f"{short_task(self.task)}-{self.method.name}-{self.seed}-{self.hash}"

    def toml(self) -> str:
        """The configuration as TOML, from which it can be read again."""
        self.method.require_plain_hypers()
        tables = {
            "method": {"name": reference(self.method), **self.method.options()},
            "clients": self.clients,
            "samples": self.samples,
            **({"model": self.model} if isinstance(self.model, Mapping) else {}),
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
    "workers": ("a whole number of at least 1", lambda v: v is None or (_whole(v) and v >= 1)),
    "width": ("a whole number of at least 1", lambda v: v is None or (_whole(v) and v >= 1)),
    "lr": ("a number above 0", lambda v: _number(v) and v > 0),
    "momentum": ("a number in [0, 1)", lambda v: _number(v) and 0 <= v < 1),
    "weight_decay": ("a number of at least 0", lambda v: _number(v) and v >= 0),
    "participation": ("a number in (0, 1]", lambda v: _number(v) and 0 < v <= 1),
    "dirichlet": ("a number from 1e-6 to 1e6", lambda v: v is None or _concentration(v)),
    "quantity": ("a number from 1e-6 to 1e6", lambda v: v is None or _concentration(v)),
    "leftover": ("true or false", lambda v: isinstance(v, bool)),
    "repair": ("true or false", lambda v: isinstance(v, bool)),
    "public_digest": ("as a run has written it", lambda v: v is None or _of_images(v)),
}
_CHOICES = {
    "average": ("samples", "uniform"),
    "precision": ("auto", *DTYPES),
    "device": ("auto", "cpu", "cuda"),
    "norm": NORMS,
    "engine": ENGINES,
}
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "augment": "crop",
    "skip_bad": False,
    "data": None,
    "leave_out": None,
    "dirichlet": None,
    "quantity": None,
    "participation": 1.0,
    "average": "samples",
    "precision": "auto",
    "device": "auto",
    "engine": "auto",
    "workers": None,
    "checkpoint_every": 5,
    "keep_rounds": None,
}


def make_config(
    task: str | Task = "glyphs",
    method: str | Method = "fedavg",
    options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Config:
    """A complete configuration from what is given; ``None`` values count as not given."""
    if isinstance(method, type):
        raise ProtofedError(
            f"method is the class {method.__name__}, not a method",
            f"write {method.__name__}(), with hyper-parameters if you like",
        )
    if isinstance(method, Method):
        if options:
            raise ProtofedError("hyper-parameters belong into the method object here")
    else:
        method = create(method, options, task if isinstance(task, str) else task.name)
    given = {k: v for k, v in given.items() if v is not None}
    names = [f.name for f in fields(Config)]
    for name in given:
        if name not in names:
            raise unknown("setting", name, names)
    if isinstance(task, str):
        task = load_task(task, **{k: given[k] for k in TASK_OPTIONS if k in given})
    base = protocol(given.get("protocol"), task.name)
    values: dict[str, Any] = {
        **DEFAULTS,
        "leftover": task.leftover,
        "repair": task.repair and given.get("dirichlet") is None,  # label skew: classes may miss
        **{k: v for k, v in asdict(base).items() if k in names},
        "protocol": base.name,
        **given,
        **_of_task(task, given),
        "task": task.name,
        "method": method,
        "samples": _per_domain("samples", given.get("samples", task.samples), task),
        "public_digest": _public_digest(method, task, given),
    }
    for name, (words, holds) in _LIMITS.items():
        if not holds(values[name]):
            raise ProtofedError(f"{name} must be {words}, got {values[name]!r}")
    for name in ("lr", "momentum", "weight_decay", "participation"):
        values[name] = float(values[name])  # 1 and 1.0 are the same run
    for name, choices in _CHOICES.items():
        if values[name] is not None and values[name] not in choices:
            raise unknown(f"value for {name}", values[name], choices)
    values["keep_rounds"] = _keep_rounds(values["keep_rounds"])
    values["model"] = checked_models(values["model"])
    if len(model_names(values["model"])) > 1:
        values["method"] = method.for_mixed_models()
    if task.classes:  # not the outline of a task, where a finished run is only read
        sizes = (len(task.classes), task.image_size, values["width"], values["norm"])
        require_fit(values["method"], values["model"], *sizes)
    values["clients"] = _clients(values, base, task)
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    elif values["device"] == "cuda" and not torch.cuda.is_available():
        raise ProtofedError("device cuda is asked for, but torch sees no GPU", "use --device cpu")
    if values["precision"] == "auto":
        fast = values["device"] == "cuda" and torch.cuda.is_bf16_supported()
        values["precision"] = "bf16" if fast else "fp32"
    choose(values["engine"], values["device"])  # an engine that cannot run is said now
    return Config(**values)


TASK_OPTIONS = ("data", "image_size", "flip", "test_split", "skip_bad", "augment")
"""Settings that ``load_task`` takes."""


def config_task(config: Config) -> Task:
    """The task of a configuration."""
    if config.digest is None:  # not from files
        return load_task(config.task, flip=config.flip)
    return load_task(config.task, **{k: getattr(config, k) for k in TASK_OPTIONS})


def short_task(name: str) -> str:
    """A task's name as part of a file's name: ``folder:pictures/pets`` is folder-pets."""
    kind, colon, path = name.partition(":")
    return f"{kind}-{Path(path).resolve().name}" if colon else name


def _of_task(task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the task at hand has; an error where something else is asked for."""
    own = {
        "image_size": task.image_size,
        "flip": task.augment.flip,
        "test_split": task.test_split,
        "digest": task.digest or None,
    }
    if "digest" in given and given["digest"] != own["digest"]:
        raise ProtofedError(
            f"the images of task '{task.name}' are not those of the configuration",
            "point --data at the same files, or remove the configuration's line 'digest'",
        )
    for name, value in own.items():
        if name in given and given[name] != value:
            raise ProtofedError(f"{name} of task '{task.name}' is {value}, not {given[name]}")
    return own


def _public_digest(method: Method, task: Task, given: Mapping[str, Any]) -> Any:
    """What is given: whoever uses the images compares. Else of the images, where these can be."""
    wanted = method.public_images
    if wanted is None or of_task(wanted, task):
        return None
    if "public_digest" in given or not task.has_images:
        return given.get("public_digest")
    return public_digest(wanted, task, given.get("data"), given.get("skip_bad", False))


def merged_config(
    file: str | Path | None,
    task: str | Task | None,
    method: str | Method | None,
    options: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Config:
    """A configuration from a TOML file, if any, over which all that is given wins."""
    found = read_config(Path(file)) if file is not None else {}
    if method is not None and method != found.get("method"):
        found.pop("options", None)  # another method: the file's hyper-parameters are not its
    given = {"task": task, "method": method, **settings}
    found |= {name: value for name, value in given.items() if value is not None}
    merged = {**found.pop("options", {}), **(options or {})}
    return make_config(**{"task": "glyphs", **found}, options=merged)


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
    for name in ("task", "method", "protocol", "model"):
        table = name == "model" and isinstance(raw.get(name), Mapping)
        if name in raw and not (table or isinstance(raw[name], str)):
            raise ProtofedError(f"{name} in '{path}' must be a name, got {raw[name]!r}")
    return raw


def _clients(values: Mapping[str, Any], base: Protocol, task: Task) -> dict[str, int]:
    """Clients of each domain: given as numbers or by name, else the protocol's, else the task's.

    With a domain left out and nothing given, each other domain is one client.
    """
    left_out, clients = values["leave_out"], values.get("clients")
    if left_out == EACH and EACH not in task.domains:
        raise ProtofedError(
            "a run leaves out one domain, not each in turn",
            f"protofed compare --methods {values['method'].name} --leave-out {EACH} does them all",
        )
    if left_out is not None and (not isinstance(left_out, str) or left_out not in task.domains):
        raise unknown(f"domain of {task.name}", left_out, task.domains)
    if clients is None:
        named = "one" if left_out is not None else base.distribution
        # a protocol of one paper may name a distribution that only its own tasks have
        clients = named if named in distributions(task) else task.clients
    numbers = isinstance(clients, Mapping)
    if isinstance(clients, str):
        clients = distribution(task, clients, values["seed"])
    each: dict[str, int] = _per_domain("clients", clients, task)
    if left_out is not None:
        if numbers and each.get(left_out):
            raise ProtofedError(
                f"domain '{left_out}' is left out, but has {each[left_out]} clients",
                f"give it none ({left_out}=0), or name a distribution: --clients one",
            )
        each[left_out] = 0
    return {d: each[d] for d in task.domains if d in each}


def _keep_rounds(value: Any) -> tuple[int | str, ...] | None:
    """Rounds to keep prototypes and models of: ``[1, 10, "last"]``, "all" or "none"."""
    if value is None or value == "none":
        return () if value else None
    named = [value] if isinstance(value, (int, str)) else value
    if not isinstance(named, (list, tuple)) or not all(
        r in ("last", "all") if isinstance(r, str) else _whole(r) and r >= 1 for r in named
    ):
        raise ProtofedError(
            f'keep_rounds must be rounds from 1 on, "last", "all" or "none", got {value!r}'
        )
    return tuple(named)


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


def _concentration(value: Any) -> bool:
    # beyond these a Dirichlet draw is one-hot or even anyway, and its arithmetic overflows
    return _number(value) and 1e-6 <= value <= 1e6


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _of_images(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[1-9]\d*-[0-9a-f]{64}", value) is not None


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's, except that TOML knows no bare 1e400
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("_", "").isalnum()
    return name if plain else json.dumps(name, ensure_ascii=False)
