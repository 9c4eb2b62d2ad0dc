"""FedRDN: images normalized with the color statistics of a random client.

Yan et al.: "A Simple Data Augmentation for Feature Distribution Skewed
Federated Learning" (FedRDN), CVPR 2025.

A network that has seen its images under every client's normalization depends
less on the colors of any.

    statistics   of client m and each color: μ_m = mean over its images of the
                 mean over the pixels; σ_m = mean over its images of the
                 standard deviation over the pixels                         (1)
    training     x̂ = (x − μ_j)/σ_j, j a random client, itself included,
                 drawn for each image and each time it is seen              (2)
    client       CE
    test         x̂ = (x − μ̄)/σ̄, μ̄ and σ̄ the means of all μ_m and σ_m       (3)
    server       as FedAvg; keeps every client's statistics
    travels      6 numbers up, 6 for each client down: what a client's images
                 look like on average in color and contrast. They depend on
                 the images alone and are the same in every round
    cost         a clean pass per round

In round 0 there are no statistics, and images are as the task normalizes them.
A client that sits out keeps its place; one with too few images has none. The
model's file has μ̄ and σ̄, not the clients' own.

Deviations
    (1)  The paper collects statistics before training; here they come with the
         first update. 1e-6 is added to the variance of an image. The task's
         own normalization comes before and cancels in (2) and (3).
    (2)  The authors' code draws μ and σ independently of each other, once per
         batch: `draw=batch`.
    (3)  The authors test each client's images with its own statistics, so the
         domain must be known. Here one model serves all images. Their code
         also reports the best round on test data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protofed.method import (
    Client,
    Entry,
    Method,
    Network,
    Output,
    ServerView,
    Shared,
    Sizes,
    Slot,
    Slots,
    Tree,
    Updates,
    hyper,
)
from protofed.styles import EPS, restyle

BUFFER = "statistics"
"""The entry of the model that the server sets: μ̄ and σ̄."""


class NormalizingNetwork(Network):
    """A backbone whose images are normalized by (3), except in training."""

    statistics: Tensor

    def __init__(self, backbone: Network, sizes: Sizes) -> None:
        super().__init__(backbone.encoder, sizes.features, sizes.classes)
        self.head = backbone.head
        self.register_buffer(BUFFER, unchanged(torch.empty(2, 3)))

    def forward(self, x: Tensor) -> Output:
        if not self.training:
            x = normalize(x, self.statistics.expand(len(x), -1, -1))
        return super().forward(x)


@dataclass(frozen=True)
class FedRDN(Method):
    """Random normalization with the statistics of all clients."""

    name = "fedrdn"
    paper = "Yan et al., CVPR 2025"
    protocol: ClassVar = {"batch": 32, "epochs": 5, "momentum": 0.9}
    size_limit = 50.0  # images with another client's statistics can be far from all others
    slots = Slots(
        up={"statistics": "its mean and deviation of each color"},
        down={"statistics": "those of all clients"},
    )

    draw: str = hyper(
        "image",
        "",
        "(2): a client for each image, or one for μ and one for σ of a batch (the authors' code)",
        choices=("image", "batch"),
    )

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        return NormalizingNetwork(backbone, sizes)

    def shared(self, entry: Entry) -> Shared:
        return "down" if entry.name == BUFFER else "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """Statistics that change nothing; they stand for every client's until it sends its own."""
        return {"statistics": {"style": model[BUFFER][None], "mask": torch.zeros(1)}}

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return ("pixels",)

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        """(2); until there are statistics, the initial ones are used, which change nothing."""
        style_M2C, mask_M = (client.received["statistics"][n] for n in ("style", "mask"))
        draws = (len(x), 1) if self.draw == "image" else (1, 2)
        chosen = (client.uniform(*draws, len(mask_M)) * mask_M).argmax(2).expand(len(x), 2)
        both = torch.arange(2, device=x.device)
        return normalize(x, style_M2C[chosen, both])

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1), of images that (3) does not change."""
        as_they_are = {BUFFER: unchanged(client.start[BUFFER])}
        mean, _ = client.styles(as_they_are)["pixels"]
        return {"statistics": {"style": mean}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, the round's statistics in their clients' places, and their mean."""
        sent = {}
        for update in updates:
            mu, sigma = update["statistics"]["style"]
            if sigma.any():  # divide by no less than the deviation of a map of one color
                sent[update.name] = torch.stack([mu, sigma.clamp(min=EPS**0.5)])
        statistics = server.each_style("statistics", sent)
        style_M2C, mask = statistics["style"], statistics["mask"]
        known = style_M2C[mask > 0] if mask.any() else style_M2C
        model = {**mean, BUFFER: known.mean(0).to(mean[BUFFER].dtype)}
        return {"model": model, "statistics": statistics}

    def broadcast(self, server: ServerView) -> Tree:
        statistics = server.each_client("statistics")
        return {"model": server.state["model"], "statistics": statistics}


def unchanged(like: Tensor) -> Tensor:
    """Statistics [..., 2, C] that leave an image as it is: mean 0, deviation 1."""
    mean, deviation = like.unbind(-2)
    return torch.stack([torch.zeros_like(mean), torch.ones_like(deviation)], -2)


def normalize(x: Tensor, style: Tensor) -> Tensor:
    """(x − μ)/σ of images [B, C, H, W] with statistics [B, 2, C]."""
    return restyle(x, style, unchanged(style))
