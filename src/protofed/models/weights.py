"""Weights from a file, by the entry names that torchvision and timm give to a ResNet.

For a model of your own, they are the names of its encoder's entries. Only tensors are read: a
safetensors file, or a state dict that ``torch.load`` opens with ``weights_only``. The head is not
loaded: it is for other classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.models.network import Network
from protofed.models.resnet import IMAGENET
from protofed.user_code import is_file

_BATCHES = "num_batches_tracked"
"""An entry that old files lack, and that no result depends on."""
_HEADS = ("fc.", "head.", "heads.", "classifier.")
"""What the names of a head's entries start with, in public files."""
_SHOWN = 5


def load_weights(network: Network, model: str, path: str | Path) -> None:
    """Put the weights of a file into the network's encoder, which is of that model."""
    if model not in IMAGENET and not is_file(model):
        raise ProtofedError(
            f"weights from a file are for {', '.join(IMAGENET)} and models of your own, "
            f"not for {model}",
            "choose one of these with --model",
        )
    found = read_weights(path)
    wanted = {_public_name(model, n): t for n, t in network.encoder.state_dict().items()}
    missing = [n for n in wanted if n not in found and not n.endswith(_BATCHES)]
    unused = [n for n in found if n not in wanted and not n.startswith(_HEADS)]
    unequal = [
        f"{n} {_size(found[n])} instead of {_size(t)}"
        for n, t in wanted.items()
        if n in found and found[n].shape != t.shape
    ]
    problems = {"missing": missing, "unknown": unused, "of another size": unequal}
    if any(problems.values()):
        listed = "; ".join(f"{len(p)} {what}: {_listed(p)}" for what, p in problems.items() if p)
        raise ProtofedError(
            f"the weights in '{path}' do not fit {model}: {listed}",
            "use a file with weights of the same network, under torchvision's or timm's names",
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in found:
                tensor.copy_(found[name])


def _public_name(model: str, name: str) -> str:
    return public_name(name, IMAGENET[model].blocks) if model in IMAGENET else name


def public_name(name: str, blocks: tuple[int, ...]) -> str:
    """An encoder's entry as torchvision calls it: ``4.body.3.weight`` → ``layer1.0.conv2.weight``.

    ``blocks`` is the number of blocks in each stage.
    """
    layer, _, rest = name.partition(".")
    if layer in "01":
        return f"{('conv1', 'bn1')[int(layer)]}.{rest}"
    stages = [f"layer{stage}.{b}" for stage, n in enumerate(blocks, start=1) for b in range(n)]
    part, index, entry = rest.split(".")
    if part == "shortcut":
        inner = f"downsample.{index}"
    else:
        inner = f"{'bn' if int(index) % 3 else 'conv'}{int(index) // 3 + 1}"
    return f"{stages[int(layer) - 4]}.{inner}.{entry}"


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """The named tensors in a file; nothing in it is executed."""
    path = Path(path)
    found: Any
    try:
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        if is_safetensors:
            found = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ProtofedError(f"cannot read weights from '{path}': {error.strerror}") from None
    except UnpicklingError:
        raise ProtofedError(
            f"'{path}' holds more than tensors, and is therefore not opened",
            "save the state dict alone: torch.save(model.state_dict(), FILE)",
        ) from None
    except Exception as error:
        raise ProtofedError(f"cannot read weights from '{path}': {error}") from None
    for key in ("state_dict", "model"):  # a checkpoint of a training script
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ProtofedError(f"'{path}' is not a state dict", "it must map names to tensors")
    return {re.sub(r"^module\.", "", str(name)): t for name, t in found.items()}


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
