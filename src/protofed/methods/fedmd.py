"""FedMD: clients agree on what they say about public images.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation",
arXiv 2019. Clients have models of their own, and all see N public images
x_1 ... x_N without labels, different ones in every round. h_m is client m's model
up to its logits.

    (1) communicate    ℓ_m = h_m(x_1), ..., h_m(x_N) go up            [N, K]
    (2) aggregate      ℓ = mean of ℓ_m over the clients of the round
    (3) digest         min (1/NK) Σ |h_m(x_i) − ℓ_i|, before
    (4) revisit        min CE on the client's own samples

(1) happens at the end of a round, on the public images of the next one, which
starts with (3). The first rounds (`warm_up`, at least one) skip (3).

Where the paper is silent or differs, and what is done here
    public set    A hyper-parameter, `public`. `unused` (default): training images
         that no client holds, equally many from each domain that has clients,
         without their labels; a domain's name: those of that domain alone; a task's
         name: its training images; `folder:PATH`: all images below that folder.
         Never a test image of the task. N (`images`) is 2,000, or as many as there
         are. FedSeProto's table 3 does not say what it used. Between machines that
         keep their images to themselves, each has a copy of such a folder
         (docs/deploy.md).
    transfer learning    The paper first trains every model on the labeled public
         set, then on its own. There are no public labels here: the first step is
         left out, and `warm_up` rounds stand for the second. Clients that have
         hardly learned anything hold each other back: where a round has few steps,
         use more of them.
    (1)  Models are in evaluation mode; a public benchmark has them in training
         mode. Public images are not augmented.
    (3)  One epoch in batches of 256 with Adam at learning rate 0.001, within the
         authors' range.
    A round without any reply leaves ℓ as it was, for images that are gone, or leaves
    none: the term of the next digest is then 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from protofed.method import (
    Batch,
    Client,
    Entry,
    Method,
    Phase,
    PublicImages,
    ServerView,
    Shared,
    Slot,
    Slots,
    Terms,
    Tree,
    Updates,
    hyper,
)
from protofed.prototypes import full_precision


@dataclass(frozen=True)
class FedMD(Method):
    """Distillation to the clients' mean logits on public images."""

    name = "fedmd"
    paper = "Li, Wang, arXiv 2019"
    slots = Slots(
        model="",
        up={"logits": "logits of public images"},
        down={"consensus": "mean logits of public images"},
    )
    evaluates = "everyone"

    public: str = hyper(
        "unused",
        "",
        "the public images: unused (by any client), a domain's name, a task's name, folder:PATH",
    )
    images: int = hyper(2000, "N", "public images per round, if there are as many", least=1)
    warm_up: int = hyper(1, "", "rounds of (4) alone before the first digest", least=1)
    digest_epochs: int = hyper(1, "", "epochs of (3)", least=1)
    digest_batch: int = hyper(256, "", "batch size of (3)", least=1)
    digest_lr: float = hyper(0.001, "", "Adam's learning rate in (3)", above=0)

    @property
    def public_images(self) -> PublicImages:
        return PublicImages(self.public, self.images)

    def shared(self, entry: Entry) -> Shared:
        return "no"

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
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
        logits = client.forward(batch.x).logits
        if "consensus" not in client.received:  # no round has had a reply yet
            return {"digest": 0 * logits.sum()}
        consensus = client.received["consensus"]
        distance = full_precision(F.l1_loss)(logits, consensus["logits"][batch.rows])
        return {"digest": distance * (consensus["round"] == client.round)}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """(1)."""
        return {"logits": {"public": client.public_logits()}}, {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """(2), and the round whose images it is about."""
        logits = torch.stack([u["logits"]["public"] for u in updates]).mean(0)
        return {"consensus": {"logits": logits, "round": torch.tensor(server.round + 1)}}
