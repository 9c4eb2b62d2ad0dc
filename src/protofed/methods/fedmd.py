"""FedMD: clients agree on what they say of public images.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation",
arXiv 2019. Clients have models of their own, and all see N public images
x_1 ... x_N, other ones in every round, without labels. h_m is client m's model up
to its logits.

    (1) communicate    ℓ_m = h_m(x_1), ..., h_m(x_N) go up            [N, K]
    (2) aggregate      ℓ = mean of ℓ_m over the clients of the round
    (3) digest         min (1/NK) Σ |h_m(x_i) − ℓ_i|, before
    (4) revisit        min CE on the client's own samples

(1) is at the end of a round, for the public images of the next one: its digest is
what the round begins with. The first rounds (`warm_up`, at least one) have none.

Where the paper is silent or other, and what is done
    public set    A parameter, `public`. `unused` (default): training images that no
         client holds, as many of each domain that has clients, without their
         labels; a domain's name: those of that domain alone; a task's name: its
         training images; `folder:PATH`: all images below that folder. Never a test
         image of the task. N (`images`) is 2,000, or what there is. FedSeProto's
         table 3 does not say what it took. Between machines whose images are their
         own, each has a copy of such a folder (docs/deploy.md).
    transfer learning    The paper first trains every model on the labeled public
         set, then on its own. There are no public labels here: the first is left
         out, and `warm_up` rounds stand for the second. Clients that have hardly
         learned anything hold each other there: where a round has few steps, take
         more.
    (1)  Models are in evaluation mode; a public benchmark has them in training
         mode. Public images are not augmented.
    (3)  One pass in batches of 256 with Adam, learning rate 0.001, of the authors'
         range.
    A round without any reply leaves ℓ as it was, for images that are gone: the next
    digest is then 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    Phase,
    PublicImages,
    ServerView,
    Terms,
    Update,
    hyper,
)
from protofed.prototypes import full_precision
from protofed.tree import Slot, Tree


@dataclass(frozen=True)
class FedMD(Method):
    """Distillation to the clients' mean logits on public images."""

    name: ClassVar[str] = "fedmd"
    paper: ClassVar[str] = "Li, Wang, arXiv 2019"
    travels: ClassVar[str] = "logits of public images (up), their mean (down)"

    public: str = hyper(
        "unused",
        "",
        "the public images: unused (by any client), a domain's name, a task's name, folder:PATH",
    )
    images: int = hyper(2000, "N", "public images a round, if there are as many", least=1)
    warm_up: int = hyper(1, "", "rounds of (4) alone before the first digest", least=1)
    digest_epochs: int = hyper(1, "", "passes of (3)", least=1)
    digest_batch: int = hyper(256, "", "batch size of (3)", least=1)
    digest_lr: float = hyper(0.001, "", "learning rate of (3), by Adam", above=0)

    @property
    def public_images(self) -> PublicImages:
        """N of the chosen ones."""
        return PublicImages(self.public, self.images)

    @property
    def evaluates(self) -> str:
        """Every client its own model, on all domains."""
        return "everyone"

    def shared(self, entry: Entry) -> Literal["no"]:
        """No entry of a model travels."""
        return "no"

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """(3) and (4)."""
        digest = Phase(
            self.digest,
            self.digest_epochs,
            batch=self.digest_batch,
            lr=self.digest_lr,
            optimizer="adam",
            data="public",
        )
        revisit = Phase(self.loss)
        return (digest, revisit) if round >= self.warm_up else (revisit,)

    def digest(self, client: Client, batch: Batch) -> Terms:
        """(3)."""
        consensus = client.received["consensus"]
        away = apart(client.forward(batch.x).logits, consensus["logits"][batch.rows])
        return {"digest": away * (consensus["round"] == client.round)}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        return {"logits": {"public": client.public_logits()}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """(2), and the round whose images it is of."""
        logits = torch.stack([u["logits"]["public"] for u in updates]).mean(0)
        return {"consensus": {"logits": logits, "round": torch.tensor(server.round + 1)}}


@full_precision
def apart(logits_BK: Tensor, target_BK: Tensor) -> Tensor:
    """The mean absolute error of (3)."""
    return F.l1_loss(logits_BK, target_BK)
