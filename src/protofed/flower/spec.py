"""What a run is, as text: its configuration and the outline of its task, without images.

The text travels with the run (in Flower's run configuration) to the server and to every site. A
site builds the same ``Config`` from it, and its hash must be the one the server names: another
version of protofed that would compute something else is found out before it trains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from protofed.config import Config, make_config
from protofed.data.augment import AUGMENTS
from protofed.data.real import FOLDER
from protofed.data.task import Augment, Domain, Images, Task
from protofed.errors import ProtofedError
from protofed.methods import METHODS, reference

_OF_TASK = ("name", "classes", "leftover", "repair", "digest", "test_split")


def pack(config: Config, task: Task) -> str:
    """Configuration and outline of a task as text."""
    name = reference(config.method)
    if name not in METHODS:
        raise ProtofedError(
            f"method '{config.method.name}' comes from a file, which sites do not have",
            "only methods of the installed package can be deployed",
        )
    if config.method.public_images is not None:
        raise ProtofedError(
            f"method '{name}' needs public images, which the sites of a deployment do not have",
            "only methods that work on the sites' own images can be deployed",
        )
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
        "method": {"name": name, "options": config.method.options()},
        "settings": settings,
        "task": about,
    }
    return json.dumps(parts, sort_keys=True)


def unpack(text: str) -> tuple[Config, Task]:
    """The configuration, and the task without its images."""
    try:
        parts = json.loads(text)
        about, method = parts["task"], parts["method"]
        lists: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in about["augment"].items()
        }
        settings = {k: v for k, v in parts["settings"].items() if v is not None}
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
    return config, task


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
