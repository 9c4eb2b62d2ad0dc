"""ResNets: those of the papers for small images, and the usual ones for images of 96 or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from protofed.models.network import Network, Stage, conv, normalize


class ResidualBlock(nn.Module):
    """Convolutions and a shortcut around them."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(
    blocks: int, classes: int, image_size: int, width: int | None, norm: str | None
) -> Network:
    """For small images: a 3×3 stem without max-pooling, ``blocks`` basic blocks per stage.

    It has 8 × ``width`` features.
    """
    width, norm = width or 64, norm or "batch"
    stem = [conv(3, width, 3, 1, norm), normalize(norm, width), nn.ReLU()]
    return _resnet(stem, [blocks] * 4, False, classes, width, norm)


@dataclass(frozen=True)
class ImageNetResNet:
    """As trained on ImageNet: a 7×7 stem with stride 2 and max-pooling, ``blocks`` per stage.

    It has 8 × width features, with bottlenecks 32 × width. A bottleneck has its stride in the 3×3
    convolution, as torchvision's and timm's have.
    """

    blocks: tuple[int, ...]
    bottleneck: bool = False

    def __call__(
        self, classes: int, image_size: int, width: int | None, norm: str | None
    ) -> Network:
        width, norm = width or 64, norm or "batch"
        stem = [conv(3, width, 7, 2, norm), normalize(norm, width), nn.ReLU()]
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        return _resnet([*stem, pool], self.blocks, self.bottleneck, classes, width, norm)


IMAGENET = {
    "resnet18_imagenet": ImageNetResNet((2, 2, 2, 2)),
    "resnet34_imagenet": ImageNetResNet((3, 4, 6, 3)),
    "resnet50_imagenet": ImageNetResNet((3, 4, 6, 3), bottleneck=True),
}
"""For images of 96 pixels or more; ``load_weights`` takes public weights for them."""


def _resnet(
    stem: Sequence[nn.Module],
    blocks: Sequence[int],
    bottleneck: bool,
    classes: int,
    width: int,
    norm: str,
) -> Network:
    layers = [*stem]
    stages = {"stem": Stage(str(len(layers) - 1), width)}
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        outputs = 4 * inner if bottleneck else inner
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            sizes = [(inputs, inner, 3, stride), (inner, inner, 3, 1)]
            if bottleneck:
                sizes = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
            body: list[nn.Module] = []
            for size in sizes:
                body += [conv(*size, norm), normalize(norm, size[1]), nn.ReLU()]
            shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != outputs:
                shortcut = nn.Sequential(
                    conv(inputs, outputs, 1, stride, norm), normalize(norm, outputs)
                )
            layers.append(ResidualBlock(nn.Sequential(*body[:-1]), shortcut))
            inputs = outputs
        stages[f"stage{stage + 1}"] = Stage(str(len(layers) - 1), outputs)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), inputs, classes, stages)
