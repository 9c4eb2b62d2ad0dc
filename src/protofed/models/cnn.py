"""Plain convolutional networks: a few 3×3 convolutions, each with a max-pool, and one FC layer."""

from __future__ import annotations

from torch import nn

from protofed.errors import ProtofedError
from protofed.models.network import Network, Stage, conv, normalize

FEATURES = 512


def cnn(
    convolutions: int, classes: int, image_size: int, width: int | None, norm: str | None
) -> Network:
    """A CNN with ``width``, 2 × ``width``, ... channels and 512 features."""
    width, norm = width or 32, norm or "none"
    shrink = 2**convolutions
    if image_size % shrink:
        raise ProtofedError(
            f"cnn{convolutions} halves the image {convolutions} times and cannot take images of "
            f"{image_size}×{image_size}",
            f"use an image size that is a multiple of {shrink}",
        )
    layers: list[nn.Module] = []
    stages = {}
    inputs = 3
    for layer in range(convolutions):
        outputs = width * 2**layer
        layers += [conv(inputs, outputs, 3, 1, norm), normalize(norm, outputs)]
        # Pool first: ReLU keeps the order, and then has a quarter of the work.
        layers += [nn.MaxPool2d(2), nn.ReLU()]
        stages[f"stage{layer + 1}"] = Stage(str(len(layers) - 1), outputs)
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(inputs * (image_size // shrink) ** 2, FEATURES), nn.ReLU()]
    return Network(nn.Sequential(*layers), FEATURES, classes, stages)
