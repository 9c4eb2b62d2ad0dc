"""FedSeProto: semantic features, separated from what only identifies the domain.

Lai, Fu, Liao, Chen, Zheng: "FedSeProto: Learning Semantic Prototype in
Federated Learning", ECAI 2024. Modules of a client n: general encoder F_n,
semantic and domain encoders F_n^s and F_n^d (one linear layer each), head H_n,
decoder G_n. z = F_n(x), z^s = F_n^s(z), z^d = F_n^d(z).

An image's feature is split in two: what identifies the class and what
identifies the domain. Low mutual information keeps the two apart, distillation
decides which is which, and only prototypes of the semantic half are shared.

Equations as printed; → says where each is computed, and how if it differs.

    (3)   c_g^k = 1/N^k Σ_{n=1..N^k} c_n^k
          → prototypes.Prototypes.per_class_mean, over the owners of class k.
    (9)   I(Z^s;Z^d) ≤ 1/|D_n| Σ_i ( KL[p(z_i^s|x_i) ‖ q(z_i^s)]
                       + KL[p(z_i^d|x_i) ‖ r(z_i^d)] + log(−t(x_i|z_i^s,z_i^d)) )
          log(−t) is read as −log t, the reconstruction error of (10).
    (10)  L_MI = 1/|D_n| Σ_i ( KL(z_i^s, N(0,1)) + KL(z_i^d, N(0,1)) )
                 + ℓ_MSE(x_i, G_n(z_i^s ∘ z_i^d))
          → to_normal, FedSeProto.loss. The encoders have no variance output:
            KL of a unit-variance Gaussian around z, ½ z² averaged over d
            (`kl=unit`, default); `kl=moments` takes the batch's mean and
            variance in each dimension. MSE is a mean over pixels and batch.
            `decoder_step` multiplies the decoder's gradient alone.
    (11)  L_KD = 1/|D_n| Σ_i ( −log exp(s_1) / (exp(s_1) + exp(s_2)) )
          s_1 = KL(H(z) ‖ H(z^s)), s_2 = KL(H(z) ‖ H(z^d))
          → distillation. As printed it equals softplus(s_2 − s_1), and
            minimizing it *raises* the semantic branch's divergence. Computed
            here: softplus(s_1 − s_2). `kd_sign`: corrected (default), printed.
            The teacher H(z), of the F being trained (not phase 1's), is held
            constant. The corrected sign raises s_2, clamped at 50; the printed
            one has no clamp.
    (12)  c_n^k = 1/|D_n^k| Σ_i F_n^s(F_n(x_i))
          → method.Client.class_means, after training: algorithm 1 says so, and
            no code says otherwise. `proto_pass`: post (default), last_epoch.
    (13)  L_Proto = 1/K Σ_k ( 1/|D_n^k| Σ_i ‖F_n^s(F_n(x_i)) − c_g^k‖² )
          → to_prototypes: over the batch's classes that have a c_g, and the
            mean over d, with λ = 1. `proto_reduction`: mean (default), sum
            (as printed: d times stronger, so use λ near 0.01 with it).
    (14)  L_CE = 1/|D_n| Σ_i −y_i log(H_n(z_i^s))
    (15)  L = L_CE + α L_KD + β L_MI + λ L_Proto
          → FedSeProto.loss. α, β, λ are in a supplement that was not
            available: 1, 1, 1 are ours. β was chosen among 0.01, 0.1, 1 and
            `decoder_step` among 1, 10, 100 by validation accuracy on unused
            training images of Office-Caltech (40 rounds, seeds 100 and 101): it
            is 58.0 to 59.0 for all that do not diverge, which is noise, and
            highest for β = 1 with step 1. What differs is the decoder: its
            error falls from 2.8 to 1.2 there, but only to 2.7 with β = 0.01.
    (16)  w = Σ_n |D_n|/|D| w_n
          → federation.server.Server.finish. w: F, F^s and H. F^d and G never
            leave the client.

(1) is FedAvg's objective, (2) defines a prototype in general, and (4) to (8)
derive (9).

Deviations under the equations, and where the paper is silent
    phases     (section 3.3.2) Phase 1 trains F and H with CE of H(z), phase 2
               all but H with (15). Algorithm 1 has no phases: phase 1 gets 2 of
               10 epochs (`first_phase`), and each at least one, so that with 1
               epoch a client trains 2.
    inference  H(z^s)
    F^s        starts as the identity, because H was fitted on z.
    decoder    a linear layer, then three transposed convolutions 128-64-32-3
               with ReLU between them.
    models     Where clients' models differ (section 3.4; `share=prototypes`),
               only prototypes travel, every client keeps all of its modules,
               and its own model is tested on every domain. `share=auto` does
               that where models differ, and the above elsewhere.
    In round 0 there is no c_g, and L_Proto is 0. A class absent from a round
    has no c_g in the next. With α = β = λ = 0 it is not FedAvg: F^s and the two
    phases remain.

Readings
    published  what the code, which is not public, most plausibly does (default)
    printed    equations and algorithm 1 to the letter: `kd_sign=printed` (11),
               `proto_reduction=sum` (13). The two phases stay: the text has them.

Ablations
    figure 3   `alpha=0` (without L_KD), `beta=0` (L_MI), `lam=0` (L_Proto). With
               β = 0.01 L_MI would be nearly off, and removing it would remove
               almost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.method import (
    Batch,
    Client,
    Entry,
    Network,
    Output,
    Phase,
    ProtofedError,
    PrototypeMethod,
    Shared,
    Sizes,
    Slots,
    Terms,
    hyper,
    proto_pass_hyper,
    share_hyper,
)
from protofed.prototypes import Prototypes, class_means, class_sums, full_precision

PRIVATE = ("domain.", "decoder.")
"""The entries that never leave the client."""


@dataclass(frozen=True)
class SeparatedOutput(Output):
    """z^s (as ``feature``) and its logits, together with z and z^d."""

    general: Tensor
    domain: Tensor


class SeparatedNetwork(Network):
    """A backbone followed by semantic and domain encoders, and a decoder of both."""

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

    def forward(self, x: Tensor) -> SeparatedOutput:
        """z^s and H(z^s), together with z and z^d."""
        z = self.encoder(x)
        z_s = self.semantic(z)
        return SeparatedOutput(z_s, self.head(z_s), z, self.domain(z))


@dataclass(frozen=True)
class FedSeProto(PrototypeMethod):
    """Semantic prototypes by mutual information and distillation."""

    name = "fedseproto"
    paper = "Lai et al., ECAI 2024"
    protocol: ClassVar = {"model": "cnn3"}  # the rest is in a supplement that was not obtained

    alpha: float = hyper(1.0, "α", "weight of L_KD (0 = off)", least=0)
    beta: float = hyper(1.0, "β", "weight of L_MI (0 = off)", least=0)
    lam: float = hyper(1.0, "λ", "weight of L_Proto (0 = off)", least=0)
    decoder_step: float = hyper(1.0, "", "factor of the decoder's gradient in (10)", above=0)
    first_phase: float = hyper(0.2, "", "share of the epochs that phase 1 gets", above=0, most=1)
    kd_sign: str = hyper(
        "corrected", "", "sign of (11)", choices=("corrected", "printed"), printed="printed"
    )
    kl: str = hyper("unit", "", "KL to N(0,1) in (10)", choices=("unit", "moments"))
    proto_reduction: str = hyper(
        "mean", "", "(13) over the d dimensions", choices=("mean", "sum"), printed="sum"
    )
    proto_pass: str = proto_pass_hyper("features of (12)", "post")
    share: str = share_hyper()

    @property
    def slots(self) -> Slots:
        words = "" if self.without_model else "encoder, semantic encoder, head"
        return replace(super().slots, model=words)

    @property
    def detached_terms(self) -> tuple[str, ...]:
        """The teacher's, and the one whose gradient is scaled."""
        return ("kd",) if self.decoder_step == 1 else ("kd", "mi_error")

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        return SeparatedNetwork(backbone, sizes)

    @property
    def sgd_only(self) -> str:
        return "" if self.decoder_step == 1 else "decoder_step has no effect on it"

    def shared(self, entry: Entry) -> Shared:
        return "no" if entry.name.startswith(PRIVATE) else super().shared(entry)

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """CE for F and H; then everything else, with H fixed."""
        first = min(max(1, int(self.first_phase * epochs + 0.5)), max(1, epochs - 1))
        return (
            Phase(self.basic, first, trainable=lambda n: n.startswith(("encoder.", "head."))),
            Phase(self.loss, max(1, epochs - first), trainable=lambda n: not n.startswith("head.")),
        )

    def basic(self, client: Client, batch: Batch) -> Terms:
        """Phase 1: CE of H(z)."""
        logits = client.network.head(client.network.encoder(batch.x))
        return {"basic": client.cross_entropy(logits, batch.y)}

    def loss(self, client: Client, batch: Batch) -> Terms:
        """Phase 2: (15)."""
        network, out = client.network, client.forward(batch.x)
        assert isinstance(network, SeparatedNetwork) and isinstance(out, SeparatedOutput)
        terms = {"ce": client.cross_entropy(out.logits, batch.y)}
        if self.alpha:
            from_z, from_z_d = network.head(out.general), network.head(out.domain)
            kd = distillation(from_z, out.logits, from_z_d, self.kd_sign)
            terms["kd"] = self.alpha * kd
        if self.beta:
            # scaled on both sides of the decoder, so that only its own gradient changes
            both = scaled_gradient(torch.cat([out.feature, out.domain], 1), 1 / self.decoder_step)
            error = F.mse_loss(network.decoder(both).to(batch.x.dtype), batch.x)
            kl = to_normal(out.feature, self.kl) + to_normal(out.domain, self.kl)
            terms["mi_kl"] = self.beta * kl
            terms["mi_error"] = self.beta * scaled_gradient(error, self.decoder_step)
        if self.lam:
            C = Prototypes.of(client.received["prototypes"])
            distance = to_prototypes(out.feature, batch.y, C, self.proto_reduction)
            terms["proto"] = self.lam * distance
        return terms


@full_precision
def distillation(teacher: Tensor, semantic: Tensor, domain: Tensor, sign: str) -> Tensor:
    """(11) from the three logits [B, K]: batch mean of softplus(s_1 − s_2), or as printed."""
    target = teacher.detach().log_softmax(1)
    s1, s2 = (
        F.kl_div(logits.log_softmax(1), target, reduction="none", log_target=True).sum(1)
        for logits in (semantic, domain)
    )
    if sign == "printed":
        return F.softplus(s2 - s1).mean()
    # without the clamp the domain branch would be pushed away forever
    return F.softplus(s1 - s2.clamp(max=50)).mean()


def scaled_gradient(value: Tensor, factor: float) -> Tensor:
    """The same value, with ``factor`` times its gradient."""
    if factor == 1:
        return value
    return value.detach() + factor * (value - value.detach())


@full_precision
def to_normal(z: Tensor, kind: str) -> Tensor:
    """KL of features [B, d] to N(0,1), averaged over d."""
    if kind == "unit":
        return 0.5 * z.square().mean()
    mean, variance = z.mean(0), z.var(0, unbiased=False) + 1e-6
    return 0.5 * (mean.square() + variance - variance.log() - 1).mean()


@full_precision
def to_prototypes(z: Tensor, y: Tensor, prototypes: Prototypes, reduction: str) -> Tensor:
    """(13): each class's mean distance to its prototype, averaged over the batch's classes."""
    mean_Kd, mask_K = prototypes
    square_B = (z - mean_Kd.detach()[y]).square().sum(1) / (
        z.shape[1] if reduction == "mean" else 1
    )
    sum_K1, count_K = class_sums(square_B[:, None], y, len(mask_K))
    present = (count_K > 0) & (mask_K > 0)
    per_class = class_means(sum_K1, count_K)[:, 0].masked_fill(~present, 0)
    return per_class.sum() / present.sum().clamp(min=1)
