"""Settings for your own images, chosen by what the images are like: each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protofed.models import LARGE_IMAGE as LARGE
from protofed.models import LARGE_MODEL

SMALL, LARGEST = 32, 224
"""By default, images are at least SMALL and at most LARGEST; from LARGE on, ImageNet networks."""
STEP = 8
"""Image sizes are multiples of this: networks halve them three times."""
STEPS_A_ROUND = 100
"""As in FPL's Digits: 600 images, batches of 64, 10 epochs."""


class Choice(NamedTuple):
    """A value, and the reason for it in words."""

    value: Any
    reason: str


class Survey(NamedTuple):
    """What the images of a folder are like."""

    side: int
    """The median of their shorter sides."""
    sides: Mapping[str, int]
    """The same by domain."""
    pixel_range: str | None = None
    """The lowest and highest value, ``LOW:HIGH``, if they have more than 8 bits."""


def image_size(survey: Survey) -> Choice:
    """As large as most images, so that nothing is lost; no larger than fits in an afternoon."""
    side = survey.side
    size = min(LARGEST, max(SMALL, -(-side // STEP) * STEP))
    differ = ", ".join(f"{domain} {s}" for domain, s in survey.sides.items())
    whose = f" ({differ})" if len({*survey.sides.values()}) > 1 else ""
    reason = f"the images' median shorter side is {side} pixels{whose}"
    if side > size:
        reason += f"; they are shrunk to {size}, as networks for ImageNet expect"
        reason += ", --image-size N keeps more"
    elif size == SMALL > side:
        reason += "; they are enlarged to the size of the papers' images"
    elif size > side:
        reason += f", rounded up to a multiple of {STEP}"
    return Choice(size, reason)


def model(size: int) -> Choice:
    if size >= LARGE:
        return Choice(LARGE_MODEL, f"for images of {LARGE} pixels and more")
    return Choice("resnet10", f"the papers' network, for images below {LARGE} pixels")


def augment(size: int) -> Choice:
    if size >= LARGE:
        return Choice("large", f"random parts and colors, for {LARGE} pixels and more")
    return Choice("crop", f"shifts by up to 4 pixels, as in the papers, below {LARGE} pixels")


def batch(size: int, samples: Sequence[int]) -> Choice:
    """``samples`` are the numbers of the clients' training images, if they are known."""
    value = 32 if size >= LARGE else 64
    reason = f"for images of {size} pixels"
    fewest = min(samples, default=0)
    if fewest and fewest < 4 * value:
        while value > 8 and fewest < 4 * value:
            value //= 2
        reason = f"the smallest client has {fewest} training images: a few steps in each epoch"
    return Choice(value, reason)


def epochs(batch: int, samples: Sequence[int]) -> Choice:
    if not samples:
        return Choice(10, "as in the papers")
    mean = sum(samples) / len(samples)
    value = min(10, max(1, round(STEPS_A_ROUND * batch / mean)))
    steps = round(value * max(1, mean / batch))
    return Choice(value, f"about {steps} steps of a client between two averages")
