"""StableFDG's style sharing and shifting, and its attention to what a class has in common.

Park, Han, Kim, Wang, Brinton, Moon: "StableFDG: Style and Attention Based
Learning for Federated Domain Generalization", NeurIPS 2023.

Each client trains on features in the styles of its own batch, spread out, and
in the styles of another client.

    style        s_i = [μ_i ; σ_i]: mean and standard deviation of each channel
                 of the first stage's map of sample i
    sharing      client m sends the mean m_m and the standard deviation v_m of
                 s_i over its samples, under the received model            (1)
    server       as FedAvg; sends each client the (m, v) of one other, by a
                 random derangement drawn in each round                    (2)
    shifting     with probability p for a batch of B: the first ⌊B/2⌋ samples
                 take as styles the ⌊B/2⌋ centers of k-means++ on the batch's
                 s_i (one iteration), the others
                     m + e ⊙ v,  e ~ N(0, 1),  σ ≥ 0                       (3)
                 x' = σ_new (x − μ_i)/σ_i + μ_new; no gradient through μ_i, σ_i
    highlighter  on the last stage's map x, with P positions: a 1×1 convolution
                 gives q and k (30 channels each), of length 1 at each position;
                     A = softmax over positions of
                         the mean over queries of ((q_i + q_j)/2)ᵀ k_i     (4)
                 j is the next sample of the same class in the batch; at test
                 and if there is none, j = i.
                 feature = [ mean of x ; Σ_P A·x ], twice as long          (5)
    client       CE
    travels      4C numbers up (1 KB with 64 channels); 4C for each client
                 down, of which it uses one client's: what its early features
                 look like on average, and how much they vary
    cost         a clean pass per round; ⌊B/2⌋ + 1 small steps of clustering

In round 0 there are no styles and no shifting, and none where a client has no
partner. A client that sits out keeps its place at the server, and one that has
sent nothing gets the style of anyone who has.

Deviations
    exploration   The paper's third part (oversampled rare classes, styles
         beyond those of the batch, MixStyle) is not here.
    (1)  The authors collect styles at the start of a round; here they come
         with an update and are used in the next round. 1e-6 is not added to
         v², whose divisor is the number of samples, not one less.
    (2)  The derangement is among all clients whose styles are known, not
         among the round's. All of them go to every client in one broadcast.
    (3)  The authors' code always shifts 16 of 32; its k-means++ tries several
         seeds each time and takes the best. Here the batch is cut in half,
         and each seed is drawn once (Arthur and Vassilvitskii, 2007).
    (4)  Where a class is alone in a batch, the authors take q from a second,
         class-balanced batch.
    (5)  In a CNN the first half of the feature is the encoder's own, which is
         not a mean over positions.
    averaging   plain in the authors' code; by sample counts here, as for every
         method (`--average uniform` changes it). They begin with pretrained
         networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from protofed.method import (
    Batch,
    Client,
    Method,
    Network,
    Output,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.prototypes import full_precision
from protofed.styles import restyle, style_of

CHANNELS = 30
"""The channels of q and k."""


@dataclass(frozen=True)
class HighlightedOutput(Output):
    """The output with j = i, and what it was made of: enough to pair samples later."""

    pooled: Tensor
    map: Tensor
    q: Tensor
    k: Tensor


class HighlightingNetwork(Network):
    """A backbone whose feature is joined with one that attends to some positions."""

    def __init__(self, backbone: Network, sizes: Sizes) -> None:
        *_, (self.last, stage) = backbone.stages.items()
        super().__init__(backbone.encoder, sizes.features + stage.channels, sizes.classes)
        self.attention = nn.Conv2d(stage.channels, 2 * CHANNELS, 1)

    def forward(self, x: Tensor) -> HighlightedOutput:
        maps: list[Tensor] = []

        def keep(stage: str, x: Tensor) -> Tensor:
            maps.append(x)
            return x

        with self.between([self.last], keep):
            pooled = self.encoder(x)
        (map_,) = maps
        q, k = map(unit, self.attention(map_).flatten(2).chunk(2, 1))
        parts = pooled, map_.flatten(2), q.mean(2), k
        feature, logits = self.highlighted(*parts)
        return HighlightedOutput(feature, logits, *parts)

    def highlighted(self, pooled: Tensor, map: Tensor, q: Tensor, k: Tensor) -> Output:
        """(4) and (5), of maps [B, C, P] with their mean query [B, 30] and keys [B, 30, P].

        The mean of the queries' products with a key is the product of the mean query with it.
        """
        feature = torch.cat([pooled, attended(map, q, k).to(pooled.dtype)], 1)
        return Output(feature, self.head(feature))


@dataclass(frozen=True)
class StableFDG(Method):
    """Styles of other clients and of the batch, and attention to what a class has in common."""

    name = "stablefdg"
    paper = "Park et al., NeurIPS 2023"
    protocol: ClassVar = {"batch": 32, "epochs": 5}
    size_limit = 50.0  # the gradient of a nearly flat map can be huge
    slots = Slots(
        up={"styles": "mean and spread of its styles"}, down={"styles": "another client's, for all"}
    )
    detached_terms = ("ce",)

    p: float = hyper(0.5, "p", "probability that a batch is shifted", least=0, most=1)
    stage: str = hyper("stage1", "", "the stage whose styles are shared and shifted")
    highlighter: bool = hyper(True, "", "whether the network has the highlighter, (4) and (5)")

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        return HighlightingNetwork(backbone, sizes) if self.highlighter else backbone

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """No style, for every client until it sends its own."""
        C = sizes.channels[self.stage]
        return {"styles": {"style": torch.zeros(1, 2, 2, C), "mask": torch.zeros(1)}}

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        return (self.stage,)

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        """(3)."""
        received = client.received["styles"]
        for_me_M = (received["id"] == client.id) * received["mask"]
        m, v = (received["style"] * for_me_M[:, None, None, None]).sum(0)
        own_B2C, kept = style_of(x).detach(), len(x) // 2
        spread = centers(own_B2C.flatten(1), client.uniform(kept, len(x)))
        drawn = m + client.normal(len(x) - kept, *m.shape) * v
        drawn = torch.stack([drawn[:, 0], drawn[:, 1].clamp(min=0)], 1)
        new_B2C = torch.cat([spread.view(kept, *m.shape), drawn])
        taken = (client.uniform(1) < self.p) & (for_me_M.sum() > 0)
        return restyle(x, own_B2C, torch.where(taken, new_B2C, own_B2C))

    def loss(self, client: Client, batch: Batch) -> Terms:
        out = client.forward(batch.x)
        if isinstance(out, HighlightedOutput):
            network = client.network
            assert isinstance(network, HighlightingNetwork)
            q = (out.q + out.q.index_select(0, next_of_class(batch.y))) / 2
            out = network.highlighted(out.pooled, out.map, q, out.k)
        return {"ce": client.cross_entropy(out.logits, batch.y)}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        return {"styles": {"style": client.styles(client.start)[self.stage]}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """FedAvg, and the round's styles in their clients' places."""
        sent = {u.name: u["styles"]["style"] for u in updates}
        return {"model": mean, "styles": server.each_style("styles", sent)}

    def broadcast(self, server: ServerView) -> Tree:
        """(2): for each client its partner's style; a client finds its place by its id."""
        kept = server.each_client("styles")
        there = kept["mask"].cpu().numpy() > 0
        partner = torch.from_numpy(partners(server.generator("styles"), there))
        styles = {
            "style": kept["style"][partner],
            "mask": (partner >= 0).to(kept["mask"].dtype),
            "id": server.client_ids(),
        }
        return {"model": server.state["model"], "styles": styles}


def partners(rng: np.random.Generator, there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each client, the place of another one that is ``there`` [M]; −1 if nobody is.

    Among those who are there it is a derangement, and all derangements are equally likely.
    """
    known = np.flatnonzero(there)
    if not known.size:
        return np.full(len(there), -1)
    found = rng.choice(known, len(there))
    if known.size == 1:
        found[known] = -1
        return found
    drawn = known
    while (drawn == known).any():
        drawn = rng.permutation(known)
    found[known] = drawn
    return found


def centers(s_BD: Tensor, uniform_kB: Tensor) -> Tensor:
    """k-means++ with one iteration: seeds with probability ∝ D², then the means of their members.

    D is the distance to the nearest seed so far. Seeds are drawn by a race of exponential
    variables: the first of those with rates D² is sample i's with probability D_i² / Σ D².
    """
    rate_B, nearest_B = torch.ones_like(s_BD[:, 0]), torch.full_like(s_BD[:, 0], torch.inf)
    seeds, distances = [], []
    for time_B in -uniform_kB.log():
        seed_1D = s_BD.index_select(0, (rate_B / time_B).argmax()[None])
        distance_B = (s_BD - seed_1D).square().sum(1)
        rate_B = nearest_B = torch.minimum(nearest_B, distance_B)
        seeds.append(seed_1D)
        distances.append(distance_B)
    if not seeds:
        return s_BD[:0]
    member_B = torch.stack(distances).argmin(0)
    of_kB = (member_B == torch.arange(len(seeds), device=s_BD.device)[:, None]).to(s_BD.dtype)
    size_k1 = of_kB.sum(1, keepdim=True)
    means_kD = of_kB @ s_BD / size_k1.clamp(min=1)
    # the second of two equal seeds has no members
    return torch.where(size_k1 > 0, means_kD, torch.cat(seeds))


def next_of_class(y: Tensor) -> Tensor:
    """For each sample, the next one of its class in the batch; after the last, the first."""
    at = torch.arange(len(y), device=y.device)
    steps_BB = (at - at[:, None] - 1) % len(y)  # to itself it is the whole way round
    return steps_BB.masked_fill(y != y[:, None], len(y)).argmin(1)


@full_precision
def unit(q: Tensor) -> Tensor:
    """Queries or keys [B, 30, P], of length 1 at each position."""
    return F.normalize(q, dim=1)


@full_precision
def attended(map_BCP: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Σ_P A·x of (5)."""
    A_BP = (q[:, :, None] * k).sum(1).softmax(1)
    return (map_BCP * A_BP[:, None]).sum(2)
