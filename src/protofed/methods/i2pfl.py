"""I²PFL: prototypes within a domain by MixUp, between domains by reweighting.

Le, Tun, Qiao, Nguyen, Kim, Hong: "Mitigating Domain Shift in Federated
Learning via Intra- and Inter-Domain Prototypes", arXiv 2501.08521, 2025.
Equation numbers are the paper's. h = f(x) is a feature, d its size.

    local prototypes   p_m^k = mean of h over client m's samples of class k     (2)
    inter-domain       μ^k = mean of p_m^k over the owners of class k           (3)
                       d_m^k = ‖p_m^k − μ^k‖²
                       g^k = Σ_m (d_m^k / Σ_m d_m^k) p_m^k                      (4)
                       G^k ← β g^k + (1−β) G^k                                  (5)
    GPCL               −log e^{cos(h,G^y)/τ} / Σ_k e^{cos(h,G^k)/τ}             (6)
    intra-domain       h̃_i = γ h_i + (1−γ) h_j, y_j ≠ y_i, γ ~ Beta(α,α)        (7)
                       p̃^k = mean of h̃_i over class k                           (8)
    APA                (1/d) ‖h_i − p̃^{y_i}‖², mean over the batch              (9)
    client             CE + λ_intra APA + λ_inter GPCL                         (10)
    server             θ averaged by sample counts, as FedAvg

The p̃ never leave the client. Only GPCL needs p and G: without it (λ_inter = 0)
they do not travel. Round 0 has no G: GPCL is 0. A sample whose class has no G
adds 0 to GPCL and still counts in its mean. A class absent from a round keeps
its G. One owner, or equal prototypes: g = μ.

Where the paper is ambiguous, and what is done
    (5)   Equation and algorithm put β = 0.99 on the new prototypes; the text
          says the past gets more weight. `ema`: as_written (default), as_text,
          off.
    (3)   1/M with missing classes: divided by the number of owners.
    (7)   j from the same batch (a batch of one class: APA is 0); one γ a batch.
          Beta(α,α) is symmetric and labels are not mixed, so on average p̃ lies
          halfway to other classes; `gamma_max` takes max(γ, 1−γ), our variant.
    (9)   Printed as Σ_k ‖h^k − p̃^k‖². Read per sample against its class's p̃
          (with class means, "w/o MixUp" of table 6 would be 0 always); the mean
          over d, since a sum over 512 would dwarf CE at λ = 10.
          `apa_reduction`: mean, sum. p̃ is held constant (`detach`), else both
          sides move, and may collapse.
    (2)   After training in algorithm 1; here features of the last local epoch,
          as in FPL's code. `proto_pass`: last_epoch, post.
The paper's ablations: `inter` = reweight / average / cluster (table 5; the mean
of FINCH's last clusters), `mixup` = feature / input / none (table 6),
`lambda_intra=0`, `lambda_inter=0`, `ema=off` (table 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    Method,
    ServerView,
    Sizes,
    Terms,
    Update,
    clustered,
    hyper,
    no_prototypes,
    owned,
    proto_pass_hyper,
    upload_means,
    uploaded_means,
)
from protofed.prototypes import (
    class_means,
    class_sums,
    consistency,
    contrast,
    full_precision,
    owners_mean,
    pad,
    per_class_mean,
    reweighted_mean,
    smoothed,
)
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class I2PFL(Method):
    """Intra- and inter-domain prototypes."""

    name: ClassVar[str] = "i2pfl"
    paper: ClassVar[str] = "Le et al., arXiv 2025"
    travels: ClassVar[str] = "model, class means (up), generalized prototypes (down)"

    tau: float = hyper(
        0.07,
        "τ",
        "temperature of GPCL (6)",
        above=0,
        per_task={"office_caltech": 0.02, "pacs": 0.04},
    )
    alpha: float = hyper(0.4, "α", "MixUp's Beta(α,α) (7)", above=0, per_task={"pacs": 0.2})
    lambda_intra: float = hyper(
        10.0, "λ_intra", "weight of APA (0 = off)", least=0, weight=True, per_task={"pacs": 2.0}
    )
    lambda_inter: float = hyper(1.0, "λ_inter", "weight of GPCL (0 = off)", least=0, weight=True)
    beta: float = hyper(
        0.99,
        "β",
        "share of the new prototypes in (5); of the past ones with ema=as_text",
        least=0,
        most=1,
    )
    ema: str = hyper(
        "as_written",
        "",
        "(5) as the equation has it, as the text says (β on the past), or none",
        choices=("as_written", "as_text", "off"),
    )
    inter: str = hyper(
        "reweight", "g", "how (4) joins the clients", choices=("reweight", "average", "cluster")
    )
    mixup: str = hyper(
        "feature",
        "",
        "what (7) mixes: features, images, or nothing",
        choices=("feature", "input", "none"),
    )
    gamma_max: bool = hyper(False, "", "max(γ, 1−γ) for γ: stay nearer to the own class")
    apa_reduction: str = hyper("mean", "", "(9) over the d dimensions", choices=("mean", "sum"))
    detach: bool = hyper(True, "", "hold p̃ constant in (9)")
    proto_pass: str = proto_pass_hyper("features of (2)")

    @property
    def constant_parts(self) -> tuple[str, ...]:
        """p̃ depends on the weights and is held constant."""
        return ("apa",) if self.detach else ()

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        return {"prototypes": no_prototypes(sizes)} if self.lambda_inter else {}

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        """γ, one a batch."""
        gamma = rng.beta(self.alpha, self.alpha, size=steps)
        return {"gamma": np.maximum(gamma, 1 - gamma) if self.gamma_max else gamma}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(10)."""
        h, logits = client.forward(batch.x)
        terms = {"ce": F.cross_entropy(logits, batch.y)}
        if self.lambda_intra:
            terms["apa"] = self.lambda_intra * self._apa(client, batch, h)
        if self.lambda_inter:
            G = client.received["prototypes"]
            gpcl = contrast(h, batch.y, G["mean"][:, None], G["mask"][:, None], self.tau)  # (6)
            terms["gpcl"] = self.lambda_inter * gpcl
        return terms

    def _apa(self, client: Client, batch: Batch, h: Tensor) -> Tensor:
        """(7) to (9)."""
        mixed, mixable = h, torch.ones_like(batch.y, dtype=torch.bool)
        if self.mixup != "none":
            gamma = client.drawn["gamma"]
            j, mixable = _partners(client, batch.y)
            if self.mixup == "feature":
                mixed = _mixed(h, h[j], gamma)
            else:
                mixed = client.forward(gamma * batch.x + (1 - gamma) * batch.x[j]).feature
        sums, counts = class_sums(mixed, batch.y, client.classes)
        prototypes = class_means(sums, counts)  # (8)
        # Mixing needs a second class in the batch: without one, APA is 0.
        there = (counts > 0) & mixable.any()
        if self.detach:
            return consistency(h, batch.y, prototypes, there, self.apa_reduction)
        size = h.shape[1] if self.apa_reduction == "mean" else 1
        return ((h - prototypes[batch.y]).square().sum(1) * there[batch.y]).mean() / size

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(2), which GPCL alone is for."""
        return upload_means(client) if self.lambda_inter else {}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg, and (3) to (5)."""
        if not self.lambda_inter:
            return {"model": mean}
        new, new_mask = self._joined(*uploaded_means(updates))
        old = server.state["prototypes"]
        share = {"as_written": self.beta, "as_text": 1 - self.beta, "off": 1.0}[self.ema]
        G, mask = smoothed(new, new_mask, old["mean"], old["mask"], share)
        return {"model": mean, "prototypes": {"mean": G, "mask": mask}}

    def _joined(self, p_MKd: Tensor, count_MK: Tensor) -> tuple[Tensor, Tensor]:
        """(3) and (4), or what table 5 puts in their place."""
        if self.inter == "reweight":
            return reweighted_mean(p_MKd, count_MK)
        if self.inter == "average":
            return owners_mean(p_MKd, count_MK)
        clusters = clustered(owned(p_MKd, count_MK))
        return per_class_mean(*pad(clusters, p_MKd.shape[2]))


@full_precision
def _mixed(h: Tensor, h_j: Tensor, gamma: Tensor) -> Tensor:
    """(7)."""
    return gamma * h + (1 - gamma) * h_j


def _partners(client: Client, y: Tensor) -> tuple[Tensor, Tensor]:
    """For each sample a random one of another class in the batch, and whether there is any."""
    other = y[:, None] != y
    score = client.uniform(len(y), len(y)).masked_fill(~other, -1)
    return score.argmax(1), other.any(1)
