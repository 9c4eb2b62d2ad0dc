"""Clients with different models: who has which.

A federation's models are named as one name for all, as names that alternate over the clients
(``cnn3,cnn2``: even-numbered clients the first), or as a table client → model. What the models of
a federation must have in common is the size of their features, and the entries that travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protofed.errors import ProtofedError, unknown
from protofed.models import MODELS
from protofed.models.own import full_name, short_name
from protofed.user_code import is_file

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
        if not isinstance(name, str) or not (is_file(name) or name in MODELS):
            raise unknown(what, name, (*MODELS, "path/to/file.py:factory"))
    if not names:
        raise ProtofedError("the table of models is empty", 'write [model] and a-0 = "cnn3" in it')
    names = [full_name(name) if is_file(name) else name for name in names]
    if isinstance(value, Mapping):
        return dict(zip(value, names, strict=True))
    return ",".join(names) if len(set(names)) > 1 else str(names[0])


def without_folders(models: Models) -> Models:
    """The models as a run's hash has them: a file's content is a fact, its folder is not."""
    if isinstance(models, Mapping):
        return {client: short_name(name) for client, name in models.items()}
    return ",".join(map(short_name, models.split(",")))


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
