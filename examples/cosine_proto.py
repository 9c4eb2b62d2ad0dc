"""A method of one's own: FedProto with the cosine in the place of the squared distance.

    protofed methods check examples/cosine_proto.py:CosineProto
    protofed compare --methods fedavg,fedproto,examples/cosine_proto.py:CosineProto

    client    CE + λ (1 − cos(z, C^y)), mean over the batch
    server    as FedAvg; C^k = mean over its owners of the clients' class means

Deviations: no paper, no deviations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from protofed.method import (
    Batch,
    Client,
    Method,
    ServerView,
    Sizes,
    Terms,
    Update,
    hyper,
    no_prototypes,
    upload_means,
    uploaded_means,
)
from protofed.prototypes import owners_mean, paired_cosine
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class CosineProto(Method):
    """Features turn towards their class's prototype, whatever their length."""

    name: ClassVar[str] = "cosineproto"
    paper: ClassVar[str] = "an example"
    travels: ClassVar[str] = "model, class means (up), global prototypes (down)"

    weight: float = hyper(1.0, "λ", "weight of the prototype term", least=0, weight=True)
    proto_pass: str = hyper(
        "last_epoch", "", "when features are summed", choices=("last_epoch", "post")
    )

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet: their mask is 0."""
        return {"prototypes": no_prototypes(sizes)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """Named terms; the objective is their sum, and each is recorded by its name."""
        z, logits = client.forward(batch.x)
        C = client.received["prototypes"]
        away = (1 - paired_cosine(z, C["mean"][batch.y])) * C["mask"][batch.y]
        return {"ce": F.cross_entropy(logits, batch.y), "proto": self.weight * away.mean()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """What travels beside the model, and what the client keeps."""
        return upload_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """The server's next state."""
        C, mask = owners_mean(*uploaded_means(updates))
        return {"model": mean, "prototypes": {"mean": C, "mask": mask}}
