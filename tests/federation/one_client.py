"""One client with a tiny network, for tests of its round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed import keys, tree
from protofed.data.augment import normalized
from protofed.data.task import Augment, Images
from protofed.federation.client_round import Reply, train_client
from protofed.federation.setup import ClientData, Setup, Training
from protofed.method import Batch, Client, Method, Sizes, Terms
from protofed.methods import FedAvg
from protofed.models import Network
from protofed.tree import Tree

PLAIN = Augment(padding=0, flip=False)
CLASSES, FEATURES, SIDE = 4, 5, 8
SIZES = Sizes(CLASSES, FEATURES, SIDE)


def network(norm: bool = False) -> Network:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.BatchNorm2d(3)] if norm else []
    layers += [nn.Flatten(), nn.Linear(3 * SIDE * SIDE, FEATURES), nn.ReLU()]
    return Network(nn.Sequential(*layers), FEATURES, CLASSES).double()


def client_data(n: int = 10, classes: int = CLASSES, name: str = "left-0") -> ClientData:
    rng = keys.generator("site", n)
    x = torch.from_numpy(rng.integers(0, 256, (n, 3, SIDE, SIDE))).to(torch.uint8)
    return ClientData(name, "left", Images(x, torch.arange(n) % classes))


def setup(method: Method | None = None, augment: Augment = PLAIN, **training: Any) -> Setup:
    given = {
        "batch": 100,
        "epochs": 1,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.01,
        **training,
    }
    return Setup(
        method or FedAvg(), SIZES, augment, Training(**given), rounds=3, seed=0, dtype=torch.float64
    )


def start(net: Network) -> Tree:
    return tree.copy({"model": net.state_dict()})


def train(s: Setup, data: ClientData, net: Network | None = None, round: int = 0) -> Reply:
    """The reply of a client that starts from the network; ``Recorder.seen`` starts empty."""
    net = net or network()
    Recorder.seen.clear()
    return train_client(s, net, data, start(net), {}, round)


def all_of(data: ClientData) -> tuple[Tensor, Tensor]:
    return normalized(data.images.x, PLAIN, torch.float64), data.images.y


@dataclass(frozen=True)
class Recorder(Method):
    """Records every batch and the features of its main forward pass."""

    name: ClassVar[str] = "recorder"
    seen: ClassVar[list[tuple[Batch, Tensor]]] = []
    kept: float = 0.0
    passes: str = "none"

    @property
    def holdout(self) -> float:
        return self.kept

    @property
    def proto_pass(self) -> str:
        return self.passes

    def loss(self, client: Client, batch: Batch) -> Terms:
        z, logits = client.forward(batch.x)
        self.seen.append((batch, z.detach().clone()))
        return {"ce": F.cross_entropy(logits, batch.y)}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        if self.passes == "none":
            return {}, {}
        mean, count = client.class_means()
        return {"prototypes": {"mean": mean, "count": count}}, {}
