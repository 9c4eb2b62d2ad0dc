"""FedSeProto: semantic features, separated from what only tells the domain.

Lai, Fu, Liao, Chen, Zheng: "FedSeProto: Learning Semantic Prototype in
Federated Learning", ECAI 2024. Equation numbers are the paper's. Modules of a
client: general encoder F, semantic and domain encoders F^s, F^d (one linear
layer each), head H, decoder G.

    z = F(x),  z^s = F^s(z),  z^d = F^d(z),  p(·) = softmax H(·)
    prototypes    C_m^k = mean of z^s over class k                            (12)
                  C^k = mean of C_m^k over the owners of class k               (3)
    L_MI          mean[KL(z^s, N(0,1)) + KL(z^d, N(0,1))]
                  + MSE(x, G(z^s, z^d))                                       (10)
    L_KD          s1 = KL(p(z) ‖ p(z^s)),  s2 = KL(p(z) ‖ p(z^d)):
                  −log e^{−s1} / (e^{−s1} + e^{−s2}) = softplus(s1 − s2)
                                                        (11, sign corrected)
    L_Proto       mean over classes of mean over their samples of
                  ‖z^s − C^k‖²                                                (13)
    phase 1       trains F and H with CE of H(z)                   (section 3.3.2)
    phase 2       H stays; F, F^s, F^d, G train with                          (15)
                  CE of H(z^s) (14) + α L_KD + β L_MI + λ L_Proto
    server        F, F^s, H averaged by sample counts                         (16)
    inference     H(z^s)

Where clients' models differ (section 3.4; `share=prototypes`) nothing but prototypes
travels, every client keeps all of its modules, and its own model is tested on every
domain. `share=auto` is that where models differ, and the above elsewhere.

F^d and G never leave the client. Round 0 has no C: L_Proto is 0. A class absent
from a round has no C in the next. With α = β = λ = 0 it is not FedAvg: F^s and
the two phases remain.

Where the paper is silent or wrong, and what is done
    (11)  As printed it equals softplus(s2 − s1): minimizing it *raises* the
          semantic branch's divergence. `kd_sign`: corrected (default), printed.
          The teacher p(z), of the F being trained (not phase 1's), is held
          constant; s2 is cut at 50.
    (10)  The encoders have no variance output: KL of a unit-variance Gaussian
          around z, ½ z² averaged over d (`kl=unit`); `kl=moments` takes the
          batch's mean and variance in each dimension. Eq. 9's log(−t) is read
          as −log t, the reconstruction error: mean over pixels and batch.
    (12)  After training in algorithm 1; `proto_pass` as in FPL.
    (13)  1/K over all classes in the paper; here over the batch's classes that
          have a C. Mean over d beside λ = 1 (`proto_reduction=sum` as printed;
          take λ near 0.01 with it).
    α, β, λ are in a supplement that could not be had: 1, 0.01, 1 are ours.
    Phases (algorithm 1 has none): 2 of 10 epochs for phase 1 (`first_phase`),
    at least one each, so that with 1 epoch a client trains 2.
    F^s starts as the identity, because H was fitted on z. Decoder: a linear
    layer, then three transposed convolutions 128-64-32-3, ReLU between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.errors import ProtofedError
from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    Phase,
    ServerView,
    Sizes,
    Terms,
    Update,
    hyper,
    no_prototypes,
    proto_pass_hyper,
    share_hyper,
    upload_means,
    uploaded_means,
)
from protofed.models import Network, Output
from protofed.prototypes import class_means, class_sums, full_precision, owners_mean
from protofed.tree import Slot, Tree

PRIVATE = ("domain.", "decoder.")
"""What never leaves the client."""


class Separated(Output):
    """z^s (as ``feature``) and its logits, with the features it was separated from."""

    general: Tensor
    domain: Tensor


class SeparatedNetwork(Network):
    """A backbone with semantic and domain encoders behind it, and a decoder of both."""

    def __init__(self, backbone: Network, sizes: Sizes) -> None:
        super().__init__(backbone.encoder, sizes.features, sizes.classes)
        if sizes.image % 8:
            raise ProtofedError(
                f"FedSeProto's decoder cannot make images of {sizes.image}×{sizes.image}",
                "use an image size that is a multiple of 8",
            )
        d, base = sizes.features, sizes.image // 8
        self.head = backbone.head
        self.semantic = nn.Linear(d, d)
        nn.init.eye_(self.semantic.weight)
        nn.init.zeros_(self.semantic.bias)
        self.domain = nn.Linear(d, d)
        self.decoder = nn.Sequential(
            nn.Linear(2 * d, 128 * base * base),
            nn.ReLU(),
            nn.Unflatten(1, (128, base, base)),
            nn.ConvTranspose2d(128, 64, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
        )

    def decode(self, out: Separated) -> Tensor:
        """G(z^s, z^d)."""
        return self.decoder(torch.cat([out.feature, out.domain], 1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Separated:
        """z^s and H(z^s), with z and z^d beside them."""
        z = self.encoder(x)
        z_s = self.semantic(z)
        out = Separated(z_s, self.head(z_s))
        out.general, out.domain = z, self.domain(z)
        return out


@dataclass(frozen=True)
class FedSeProto(Method):
    """Semantic prototypes by mutual information and distillation."""

    name: ClassVar[str] = "fedseproto"
    paper: ClassVar[str] = "Lai et al., ECAI 2024"
    travels: ClassVar[str] = (
        "encoder, semantic encoder, head (unless models differ); prototypes (both ways)"
    )

    alpha: float = hyper(1.0, "α", "weight of L_KD (0 = off)", least=0)
    beta: float = hyper(0.01, "β", "weight of L_MI (0 = off)", least=0)
    lam: float = hyper(1.0, "λ", "weight of L_Proto (0 = off)", least=0)
    first_phase: float = hyper(0.2, "", "share of the epochs that phase 1 gets", above=0, most=1)
    kd_sign: str = hyper("corrected", "", "sign of (11)", choices=("corrected", "printed"))
    kl: str = hyper("unit", "", "KL to N(0,1) in (10)", choices=("unit", "moments"))
    proto_reduction: str = hyper("mean", "", "(13) over the d dimensions", choices=("mean", "sum"))
    proto_pass: str = proto_pass_hyper("features of (12)")
    share: str = share_hyper()

    @property
    def evaluates(self) -> str:
        """The global model; without one, every client its own, on all domains."""
        return "everyone" if self.share == "prototypes" else "global"

    def apart(self) -> Self:
        """Prototypes alone."""
        return replace(self, share="prototypes") if self.share == "auto" else self

    @property
    def constant_parts(self) -> tuple[str, ...]:
        """The teacher p(z) is held constant."""
        return ("kd",)

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        """The backbone with F^s, F^d and G."""
        return SeparatedNetwork(backbone, sizes)

    def shared(self, entry: Entry) -> Literal["both", "no"]:
        """All but F^d and G travels, or nothing does."""
        alone = self.share == "prototypes"
        return "no" if alone or entry.name.startswith(PRIVATE) else "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No prototypes yet."""
        return {"prototypes": no_prototypes(sizes)}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """CE for F and H; then everything else with H as it is."""
        first = min(max(1, int(self.first_phase * epochs + 0.5)), max(1, epochs - 1))
        return (
            Phase(self.basic, first, trainable=lambda n: n.startswith(("encoder.", "head."))),
            Phase(self.loss, max(1, epochs - first), trainable=lambda n: not n.startswith("head.")),
        )

    def basic(self, client: Client, batch: Batch) -> Terms:
        """Phase 1: CE of H(z)."""
        logits = client.network.head(client.network.encoder(batch.x))
        return {"basic": F.cross_entropy(logits, batch.y)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """(15)."""
        network, out = client.network, client.forward(batch.x)
        assert isinstance(network, SeparatedNetwork) and isinstance(out, Separated)
        terms = {"ce": F.cross_entropy(out.logits, batch.y)}
        if self.alpha:
            from_z, from_z_d = network.head(out.general), network.head(out.domain)
            kd = distillation(from_z, out.logits, from_z_d, self.kd_sign)
            terms["kd"] = self.alpha * kd
        if self.beta:
            image = network.decode(out)
            kl = to_normal(out.feature, self.kl) + to_normal(out.domain, self.kl)
            terms["mi"] = self.beta * (kl + F.mse_loss(image.to(batch.x.dtype), batch.x))
        if self.lam:
            C = client.received["prototypes"]
            drawn = to_prototypes(out.feature, batch.y, C["mean"], C["mask"], self.proto_reduction)
            terms["proto"] = self.lam * drawn
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """Class means of z^s."""
        return upload_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """FedAvg of what is shared, and (3)."""
        C, mask = owners_mean(*uploaded_means(updates))
        return {"model": mean, "prototypes": {"mean": C, "mask": mask}}


@full_precision
def distillation(teacher: Tensor, semantic: Tensor, domain: Tensor, sign: str) -> Tensor:
    """(11) from the three logits [B, K]: batch mean of softplus(s1 − s2), or as printed."""
    target = teacher.detach().log_softmax(1)
    s1, s2 = (
        F.kl_div(logits.log_softmax(1), target, reduction="none", log_target=True).sum(1)
        for logits in (semantic, domain)
    )
    s2 = s2.clamp(max=50)  # the domain branch is pushed away without end otherwise
    return F.softplus(s1 - s2 if sign == "corrected" else s2 - s1).mean()


@full_precision
def to_normal(z: Tensor, kind: str) -> Tensor:
    """KL of features [B, d] to N(0,1), averaged over d."""
    if kind == "unit":
        return 0.5 * z.square().mean()
    mean, variance = z.mean(0), z.var(0, unbiased=False) + 1e-6
    return 0.5 * (mean.square() + variance - variance.log() - 1).mean()


@full_precision
def to_prototypes(z: Tensor, y: Tensor, mean_Kd: Tensor, mask_K: Tensor, reduction: str) -> Tensor:
    """(13): over the batch's classes with a prototype, the mean of each one's mean distance."""
    square_B = (z - mean_Kd.detach()[y]).square().sum(1) / (
        z.shape[1] if reduction == "mean" else 1
    )
    sum_K1, count_K = class_sums(square_B[:, None], y, len(mask_K))
    present = (count_K > 0) & (mask_K > 0)
    per_class = class_means(sum_K1, count_K)[:, 0].masked_fill(~present, 0)
    return per_class.sum() / present.sum().clamp(min=1)
