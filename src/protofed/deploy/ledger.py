"""What the server of a deployment writes: a run's folder like any other, with its log next to it.

A deployment's checkpoint has, in addition, the name of the private state that belongs to each
site's last accepted reply, the bytes of its messages, and the record of the last round, whose
accuracy arrives with the next round's replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protofed.deploy.members import Members
from protofed.deploy.spec import RunSpec
from protofed.federation.simulation import batchnorm_policy, weights_policy
from protofed.models import Network
from protofed.models.mixed import client_models
from protofed.runs.artifacts import ArtifactWriter
from protofed.runs.folder import Checkpoint, RunFolder
from protofed.runs.model_file import ModelCard, StoredModel
from protofed.runs.records import Record
from protofed.runs.summary import pretrained, summarize
from protofed.tree import Tree


class Ledger:
    """The records, checkpoints and result of a deployed run, and what each site has sent."""

    def __init__(self, path: Path, spec: RunSpec, members: Members, network: Network) -> None:
        self.folder = RunFolder(path, members.checkpoints)
        self.spec, self.config, self.members = spec, spec.config, members
        self.kept: list[tuple[int, Mapping[str, str]]] = []
        """The round of each checkpoint and the private states it names, newest first."""
        self.samples: dict[str, int] = {}
        self.tested: dict[str, int] = {}
        self.wire: dict[str, dict[str, int]] = {}
        """Bytes of each site's messages, including failed rounds and the last evaluation."""
        method, average = spec.config.method, spec.config.average
        self.policies: dict[str, Any] = {
            "batchnorm": batchnorm_policy(network, method),
            "weights": weights_policy(network, method, average),
        }
        domains = {site.name: site.domain for site in members.sites.values()}
        self.artifacts = ArtifactWriter(
            self.folder, spec.config, spec.hash, spec.task.classes, domains
        )

    @contextmanager
    def opened(self, resume: bool, overwrite: bool) -> Iterator[Checkpoint | None]:
        """Hold the folder for this run alone; yields what to resume from, if anything."""
        config, hash = self.config, self.spec.hash
        facts = {**self.spec.facts.to_dict(), "run": hash, "config": config.hash}
        with self.folder.open(
            config, hash, facts, resume=resume, overwrite=overwrite, deployed=True
        ) as found:
            if found is not None:
                self._look()
                self.samples, self.wire = found.extra["samples"], found.extra["wire"]
            yield found

    def completed(
        self, round: int, state: Tree, pending: Record | None, **extra: Any
    ) -> Checkpoint:
        """The checkpoint of a completed round; its bytes still grow until it is written."""
        extra |= {"samples": self.samples, "wire": self.wire}
        rounds = self.config.rounds
        return Checkpoint(self.spec.hash, round, state, {}, pending, extra, rounds)

    def checkpoint(self, done: Checkpoint) -> None:
        again = bool(self.kept) and self.kept[0][0] == done.round
        self.folder.save_checkpoint(done, again)
        now = (done.round, done.extra["accepted"])
        self.kept = [now, *self.kept[again:]][: self.members.checkpoints]

    def states(self, site: str) -> list[str]:
        """The private states of a site that some checkpoint names, newest first."""
        found = (accepted.get(site) for _, accepted in self.kept)
        return list(dict.fromkeys(filter(None, found)))

    def go_back(self, most: int, excluded: Mapping[str, int]) -> Checkpoint:
        """Return to the newest checkpoint of at most that many rounds, without these sites."""
        found = self.folder.roll_back(most, excluded=excluded)
        self._look()
        return found

    def _look(self) -> None:
        kept = self.folder.kept_checkpoints().values()
        self.kept = [(done.round, done.extra["accepted"]) for done in kept]

    def count_bytes(self, wire: Mapping[str, Mapping[str, int]]) -> None:
        """Add the bytes of an exchange to each site's total."""
        for name, count in wire.items():
            so_far = self.wire.setdefault(name, {"up": 0, "down": 0})
            for way, size in count.items():
                so_far[way] += size

    def finish(self, done: Checkpoint, broadcast: Tree) -> dict[str, Any]:
        """After the last evaluation: write checkpoint, model, clients and summary."""
        self.checkpoint(done)
        holds = "the global model"
        if self.config.method.evaluates != "global":
            holds = "what all sites share (model/...); their own entries stay with them"
        summary = self._summary()
        config, task = self.spec.facts.applied(self.config), self.spec.task
        table, accuracy = summary["clients"], summary["accuracy"]
        card = ModelCard.of(config, task, self.spec.hash, table, accuracy, holds)
        self.folder.save_model(StoredModel.of(card, broadcast, config.method, {}))
        self.folder.save_clients(summary["clients"])
        self.folder.finish(summary)
        return summary

    def _summary(self) -> dict[str, Any]:
        facts, sites = self.spec.facts, self.members.sites
        public: dict[str, Any] = {"public": dict(self.spec.public)} if self.spec.public else {}
        models = client_models(self.config.model, list(sites))
        return summarize(
            facts.applied(self.config),
            self.folder.records(),
            hash=self.spec.hash,
            versions=facts.versions,
            data=f"Images of the {len(sites)} sites of {self.members.name}.",
            engine=f"{facts.engine} ({facts.engine_reason})",
            # a site has only its own test images, so no site is tested on another's
            evaluated="global" if self.config.method.evaluates == "global" else "clients",
            tested=self.tested,
            classes=list(self.spec.task.classes),
            wire={name: self.wire[name] for name in sites if name in self.wire},
            clients=[
                {
                    "client": name,
                    "domain": site.domain,
                    "model": models[name],
                    "samples": self.samples.get(name, 0),
                }
                for name, site in sites.items()
            ],
            **self.policies,
            **pretrained(self.config, facts),
            **public,
        )
