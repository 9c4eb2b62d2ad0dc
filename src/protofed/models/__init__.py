"""The models: an encoder with a non-negative feature, and a linear head."""

from __future__ import annotations

from collections.abc import Callable

from protofed.errors import ProtofedError, unknown
from protofed.models.cnn import cnn
from protofed.models.network import NORMS, Network, Output, entries
from protofed.models.resnet import resnet

__all__ = ["MODELS", "NORMS", "Network", "Output", "build", "entries"]

# (classes, image size, width or None, norm or None) -> network; None is the model's own.
Builder = Callable[[int, int, int | None, str | None], Network]

SMALLEST_IMAGE = 8


def _resnet(blocks: int) -> Builder:
    def builder(classes: int, image_size: int, width: int | None, norm: str | None) -> Network:
        return resnet(blocks, classes, width or 64, norm or "batch")

    return builder


def _cnn(convolutions: int) -> Builder:
    def builder(classes: int, image_size: int, width: int | None, norm: str | None) -> Network:
        return cnn(convolutions, classes, image_size, width or 32, norm or "none")

    return builder


MODELS: dict[str, Builder] = {
    "resnet10": _resnet(1),
    "resnet18": _resnet(2),
    "cnn3": _cnn(3),
    "cnn2": _cnn(2),
}


def build(
    name: str, classes: int, image_size: int, width: int | None = None, norm: str | None = None
) -> Network:
    """The model called ``name``, with PyTorch's own initialization.

    ``width`` (channels of the first stage) and ``norm`` ("batch", "group", "none") are the model's
    own when None: 64 and "batch" for a ResNet, 32 and "none" for a CNN.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if norm is not None and norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if image_size < SMALLEST_IMAGE:
        raise ProtofedError(
            f"images of {image_size}×{image_size} are too small for {name}",
            f"use an image size of {SMALLEST_IMAGE} or more",
        )
    for what, number in (("classes", classes), ("width", width)):
        if number is not None and number < 1:
            raise ProtofedError(f"{name}: {what} is {number}", "it must be 1 or more")
    return MODELS[name](classes, image_size, width, norm)
