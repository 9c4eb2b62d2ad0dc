"""Whether clients with different models can form one federation of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from protofed import keys
from protofed.errors import ProtofedError
from protofed.method import Entry, Method, Sizes, restyled_stages
from protofed.methods import METHODS
from protofed.models import Network, build, entries


def require_fit(
    method: Method,
    names: Sequence[str],
    classes: int,
    image_size: int,
    width: int | None,
    norm: str | None,
) -> None:
    """Raise an error if clients with these models cannot form one federation of the method."""
    if len(names) < 2:
        return
    with keys.torch_draws("to look at"):  # none of these draws counts
        backbones = {n: build(n, classes, image_size, width, norm) for n in names}
        sizes = {n: b.features for n, b in backbones.items()}
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{n} has {d}" for n, d in sizes.items())
            raise ProtofedError(
                f"the clients' models must have features of the same size: {each}",
                "choose other models, or a --width that makes them equal (a ResNet has 8 × width)",
            )
        if _fits(method, backbones, classes, image_size):
            _require_same_stages(method, backbones)
            return
        able = [
            n
            for n, cls in METHODS.items()
            if _fits(cls().for_mixed_models(), backbones, classes, image_size)
        ]
        able = [f"{n} as it is by default" if n == method.name else n for n in able]
    raise ProtofedError(
        f"{method.name} sends whole models, or parts that differ between {' and '.join(names)}: "
        "it needs the same model at all clients",
        f"methods that can: {', '.join(able)}; or give one --model",
    )


def _fits(method: Method, backbones: Mapping[str, Network], classes: int, image_size: int) -> bool:
    """Whether what travels of the models is the same in all of them."""
    traveling = [
        _traveling(method, method.network(b, Sizes.of(b, classes, image_size)))
        for b in backbones.values()
    ]
    return all(entries == traveling[0] for entries in traveling)


def _require_same_stages(method: Method, backbones: Mapping[str, Network]) -> None:
    """Raise an error if the method's stages, or their channels, differ between the models."""
    found = {
        name: {stage: b.stages[stage].channels for stage in restyled_stages(method, b)}
        for name, b in backbones.items()
    }
    if any(stages != found[name] for name in found for stages in found.values()):
        each = "; ".join(
            f"{name} has {', '.join(f'{stage} ({c} channels)' for stage, c in stages.items())}"
            for name, stages in found.items()
        )
        raise ProtofedError(
            f"{method.name} works between the same stages of all clients' models: {each}",
            "choose stages that all of them have, or give one --model",
        )


def _traveling(method: Method, network: Network) -> dict[str, torch.Size]:
    state = network.state_dict()
    return {
        name: state[name].shape
        for name, kind in entries(network).items()
        if method.shared(Entry(name, kind)) != "no"
    }
