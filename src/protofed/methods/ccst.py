"""CCST: training images redrawn in the styles of all clients, by a pretrained VGG and decoder.

Chen, Jiang, Dou, Chen: "Federated Domain Generalization for Image Recognition via Cross-Client
Style Transfer", WACV 2023.

Φ is VGG-19 up to relu4_1, Ψ a decoder trained with it for AdaIN (Huang, Belongie, ICCV 2017);
`protofed.adain` computes both. A style is the mean μ and the deviation σ of each of Φ's C = 512
channels. Every client sends its own, and the server sends the bank of all to all.

    (1) overall style   μ_m, σ_m over all positions of the maps Φ(x) of all of client m's images
        single style    μ_i, σ_i over the positions of one map Φ(x_i); N images of the client
    (2) transfer        x' = Ψ(σ_j (Φ(x) − μ(Φ(x)))/σ(Φ(x)) + μ_j),  j a client, drawn for each
                        image; of single styles, one of its N. If j is the client itself, x' = x
    (3) enlarged set    each image in K styles: a round has K times the epochs
    client              CE
    server              FedAvg with equal weights; keeps every client's style
    travels             C means and C deviations (4 KB) per style, one or N up, those of all clients
                        down: the textures and colors of a client's images, in single mode of some
                        of its images. The paper tries to reconstruct images from styles, without
                        success; that is no proof
    cost                Φ and Ψ for every image of every step, which is more than a ResNet-10's own
                        step; Φ for all images after each round, in single mode for N

The weights of Φ and Ψ are not part of Protofed. Name the files of the public PyTorch release of
AdaIN: `--set encoder=file:vgg_normalised.pth --set decoder=file:decoder.pth`, as they are or as
safetensors. They are frozen, do not travel and are not in the model's file, which is used without
them. A run's facts have a digest of them. This file was tested with random weights in the layout of
that release only, because no trained ones were at hand: no accuracy was measured.

In round 0 there are no styles: it is a round of FedAvg, with as many epochs as the protocol has. A
client that sits out keeps its place in the bank; one with too few images has none. Single styles
are those of single images, so a federation that holds back prototypes of few images
(`--min-class-count`) cannot send them.

Deviations
    (1)  The paper computes styles once, before training; here they come with every update, and
         overall styles are the same in each. Images are those of the task, `enlarge` times as large
         (bilinear); the paper's code enlarges images of 227 pixels to 512. 1e-5 is added to a
         variance. A single style's variance is divided by positions − 1, the code's by positions.
         The paper has a single style of every image in the bank; here N, drawn in each round.
    (2)  The authors redraw every image once and store it as a JPEG file; here images are redrawn
         when they are seen, after crops and flips, and shrunk to the task's size. Pixels are
         clamped to [0, 1] in both. Their code draws one single style for a batch.
    (3)  The paper draws K of the styles for an image, once and without replacement. Here each time
         an image is seen it gets one of all: the same set in the mean if K is the number of
         clients, as in the paper's main results, and a larger one if there are more clients.
    averaging   Equal weights are in the authors' code. They begin with pretrained networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protofed.adain import EPS, StyleTransfer, style_transfer
from protofed.method import (
    Batch,
    Client,
    Method,
    Phase,
    ProtofedError,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.styles import style_of


@dataclass(frozen=True)
class CCST(Method):
    """Images in the styles of all clients, by AdaIN."""

    name = "ccst"
    paper = "Chen et al., WACV 2023"
    protocol: ClassVar = {"epochs": 1, "lr": 0.001, "momentum": 0.0}
    weighting = "uniform"
    slots = Slots(up={"style": "VGG styles of its images"}, down={"bank": "those of all clients"})

    encoder: str = hyper("", "Φ", "the weights of the encoder: file:vgg_normalised.pth", file=True)
    decoder: str = hyper("", "Ψ", "the weights of the decoder: file:decoder.pth", file=True)
    styles: str = hyper(
        "overall",
        "",
        "(1): one style of all of a client's images, or N of single ones",
        choices=("overall", "single"),
    )
    single: int = hyper(16, "N", "styles of single images per client (1)", least=1)
    variants: int = hyper(3, "K", "how often an epoch has each image (3)", least=1)
    enlarge: int = hyper(2, "", "how many times as large images are for Φ", least=1, most=64)

    @property
    def _sent(self) -> int:
        """How many styles a client sends."""
        return self.single if self.styles == "single" else 1

    def _transfer(self, like: Tensor) -> StyleTransfer:
        return style_transfer(self.encoder, self.decoder, like)

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No style of any client. Files that cannot be used are an error here."""
        like = next(t for t in model.values() if t.is_floating_point()).cpu()
        transfer = self._transfer(like)
        image = torch.zeros(1, 3, sizes.image, sizes.image, dtype=like.dtype)
        style = torch.zeros(1, self._sent, 2, transfer.channels, dtype=like.dtype)
        transfer.restyled(image, style[:, 0], self.enlarge)  # an image that is too small, too
        return {"bank": {"style": style, "mask": torch.zeros(1)}}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """(3)."""
        return (Phase(self.loss, self.variants * epochs) if round else Phase(super().loss),)

    def loss(self, client: Client, batch: Batch) -> Terms:
        return super().loss(client, batch._replace(x=self._redrawn(client, batch.x)))

    def _redrawn(self, client: Client, x: Tensor) -> Tensor:
        """(2)."""
        bank = client.received["bank"]
        own_M = bank["id"] == client.id
        there_M = own_M | (bank["mask"] > 0)
        j_B = (client.uniform(len(x), len(own_M)) * there_M).argmax(1)
        i_B = (client.uniform(len(x)) * self._sent).long().clamp(max=self._sent - 1)
        pixels = x * client.pixel_std + client.pixel_mean
        redrawn = self._transfer(x).restyled(pixels, bank["style"][j_B, i_B], self.enlarge)
        redrawn = (redrawn - client.pixel_mean) / client.pixel_std
        return torch.where(own_M[j_B][:, None, None, None], x, redrawn)

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        if self.styles == "overall":
            enough = client.samples >= client.min_class_count
            return {"style": {"style": self._overall(client)[None] * enough}}, {}
        if client.min_class_count > 1:
            raise ProtofedError(
                f"{self.name} sends styles of single images",
                "it cannot run with --min-class-count above 1; send one of all: "
                "--set styles=overall",
            )
        return {"style": {"style": self._singles(client)}}, {}

    def _overall(self, client: Client) -> Tensor:
        """The mean and the deviation [2, C] over all positions of all maps."""
        positions, sums = 0, torch.zeros(2, 1, dtype=torch.float64, device=client.id.device)
        for x, _ in client.batches("train"):
            for map_ in self._maps(client, x):
                map_ = map_.double()
                each = torch.stack([map_.sum((0, 2, 3)), map_.square().sum((0, 2, 3))])
                positions, sums = positions + map_[:, 0].numel(), sums + each
        mean, square = sums / positions
        style = torch.stack([mean, (square - mean**2).clamp(min=0).add(EPS).sqrt()])
        return style.to(client.pixel_mean.dtype)

    def _singles(self, client: Client) -> Tensor:
        """The styles [N, 2, C] of N images; a client with fewer repeats some."""
        order = client.uniform(client.samples).argsort()
        chosen = order[torch.arange(self.single, device=order.device) % len(order)]
        styles, first = [], 0
        for x, _ in client.batches("train"):
            here = chosen[(chosen >= first) & (chosen < first + len(x))] - first
            first += len(x)
            if len(here):
                styles += [style_of(map_, EPS) for map_ in self._maps(client, x[here])]
        return torch.cat(styles)

    def _maps(self, client: Client, x: Tensor) -> Iterator[Tensor]:
        """Φ of images, a few at a time."""
        pixels = x * client.pixel_std + client.pixel_mean
        return self._transfer(x).maps(pixels, self.enlarge)

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, and the round's styles in their clients' places."""
        sent = {u.name: u["style"]["style"] for u in updates}
        return {"model": mean, "bank": server.each_style("bank", sent)}

    def broadcast(self, server: ServerView) -> Tree:
        """The bank with the clients' ids: one who draws its own style keeps the image."""
        bank = {**server.each_client("bank"), "id": server.client_ids()}
        return {"model": server.state["model"], "bank": bank}
