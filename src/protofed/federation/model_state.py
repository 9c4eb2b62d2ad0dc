"""The state of a network: its entries, and copying a model into it."""

from __future__ import annotations

import math
from collections.abc import Container

import torch

from protofed.errors import ProtofedError
from protofed.method import Entry, Method, Shared
from protofed.models import Network, entries
from protofed.models.network import frozen
from protofed.tree import Slot


def model_entries(network: Network) -> list[Entry]:
    """The entries of the network's state, with their kinds."""
    return [Entry(name, kind) for name, kind in entries(network).items()]


def travel(method: Method, network: Network) -> dict[str, Shared]:
    """Which way each entry of the network's state travels; what is frozen does not go up."""
    fixed = frozen(network)
    ways = {e.name: method.shared(e) for e in model_entries(network)}
    return {n: "down" if way == "both" and n in fixed else way for n, way in ways.items()}


def private_as_nan(method: Method, network: Network, given: Container[str] = ()) -> Slot:
    """The entries that clients keep to themselves, without those that are ``given``, as NaN.

    A result that needs them is then NaN too.
    """
    state = network.state_dict()
    return {
        name: torch.full_like(state[name], math.nan)
        for name, way in travel(method, network).items()
        if way == "no" and name not in given and state[name].is_floating_point()
    }


@torch.no_grad()
def load_model(network: Network, model: Slot) -> None:
    """Copy a model into the network's own memory; its entries must be exactly the network's."""
    state = network.state_dict()
    if state.keys() != model.keys():
        differing = sorted(state.keys() ^ model.keys())[:3]
        raise ProtofedError(f"the model does not fit the network: {', '.join(differing)} ...")
    for name, t in state.items():
        if model[name].shape != t.shape:
            raise ProtofedError(
                f"the model does not fit the network: {name} is {tuple(model[name].shape)}, "
                f"not {tuple(t.shape)}"
            )
    torch._foreach_copy_(list(state.values()), [model[name] for name in state])
