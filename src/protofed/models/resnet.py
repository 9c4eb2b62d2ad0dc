"""ResNets for small images: a 3×3 stem without max-pooling, then four stages of BasicBlocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from protofed.models.network import Network, conv, normalize


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride, norm),
            normalize(norm, outputs),
            nn.ReLU(),
            conv(outputs, outputs, 3, 1, norm),
            normalize(norm, outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                conv(inputs, outputs, 1, stride, norm), normalize(norm, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(
    blocks: int, classes: int, image_size: int, width: int | None, norm: str | None
) -> Network:
    """A ResNet with ``blocks`` BasicBlocks per stage and 8 × ``width`` features."""
    width, norm = width or 64, norm or "batch"
    layers: list[nn.Module] = [conv(3, width, 3, 1, norm), normalize(norm, width), nn.ReLU()]
    inputs = width
    for stage, first_stride in enumerate((1, 2, 2, 2)):
        outputs = width * 2**stage
        for block in range(blocks):
            layers.append(BasicBlock(inputs, outputs, first_stride if block == 0 else 1, norm))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), inputs, classes)
