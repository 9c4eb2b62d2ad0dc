"""Every method, with those that repeat another's kind left to `make slow`, and what they need."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protofed.adain import DECODER, ENCODER
from protofed.method import Method
from protofed.methods import METHODS, WITHOUT_FILES, create

ALWAYS = (
    "ccst", "fedavg", "fedbn", "fedmd", "fedproto", "fpl", "i2pfl", "mixstyle", "scaffold",
    "stablefdg",
)  # fmt: skip
"""One of each kind. Methods have oracles, golden values and tests of their own beside."""

REPEATS = {n: [] if n in ALWAYS else [pytest.mark.slow] for n in METHODS}
SOME = [pytest.param(n, marks=marks) for n, marks in REPEATS.items()]

NEED_FILES = [name for name in METHODS if name not in WITHOUT_FILES]
"""The methods that do not run as they are, but need the files that ``options_of`` names."""


def made(name: str) -> Method:
    """A method that runs: as it is by default, with small files if it needs some."""
    return create(name, options_of(name))


def options_of(name: str) -> dict[str, Any]:
    """What a method must be given to run."""
    return adain_options() if name in NEED_FILES else {}


@cache
def adain_options() -> dict[str, Any]:
    """A narrow encoder and decoder for AdaIN, the same in every process."""
    folder = Path(tempfile.mkdtemp(prefix="protofed-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rng = np.random.default_rng(2032)  # with most others, some channel is 0 everywhere
    files = {
        "encoder": adain_weights(rng, ENCODER, (3, 3, 6, 6, 6, 6, 6, 6, 6, 6, 5)),
        "decoder": adain_weights(rng, DECODER, (5, 6, 6, 6, 6, 6, 6, 6, 6, 3)),
    }
    for name, weights in files.items():
        save_file(weights, folder / f"{name}.safetensors")
    return {name: f"file:{folder / name}.safetensors" for name in files}


def adain_weights(
    rng: np.random.Generator, layers: tuple[str, ...], channels: tuple[int, ...]
) -> dict[str, Tensor]:
    """Random weights of the layers, by the names of the public release.

    ``channels`` are those of the image and after each convolution.
    """
    found, (inputs, *outputs) = {}, channels
    for place in (n for n, layer in enumerate(layers) if layer == "conv"):
        output = outputs.pop(0)
        side = 1 if layers[0] == "conv" and not place else 3
        spread = (2 / (inputs * side**2)) ** 0.5
        weight = rng.normal(0, spread, (output, inputs, side, side))
        bias = rng.uniform(0.0, 0.1, output)
        found[f"{place}.weight"] = torch.from_numpy(weight.astype("float32"))
        found[f"{place}.bias"] = torch.from_numpy(bias.astype("float32"))
        inputs = output
    assert not outputs
    return found
