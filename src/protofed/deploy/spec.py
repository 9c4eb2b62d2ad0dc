"""What of a run travels: its configuration and its task without images, as text.

Of public images only their number a round and a digest travel; of a folder that every machine has a
copy of, neither a path nor a name.

The text goes with the run (in Flower's run configuration) to the server and to every site. A site
builds the same ``Config`` from it, and the hash must be the one the server names: a version of
protofed that would compute something else is detected before it trains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from protofed.config import SETTINGS, Config, make_config
from protofed.data.augment import AUGMENTS
from protofed.data.info import FOLDER
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts, discover
from protofed.federation.model_fit import require_fit
from protofed.federation.public_images import (
    FOLDER_POOL,
    digest_count,
    is_from_task,
    make_public_sampler,
)
from protofed.federation.simulation import make_shares
from protofed.methods import METHODS, reference

_TASK_FIELDS = ("name", "classes", "leftover", "repair", "digest", "test_split")


@dataclass(frozen=True)
class RunSpec:
    """A run as server and sites know it before they look at any image."""

    config: Config
    """Complete: the clients of every domain, and the precision."""
    task: Task
    """Without its images."""
    facts: Facts
    """Of the machine that started the run; the digests are of the images that sites must have."""
    public: Mapping[str, int]
    """How many public images a round has, by where they come from; empty if it needs none."""

    @property
    def hash(self) -> str:
        """Stands for the run, as in every run's folder."""
        return self.facts.run_hash(self.config)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.facts.run_name(self.config)


def make_spec(config: Config, task: Task) -> RunSpec:
    """The run of this config, on a task whose images may be elsewhere."""
    name = reference(config.method)
    if name not in METHODS:
        raise ProtofedError(
            f"method '{config.method.name}' comes from a file that the sites do not have",
            "only methods that the package includes can be deployed",
        )
    complete = config.for_task(task.info)
    sizes = (len(task.classes), task.image_size, config.width, config.norm)
    require_fit(config.method, config.models, *sizes)
    found = discover(complete, task)
    facts = replace(found, engine="flower", engine_reason="sites of a deployment")
    public = _public(complete, task, facts.public_digest)
    return RunSpec(replace(complete, precision=facts.precision), task, facts, public)


def pack(spec: RunSpec) -> str:
    """A run as text; ``unpack`` reads it."""
    config, task, method = spec.config, spec.task, spec.config.method
    wanted = method.public_images
    if wanted is not None and wanted.source.startswith(FOLDER):
        method = method.with_public(FOLDER)  # its path on this machine stays here
    about = {
        **{k: getattr(task, k) for k in _TASK_FIELDS},
        "image_size": task.image_size,
        "domains": list(task.domains),
        "augment": asdict(task.augment),
    }
    parts = {
        "hash": spec.hash,
        "method": {"name": reference(method), "options": method.options()},
        "public": dict(spec.public),
        "settings": {name: getattr(config, name) for name in SETTINGS if name != "data"},
        "facts": spec.facts.to_dict(),
        "task": about,
    }
    return json.dumps(parts, sort_keys=True)


def _public(config: Config, task: Task, digest: str | None) -> dict[str, int]:
    """How many public images a round has, by where they come from."""
    wanted = config.method.public_images
    if wanted is None:
        return {}
    if wanted.source.startswith(FOLDER):
        assert digest is not None
        return {FOLDER_POOL: min(wanted.images, digest_count(digest))}
    if is_from_task(wanted, task) and not task.has_images:
        raise ProtofedError(
            f"method '{config.method.name}' needs public images, and the sites' own are not public",
            "copy the same folder of unlabeled images to every site and to this machine, and use "
            "deploy site --public PATH there and deploy start --public PATH here",
        )
    shares = make_shares(config, task) if task.has_images else []
    made = make_public_sampler(
        wanted, task, shares, config.seed, "cpu", config.data, config.skip_bad
    )
    assert made is not None
    return made.counts


def unpack(text: str) -> RunSpec:
    """The run that ``pack`` wrote."""
    try:
        parts = json.loads(text)
        about, method = parts["task"], parts["method"]
        augment: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in about["augment"].items()
        }
        settings = {k: v for k, v in parts["settings"].items() if v is not None}
        public = {str(name): int(n) for name, n in parts["public"].items()}
        facts = Facts.from_dict(parts["facts"])
        task = skeleton(
            about["name"],
            about["classes"],
            about["image_size"],
            {d: settings["clients"].get(d, 0) for d in about["domains"]},
            Augment(**augment),
            **{k: about[k] for k in ("leftover", "repair", "digest", "test_split")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"the run's configuration cannot be read: {error!r}") from None
    if method["name"] not in METHODS:
        raise ProtofedError(f"this installation has no method {method['name']!r}")
    config = make_config(task, method["name"], method["options"], **settings)
    spec = RunSpec(config, task, facts, public)
    if spec.hash != parts["hash"]:
        raise ProtofedError(
            f"run {parts['hash']} has hash {spec.hash} on this machine",
            "server and sites need the same version of protofed",
        )
    return spec


def skeleton(
    name: str,
    classes: list[str] | tuple[str, ...],
    image_size: int,
    clients: Mapping[str, int],
    augment: Augment,
    **more: Any,
) -> Task:
    """A task without its images."""
    none = Images(
        torch.empty(0, 3, image_size, image_size, dtype=torch.uint8), torch.empty(0).long()
    )
    return Task(
        name=name,
        classes=tuple(classes),
        domains={d: Domain(none, none) for d in clients},
        augment=augment,
        clients=dict(clients),
        samples=dict.fromkeys(clients, 1.0),
        **more,
    )


def folder_skeleton(
    name: str,
    classes: tuple[str, ...],
    image_size: int,
    clients: Mapping[str, int],
    augment: str = "crop",
    flip: bool | None = None,
) -> Task:
    """The task of a federation whose sites bring their own image folders."""
    if augment not in AUGMENTS:
        raise ProtofedError(f"unknown augmentation '{augment}'", f"valid: {', '.join(AUGMENTS)}")
    # the configuration's hash covers the digest, and so what all sites must agree on
    text = json.dumps([name, classes, image_size])
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = AUGMENTS[augment](True if flip is None else flip)
    return skeleton(
        FOLDER + name, classes, image_size, clients, kind, digest=digest, test_split="auto"
    )
