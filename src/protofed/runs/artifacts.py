"""What a run keeps from single rounds for analyses: prototypes and models.

``prototypes/<round>.safetensors`` has the prototypes that each client sent and those that the
server made of them; ``snapshots/<round>.safetensors`` has the global model. File names count rounds
from 1. The files do not affect the run. They are written before the checkpoint that covers their
round: if a crash comes in between, the round is repeated and its files get the same bits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protofed import tree
from protofed.config import Config
from protofed.federation.server import Server
from protofed.federation.simulation import Observer
from protofed.runs.folder import RunFolder
from protofed.tree import Slot, Tree

DEFAULT_COUNT = 10
"""How many rounds, besides the first, keep their prototypes if ``keep_rounds`` is not set."""
DEFAULT_MAX_BYTES = 2 << 20
"""If ``keep_rounds`` is not set, larger prototypes are kept for the last round only."""


class ArtifactWriter(Observer):
    """Writes what ``keep_rounds`` asks for into a run's folder.

    If it is not set, that is the prototypes of the first round and of ten rounds spread evenly up
    to the last, and no models. If it is set, the prototypes and the model of each round it names.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        config: Config,
        hash: str,
        classes: Sequence[str],
        domains: Mapping[str, str],
    ) -> None:
        """``domains`` has the domain of each client, in the federation's order.

        Without a ``folder`` nothing is written.
        """
        self.folder, self.config, self.hash = folder, config, hash
        self.classes, self.domains = classes, domains
        self.rounds = rounds_to_keep(config) if folder is not None else frozenset()
        named = config.keep_rounds is None or "last" in config.keep_rounds
        self._any_may_be_last = folder is not None and config.patience is not None and named
        self._sent: dict[str, Slot] = {}

    def reply(self, round: int, name: str, message: Tree) -> None:
        """Take the prototypes out of a client's message."""
        if not (round in self.rounds or self._any_may_be_last):
            return
        if found := prototype_entries(message, len(self.classes)):
            self._sent[name] = found

    def refused(self, round: int, name: str, why: str) -> None:
        """Forget the message of a client: it does not count."""
        self._sent.pop(name, None)

    def abandon(self) -> None:
        """Forget the messages of a round that will be repeated."""
        self._sent = {}

    def write(self, server: Server, last: bool = False) -> None:
        """Write what is kept from the round that the server has just finished.

        ``last``: the run stops early with it.
        """
        round = server.round  # counts from 1 here: the server has moved on to the next round
        # in the federation's order, whatever the order of arrival
        sent = {name: self._sent[name] for name in self.domains if name in self._sent}
        self._sent = {}
        last = (last and self._any_may_be_last) or round == self.config.rounds
        if self.folder is None or not (round in self.rounds or (last and self._any_may_be_last)):
            return
        explicit = self.config.keep_rounds is not None
        if explicit:
            model = tree.copy({"model": server.state.get("model", {})})
            self.folder.save_artifact("snapshots", round, model, {"hash": self.hash})
        if not sent:
            return
        down = prototype_entries(server.broadcast(), len(self.classes))
        # numbered as in the metadata's list: a client's name may not be valid as a slot's name
        kept = {"down": down, **{f"up{i}": slot for i, slot in enumerate(sent.values())}}
        if not explicit and not last and tree.nbytes(kept) > DEFAULT_MAX_BYTES:
            return
        clients = [{"client": name, "domain": self.domains[name]} for name in sent]
        metadata = {"hash": self.hash, "clients": clients, "classes": list(self.classes)}
        self.folder.save_artifact("prototypes", round, tree.copy(kept), metadata)


def rounds_to_keep(config: Config) -> frozenset[int]:
    """The rounds, from 1, from which something is kept."""
    last = config.rounds
    if config.keep_rounds is None:
        steps = min(DEFAULT_COUNT, last)
        return frozenset({1, *(round(last * i / steps) for i in range(1, steps + 1))})
    words: Mapping[str, set[int]] = {"last": {last}, "all": set(range(1, last + 1))}
    named = (words[r] if isinstance(r, str) else {r} for r in config.keep_rounds)
    return frozenset(r for rounds in named for r in rounds if r <= last)


def prototype_entries(message: Tree, classes: int) -> Slot:
    """The prototypes in a message, with keys ``slot.entry``.

    A slot holds prototypes if its ``mean`` is [classes, features] or [classes, clusters, features];
    its ``count`` and ``mask`` come along.
    """
    return {
        f"{slot}.{name}": entries[name]
        for slot, entries in message.items()
        if "mean" in entries and entries["mean"].ndim in (2, 3) and len(entries["mean"]) == classes
        for name in ("mean", "count", "mask")
        if name in entries
    }
