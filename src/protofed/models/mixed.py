"""Clients with different models: who has which, and whether a method can work with them.

A federation's models are named as one name for all, as names that alternate over the clients
(``cnn3,cnn2``: even-numbered clients the first), or as a table client → model. What the models of
a federation must have in common is the size of their features, and the entries that travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from protofed.errors import ProtofedError, unknown
from protofed.method import Entry, Method, Sizes
from protofed.methods import METHODS
from protofed.models import MODELS, Network, build, entries

Models = str | Mapping[str, str]
"""A name, names separated by commas, or client → name."""


def checked_models(value: object) -> Models:
    """The setting ``model`` in one spelling: the same models are the same run."""
    if isinstance(value, Mapping):
        names = list(value.values())
        what = "model of a client"
    else:
        names = [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
        what = "model"
    for name in names:
        if not isinstance(name, str) or name not in MODELS:
            raise unknown(what, name, MODELS)
    if not names:
        raise ProtofedError("the table of models is empty", 'write [model] and a-0 = "cnn3" in it')
    if isinstance(value, Mapping):
        return dict(value)
    return ",".join(names) if len(set(names)) > 1 else str(names[0])


def model_names(models: Models) -> tuple[str, ...]:
    """The different models, in the order in which they are named."""
    names = models.values() if isinstance(models, Mapping) else models.split(",")
    return tuple(dict.fromkeys(names))


def client_models(models: Models, clients: Sequence[str]) -> dict[str, str]:
    """The model of each client; the clients are in the federation's order."""
    if isinstance(models, Mapping):
        for name in models:
            if name not in clients:
                raise unknown("client in the table of models:", name, clients)
        missing = [name for name in clients if name not in models]
        if missing:
            raise ProtofedError(
                f"the table of models names no model for {', '.join(missing)}",
                f'add {missing[0]} = "{next(iter(models.values()))}" to [model]',
            )
        return {name: models[name] for name in clients}
    names = models.split(",")
    return {client: names[i % len(names)] for i, client in enumerate(clients)}


def require_fit(
    method: Method,
    models: Models,
    classes: int,
    image_size: int,
    width: int | None = None,
    norm: str | None = None,
) -> None:
    """An error if clients with these models cannot be one federation of the method."""
    if len(names := model_names(models)) > 1:
        with torch.random.fork_rng(devices=[]):  # networks to look at: no draw of theirs counts
            _require_fit(method, names, classes, image_size, width, norm)


def _require_fit(
    method: Method,
    names: Sequence[str],
    classes: int,
    image_size: int,
    width: int | None,
    norm: str | None,
) -> None:
    backbones = {n: build(n, classes, image_size, width, norm) for n in names}
    sizes = {n: b.features for n, b in backbones.items()}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{n} has {d}" for n, d in sizes.items())
        raise ProtofedError(
            f"the clients' models must have features of one size: {each}",
            "choose other models, or a --width that makes them equal (a ResNet's are 8 × width)",
        )
    common = Sizes(classes, next(iter(sizes.values())), image_size)
    if not _fits(method, backbones, common):
        able = [
            n for n, cls in METHODS.items() if _fits(cls().for_mixed_models(), backbones, common)
        ]
        able = [f"{n} as it is by default" if n == method.name else n for n in able]
        raise ProtofedError(
            f"{method.name} sends whole models, or parts that differ between "
            f"{' and '.join(names)}: it needs the same model at all clients",
            f"methods that can: {', '.join(able)}; or give one --model",
        )


def _fits(method: Method, backbones: Mapping[str, Network], sizes: Sizes) -> bool:
    """Whether what travels of the models is the same in all of them."""
    traveling = [_traveling(method, method.network(b, sizes)) for b in backbones.values()]
    return all(entries == traveling[0] for entries in traveling)


def _traveling(method: Method, network: Network) -> dict[str, torch.Size]:
    state = network.state_dict()
    return {
        name: state[name].shape
        for name, kind in entries(network).items()
        if method.shared(Entry(name, kind)) != "no"
    }
