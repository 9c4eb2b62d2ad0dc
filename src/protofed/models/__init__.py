"""The models: an encoder with a non-negative feature, and a linear head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from protofed.errors import ProtofedError, unknown
from protofed.models.cnn import cnn
from protofed.models.network import NORMS, Network, Output, entries
from protofed.models.own import own_model
from protofed.models.resnet import IMAGENET, resnet
from protofed.user_code import is_file

__all__ = ["LARGE_IMAGE", "LARGE_MODEL", "MODELS", "NORMS", "Network", "Output", "build", "entries"]

SMALLEST_IMAGE = 8
LARGE_IMAGE, LARGE_MODEL = 96, "resnet18_imagenet"
"""Images of this size or larger get this model, unless another is chosen."""

MODELS: dict[str, Callable[[int, int, int | None, str | None], Network]] = {
    "resnet10": partial(resnet, 1),
    "resnet18": partial(resnet, 2),
    "cnn3": partial(cnn, 3),
    "cnn2": partial(cnn, 2),
    **IMAGENET,
}


def build(
    name: str, classes: int, image_size: int, width: int | None = None, norm: str | None = None
) -> Network:
    """The model called ``name``, with PyTorch's own initialization, or that of the user's file.

    ``width`` (channels of the first stage) and ``norm`` ("batch", "group", "none") are the model's
    own when None: 64 and "batch" for a ResNet, 32 and "none" for a CNN.
    """
    if is_file(name):
        for what, given in (("width", width), ("norm", norm)):
            if given is not None:
                raise ProtofedError(
                    f"{what} is for the models of this package, not for {name}", f"leave out {what}"
                )
        return own_model(name, classes, image_size)
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
