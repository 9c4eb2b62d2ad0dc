"""What a run keeps of single rounds for analyses: prototypes and models.

``prototypes/<round>.safetensors`` has what each client sent up and what the server made of it,
``snapshots/<round>.safetensors`` the global model; rounds count from 1. Only looks: no number of
a run depends on it. A file is written before the checkpoint that counts its round in, so that
after a crash the round is repeated and its file written once more, with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from protofed import tree
from protofed.config import Config
from protofed.tree import Slot, Tree

if TYPE_CHECKING:
    from protofed.federation.simulation import Federation

FOLDERS = ("prototypes", "snapshots")
SPREAD = 10
"""Rounds whose prototypes are kept if nothing is said."""
SMALL = 2 << 20
"""Bytes up to which they are; the last round's always."""


class Keeper:
    """Keeps in a run's folder what ``keep_rounds`` asks for.

    Without it: the prototypes of ten rounds spread over the run, the last among them, and no
    models. With it: prototypes and model of the rounds it names, and nothing of others.
    """

    def __init__(self, config: Config, folder: Path | None) -> None:
        self.config, self.folder = config, folder
        self.rounds = kept_rounds(config) if folder is not None else frozenset()
        self._sent: dict[str, Slot] = {}

    def receive(self, round: int, name: str, message: Tree, classes: int) -> None:
        """Look at a client's message as it comes in; ``round`` counts from 0."""
        if round + 1 in self.rounds and (found := prototype_entries(message, classes)):
            self._sent[name] = found

    def abandon(self) -> None:
        """Forget the messages of a round that is done again."""
        self._sent = {}

    def write(self, federation: Federation) -> None:
        """After the round: write what is kept of it."""
        server, round = federation.server, federation.server.round
        # in the federation's order, whatever the order of arrival
        sent = {name: self._sent[name] for name in server.clients if name in self._sent}
        self._sent = {}
        if self.folder is None or round not in self.rounds:
            return
        metadata = {"round": round, "hash": self.config.hash}
        if self.config.keep_rounds is not None:
            path = self.folder / "snapshots" / f"{round}.safetensors"
            tree.save(tree.copy({"model": federation.model}), path, metadata)
        if not sent:
            return
        down = prototype_entries(server.broadcast(), federation.sizes.classes)
        # clients by number: their names may hold any character, a slot's may not
        kept = {"down": down, **{f"up{i}": slot for i, slot in enumerate(sent.values())}}
        unasked = self.config.keep_rounds is None and round != self.config.rounds
        if unasked and tree.nbytes(kept) > SMALL:
            return
        domain = federation.sites.domain
        clients = [{"client": name, "domain": domain(name)} for name in sent]
        metadata |= {"clients": clients, "classes": list(federation.task.classes)}
        tree.save(tree.copy(kept), self.folder / "prototypes" / f"{round}.safetensors", metadata)


def kept_rounds(config: Config) -> frozenset[int]:
    """The rounds of which something is kept, counted from 1."""
    last = config.rounds
    if config.keep_rounds is None:
        steps = min(SPREAD, last)
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
