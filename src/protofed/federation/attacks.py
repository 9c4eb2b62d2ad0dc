"""Clients that lie, for studies of what withstands them: what they train on, and what they send.

Each lie stays within the bounds of ``protofed.federation.bounds``: a larger one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protofed import keys
from protofed.data import Images
from protofed.errors import ProtofedError
from protofed.federation.bounds import prototypes_of
from protofed.federation.model_state import travel
from protofed.method import Method
from protofed.models import Network
from protofed.tree import Slot, Tree

STRENGTH = 5.0


def choose_attackers(names: Sequence[str], fraction: float, seed: int) -> frozenset[str]:
    """The clients that attack: that fraction of all, the same in every round."""
    count = round(fraction * len(names))
    if fraction and not count:
        raise ProtofedError(
            f"attackers = {fraction:g} of {len(names)} clients is none: nobody would attack",
            f"raise --attackers, to {min(1 / len(names), 0.99):.2g} for one client, or leave out "
            "--attack",
        )
    chosen = keys.generator(seed, "attackers").permutation(len(names))[:count]
    return frozenset(names[i] for i in chosen)


def what_it_lacks(kind: str, method: Method, network: Network) -> str:
    """What such an attacker changes, if the method's clients do not send it; else empty."""
    if kind == "prototypes":
        return "" if "prototypes" in method.slots.up else "prototypes"
    sends_model = kind == "flip" or "both" in travel(method, network).values()
    return "" if sends_model else "model"


def flipped(images: Images, classes: int) -> Images:
    """The images with wrong labels: the last class's for the first's, and so on."""
    return Images(images.x, classes - 1 - images.y)


def attacked(kind: str, message: Tree, start: Slot, key: tuple[int | str, ...]) -> Tree:
    """What an attacker sends in place of its message; ``start`` is the model it received."""
    changed = dict(message)
    if kind == "prototypes":
        for slot, entries in message.items():
            if prototypes_of(entries) is not None:  # each class poses as the one before
                changed[slot] = {**entries, "mean": STRENGTH * entries["mean"].roll(1, 0)}
        return changed
    for name, t in message.get("model", {}).items():
        if t.is_floating_point() and not name.endswith("running_var"):  # a variance has a sign
            lie = _lie(kind, t, start[name], (*key, name))
            changed["model"] = {**changed["model"], name: lie}
    return changed


def _lie(kind: str, t: Tensor, start: Tensor, key: tuple[int | str, ...]) -> Tensor:
    change = t - start
    if kind == "scale":
        return start - STRENGTH * change
    noise = keys.generator(*key, "attack").standard_normal(tuple(t.shape))
    return start + STRENGTH * change.square().mean().sqrt() * torch.as_tensor(noise).to(t)
