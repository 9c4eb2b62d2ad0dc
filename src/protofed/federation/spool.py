"""The messages of a round until it is complete: in memory up to a limit, then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from protofed import tree
from protofed.tree import Slot, Tree

MEMORY_LIMIT = 2 << 30
"""Bytes of messages that a round keeps in memory; further ones go to disk."""


class Spool:
    """Holds the messages of one round by the client's name."""

    def __init__(self, limit: int = MEMORY_LIMIT, device: torch.device | str = "cpu") -> None:
        self.limit, self.device = limit, device
        self.used = 0
        self._memory: dict[str, Tree] = {}
        self._disk: dict[str, dict[str, Path]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._written = 0

    def put(self, name: str, message: Tree) -> None:
        """Keep a message. On disk, each slot is a file of its own."""
        size = tree.nbytes(message)
        self.used -= tree.nbytes(self._memory.pop(name, {}))
        message = {slot: entries for slot, entries in message.items() if entries}
        if self.used + size <= self.limit:
            self._memory[name] = message
            self.used += size
            return
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="protofed-spool-")
        at = Path(self._folder.name) / str(self._written)
        self._written += 1
        self._disk[name] = {slot: at / f"{slot}.safetensors" for slot in message}
        for slot, path in self._disk[name].items():
            tree.save({slot: message[slot]}, path)

    def get(self, name: str, slot: str) -> Slot:
        """A slot of a message; empty if the message does not have it."""
        if name in self._memory:
            return self._memory[name].get(slot, {})
        path = self._disk[name].get(slot)
        return tree.to(tree.load(path)[0], self.device)[slot] if path else {}

    def in_memory(self) -> dict[str, Tree]:
        """The messages that are in memory, by what an error should call them."""
        return {f"{name}'s message": message for name, message in self._memory.items()}

    def close(self) -> None:
        """Drop all messages and remove their files."""
        self._memory.clear()
        self._disk.clear()
        self.used = 0
        if self._folder:
            self._folder.cleanup()
            self._folder = None
