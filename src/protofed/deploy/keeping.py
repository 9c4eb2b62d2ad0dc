"""The folder of a deployed run: the same files as every run's, written as carefully.

Beside the folder lies its log. The checkpoint also holds, of each site, the name of the private
state that belongs to its last accepted reply, and the record of the last round, whose accuracy
comes with the next one's replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.config import Config
from protofed.data import Task
from protofed.deploy.members import Members
from protofed.errors import ProtofedError
from protofed.federation.server import Server
from protofed.federation.simulation import batchnorm_policy, weights_policy
from protofed.files import write_atomic
from protofed.models import Network
from protofed.models.mixed import client_models
from protofed.runs.artifacts import Keeper
from protofed.runs.folder import append_record, complete_records, opened_folder
from protofed.runs.records import Record, Records, line
from protofed.runs.summary import summarize
from protofed.tree import Tree


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
        self,
        path: Path,
        config: Config,
        members: Members,
        task: Task,
        network: Network,
        public: Mapping[str, int] | None = None,
    ) -> None:
        self.path, self.config, self.members, self.task = path, config, members, task
        self.public = dict(public or {})
        self.records = Records()
        self.accepted: dict[str, str] = {}
        """Each site's private state as of the last checkpoint."""
        self.samples: dict[str, int] = {}
        self.tested: dict[str, int] = {}
        self.wire: dict[str, dict[str, int]] = {}
        """Bytes of each site's messages: of all rounds, failed ones and the last evaluation."""
        self.batchnorm = batchnorm_policy(network, config.method)
        self.weights = weights_policy(network, config.method, config.average)
        self.keeper = Keeper(config, path)

    @contextmanager
    def opened(self, resume: bool, overwrite: bool) -> Iterator[Kept | None]:
        """While it lasts the folder is this run's alone; gives what to go on from."""
        with opened_folder(self.config, self.path, resume, overwrite) as found:
            yield self._open(found)

    def _open(self, found: tuple[Tree, dict[str, Any]] | None) -> Kept | None:
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
            self.records = complete_records(self.path, complete, kept.round)
            self.accepted, self.samples = dict(kept.accepted), dict(about["samples"])
            self.wire = dict(about["wire"])
        write_atomic(self.path / "config.toml", self.config.toml())
        write_atomic(self.path / "rounds.jsonl", "".join(map(line, self.records)))
        return kept

    def append(self, record: Record) -> None:
        """Write a complete record, on disk before a checkpoint that counts on it."""
        self.records.append(record)
        append_record(self.path, record)

    def checkpoint(self, kept: Kept) -> None:
        """Write what the run can go on from."""
        about = {
            "round": kept.round,
            "hash": self.config.hash,
            "clients": {},
            "accepted": kept.accepted,
            "pending": kept.pending,
            "samples": self.samples,
            "wire": self.wire,
        }
        tree.save(kept.state, self.path / "checkpoint.safetensors", about)
        self.accepted = dict(kept.accepted)

    def bill(self, wire: Mapping[str, Mapping[str, int]]) -> None:
        """Add the bytes of an exchange to each site's bill."""
        for name, count in wire.items():
            so_far = self.wire.setdefault(name, {"up": 0, "down": 0})
            for way, size in count.items():
                so_far[way] += size

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
        sites = self.members.sites.values()
        models = client_models(self.config.model, list(self.members.sites))
        public: dict[str, Any] = {"public": self.public} if self.public else {}
        return summarize(
            self.config,
            self.records,
            data=f"Images of the {len(sites)} sites of {self.members.name}.",
            batchnorm=self.batchnorm,
            weights=self.weights,
            engine="flower (sites of a deployment)",
            # a site has its own test images only: nobody is tested on another's
            evaluated="global" if self.config.method.evaluates == "global" else "clients",
            tested=self.tested,
            classes=list(self.task.classes),
            **public,
            wire={name: self.wire[name] for name in self.members.sites if name in self.wire},
            clients=[
                {
                    "client": m.name,
                    "domain": m.domain,
                    "model": models[m.name],
                    "samples": self.samples.get(m.name, 0),
                }
                for m in sites
            ],
        )


class _View:
    """What a ``Keeper`` looks at of a federation."""

    def __init__(self, server: Server, members: Members, task: Task) -> None:
        self.server, self.model = server, server.state.get("model", {})
        self.sizes, self.sites, self.task = server.sizes, members, task
