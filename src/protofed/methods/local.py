"""Local: every client on its own.

No paper of its own: it is the row "Local" of comparisons, e.g. of table 3 in Lai,
Fu, Liao, Chen, Zheng: "FedSeProto: Learning Semantic Prototype in Federated
Learning", ECAI 2024. It shows what a federation adds.

    client m    CE on its own samples, continuing from its own model
    server      nothing; nothing travels
    test        every client's model on every domain: a domain's accuracy is the mean
                over all clients; next to it, the mean over that domain's own clients

Deviations
    A round is the same as for other methods (as many epochs, fresh momentum), so after
    the same number of rounds a client has taken the same number of steps.
    Clients with the same model start from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.method import Entry, Method, Shared, Slots


@dataclass(frozen=True)
class Local(Method):
    """No federation at all."""

    name = "local"
    paper = "Lai et al., ECAI 2024"
    slots = Slots(model="")
    evaluates = "everyone"

    def shared(self, entry: Entry) -> Shared:
        return "no"
