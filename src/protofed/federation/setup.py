"""What one client's round is given: the settings all clients share, and the client's images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from protofed.data.task import Augment, Images
from protofed.errors import ProtofedError
from protofed.federation.privacy import Privacy
from protofed.federation.public_images import PublicSampler
from protofed.method import Method, Phase, Sizes


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes from round to round."""

    shape: str = "constant"
    rounds: int = 1
    warmup: int = 0
    step_every: int | None = None
    step_factor: float = 1.0

    @property
    def varies(self) -> bool:
        return self.shape != "constant" or self.warmup > 0

    def factor(self, round: int) -> float:
        """What the learning rate is multiplied by in a round; the first round is 0."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        since = round - self.warmup
        if self.shape == "cosine":
            return (1 + math.cos(math.pi * since / (self.rounds - self.warmup))) / 2
        if self.step_every is not None:
            return self.step_factor ** (since // self.step_every)
        return 1.0


@dataclass(frozen=True)
class Training:
    """How a client trains, unless a phase of the method says otherwise."""

    batch: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    optimizer: str = "sgd"
    clip: float | None = None
    label_smoothing: float = 0.0
    sampling: str = "uniform"
    schedule: Schedule = Schedule()

    def for_phase(self, phase: Phase) -> Training:
        """These settings, with those that the phase overrides; of two norms, the smaller one."""
        names = ("batch", "epochs", "lr", "momentum", "optimizer")
        given = {name: getattr(phase, name) for name in names}
        clips = [clip for clip in (self.clip, phase.clip) if clip is not None]
        given["clip"] = min(clips, default=None)
        return replace(self, **{name: v for name, v in given.items() if v is not None})

    def lr_in(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * self.schedule.factor(round)

    def record(self, round: int) -> dict[str, float]:
        """What a round's record says about it: the learning rate, if that changes."""
        return {"lr": self.lr_in(round)} if self.schedule.varies else {}


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
    """How many images a class must have for its prototype to leave a client."""
    privacy: Privacy = field(default_factory=Privacy)

    @property
    def proto_pass(self) -> str:
        """The method's; ``received`` under privacy: a clean pass of the received model."""
        return self.method.proto_pass if self.privacy.prototypes is None else "received"

    def autocast(self, device: torch.device) -> torch.autocast:
        # No cache: it would keep bfloat16 copies of weights that have since been updated.
        return torch.autocast(device.type, torch.bfloat16, self.bf16, cache_enabled=False)


@dataclass(frozen=True)
class ClientData:
    """A client's name, domain and images (on the device it trains on), and its model.

    With ``rows`` its images are those of ``source``, and are taken out when first asked for.
    ``public``: the images are not the client's own but a round's public ones.
    """

    name: str
    domain: str
    source: Images
    model: str = ""
    rows: Tensor | None = None
    public: bool = False

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @cached_property
    def images(self) -> Images:
        x, y = self.source.x, self.source.y
        return self.source if self.rows is None else Images(x[self.rows], y[self.rows])

    def with_images(self, images: Images) -> ClientData:
        return replace(self, source=images, rows=None)

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
        return replace(self.with_images(setup.public.draw(round)), public=True)
