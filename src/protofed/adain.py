"""AdaIN: images in another style, by an encoder and a decoder whose weights come from files.

Huang, Belongie: "Arbitrary Style Transfer in Real-Time with Adaptive Instance Normalization",
ICCV 2017. The encoder Φ is VGG-19 up to relu4_1, the decoder Ψ its mirror image, and

    Ψ(σ (Φ(x) − μ(Φ(x)))/σ(Φ(x)) + μ)

is the image x in the style (μ, σ). Layers have the numbers of the public PyTorch release, whose
files are ``vgg_normalised.pth`` and ``decoder.pth``: entries are ``2.weight``, ``2.bias`` and so
on. What VGG has after relu4_1 is not used. Files may have fewer or more channels than those.

Pixels are RGB in [0, 1]; the encoder's first convolution changes them to what VGG expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import ProtofedError
from protofed.files import FILE
from protofed.models.weights import read_weights
from protofed.prototypes import widened
from protofed.styles import restyle, style_of

EPS = 1e-5
"""What is added to the variance of the encoder's features."""

_BLOCK = ("pad", "conv", "relu")
ENCODER = ("conv", *_BLOCK * 2, "pool", *_BLOCK * 2, "pool", *_BLOCK * 4, "pool", *_BLOCK)
DECODER = (*_BLOCK, "up", *_BLOCK * 4, "up", *_BLOCK * 2, "up", *_BLOCK, "pad", "conv")
"""The layers in order; the place of a convolution is the number in its entries' names."""

SMALLEST_IMAGE = 9
"""The side of images below which a map of relu4_1 has one pixel, too few to be padded."""

_PIXELS_AT_ONCE = 512**2
"""Pixels that are encoded at once: a map of VGG's first layers then takes 64 MiB."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class StyleTransfer:
    """An encoder and a decoder on a device; ``channels`` is the number C of a style's channels."""

    encoder: Weights
    decoder: Weights
    channels: int

    def maps(self, pixels: Tensor, enlarge: int = 1) -> Iterator[Tensor]:
        """The encoder's maps [b, C, h, w] of images [B, 3, H, W], a few images at a time.

        Images are first made ``enlarge`` times as large.
        """
        side = [enlarge * n for n in pixels.shape[2:]]
        if min(side) < SMALLEST_IMAGE:
            raise ProtofedError(
                f"images of {side[0]}×{side[1]} pixels are too small for the encoder",
                f"it needs {SMALLEST_IMAGE} pixels or more: enlarge them further",
            )
        for part in pixels.split(max(1, _PIXELS_AT_ONCE // (side[0] * side[1]))):
            yield _layers(ENCODER, self.encoder, _resized(part, side))

    def restyled(self, pixels: Tensor, style_B2C: Tensor, enlarge: int = 1) -> Tensor:
        """The images [B, 3, H, W] in other styles, one for each."""
        images, done = [], 0
        for map_ in self.maps(pixels, enlarge):
            new = style_B2C[done : done + len(map_)].to(map_.dtype)
            mixed = restyle(map_, style_of(map_, EPS), new)
            image = _layers(DECODER, self.decoder, mixed)
            images.append(_resized(image, pixels.shape[2:]).clamp(0, 1))
            done += len(map_)
        return torch.cat(images).to(pixels.dtype)


def style_transfer(encoder: str, decoder: str, like: Tensor) -> StyleTransfer:
    """The encoder and decoder in these files, on the device and in the precision of a tensor.

    Files are named ``file:PATH``. A process reads a file once, and again if it has changed.
    """
    paths = (_path("encoder", encoder), _path("decoder", decoder))
    return _loaded(paths, tuple(map(_stamp, paths)), like.device, like.dtype)


def _path(what: str, value: str) -> str:
    if not value.startswith(FILE):
        raise ProtofedError(
            f"the style transfer needs a file with the weights of its {what}",
            f"--set encoder={FILE}vgg_normalised.pth --set decoder={FILE}decoder.pth name those of "
            "the public PyTorch release of AdaIN",
        )
    return value.removeprefix(FILE)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise ProtofedError(f"cannot read weights from '{path}': {error.strerror}") from None
    return found.st_mtime_ns, found.st_size


@cache
def _loaded(
    paths: tuple[str, str], stamps: object, device: torch.device, dtype: torch.dtype
) -> StyleTransfer:
    """Kept as long as the process: a recorded CUDA graph reads these tensors at their addresses."""
    encoder, decoder = map(read_weights, paths)
    last = len(ENCODER)
    used = {name: t for name, t in encoder.items() if not _number(name) >= last}
    inputs, channels = _require_layers("encoder", paths[0], ENCODER, used)
    taken, outputs = _require_layers("decoder", paths[1], DECODER, decoder)
    if (inputs, taken, outputs) != (3, channels, 3):
        raise ProtofedError(
            f"the encoder in '{paths[0]}' makes {channels} channels of {inputs}, and the decoder "
            f"in '{paths[1]}' {outputs} of {taken}",
            "they must be of the same release, and images have 3",
        )
    # a copy from the host is complete when it returns, so every GPU stream may read it
    own, theirs = ({n: t.to(dtype).to(device) for n, t in f.items()} for f in (used, decoder))
    return StyleTransfer(own, theirs, channels)


def _number(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else -1


def _require_layers(
    what: str, path: str, layers: tuple[str, ...], found: Weights
) -> tuple[int, int]:
    """Raise an error if these are not the layers' weights; returns channels in and out."""
    places = [place for place, layer in enumerate(layers) if layer == "conv"]
    names = {f"{place}.{kind}" for place in places for kind in ("weight", "bias")}
    if names != found.keys():
        differ = sorted(names ^ found.keys(), key=lambda name: (_number(name), name))
        raise ProtofedError(
            f"'{path}' does not hold the {what} of AdaIN: entry {differ[0]} is "
            f"{'missing' if differ[0] in names else 'unknown'}",
            "vgg_normalised.pth is the encoder, decoder.pth the decoder",
        )
    inputs = channels = found[f"{places[0]}.weight"].shape[1:2].numel()
    for place in places:
        weight, bias = found[f"{place}.weight"], found[f"{place}.bias"]
        kernel = 3 if layers[place - 1] == "pad" and place else 1
        outputs = weight.shape[:1].numel()
        wanted = (outputs, channels, kernel, kernel)
        if weight.shape != wanted or bias.shape != wanted[:1] or not weight.is_floating_point():
            raise ProtofedError(
                f"'{path}' does not hold the {what} of AdaIN: entry {place}.weight is "
                f"{tuple(weight.shape)} with a bias of {tuple(bias.shape)}",
                f"it must be {wanted}: channels out and in, and the kernel's size",
            )
        channels = outputs
    return inputs, channels


def _layers(layers: tuple[str, ...], weights: Weights, x: Tensor) -> Tensor:
    for place, layer in enumerate(layers):
        if layer == "conv":
            x = F.conv2d(x, weights[f"{place}.weight"], weights[f"{place}.bias"])
        elif layer == "pad":
            x = F.pad(x, (1, 1, 1, 1), "reflect")
        elif layer == "relu":
            x = F.relu(x)
        elif layer == "pool":
            x = F.max_pool2d(x, 2, ceil_mode=True)
        else:
            x = F.interpolate(x, scale_factor=2)  # each pixel four times
    return x


def _resized(x: Tensor, side: list[int] | torch.Size) -> Tensor:
    """Bilinear, and smoothed where the image becomes smaller."""
    if x.shape[2:] == torch.Size(side):
        return x
    return F.interpolate(widened(x), tuple(side), mode="bilinear", antialias=True)
