"""I²PFL: prototypes within a domain by MixUp, between domains by reweighting.

Le, Tun, Qiao, Nguyen, Kim, Hong: "Mitigating Domain Shift in Federated
Learning via Intra- and Inter-Domain Prototypes", arXiv 2501.08521, 2025.
Numbers are those of v2 (six authors, seven tables, eleven figures).

Between domains, a client whose class means lie far from the others' counts more
in the global ("generalized") prototypes, so that a small, unusual domain is not
drowned out. Within a domain, features are drawn to class means of mixed
features, which vary more than the plain ones.

Equations as printed; → says where each is computed, and how if it differs.

    (2)   p_m^k = 1/|S_m^k| Σ_{i ∈ S_m^k} h_i,  h_i = f(x_i)
          → method.Client.class_means. Algorithm 1 does it after training (post);
            here features of the last local epoch, as in FPL's code.
            `proto_pass`: last_epoch (default), post.
    (3)   μ^k = 1/M Σ_{m=1..M} p_m^k
          → prototypes.Prototypes.per_class_mean, over the owners of class k
            rather than all M clients.
    (4)   g^k = Σ_{m=1..M} (d_m^k/d^k) p_m^k,  d_m^k = ‖p_m^k − μ^k‖²,
          d^k = Σ_m d_m^k
          → prototypes.Prototypes.reweighted_mean. One owner, or equal
            prototypes: g = μ.
    (5)   G^{t+1} = β G^{t+1} + (1−β) G^t
          → prototypes.Prototypes.smoothed. Equation and algorithm put β = 0.99
            on the new prototypes, which is nearly no EMA. The text gives more
            weight to the past, and table 4, where EMA gains 1.1 to 2.8 points,
            fits that better. `ema`: as_written (default), as_text; the study
            `readings` runs both. A class absent from a round keeps its G.
    (6)   L_GPCL = −1/B Σ_{i=1..B} log exp(s(h_i,g⁺)/τ)
                   / Σ_{g^k ∈ G} exp(s(h_i,g^k)/τ)
          → prototypes.losses.contrast, s: the cosine. A sample whose class has
            no G adds 0 and still counts in the mean.
    (7)   h̃_i = γ h_i + (1−γ) h_j
          → prototypes.mixing.mixed_class_means. y_j ≠ y_i, j from the same batch
            (a batch of one class: APA is 0), one γ ~ Beta(α,α) per batch.
            Beta(α,α) is symmetric and labels are not mixed, so on average p̃ lies
            halfway to other classes; `gamma_max` takes max(γ, 1−γ), a variant of
            ours.
    (8)   p̃_m^k = 1/|S_m^k| Σ_{i ∈ S_m^k} h̃_i
          → prototypes.mixing.batch_means.
    (9)   L_APA = Σ_k ‖h_m^k − p̃_m^k‖²
          → I2PFL._apa. `apa_reduction`: mean (default) is (1/d) ‖h_i − p̃^{y_i}‖²
            per sample, mean over the batch; sum is that without 1/d;
            class_means is as printed, with the mean of the batch's features
            for h^k. As printed, "w/o MixUp" of table 6 would always be 0, and
            a sum over d = 512 dwarfs CE at λ = 10. p̃ is held constant
            (`detach`); otherwise both sides move, and may collapse.
    (10)  L = L_CE + λ_intra L_APA + λ_inter L_GPCL
          → I2PFL.loss.
    server: θ averaged by sample counts, as FedAvg

(1) is FedAvg's objective. p̃ never leaves the client. Only GPCL needs p and G:
with λ_inter = 0 they do not travel. In round 0 there is no G, and GPCL is 0.

Deviations: under (2), (3), (5), (7), (9).

Readings
    published  what the code, which is not public, most plausibly does; the
               protocol is FPL's (default)
    printed    equations and algorithm 1 to the letter: `proto_pass=post` (2),
               `apa_reduction=class_means` and `detach=false` (9). (5) is as
               printed in both.

Ablations
    table 4    `lambda_intra=0`, `lambda_inter=0`, `ema=off`
    table 5    `inter`: reweight, average, cluster (the mean of FINCH's last
               clusters)
    table 6    `mixup`: feature, input, none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
from protofed.prototypes import (
    Prototypes,
    batch_means,
    class_means,
    class_sums,
    consistency,
    contrast,
    mixed_class_means,
    partners,
)


@dataclass(frozen=True)
class I2PFL(Method):
    """Intra- and inter-domain prototypes."""

    name = "i2pfl"
    paper = "Le et al., arXiv 2025"
    protocol = "i2pfl"

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
    gamma_max: bool = hyper(False, "", "max(γ, 1−γ) for γ: stay closer to the image's own class")
    apa_reduction: str = hyper(
        "mean",
        "",
        "(9) of every sample, as mean or sum over the d dimensions; or of class means, summed",
        choices=("mean", "sum", "class_means"),
        printed="class_means",
    )
    detach: bool = hyper(True, "", "hold p̃ constant in (9)", printed=False)
    proto_pass: str = proto_pass_hyper("features of (2)", printed="post")

    @property
    def slots(self) -> Slots:
        if not self.lambda_inter:
            return Slots()
        return Slots(
            up={"prototypes": "class means"}, down={"prototypes": "generalized prototypes"}
        )

    @property
    def detached_terms(self) -> tuple[str, ...]:
        return ("apa",) if self.detach else ()

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        none = Prototypes.empty(sizes.classes, sizes.features)
        return {"prototypes": none.slot()} if self.lambda_inter else {}

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        """γ, one per batch."""
        gamma = rng.beta(self.alpha, self.alpha, size=steps)
        return {"gamma": np.maximum(gamma, 1 - gamma) if self.gamma_max else gamma}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(10)."""
        h, logits = client.forward(batch.x)
        terms = {"ce": client.cross_entropy(logits, batch.y)}
        if self.lambda_intra:
            terms["apa"] = self.lambda_intra * self._apa(client, batch, h)
        if self.lambda_inter:  # (6)
            G = Prototypes.of(client.received["prototypes"])
            terms["gpcl"] = self.lambda_inter * contrast(h, batch.y, G, self.tau)
        return terms

    def _apa(self, client: Client, batch: Batch, h: Tensor) -> Tensor:
        """(7) to (9)."""
        if self.mixup == "feature":
            p = mixed_prototypes(client, batch.y, h.detach() if self.detach else h)
        elif self.mixup == "none":
            p = batch_means(h, batch.y, client.classes)
        else:
            gamma = client.drawn["gamma"]
            j, mixable = partners(_scores(client, batch.y), batch.y)
            mixed = client.forward(gamma * batch.x + (1 - gamma) * batch.x[j]).feature
            p = batch_means(mixed, batch.y, client.classes, mixable.any())
        if self.apa_reduction != "class_means":
            return consistency(h, batch.y, p, self.apa_reduction, self.detach)  # (9)
        h_K = class_means(*class_sums(h, batch.y, client.classes))
        k = torch.arange(client.classes, device=h.device)
        return client.classes * consistency(h_K, k, p, "sum", self.detach)  # (9) as printed

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(2), which only GPCL needs."""
        return upload_class_means(client) if self.lambda_inter else {}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, and (3) to (5)."""
        if not self.lambda_inter:
            return {"model": mean}
        g = self._joined(clients_class_means(updates))
        share = {"as_written": self.beta, "as_text": 1 - self.beta, "off": 1.0}[self.ema]
        G = g.smoothed(Prototypes.of(server.state["prototypes"]), share)
        return {"model": mean, "prototypes": G.slot()}

    def _joined(self, p: Prototypes) -> Prototypes:
        """(3) and (4), or what table 5 puts in their place."""
        if self.inter == "reweight":
            return p.reweighted_mean()
        if self.inter == "average":
            return p.per_class_mean()
        return p.clustered().per_class_mean()


def mixed_prototypes(client: Client, y: Tensor, h: Tensor) -> Prototypes:
    """(7) and (8) of features, with the step's ``client.drawn["gamma"]``."""
    return mixed_class_means(h, y, client.drawn["gamma"], _scores(client, y), client.classes)


def _scores(client: Client, y: Tensor) -> Tensor:
    """The scores by which each sample's partner in (7) is drawn."""
    return client.uniform(len(y), len(y))
