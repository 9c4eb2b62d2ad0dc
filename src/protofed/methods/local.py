"""Local: every client for itself.

No paper of its own: the row "Local" of comparisons, e.g. of table 3 in Lai, Fu, Liao, Chen,
Zheng: "FedSeProto: Learning Semantic Prototype in Federated Learning", ECAI 2024.

    client m    CE on its own samples, going on from its own model
    server      nothing; nothing travels
    test        every client's model on every domain: a domain's accuracy is the mean
                over all clients; on its own domain alone, the mean over that domain's

Deviations
    A round is what it is for other methods (so many epochs, momentum starts anew), so
    that after as many rounds a client has taken as many steps.
    Clients with the same model start from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from protofed.method import Entry, Method


@dataclass(frozen=True)
class Local(Method):
    """No federation at all."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "Lai et al., ECAI 2024"
    travels: ClassVar[str] = "nothing"

    @property
    def evaluates(self) -> str:
        """Every client its own model, on all domains."""
        return "everyone"

    def shared(self, entry: Entry) -> Literal["no"]:
        """Nothing."""
        return "no"
