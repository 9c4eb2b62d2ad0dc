"""FedDyn: a dynamic regularizer that makes local and global optima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning
Based on Dynamic Regularization", ICLR 2021.

Each client remembers in g_m how far its data pulled it in past rounds; the
linear term cancels that pull, so that the optimum of the regularized local
objective approaches the global one.

    client m    CE − ⟨g_m, θ⟩ + (α/2) ‖θ − θ^t‖²,  gradients clipped at norm 10
                then g_m ← g_m − α (θ_m − θ^t)
    server      h ← h − (α/M) Σ_{m active} (θ_m − θ^t),  M: all clients
                θ^{t+1} = mean_{m active} θ_m − h/α
    state       g_m at each client, h at the server, both initially 0 and both
                over trainable entries only; buffers are averaged
    cost        two passes over the weights per step, and clipping

Deviations
    In the code behind FPL's and I²PFL's rows the regularizer is computed on
    the *global* network's parameters: it has no gradient for the local model,
    and the server's correction is missing, so those rows are FedAvg.
    `variant=reference` reproduces them; the default is the algorithm.
    The authors scale α by 1/(M n_m/Σn); here α is the same for all clients.
    The authors also report the plain mean of the clients; here only θ is
    tested.
    With momentum 0.9 and BatchNorm the −h/α step can blow up: watch it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import (
    Batch,
    Client,
    Method,
    Phase,
    ServerView,
    Sizes,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
    inner_product,
    squared_distance,
    zeros,
)


@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg with a dual variable at every client."""

    name = "feddyn"
    paper = "Acar et al., ICLR 2021"

    alpha: float = hyper(0.01, "α", "strength of the regularizer", above=0)
    clip: float = hyper(10.0, "", "largest norm of a gradient", above=0)
    variant: str = hyper(
        "correct",
        "",
        "the algorithm, or what the published comparisons ran (FedAvg)",
        choices=("correct", "reference"),
    )

    @property
    def correct(self) -> bool:
        """Whether this is the algorithm rather than the reference's FedAvg."""
        return self.variant == "correct"

    @property
    def slots(self) -> Slots:
        if not self.correct:
            return Slots()
        return Slots(client={"g": "g_m, the dual variable"}, server={"h": "h, the correction"})

    @property
    def weighting(self) -> str:
        return "uniform" if self.correct else ""

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"h": zeros(model, sizes.parameters)} if self.correct else {}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        return {"g": zeros(model, sizes.parameters)} if self.correct else {}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        return (Phase(self.loss, clip=self.clip if self.correct else None),)

    def loss(self, client: Client, batch: Batch) -> Terms:
        terms = {"ce": client.cross_entropy(client.forward(batch.x).logits, batch.y)}
        if self.correct:
            terms["linear"] = -inner_product(client.parameters, client.mine["g"])
            distance = squared_distance(client.parameters, client.start)
            terms["quadratic"] = self.alpha / 2 * distance
        return terms

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """g_m ← g_m − α (θ_m − θ^t)."""
        if not self.correct:
            return {}, {}
        start, g = client.start, client.mine["g"]
        g = {n: g[n] - self.alpha * (p.detach() - start[n]) for n, p in client.parameters.items()}
        return {}, {"g": g}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        if not self.correct:
            return {"model": mean}
        start, rate = server.state["model"], self.alpha * (len(updates) / len(server.clients))
        h = {n: h - rate * (mean[n] - start[n]) for n, h in server.state["h"].items()}
        moved = {n: mean[n] - h[n] / self.alpha for n in h}
        return {"model": mean | moved, "h": h}

    def broadcast(self, server: ServerView) -> Tree:
        return {"model": server.state["model"]}
