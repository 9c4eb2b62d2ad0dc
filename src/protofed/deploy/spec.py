"""What a run is, as text: its configuration and the outline of its task, without images.

Of public images there is how many a round has, and the digest that stands in the configuration;
of a folder that every machine has its own copy of, neither a path nor a name.

The text travels with the run (in Flower's run configuration) to the server and to every site. A
site builds the same ``Config`` from it, and its hash must be the one the server names: another
version of protofed that would compute something else is found out before it trains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import torch

from protofed.config import Config, make_config
from protofed.data.augment import AUGMENTS
from protofed.data.info import FOLDER
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.federation.public_images import PLACE, count, make_public, of_task
from protofed.federation.simulation import make_shares
from protofed.methods import METHODS, reference

_OF_TASK = ("name", "classes", "leftover", "repair", "digest", "test_split")


class Outline(NamedTuple):
    """A run as server and sites know it before they look at any image."""

    config: Config
    task: Task
    """Without its images."""
    public: dict[str, int]
    """Public images a round has, by where they are from; empty where a method needs none."""


def pack(config: Config, task: Task) -> str:
    """Configuration and outline of a task as text."""
    name = reference(config.method)
    if name not in METHODS:
        raise ProtofedError(
            f"method '{config.method.name}' comes from a file, which sites do not have",
            "only methods of the installed package can be deployed",
        )
    wanted, method = config.method.public_images, config.method
    if wanted is not None and wanted.source.startswith(FOLDER):
        method = method.with_public(FOLDER)  # where it lies here is nobody's business
    settings = {f.name: getattr(config, f.name) for f in fields(Config)}
    for field in ("task", "method", "data"):
        del settings[field]
    about = {
        **{k: getattr(task, k) for k in _OF_TASK},
        "image_size": task.image_size,
        "domains": list(task.domains),
        "augment": asdict(task.augment),
    }
    parts = {
        "hash": config.hash,
        "method": {"name": name, "options": method.options()},
        "public": _public(config, task),
        "settings": settings,
        "task": about,
    }
    return json.dumps(parts, sort_keys=True)


def _public(config: Config, task: Task) -> dict[str, int]:
    """Public images of a round, by where they are from."""
    wanted = config.method.public_images
    if wanted is None:
        return {}
    if wanted.source.startswith(FOLDER):
        assert config.public_digest is not None  # deploy start has read the folder
        return {PLACE: min(wanted.images, count(config.public_digest))}
    if of_task(wanted, task) and not task.has_images:
        raise ProtofedError(
            f"method '{config.method.name}' needs public images, and the sites' own are not public",
            "give every site the same folder of images without labels, and name it to each "
            "(deploy site --public PATH) and here: deploy start --public PATH",
        )
    shares = make_shares(config, task) if task.has_images else []
    made = make_public(wanted, task, shares, config.seed, "cpu", config.data, config.skip_bad)
    assert made is not None
    return made.counts


def unpack(text: str) -> Outline:
    """What ``pack`` has written."""
    try:
        parts = json.loads(text)
        about, method = parts["task"], parts["method"]
        lists: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in about["augment"].items()
        }
        settings = {k: v for k, v in parts["settings"].items() if v is not None}
        public = {str(name): int(n) for name, n in parts["public"].items()}
        task = skeleton(
            about["name"],
            about["classes"],
            about["image_size"],
            {d: settings["clients"].get(d, 0) for d in about["domains"]},
            Augment(**lists),
            **{k: about[k] for k in ("leftover", "repair", "digest", "test_split")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"the run's configuration cannot be read: {error!r}") from None
    if method["name"] not in METHODS:
        raise ProtofedError(f"this installation has no method {method['name']!r}")
    config = make_config(task, method["name"], method["options"], **settings)
    if config.hash != parts["hash"]:
        raise ProtofedError(
            f"this installation understands run {parts['hash']} as {config.hash}",
            "server and sites need the same version of protofed",
        )
    return Outline(config, task, public)


def skeleton(
    name: str,
    classes: list[str] | tuple[str, ...],
    image_size: int,
    clients: Mapping[str, int],
    augment: Augment,
    **more: Any,
) -> Task:
    """A task whose images are elsewhere."""
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
    """The task of a federation whose sites have image folders of their own."""
    if augment not in AUGMENTS:
        raise ProtofedError(f"unknown augmentation '{augment}'", f"valid: {', '.join(AUGMENTS)}")
    # stands in the configuration's hash for what the sites must agree on
    text = json.dumps([name, classes, image_size])
    digest = hashlib.sha256(text.encode()).hexdigest()
    kind = AUGMENTS[augment](True if flip is None else flip)
    return skeleton(
        FOLDER + name, classes, image_size, clients, kind, digest=digest, test_split="auto"
    )
