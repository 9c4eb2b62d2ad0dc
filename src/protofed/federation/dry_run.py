"""What a client would send, found by training one on noise: no method has to declare it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from protofed import tree
from protofed.data.task import Images
from protofed.errors import Diverged
from protofed.federation.bounds import sizes
from protofed.federation.client_round import train_client
from protofed.federation.public_images import ImagePool, PublicSampler
from protofed.federation.server import Server
from protofed.federation.setup import ClientData, Setup
from protofed.keys import generator
from protofed.models import Network
from protofed.tree import Tree

MOST_IMAGES = 256
"""How many images of noise a dry run takes, if the batch is larger: it may be out of all bounds."""
MOST_MORE = 10_000
"""How many more images of noise a method with a small holdout may need."""


def dry_run(setup: Setup, network: Network, server: Server, received: Tree) -> dict[str, float]:
    """The size of each slot of a reply to ``received``, a run's first message.

    Prototypes count however few images a class has: noise has few of each.
    """
    protos = setup.privacy.prototypes
    privacy = dataclasses.replace(setup.privacy, prototypes=None)
    shown = dataclasses.replace(setup, min_class_count=1, privacy=privacy)
    try:
        images = enough_images(setup, min(MOST_IMAGES, max(12, setup.training.batch)))
        message = noise_message(shown, network, server, images, 12, received=received)
    except Diverged:  # so will the clients, whose error says more
        return {}
    # the model's is its norm, not that of its change: a step on noise says little about how far
    # the epochs of a client go
    found = sizes(message, {}, setup.method.slots.rows)
    # under privacy, no prototype is longer than a feature that counts in full
    return found | ({} if protos is None else {protos.part: protos.clip})


def enough_images(setup: Setup, least: int) -> int:
    """At least ``least``, so many that some can be held out and no batch is of a single image."""
    batch, holdout = max(2, setup.training.batch), setup.method.holdout
    for images in range(least, least + MOST_MORE):
        held = int(images * holdout)
        if bool(held) == bool(holdout) and (images - held) % batch != 1:
            return images
    return least


def noise_message(
    setup: Setup,
    network: Network,
    server: Server,
    images: int,
    public: int,
    lr: float = 0.0,
    received: Tree | None = None,
) -> Tree:
    """What a client sends after an epoch on noise, which also stands in for public images.

    ``received`` is what the server sent it; None: what it would send now.
    """
    training = dataclasses.replace(setup.training, epochs=1, batch=max(2, setup.training.batch))
    if lr:
        training = dataclasses.replace(training, lr=lr)
    pool = ImagePool(_noise(setup, public), torch.arange(public), public)
    sampler = PublicSampler({"noise": pool}, seed=0) if setup.method.public_images else None
    quiet = dataclasses.replace(setup, training=training, public=sampler, bf16=False)
    labels = torch.arange(images) % setup.sizes.classes
    client = ClientData("template", "none", Images(_noise(setup, images), labels))
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0  # statistics of the noise at once, as after many steps
    mine = server.initial_client(tree.copy({"model": network.state_dict()})["model"])
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    received = tree.to(server.broadcast() if received is None else received, "cpu")
    return train_client(quiet, network, client, received, mine, 0).message


def _noise(setup: Setup, n: int) -> Tensor:
    rng, side = generator("template", n), setup.sizes.image
    return torch.from_numpy(rng.integers(0, 256, (n, 3, side, side), dtype="uint8"))
