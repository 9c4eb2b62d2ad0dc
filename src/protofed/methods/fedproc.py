"""FedProc: contrast with global prototypes first, cross-entropy later.

Mu, Shen, Cheng, Geng, Fu, Zhang, Zhang: "FedProc: Prototypical Contrastive
Federated Learning on Non-IID Data", 2021 (FGCS 2023).

    prototypes    C^k = mean over its owners of the clients' class means
    client        α_t L_gpc + (1 − α_t) CE,  α_t = 1 − t/(T−1),  t = 0 .. T−1
                  L_gpc = −log e^{cos(z,C^y)/τ} / Σ_k e^{cos(z,C^k)/τ},  τ = 1
    server        as FedAvg

Deviations
    Round 0: α = 1 and there are no prototypes, so the loss is identically 0
    and nothing learns but BatchNorm statistics (and the weights decay). The
    code behind FPL's and I²PFL's rows does that, and so does the default.
    `warmup=true` trains round 0 with CE. A run of a single round has α = 1 and
    learns nothing without it.
    The paper has a projection head; here z is the feature, as in that code.
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
    proto_pass_hyper,
    upload_means,
    uploaded_means,
)
from protofed.prototypes import contrast, owners_mean
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedProc(Method):
    """A prototype contrast that fades into cross-entropy."""

    name: ClassVar[str] = "fedproc"
    paper: ClassVar[str] = "Mu et al., FGCS 2023"
    travels: ClassVar[str] = "model, class means (up), global prototypes (down)"

    tau: float = hyper(1.0, "τ", "temperature of the contrast", above=0)
    warmup: bool = hyper(False, "", "cross-entropy in round 0, where the published code has 0")
    proto_pass: str = proto_pass_hyper("features of the class means")

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        return {"prototypes": no_prototypes(sizes)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """Both terms with the weights of this round."""
        z, logits = client.forward(batch.x)
        C = client.received["prototypes"]
        alpha = 1 - client.progress
        if self.warmup:
            alpha = alpha * (client.round > 0)
        gpc = contrast(z, batch.y, C["mean"][:, None], C["mask"][:, None], self.tau)
        return {"ce": (1 - alpha) * F.cross_entropy(logits, batch.y), "gpc": alpha * gpc}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """The class means."""
        return upload_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg, and the mean of each class over its owners."""
        C, mask = owners_mean(*uploaded_means(updates))
        return {"model": mean, "prototypes": {"mean": C, "mask": mask}}
