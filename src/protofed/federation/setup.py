"""What one client's round is given: the settings all clients share, and the client's images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from protofed.data.task import Augment, Images
from protofed.errors import ProtofedError
from protofed.federation.public_images import PublicSampler
from protofed.method import Method, Phase, Sizes


@dataclass(frozen=True)
class Training:
    """How a client trains, unless a phase of the method says otherwise."""

    batch: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    optimizer: str = "sgd"

    def for_phase(self, phase: Phase) -> Training:
        """These settings, with those that the phase overrides."""
        names = ("batch", "epochs", "lr", "momentum", "optimizer")
        given = {name: getattr(phase, name) for name in names}
        return replace(self, **{name: v for name, v in given.items() if v is not None})


@dataclass(frozen=True)
class Setup:
    """What all clients of a run have in common."""

    method: Method
    sizes: Sizes
    augment: Augment
    training: Training
    rounds: int
    seed: int
    dtype: torch.dtype = torch.float32
    bf16: bool = False
    """Whether convolutions and matrix products compute in bfloat16 (weights stay float32)."""
    public: PublicSampler | None = None
    min_class_count: int = 1
    """The fewest images of a class whose prototype leaves a client."""

    def autocast(self, device: torch.device) -> torch.autocast:
        # No cache: it would keep bfloat16 copies of weights that have since been updated.
        return torch.autocast(device.type, torch.bfloat16, self.bf16, cache_enabled=False)


@dataclass(frozen=True)
class ClientData:
    """A client's name, domain and images (on the device it trains on), and its model.

    ``public``: the images are not the client's own but a round's public ones.
    """

    name: str
    domain: str
    images: Images
    model: str = ""
    public: bool = False

    def for_phase(self, setup: Setup, phase: Phase, round: int) -> ClientData:
        """This client with the images that a phase trains on."""
        return self if phase.data == "own" else self.with_public_images(setup, round)

    def with_public_images(self, setup: Setup, round: int) -> ClientData:
        """This client with a round's public images in place of its own."""
        if setup.public is None:
            raise ProtofedError(
                f"{setup.method.name} needs public images, but this run has none",
                "the method's public_images must say where they come from",
            )
        return replace(self, images=setup.public.draw(round), public=True)
