"""The folder of a deployed run: the same files as every run's, written as carefully.

Beside the folder lies its log. The checkpoint also holds, of each site, the name of the private
state that belongs to its last accepted reply, and the record of the last round, whose accuracy
comes with the next one's replies.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protofed.config import Config
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation import tree
from protofed.federation.federation import batchnorm_policy, round_to
from protofed.federation.folder import open_folder
from protofed.federation.keep import Keeper
from protofed.federation.records import (
    SELECTION,
    Record,
    Records,
    last_mean,
    line,
    read_records,
)
from protofed.federation.server import Server
from protofed.federation.tree import Tree
from protofed.files import write_atomic
from protofed.flower.members import Members
from protofed.models import Network
from protofed.version import __version__


@dataclass(frozen=True)
class Kept:
    """What a run goes on from after a complete round."""

    round: int
    state: Tree
    accepted: dict[str, str]
    pending: Record | None


class RunFolder:
    """Opens, writes and finishes the folder."""

    def __init__(
        self, path: Path, config: Config, members: Members, task: Task, network: Network
    ) -> None:
        self.path, self.config, self.members, self.task = path, config, members, task
        self.records = Records()
        self.accepted: dict[str, str] = {}
        """Each site's private state as of the last checkpoint."""
        self.samples: dict[str, int] = {}
        self.tested: dict[str, int] = {}
        self.batchnorm = batchnorm_policy(network, config.method)
        self.keeper = Keeper(config, path)

    def open(self, resume: bool, overwrite: bool) -> Kept | None:
        """Make it ready; returns what to go on from."""
        found = open_folder(self.config, self.path, resume, overwrite)
        kept = None
        if found is not None:
            state, about = found
            if "accepted" not in about:
                raise ProtofedError(
                    f"'{self.path}' holds a run of the simulator, not of a deployment",
                    "choose another folder, or start anew with --overwrite",
                )
            kept = Kept(about["round"], state, about["accepted"], about["pending"])
            complete = kept.round - (kept.pending is not None)
            self.records = Records(read_records(self.path / "rounds.jsonl")[:complete])
            if len(self.records) != complete:
                raise ProtofedError(
                    f"'{self.path}' has a checkpoint of round {kept.round} but records of "
                    f"{len(self.records)} rounds",
                    "start anew with --overwrite",
                )
            self.accepted, self.samples = dict(kept.accepted), dict(about["samples"])
        write_atomic(self.path / "config.toml", self.config.toml())
        write_atomic(self.path / "rounds.jsonl", "".join(map(line, self.records)))
        return kept

    def append(self, record: Record) -> None:
        """Write a complete record, on disk before a checkpoint that counts on it."""
        self.records.append(record)
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(line(record))
            file.flush()
            os.fsync(file.fileno())

    def checkpoint(self, kept: Kept) -> None:
        """Write what the run can go on from."""
        about = {
            "round": kept.round,
            "hash": self.config.hash,
            "clients": {},
            "accepted": kept.accepted,
            "pending": kept.pending,
            "samples": self.samples,
        }
        tree.save(kept.state, self.path / "checkpoint.safetensors", about)
        self.accepted = dict(kept.accepted)

    def receive(self, round: int, name: str, message: Tree, classes: int) -> None:
        """Look at a site's message, of which an analysis may want the prototypes."""
        self.keeper.receive(round, name, message, classes)

    def keep(self, server: Server) -> None:
        """After a round: write what analyses want of it."""
        self.keeper.write(_View(server, self.members, self.task))  # type: ignore[arg-type]

    def finish(self, kept: Kept) -> dict[str, Any]:
        """After the last evaluation: checkpoint, model, clients and summary."""
        self.checkpoint(kept)
        model = tree.copy({"model": kept.state.get("model", {})})
        tree.save(model, self.path / "model.safetensors", {"hash": self.config.hash})
        summary = self._summary()
        clients = json.dumps(summary["clients"], indent=2, ensure_ascii=False)
        write_atomic(self.path / "clients.json", clients + "\n")
        text = json.dumps(summary, indent=2, ensure_ascii=False)
        write_atomic(self.path / "summary.json", text + "\n")
        return summary

    def _summary(self) -> dict[str, Any]:
        config, method, records = self.config, self.config.method, self.records
        return {
            "task": config.task,
            "data": f"Images of the {len(self.members.sites)} sites of {self.members.name}.",
            "skipped": [],
            "method": method.name,
            "hyper_parameters": method.options(),
            "protocol": config.protocol,
            "seed": config.seed,
            "hash": config.hash,
            "accuracy": last_mean(records),
            "selection": SELECTION,
            "evaluated": method.evaluates,
            "rounds": len(records),
            "bytes_up": sum(r["bytes_up"] for r in records),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "seconds": round_to(sum(sum(r["seconds"].values()) for r in records), 3),
            "batchnorm": self.batchnorm,
            "average": config.average,
            "precision": config.precision,
            "engine": "flower (sites of a deployment)",
            "device": config.device,
            "unseen": config.leave_out,
            "tested": self.tested,
            "classes": list(self.task.classes),
            "clients": [
                {"client": m.name, "domain": m.domain, "samples": self.samples.get(m.name, 0)}
                for m in self.members.sites.values()
            ],
            "versions": {
                "protofed": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


class _View:
    """What a ``Keeper`` looks at of a federation."""

    def __init__(self, server: Server, members: Members, task: Task) -> None:
        self.server, self.model = server, server.state.get("model", {})
        self.sizes, self.sites, self.task = server.sizes, members.sites, task
