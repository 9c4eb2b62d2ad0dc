"""A site's policy, ``[policy]`` in ``site.toml``: what the site lets a server ask of it.

Whatever is outside is refused, and the site's log and the server's name the setting.
"""

from __future__ import annotations

import getpass
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.config import SETTINGS, Config
from protofed.deploy.audit import AuditLog, now
from protofed.deploy.spec import RunSpec, asked_settings
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError, unknown
from protofed.federation.model_state import model_entries, travel
from protofed.federation.setup import Setup
from protofed.files import make_folder, read_json, write_json
from protofed.method import Method
from protofed.methods import METHODS
from protofed.models import MODELS, NORMS, Network, build

LIMITS = {
    "max_rounds": "rounds",
    "max_epochs": "epochs",
    "max_batch": "batch",
    "min_lr": "lr",
    "max_lr": "lr",
    "max_width": "width",
    "min_class_count": "min_class_count",
    "max_proto_epsilon": "proto_epsilon",
    "max_update_epsilon": "update_epsilon",
    "max_delta": "delta",
}
"""The setting that each number of a policy is about."""
MAX_TEXTS = 100
"""How many different texts with the hash of one run a site notes for approval."""


class NotApproved(Refused):
    """A run that nobody has approved yet: the server may ask again."""


@dataclass(frozen=True)
class Policy:
    """What a site allows; None: anything."""

    methods: tuple[str, ...] | None = None
    max_rounds: int | None = None
    max_epochs: int | None = None
    """In a round, over all phases of the method."""
    max_batch: int | None = None
    min_lr: float | None = None
    max_lr: float | None = None
    models: tuple[str, ...] | None = None
    max_width: int | None = None
    """That of the first layer, whether it is set by the run or by the model's default."""
    norms: tuple[str, ...] | None = None
    min_class_count: int = 1
    """A run that asks for less is not refused: the site's number is applied."""
    max_proto_epsilon: float | None = None
    """A run that sends anything besides the model without such a budget is refused, too."""
    max_update_epsilon: float | None = None
    """The same for a run that sends a model."""
    max_delta: float | None = None
    private_state: bool = True
    """Whether a method may keep something at the site between rounds."""
    approval: bool = False
    """Whether a person has to approve each run (``deploy approve``)."""

    def check(self, config: Config) -> None:
        """Refuse a run whose method, models or rounds are not allowed, before anything is built."""
        _require_known("method", config.method.name, self.methods)
        for model in config.models:
            _require_known("model", model, self.models)
            if self.max_width is not None:
                with torch.device("meta"):  # allocates nothing
                    network = build(model, 1, config.image_size, config.width, config.norm)
                _require("width", len(next(network.parameters())), None, self.max_width)
        _require("rounds", config.rounds, None, self.max_rounds)

    def check_round(self, setup: Setup, network: Network, round: int) -> None:
        """Refuse a round that would train in ways, or keep something, that the policy forbids."""
        method, training = setup.method, setup.training
        kinds = {"batch": _BatchNorm, "group": nn.GroupNorm}
        modules = list(network.modules())
        found = [name for name, kind in kinds.items() if any(isinstance(m, kind) for m in modules)]
        for norm in found or ["none"]:
            _require_known("norm", norm, self.norms)
        phases = [training.for_phase(phase) for phase in method.phases(round, training.epochs)]
        _require("epochs", sum(phase.epochs for phase in phases), None, self.max_epochs)
        for phase in phases:
            _require("batch", phase.batch, None, self.max_batch)
            _require("lr", phase.lr, self.min_lr, self.max_lr)  # a schedule only lowers it
        if method.slots.client or any(method.shared(e) == "no" for e in model_entries(network)):
            self.check_private_state(method)
        self._check_privacy(setup, network)

    def _check_privacy(self, setup: Setup, network: Network) -> None:
        privacy, sends_more = setup.privacy, bool(setup.method.slots.up)
        sends_model = "both" in travel(setup.method, network).values()
        for name, budget, most, sent in (
            ("proto_epsilon", privacy.prototypes, self.max_proto_epsilon, sends_more),
            ("update_epsilon", privacy.model, self.max_update_epsilon, sends_model),
        ):
            if budget is not None:
                _require(name, budget.epsilon, None, most)
                _require("delta", budget.delta, None, self.max_delta)
            elif sent and most is not None:
                raise Refused(f"{name} is not set: the site's policy allows at most {most:g}")

    def check_private_state(self, method: Method) -> None:
        if not self.private_state:
            raise Refused(
                f"method = '{method.name}' keeps a private state at the site, and the site's "
                "policy allows none (private_state)"
            )


def read_policy(path: Path, raw: Any, methods: Mapping[str, Any]) -> Policy:
    """The policy in a site's settings; ``methods`` are those it has installed itself."""
    if not isinstance(raw, dict):
        raise ProtofedError(f"policy in '{path}' must be a table, got {raw!r:.100}", "[policy]")
    known = {
        "methods": [*METHODS, *methods],
        "models": list(MODELS),
        "norms": list(NORMS),
    }
    given: dict[str, Any] = {}
    for key, value in raw.items():
        where = f"{key} of [policy] in '{path}'"
        if key in LIMITS:
            value = SETTINGS[LIMITS[key]].check(where, value)
        elif key in known:
            if not isinstance(value, list) or not value:
                raise ProtofedError(f"{where} must be a list of names, got {value!r:.100}")
            for name in value:
                if name not in known[key]:
                    raise unknown(f"name in {where}:", name, known[key])
            value = tuple(value)
        elif key not in ("private_state", "approval"):
            raise unknown(f"key of [policy] in '{path}':", key, [f.name for f in fields(Policy)])
        elif not isinstance(value, bool):
            raise ProtofedError(f"{where} must be true or false, got {value!r:.100}")
        given[key] = value
    return Policy(**given)


def _require(name: str, value: float, least: float | None, most: float | None) -> None:
    words = f"at least {least:g}" if least is not None and value < least else ""
    words = f"at most {most:g}" if most is not None and value > most else words
    if words:
        raise Refused(f"{name} = {value:g}: the site's policy allows {words}")


def _require_known(name: str, value: str, allowed: tuple[str, ...] | None) -> None:
    if allowed is not None and value not in allowed:
        raise Refused(f"{name} = '{value}': the site's policy allows {', '.join(allowed)}")


# ---- approval -----------------------------------------------------------------------------------


class Approvals:
    """The runs that a site was asked for, and which of them a person has approved.

    A run is known by all of the text that describes it: ten digits of a hash can be forged. Each
    text has a name of its own, which stays with it: ``a1b2c3d4e5``, and ``a1b2c3d4e5-2`` for the
    next one with that hash. What was listed under a name is what is approved under it.
    """

    def __init__(self, folder: Path) -> None:
        self.site, self.folder = folder, folder / "approvals"

    def require(self, run: RunSpec, spec: str) -> None:
        """Refuse a run that is not approved, and note that somebody has to decide."""
        digest = hashlib.sha256(spec.encode()).hexdigest()
        names = [run.hash, *(f"{run.hash}-{n}" for n in range(2, MAX_TEXTS + 1))]
        make_folder(self.folder, private=True)
        with FileLock(self.folder / "lock", mode=0o600):
            paths = {name: self.folder / f"{name}.json" for name in names}
            known = {name: read_json(path) for name, path in paths.items() if path.is_file()}
            same = [name for name, found in known.items() if found.get("spec") == digest]
            name = next((n for n in names if n in same or not (same or n in known)), None)
            if name is None:
                raise Refused(f"run {run.hash} was asked for with {MAX_TEXTS} other settings")
            if name not in known:
                about = {"name": run.name, "spec": digest, "settings": asked_settings(run)}
                known[name] = {"run": name, "asked": now(), **about, "approved": ""}
                write_json(paths[name], known[name])
        found = known[name]
        if not found.get("approved"):
            raise NotApproved(
                f"run {name} waits for approval at the site (approval)",
                f"at the site: protofed deploy approve {name}",
            )

    def list(self) -> list[dict[str, Any]]:
        """The runs that were asked for, oldest first."""
        return sorted(map(read_json, self.folder.glob("*.json")), key=lambda run: run["asked"])

    def approve(self, run: str) -> None:
        known = {found["run"]: found for found in self.list()}
        if run not in known:
            raise unknown("run that this site was asked for:", run, known)
        user, about = getpass.getuser(), known[run]
        AuditLog(self.site).append("approved", run=run, spec=about["spec"], by=user)
        write_json(self.folder / f"{run}.json", about | {"approved": f"{now()} by {user}"})
