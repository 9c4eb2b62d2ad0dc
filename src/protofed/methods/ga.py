"""GA: a client that the aggregation hurts gets more weight in the next aggregation.

Zhang, Xu, Yao, Zhang, Tian, Wang: "Federated Domain Generalization with
Generalization Adjustment", CVPR 2023. Two methods: `fedavg_ga` trains like
FedAvg, `fedga` like FedProx (the form that I²PFL compares with).

    holdout   each client keeps a tenth of its training samples for scores
    gap       G_m = own_m − received_m, of accuracies on m's holdout:
              own_m of the model that m trained, received_m of the aggregate
              it went into. Positive: m was hurt. (Of losses: the reverse.)
    weights   a_m += (s_t / M) G_m / max_j |G_j|,  s_t = s_0 (1 − (t−1)/T);
              clamped to [0, 1], then divided by their sum; initially 1/M
    server    θ = Σ a_m θ_m over the round's clients (a renormalized): sample
              counts play no part
    cost      two evaluations on the holdout per round

A client scores the model it receives and the model it has trained, and sends
both scores with the latter. What it receives in round t (from 0) is the result
of round t − 1, so the server compares the received score of t with the own
score it remembers, adjusts a, and averages round t with the adjusted weights:
the order of the paper, with one message per round. (s_t is that of the round
being judged, counted from 1.) A client's first round has no gap. A client that
sat out is compared with its last own score, however old. A client without a
gap does not change its weight; where all gaps are 0, none does. If all clients
of a round have weight 0, they count the same. Test sets are not touched.

Deviations
    M    The authors' code has 3 in its place (their 3 domains); here it is
         the number of all clients. The paper is said to center the gaps at
         their mean first; neither their code nor this one does.
    The code behind I²PFL's rows computes the weights with the opposite sign,
    takes the score after aggregation on test data, and then ignores them.
    The validation split is the authors' own for PACS; here `holdout`.
    μ of `fedga` as for `fedprox`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protofed.method import Client, Method, ServerView, Slot, Slots, Tree, Updates, hyper
from protofed.methods.fedprox import FedProx


@dataclass(frozen=True)
class FedAvgGA(Method):
    """FedAvg with weights that follow the generalization gaps."""

    name = "fedavg_ga"
    paper = "Zhang et al., CVPR 2023"
    protocol: ClassVar = {"model": "resnet18", "batch": 16, "epochs": 5, "lr": 0.001}
    slots = Slots(
        up={"scores": "two scores on held-out samples"},
        server={"ga": "weight and last own score of every client"},
    )
    weighting = "generalization gaps"

    s0: float = hyper(0.2, "s_0", "step size of the weights in the first round", above=0, most=1)
    metric: str = hyper("accuracy", "", "score on the holdout", choices=("accuracy", "loss"))
    holdout: float = hyper(
        0.1, "", "fraction of a client's training samples held out for scores", above=0, most=0.9
    )

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        models = {"received": client.start, "own": client.model()}
        scores = {n: client.evaluate(m, "holdout")[self.metric] for n, m in models.items()}
        return {"scores": {n: torch.tensor(s, dtype=torch.float64) for n, s in scores.items()}}, {}

    def weights(self, server: ServerView, updates: Updates) -> Sequence[float]:
        """a of the round's clients, adjusted by the gaps in their scores."""
        places = [server.clients.index(u.name) for u in updates]
        a: list[float] = self._ledger(server, updates)["weight"][places].tolist()
        return a if any(a) else [1.0] * len(a)

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The average, the adjusted weights, and the own scores for the next round."""
        return {"model": mean, "ga": self._ledger(server, updates)}

    def broadcast(self, server: ServerView) -> Tree:
        return {"model": server.state["model"]}

    def _ledger(self, server: ServerView, updates: Updates) -> Slot:
        """What the server keeps about all M clients, in their order, after these scores."""
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

    name = "fedga"
    paper = "Zhang et al., CVPR 2023"

    mu: float = hyper(1e-4, "μ", "weight of the proximal term (textbook: 0.01)", least=0)


def adjusted(a_M: Tensor, gap_M: Tensor, step: float) -> Tensor:
    """a + (s/M) G/max|G|, clamped to [0, 1], divided by its sum; unchanged if all gaps are 0."""
    largest = gap_M.abs().max()
    if not largest > 0:
        return a_M
    moved = (a_M + step / len(a_M) * gap_M / largest).clamp(0, 1)
    return moved / moved.sum() if moved.sum() > 0 else a_M
