"""What the server of a deployment writes down, in the same folder as every run's.

Beside the folder lies its log. A deployment's checkpoint also has, for each site, the name of the
private state that belongs to its last accepted reply and the bytes of its messages, and the record
of the last round, whose accuracy comes with the next one's replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.deploy.members import Members
from protofed.deploy.spec import RunSpec
from protofed.federation.simulation import batchnorm_policy, weights_policy
from protofed.models import Network
from protofed.models.mixed import client_models
from protofed.runs.artifacts import ArtifactWriter
from protofed.runs.folder import Checkpoint, RunFolder
from protofed.runs.records import Record, Records
from protofed.runs.summary import summarize
from protofed.tree import Tree


@dataclass(frozen=True)
class Progress:
    """A run after a complete round."""

    round: int
    state: Tree
    accepted: dict[str, str]
    pending: Record | None


class Ledger:
    """The records, checkpoints and result of a deployed run, and what each site has sent."""

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        members: Members,
        network: Network,
    ) -> None:
        self.folder = RunFolder(path)
        self.spec, self.config, self.members = spec, spec.config, members
        self.records = Records()
        self.accepted: dict[str, str] = {}
        """Each site's private state as of the last checkpoint."""
        self.samples: dict[str, int] = {}
        self.tested: dict[str, int] = {}
        self.wire: dict[str, dict[str, int]] = {}
        """Bytes of each site's messages, of failed rounds and the last evaluation too."""
        self.batchnorm = batchnorm_policy(network, spec.config.method)
        self.weights = weights_policy(network, spec.config.method, spec.config.average)
        domains = {name: members.domain(name) for name in members.sites}
        self.artifacts = ArtifactWriter(
            self.folder, spec.config, spec.hash, spec.task.classes, domains
        )

    @contextmanager
    def opened(self, resume: bool, overwrite: bool) -> Iterator[Progress | None]:
        """Hold the folder for this run alone; yields what to resume from, if anything."""
        spec = self.spec
        facts = {**spec.facts.to_dict(), "run": spec.hash, "config": spec.config.hash}
        opened = self.folder.open(
            spec.config, spec.hash, facts, resume=resume, overwrite=overwrite, deployed=True
        )
        with opened as found:
            if found is None:
                yield None
                return
            self.records = self.folder.records()
            self.accepted = dict(found.extra["accepted"])
            self.samples, self.wire = dict(found.extra["samples"]), dict(found.extra["wire"])
            yield Progress(found.round, found.state, dict(self.accepted), found.pending)

    def append(self, record: Record) -> None:
        """Write a complete record."""
        self.records.append(record)
        self.folder.append_record(record)

    def checkpoint(self, progress: Progress) -> None:
        """Write what the run can resume from."""
        extra = {"accepted": progress.accepted, "samples": self.samples, "wire": self.wire}
        round, state, pending = progress.round, progress.state, progress.pending
        self.folder.save_checkpoint(
            Checkpoint(self.spec.hash, round, state, pending=pending, extra=extra)
        )
        self.accepted = dict(progress.accepted)

    def bill(self, wire: Mapping[str, Mapping[str, int]]) -> None:
        """Add the bytes of an exchange to each site's."""
        for name, count in wire.items():
            so_far = self.wire.setdefault(name, {"up": 0, "down": 0})
            for way, size in count.items():
                so_far[way] += size

    def finish(self, progress: Progress) -> dict[str, Any]:
        """After the last evaluation: write checkpoint, model, clients and summary."""
        self.checkpoint(progress)
        holds = "the global model"
        if self.config.method.evaluates != "global":
            holds = "what all sites share (model/...); their own entries stay with them"
        model = tree.copy({"model": progress.state.get("model", {})})
        self.folder.save_model(self.spec.hash, holds, model.get("model", {}))
        summary = self._summary()
        self.folder.save_clients(summary["clients"])
        self.folder.finish(summary)
        return summary

    def _summary(self) -> dict[str, Any]:
        sites = self.members.sites.values()
        models = client_models(self.config.model, list(self.members.sites))
        facts = self.spec.facts
        public: dict[str, Any] = {"public": dict(self.spec.public)} if self.spec.public else {}
        return summarize(
            facts.applied(self.config),
            self.records,
            hash=self.spec.hash,
            versions=facts.versions,
            data=f"Images of the {len(sites)} sites of {self.members.name}.",
            batchnorm=self.batchnorm,
            weights=self.weights,
            engine=f"{facts.engine} ({facts.engine_reason})",
            # a site has only its own test images: nobody is tested on another's
            evaluated="global" if self.config.method.evaluates == "global" else "clients",
            tested=self.tested,
            classes=list(self.spec.task.classes),
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
