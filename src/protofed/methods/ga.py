"""GA: a client that the aggregation hurts gets more weight in the next one.

Zhang, Xu, Yao, Zhang, Tian, Wang: "Federated Domain Generalization with
Generalization Adjustment", CVPR 2023. Two methods: `fedavg_ga` trains as
FedAvg, `fedga` as FedProx (the form that I²PFL compares with).

    holdout   each client keeps a tenth of its training samples for scores
    gap       G_m = own_m − received_m, of accuracies on m's holdout:
              own_m of the model that m trained, received_m of the aggregate
              it went into. Positive: m was hurt. (Of losses: the reverse.)
    weights   a_m += (s_t / M) G_m / max_j |G_j|,  s_t = s_0 (1 − (t−1)/T);
              cut to [0, 1], divided by their sum; 1/M at first
    server    θ = Σ a_m θ_m over the round's clients (a renormalized): sample
              counts play no part

A client scores the model it receives and the model it has trained, and sends
both numbers with the latter. What it receives in round t (from 0) is what
became of round t − 1, so the server holds the received score of t against the
own score it remembers, moves a, and averages round t with the moved weights:
the order of the paper, with one message a round. (s_t is that of the round
being judged, counted from 1.) A client's first round has no gap. A client that
sat out is held against its last own score, however old. A client without a gap
makes no step; where all gaps are 0 nobody does. If all clients of a round have
weight 0, they count the same. Test sets are not touched.

Deviations
    M    The authors' code has 3 in its place (their 3 domains); here it is
         the number of all clients. The paper is said to center the gaps at
         their mean first; their code does not, nor is it done here.
    The code behind I²PFL's rows computes the weights with the opposite sign,
    the score after aggregation on test data, and then ignores them.
    The validation split is the authors' own for PACS; here `holdout`.
    μ of `fedga` as for `fedprox`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protofed.method import Client, Method, ServerView, Update, hyper
from protofed.methods.fedprox import FedProx
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedAvgGA(Method):
    """FedAvg with weights that follow the generalization gaps."""

    name: ClassVar[str] = "fedavg_ga"
    paper: ClassVar[str] = "Zhang et al., CVPR 2023"
    travels: ClassVar[str] = "model; two scores on held-out samples (up)"

    s0: float = hyper(0.2, "s_0", "step size of the weights in the first round", above=0, most=1)
    metric: str = hyper("accuracy", "", "score on the holdout", choices=("accuracy", "loss"))
    holdout: float = hyper(
        0.1, "", "share of a client's training samples kept for its scores", above=0, most=0.9
    )

    @property
    def weighing(self) -> str:
        """a."""
        return "generalization gaps"

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """The scores of the received model and of the client's own."""
        models = {"received": client.start, "own": client.model()}
        scores = {n: client.evaluate(m, "holdout")[self.metric] for n, m in models.items()}
        return {"scores": {n: torch.tensor(s, dtype=torch.float64) for n, s in scores.items()}}, {}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float]:
        """a of the round's clients, moved by the gaps that their scores tell."""
        places = [server.clients.index(u.name) for u in updates]
        a: list[float] = self._ledger(server, updates)["weight"][places].tolist()
        return a if any(a) else [1.0] * len(a)

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """The average, the moved weights, and the own scores for the next round."""
        return {"model": mean, "ga": self._ledger(server, updates)}

    def broadcast(self, server: ServerView) -> Tree:
        """The weights stay at the server."""
        return {"model": server.state["model"]}

    def _ledger(self, server: ServerView, updates: Sequence[Update]) -> Slot:
        """What the server keeps of all M clients, in their order, after these scores."""
        M = len(server.clients)
        none = torch.zeros(M, dtype=torch.float64)
        first = {"weight": none + 1 / M, "own": none, "seen": none}
        old = {n: t.cpu() for n, t in (server.state.get("ga") or first).items()}
        own, seen, gap = old["own"].clone(), old["seen"].clone(), none.clone()
        for update in updates:
            m, scores = server.clients.index(update.name), update["scores"]
            if seen[m]:
                gap[m] = own[m] - scores["received"].cpu()
            own[m], seen[m] = scores["own"], 1
        hurt = gap if self.metric == "accuracy" else -gap
        step = self.s0 * (1 - (server.round - 1) / server.rounds)
        return {"weight": adjusted(old["weight"], hurt, step), "own": own, "seen": seen}


@dataclass(frozen=True)
class FedGA(FedAvgGA, FedProx):
    """FedProx with weights that follow the generalization gaps."""

    name: ClassVar[str] = "fedga"
    paper: ClassVar[str] = "Zhang et al., CVPR 2023"
    travels: ClassVar[str] = FedAvgGA.travels

    mu: float = hyper(1e-4, "μ", "weight of the proximal term (textbook: 0.01)", least=0)


def adjusted(a_M: Tensor, gap_M: Tensor, step: float) -> Tensor:
    """a + (s/M) G/max|G|, cut to [0, 1], divided by its sum; as it was if all gaps are 0."""
    largest = gap_M.abs().max()
    if not largest > 0:
        return a_M
    moved = (a_M + step / len(a_M) * gap_M / largest).clamp(0, 1)
    return moved / moved.sum() if moved.sum() > 0 else a_M
