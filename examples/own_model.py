"""A model of your own: ``protofed run --model examples/own_model.py:encoder``."""

from __future__ import annotations

from torch import nn


def encoder(image_size: int) -> nn.Module:
    """From images [B, 3, H, W] to features [B, 64]; Protofed adds the linear head."""

    def layer(inputs: int, outputs: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    layers = layer(3, 16), layer(16, 32), layer(32, 64)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
