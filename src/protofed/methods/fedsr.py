"""FedSR: a representation kept simple: in its norm and in what it says beyond the label.

Nguyen, Torr, Lim: "FedSR: A Simple and Effective Domain Generalization Method
for Federated Learning", NeurIPS 2022.

A feature that is short and says little beyond the label has less room for what
is peculiar to a domain.

    feature     μ, s = two halves of a linear layer on f(x),  σ = softplus(s)
                z = μ + σ ε,  ε ~ N(0, 1): one sample per step
    L2R         mean of ‖z‖ (not squared)
    CMI         mean of Σ_d KL( N(Cμ, (Cσ)²) ‖ N(r_y, ρ_y²) ), ρ = softplus(ρ')
    client      CE(head(z)) + c1 L2R + c2 CMI
    inference   mean of softmax(head(z)) over 20 samples of z
    server      encoder, the layer of μ and s, and head averaged
    kept        r (initially 0), ρ' (1) and the scalar C (1) are learned by each
                client and never leave it; a prediction does not need them
    cost        a d×2d layer; predictions sample 20 times

Round 0 is no exception. A class that a client does not have leaves its row of
r and ρ' without a gradient. With c1 = c2 = 0 it is not FedAvg: the sampled
feature remains.

Deviations
    averaging   plain in the authors' code; by sample counts here, as for every
         method (`--average uniform` changes it). Their local training is 5
         mini-batches per round; here it is the protocol's epochs.
    network     the authors widen the backbone's last layer to 2 d; here a
         layer d → 2 d follows the encoder, so that all methods share it.
    σ    1e-6 is added, because the logarithm in CMI is unbounded below. C may
         become negative; only its square counts, so log |C| is used.
    c2   0.001 for PACS in their description, 0.0005 as their code's default.
    The network's feature, wherever one is asked for, is z: what the head reads.
    The 20 ε of a prediction are drawn once per round and used for all images,
    so that scores do not depend on how images are batched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    Network,
    Output,
    Shared,
    Sizes,
    Slots,
    Terms,
    hyper,
)
from protofed.prototypes import full_precision

PRIVATE = "reference."
"""The entries that never leave the client."""


@dataclass(frozen=True)
class SampledOutput(Output):
    """z (as ``feature``) and its logits, with the Gaussian that z was drawn from."""

    mu: Tensor
    sigma: Tensor


class GaussianNetwork(Network):
    """A backbone followed by a layer that gives μ and s, and a client's reference."""

    def __init__(self, backbone: Network, sizes: Sizes) -> None:
        super().__init__(backbone.encoder, sizes.features, sizes.classes)
        self.head = backbone.head
        self.gaussian = nn.Linear(sizes.features, 2 * sizes.features)
        shape = (sizes.classes, sizes.features)
        own = [("r", torch.zeros(shape)), ("rho", torch.ones(shape)), ("C", torch.ones(()))]
        self.reference = nn.ParameterDict(own)  # rho is ρ'

    def distribution(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ [B, d]."""
        return _mean_and_deviation(self.gaussian(self.encoder(x)))


@dataclass(frozen=True)
class FedSR(Method):
    """A probabilistic feature, kept short and close to one Gaussian per class."""

    name = "fedsr"
    paper = "Nguyen, Torr, Lim, NeurIPS 2022"
    slots = Slots(model="encoder, Gaussian layer, head")

    c1: float = hyper(0.01, "c1", "weight of L2R (0 = off)", least=0)
    c2: float = hyper(0.001, "c2", "weight of CMI (0 = off)", least=0)
    z_samples: int = hyper(20, "", "samples of z per prediction", least=1)

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        return GaussianNetwork(backbone, sizes)

    def shared(self, entry: Entry) -> Shared:
        return "no" if entry.name.startswith(PRIVATE) else "both"

    def forward(self, client: Client, x: Tensor) -> SampledOutput:
        """One sample of z, and its logits."""
        network = client.network
        assert isinstance(network, GaussianNetwork)
        mu, sigma = network.distribution(x)
        z = mu + sigma * client.normal(*mu.shape)
        return SampledOutput(z, network.head(z), mu, sigma)

    def loss(self, client: Client, batch: Batch) -> Terms:
        network, out = client.network, client.forward(batch.x)
        assert isinstance(network, GaussianNetwork) and isinstance(out, SampledOutput)
        terms = {"ce": client.cross_entropy(out.logits, batch.y)}
        if self.c1:
            terms["l2r"] = self.c1 * out.feature.norm(dim=1).mean()
        if self.c2:
            own = network.reference
            terms["cmi"] = self.c2 * cmi(out.mu, out.sigma, batch.y, own["r"], own["rho"], own["C"])
        return terms

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """The mean of the samples' softmax, as logits."""
        network = client.network
        assert isinstance(network, GaussianNetwork)
        mu, sigma = network.distribution(x)
        epsilon = client.normal(self.z_samples, 1, mu.shape[1])
        return mean_softmax(network.head(mu + sigma * epsilon)).log()


@full_precision
def _mean_and_deviation(both: Tensor) -> tuple[Tensor, Tensor]:
    mu, s = both.chunk(2, 1)
    return mu, F.softplus(s) + 1e-6


@full_precision
def mean_softmax(logits_SBK: Tensor) -> Tensor:
    """Class probabilities [B, K], averaged over S samples."""
    return logits_SBK.softmax(2).mean(0)


@full_precision
def cmi(mu: Tensor, sigma: Tensor, y: Tensor, r: Tensor, rho: Tensor, C: Tensor) -> Tensor:
    """Batch mean of Σ_d KL( N(Cμ, (Cσ)²) ‖ N(r_y, ρ_y²) ), ρ = softplus of ``rho``."""
    # a product rather than an index: its gradient adds up in a fixed order
    own_BK = (y[:, None] == torch.arange(len(r), device=y.device)).to(r.dtype)
    r_B, rho_B = own_BK @ r, own_BK @ F.softplus(rho)
    scaled = C.abs() * sigma
    square = scaled.square() + (C * mu - r_B).square()
    kl = rho_B.log() - scaled.log() + square / (2 * rho_B.square()) - 0.5
    return kl.sum(1).mean()
