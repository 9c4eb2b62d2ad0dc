"""MOON: features close to the global model's, far from the client's previous ones.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021.

    z, z_glob, z_prev    features of the same image under the weights being
                         trained, the received model, and the model that the
                         client ended its previous round with
    client               CE + μ ℓ,
                         ℓ = −log e^{cos(z,z_glob)/τ}
                                / (e^{cos(z,z_glob)/τ} + e^{cos(z,z_prev)/τ})
    server               as FedAvg
    cost                 two forward passes without gradient per step

In a client's first round there is no previous model: ℓ = 0. A client that
sits out keeps its older one. z_glob and z_prev are computed in evaluation
mode, without gradient.

Deviations
    z     The paper adds a projection head whose output also feeds the
          classifier; here z is the feature, so that all methods share one
          network (as in the code behind FPL's and I²PFL's rows).
    μ     5 and τ = 0.5 in that code; the authors' default is 1, to be tuned.
    That code also runs both other models in training mode, and in round 0 its
    "previous" model is a differently initialized network. Neither is done
    here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from protofed.method import Batch, Client, Method, Sizes, Slot, Slots, Terms, Tree, hyper
from protofed.prototypes import paired_cosine


@dataclass(frozen=True)
class Moon(Method):
    """A contrast between models, on each client's own images."""

    name = "moon"
    paper = "Li, He, Song, CVPR 2021"

    mu: float = hyper(5.0, "μ", "weight of the contrast", least=0, weight=True)
    tau: float = hyper(0.5, "τ", "temperature of the contrast", above=0)

    @property
    def slots(self) -> Slots:
        kept = {"previous": "its previous model", "history": "whether there is one"}
        return Slots(client=kept if self.mu else {})

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        """No previous model: ``there`` = 0 switches ℓ off; the entries are placeholders."""
        if not self.mu:
            return {}
        return {"previous": model, "history": {"there": torch.zeros(())}}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """CE, and ℓ as the two-way cross-entropy that it is."""
        z, logits = client.forward(batch.x)
        terms = {"ce": client.cross_entropy(logits, batch.y)}
        if self.mu:
            near = paired_cosine(z, client.forward_with(client.start, batch.x).feature)
            previous = client.forward_with(client.mine["previous"], batch.x)
            far = paired_cosine(z, previous.feature)
            contrast = F.softplus((far - near) / self.tau).mean()
            terms["moon"] = self.mu * contrast * client.mine["history"]["there"]
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        if not self.mu:
            return {}, {}
        return {}, {"previous": client.model(), "history": {"there": torch.ones(())}}
