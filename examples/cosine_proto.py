"""A method of your own: FedProto with the cosine instead of the squared distance.

protofed methods check examples/cosine_proto.py:CosineProto
protofed compare --methods fedavg,fedproto,examples/cosine_proto.py:CosineProto

client    CE + λ (1 − cos(z, C^y)), mean over the batch
server    as FedAvg; C^k = mean over its owners of the clients' class means
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import (
    Batch,
    Client,
    Method,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    clients_class_means,
    hyper,
    proto_pass_hyper,
    upload_class_means,
)
from protofed.prototypes import Prototypes, paired_cosine


@dataclass(frozen=True)
class CosineProto(Method):
    """Features turn toward their class's prototype, whatever their length."""

    name = "cosineproto"
    paper = "an example"
    slots = Slots(up={"prototypes": "class means"}, down={"prototypes": "global prototypes"})

    weight: float = hyper(1.0, "λ", "weight of the prototype term", least=0, weight=True)
    proto_pass: str = proto_pass_hyper("features of the class means")

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet: their mask is 0."""
        return {"prototypes": Prototypes.empty(sizes.classes, sizes.features).slot()}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """Named terms; the objective is their sum, and each is recorded under its name."""
        z, logits = client.forward(batch.x)
        C = Prototypes.of(client.received["prototypes"])
        distance = (1 - paired_cosine(z, C.mean[batch.y])) * C.mask[batch.y]
        return {"ce": client.cross_entropy(logits, batch.y), "proto": self.weight * distance.mean()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """What is sent beside the model, and what the client keeps."""
        return upload_class_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The server's next state."""
        C = clients_class_means(updates).per_class_mean()
        return {"model": mean, "prototypes": C.slot()}
