"""What a run keeps of single rounds for analyses: prototypes and models.

``prototypes/<round>.safetensors`` has what each client sent up and what the server made of it,
``snapshots/<round>.safetensors`` the global model; rounds count from 1. No number of a run depends
on them. A file is written before the checkpoint that counts its round: after a crash the round is
repeated, and its file is written again with the same bits.
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
"""How many rounds' prototypes are kept if ``keep_rounds`` is not set."""
SMALL = 2 << 20
"""Bytes up to which they are kept then; those of the last round always are."""


class ArtifactWriter(Observer):
    """Writes what ``keep_rounds`` asks for into a run's folder.

    Not set, it means the prototypes of ten rounds spread over the run, including the last, and no
    models. Set, it means prototypes and model of the rounds it names, and nothing of others.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        config: Config,
        hash: str,
        classes: Sequence[str],
        domains: Mapping[str, str],
    ) -> None:
        """``domains`` has the domain of each client, in the federation's order."""
        self.folder, self.config, self.hash = folder, config, hash
        self.classes, self.domains = classes, domains
        self.rounds = rounds_to_keep(config) if folder is not None else frozenset()
        self._sent: dict[str, Slot] = {}

    def reply(self, round: int, name: str, message: Tree) -> None:
        """Take the prototypes out of a client's message; ``round`` counts from 0."""
        if round + 1 in self.rounds and (found := prototype_entries(message, len(self.classes))):
            self._sent[name] = found

    def abandon(self) -> None:
        """Forget the messages of a round that will be repeated."""
        self._sent = {}

    def write(self, server: Server) -> None:
        """Write what is kept of the round that the server has just closed."""
        round = server.round
        # in the federation's order, whatever the order of arrival
        sent = {name: self._sent[name] for name in self.domains if name in self._sent}
        self._sent = {}
        if self.folder is None or round not in self.rounds:
            return
        asked = self.config.keep_rounds is not None
        if asked:
            model = tree.copy({"model": server.state.get("model", {})})
            self.folder.save_artifact("snapshots", round, model, {"hash": self.hash})
        if not sent:
            return
        down = prototype_entries(server.broadcast(), len(self.classes))
        # clients by number: their names may have any character, a slot's may not
        kept = {"down": down, **{f"up{i}": slot for i, slot in enumerate(sent.values())}}
        if not asked and round != self.config.rounds and tree.nbytes(kept) > SMALL:
            return
        clients = [{"client": name, "domain": self.domains[name]} for name in sent]
        metadata = {"hash": self.hash, "clients": clients, "classes": list(self.classes)}
        self.folder.save_artifact("prototypes", round, tree.copy(kept), metadata)


def rounds_to_keep(config: Config) -> frozenset[int]:
    """The rounds, from 1, of which something is kept."""
    last = config.rounds
    if config.keep_rounds is None:
        steps = min(DEFAULT_COUNT, last)
        return frozenset({1, *(round(last * i / steps) for i in range(1, steps + 1))})
    words: Mapping[str, set[int]] = {"last": {last}, "all": set(range(1, last + 1))}
    named = (words[r] if isinstance(r, str) else {r} for r in config.keep_rounds)
    return frozenset(r for some in named for r in some if r <= last)


def prototype_entries(message: Tree, classes: int) -> Slot:
    """The prototypes in a message, as ``slot.entry``: [K, d] or [K, J, d] with count or mask."""
    return {
        f"{slot}.{name}": entries[name]
        for slot, entries in message.items()
        if "mean" in entries and entries["mean"].ndim in (2, 3) and len(entries["mean"]) == classes
        for name in ("mean", "count", "mask")
        if name in entries
    }
