"""FedProc: contrast with global prototypes first, cross-entropy later.

Mu, Shen, Cheng, Geng, Fu, Zhang, Zhang: "FedProc: Prototypical Contrastive
Federated Learning on Non-IID Data", 2021 (FGCS 2023).

    prototypes    C^k = mean of the class means of the round's clients with class k
    client        α_t L_gpc + (1 − α_t) CE,  α_t = 1 − t/(T−1),  t = 0 .. T−1
                  L_gpc = −log e^{cos(z,C^y)/τ} / Σ_k e^{cos(z,C^k)/τ},  τ = 1
    server        as FedAvg

Deviations
    Round 0: α = 1 and there are no prototypes, so the loss is identically 0
    and nothing learns except BatchNorm statistics (and the weights decay). The
    code behind FPL's and I²PFL's rows does that, and so does the default.
    `warmup=true` trains round 0 with CE. A run of a single round has α = 1 and
    learns nothing without it.
    The paper has a projection head; here z is the feature, as in that code.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Batch, Client, PrototypeMethod, Terms, hyper, proto_pass_hyper
from protofed.prototypes import Prototypes, contrast


@dataclass(frozen=True)
class FedProc(PrototypeMethod):
    """A prototype contrast that fades into cross-entropy."""

    name = "fedproc"
    paper = "Mu et al., FGCS 2023"

    tau: float = hyper(1.0, "τ", "temperature of the contrast", above=0)
    warmup: bool = hyper(False, "", "cross-entropy in round 0, where the published code has 0")
    proto_pass: str = proto_pass_hyper("features of the class means")

    def loss(self, client: Client, batch: Batch) -> Terms:
        z, logits = client.forward(batch.x)
        alpha = 1 - client.progress
        if self.warmup:
            alpha = alpha * (client.round > 0)
        C = Prototypes.of(client.received["prototypes"])
        gpc = contrast(z, batch.y, C, self.tau)
        return {"ce": (1 - alpha) * client.cross_entropy(logits, batch.y), "gpc": alpha * gpc}
