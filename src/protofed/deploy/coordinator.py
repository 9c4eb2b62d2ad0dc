"""The server's side of a deployment: the same ``Server``, over Flower's grid instead of an engine.

A round is one message to each site and one back. The message carries what the server broadcasts;
sites of the round train on it, and all of them evaluate it on their own test images, which gives
the accuracy of the round *before*: the server has no images. After the last round one more
message, without training, closes the run.

A site that is lost, late or sends something odd is named in the log and in the round's record, and
the round goes on with the others. With fewer than the minimum nothing is averaged: the round is
tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofed import tree
from protofed.config import Config
from protofed.data import Task
from protofed.deploy import wire
from protofed.deploy.checks import check_answer, expect
from protofed.deploy.ledger import Ledger, Progress
from protofed.deploy.members import Members
from protofed.deploy.messages import RECORD, Answer, Request, write
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.server import Server
from protofed.federation.simulation import initial_network, make_setup, round_to
from protofed.models.mixed import client_models
from protofed.observers.progress import accuracies
from protofed.runs.records import Record
from protofed.tree import Tree

log = logging.getLogger("protofed.deploy")
ATTEMPTS = 3
"""How often a round with too few replies is tried before the run ends."""
UNREADABLE = 3
"""How often a reply that cannot be fetched is tried."""
MOST_WORDS = 500
"""Characters that are kept of what is wrong with a reply: some of them are the site's own."""


@dataclass
class Exchange:
    """What came of a round's messages."""

    answers: dict[str, Answer] = field(default_factory=dict)
    losses: dict[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    up: int = 0
    """Bytes of tensor data, as every run counts them."""
    down: int = 0
    wire: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of each site's messages as Flower serializes them."""
    seconds: float = 0.0


class Coordinator:
    """Runs a federation's rounds over a grid."""

    def __init__(
        self,
        grid: Grid,
        members: Members,
        config: Config,
        task: Task,
        folder: Path,
        *,
        public: Mapping[str, int] | None = None,
        poll: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid, self.members, self.config, self.task = grid, members, config, task
        self.poll, self.sleep = poll, sleep
        models = client_models(config.model, list(members.sites))
        network = initial_network(config, task, next(iter(models.values())))
        self.sizes = make_setup(config, task, network).sizes
        self.server = Server(
            config.method,
            network,
            self.sizes,
            list(members.sites),
            rounds=config.rounds,
            seed=config.seed,
            participation=config.participation,
            average=config.average,
        )
        self.ledger = Ledger(folder, config, members, task, network, public)
        self.accepted: dict[str, str] = {}
        """Of each site the private state that belongs to its last accepted reply."""
        self.pending: Record | None = None
        """The record of the last round, which lacks its accuracy."""
        self.expected = expect(config, task, self.server, public)
        self.failures = 0

    def run(self, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        """All rounds that are left, and the last evaluation; returns the summary."""
        with self.ledger.opened(resume, overwrite) as kept:
            return self._run(kept)

    def _run(self, kept: Progress | None) -> dict[str, Any]:
        if kept is not None:
            self.server.state, self.server.round = tree.copy(kept.state), kept.round
            self.accepted, self.pending = dict(kept.accepted), kept.pending
            log.info("resumed after round %d", self.server.round)
        done = self._done()
        try:
            self._gather()
            while self.server.round < self.config.rounds:
                if self._round():
                    done = self._done()
                    if self.server.round % self.config.checkpoint_every == 0:
                        self.ledger.checkpoint(done)
            self._last_evaluation()
        except BaseException:
            self.ledger.checkpoint(done)  # what is complete is kept, and only that
            raise
        summary = self.ledger.finish(self._done())
        for name, count in summary["wire"].items():
            up, down = (f"{count[way] / 1000:,.1f} kB {way}" for way in ("up", "down"))
            log.info("site %s: %s, %s", name, up, down)
        log.info("the run is complete: %s", self.ledger.folder.path)
        return summary

    def _done(self) -> Progress:
        return Progress(self.server.round, self.server.state, dict(self.accepted), self.pending)

    # ---- who is there --------------------------------------------------------------------------

    def _nodes(self) -> dict[str, int]:
        """Flower's node of each site that is there, in the federation's order.

        A site is known by its key, which Flower has checked; not by what it says of itself.
        """
        found: dict[str, int] = {}
        for node in self.grid.get_nodes():
            name = self.members.name_of(node.public_key)
            if name is not None:
                found[name] = node.node_id
        return {name: found[name] for name in self.members.sites if name in found}

    def _gather(self) -> None:
        """Before the first round: wait a while for all, then make do with the minimum."""
        everyone = len(self.members.sites)
        self._wait(everyone, self.members.gather_seconds)

    def _enough(self) -> dict[str, int]:
        """The sites that are there, once they are the minimum; an error after the limit."""
        nodes = self._wait(self.members.minimum, self.members.wait_seconds)
        if len(nodes) < self.members.minimum:
            raise ProtofedError(
                f"after {self.members.wait_seconds:g} s {len(nodes)} sites are there, and a round "
                f"needs {self.members.minimum}",
                "start the others, then: protofed deploy start ... --resume",
            )
        return nodes

    def _wait(self, count: int, limit: float) -> dict[str, int]:
        end, said = time.monotonic() + limit, ""
        while True:
            nodes = self._nodes()
            left = end - time.monotonic()
            if len(nodes) >= count or left <= 0:
                return nodes
            missing = ", ".join(n for n in self.members.sites if n not in nodes)
            text = f"waiting for sites: {len(nodes)} of {count} are there; not yet: {missing}"
            if text != said:
                log.warning("%s (at most %.0f s more)", text, left)
                said = text
            self.sleep(min(self.poll, max(0.0, left)))

    # ---- a round -------------------------------------------------------------------------------

    def _round(self) -> bool:
        """One round; False if too few sites replied and it has to be tried again."""
        server, nodes = self.server, self._enough()
        round, sampled = server.round, server.sample()
        evaluate = self.pending is not None
        asked = {
            name: self._request(name, name in sampled, evaluate)
            for name in nodes
            if name in sampled or evaluate
        }
        log.info("round %d: asked %s", round + 1, ", ".join(asked))
        got = self._exchange(asked, nodes, server.broadcast())
        trained = [n for n in sampled if n in got.losses]
        for name in sampled:
            if name not in nodes:
                got.problems[name] = "not connected"
        needed = min(self.members.minimum, len(sampled))
        if len(trained) < needed:
            problem = f"{len(trained)} of the {needed} replies that are needed"
        else:
            problem = self._average()
        if problem:
            return self._failed(problem, got)
        self.failures = 0
        if self.pending is not None:
            self._measure(got)
        self.accepted |= {name: got.answers[name].state for name in trained}
        self.ledger.samples |= {name: got.answers[name].samples for name in trained}
        self.pending = self._record(round, trained, got)
        self.ledger.artifacts.write(server)
        log.info(
            "round %d/%d: %d of %d sites trained, %.1f s",
            round + 1, self.config.rounds, len(trained), len(sampled), got.seconds,
        )  # fmt: skip
        return True

    def _average(self) -> str:
        """Close the round with the replies that came; if that cannot be, say why.

        Replies that are fine each by each may not be so together. The state is then as before.
        """
        server = self.server
        state, round = server.state, server.round
        try:
            server.finish()
        except Exception as error:
            log.exception("round %d", round + 1)
            return f"the replies could not be averaged: {error}"
        for slot, entries in server.state.items():
            for name, t in entries.items():
                if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                    server.state, server.round = state, round
                    return f"entry '{name}' of slot '{slot}' is no longer finite"
        return ""

    def _failed(self, problem: str, got: Exchange) -> bool:
        self.server.abandon()
        self.ledger.artifacts.abandon()
        self.failures += 1
        log.warning(
            "round %d is not counted: %s (attempt %d of %d)",
            self.server.round + 1, problem, self.failures, ATTEMPTS,
        )  # fmt: skip
        if self.failures >= ATTEMPTS:
            raise ProtofedError(
                f"round {self.server.round + 1} failed {ATTEMPTS} times: {problem}{_odd(got)}",
                "mend the sites, then: protofed deploy start ... --resume",
            )
        return False

    def _request(self, name: str, train: bool, evaluate: bool) -> Request:
        return Request(
            site=name,
            run=self.config.hash,
            round=self.server.round,
            train=train,
            evaluate=evaluate,
            accepted=self.accepted.get(name, ""),
            kept=self.ledger.accepted.get(name, ""),
        )

    def _last_evaluation(self) -> None:
        """The accuracy after the last round: a message without training."""
        for _ in range(ATTEMPTS):
            nodes = self._enough()
            asked = {name: self._request(name, train=False, evaluate=True) for name in nodes}
            log.info("last evaluation: asked %s", ", ".join(asked))
            got = self._exchange(asked, nodes, self.server.broadcast())
            if got.answers:
                self._measure(got)
                self.pending = None
                return
        raise ProtofedError(f"no site evaluated the last model{_odd(got)}", "go on with --resume")

    def _measure(self, got: Exchange) -> None:
        """Complete the record of the round before with what the sites measured."""
        assert self.pending is not None
        right, tested = (dict.fromkeys(self.members.clients(), 0) for _ in range(2))
        for name, answer in got.answers.items():
            domain = self.members.domain(name)
            right[domain] += answer.right
            tested[domain] += answer.tested
        # over all test images of the domain's sites: a large test set says more than a small one
        scores = {d: 100 * right[d] / n if n else float("nan") for d, n in tested.items()}
        known = [s for d, s in scores.items() if tested[d]]
        self.pending["accuracy"] = {d: round_to(s, 4) for d, s in scores.items()}
        self.pending["average"] = round_to(sum(known) / len(known), 4) if known else float("nan")
        self.ledger.tested = tested
        self.ledger.append(self.pending)
        log.info("after round %d: %s", self.pending["round"] + 1, accuracies(self.pending))

    def _record(self, round: int, trained: list[str], got: Exchange) -> Record:
        losses: dict[str, tuple[float, int]] = {}
        for name in trained:  # in the federation's order: sums must not depend on arrival
            for term, (total, count) in got.losses[name].items():
                before, counted = losses.get(term, (0.0, 0))
                losses[term] = (before + total, counted + count)
        record: Record = {
            "round": round,
            "accuracy": {},
            "average": float("nan"),
            "loss": {term: total / count for term, (total, count) in losses.items()},
            "bytes_up": got.up,
            "bytes_down": got.down,
            "clients": len(trained),
            "steps": sum(got.answers[n].steps for n in trained),
            "seconds": {"train": round_to(got.seconds, 3), "evaluate": 0.0},
            "wire": got.wire,
        }
        if got.problems:
            record["problems"] = got.problems
        return record

    # ---- messages ------------------------------------------------------------------------------

    def _exchange(
        self, asked: Mapping[str, Request], nodes: Mapping[str, int], received: Tree
    ) -> Exchange:
        """Send a message to each site and take the replies as they come, until the limit."""
        began, limit = time.monotonic(), self.members.round_seconds
        got, records = Exchange(), wire.add_tree(RecordDict(), received)
        messages = {}
        for name, request in asked.items():
            content = RecordDict({**records, RECORD: write(request)[RECORD]})
            kind = MessageType.TRAIN if request.train else MessageType.EVALUATE
            # its life ends with the round: a site that comes back is not sent an old one. A little
            # later, so that a late reply is called late, and not a message that cannot be found
            group, life = str(request.round + 1), limit + 5
            messages[name] = Message(content, nodes[name], kind, ttl=life, group_id=group)
            got.down += tree.nbytes(received)
            got.wire[name] = {"down": wire.message_bytes(messages[name]), "up": 0}
        waiting: dict[str, str] = {}
        ids = list(self.grid.push_messages(list(messages.values())))
        for i, name in enumerate(messages):
            if i < len(ids) and ids[i]:
                waiting[ids[i]] = name
            else:
                self._problem(got, name, "the message could not be sent")
        unreadable: dict[str, int] = {}
        while waiting:
            for message_id, name in list(waiting.items()):
                try:
                    pulled = list(self.grid.pull_messages([message_id]))
                except Exception as error:  # a reply that breaks Flower's own reading
                    unreadable[name] = unreadable.get(name, 0) + 1
                    if unreadable[name] >= UNREADABLE:
                        del waiting[message_id]
                        self._problem(got, name, f"refused: unreadable ({type(error).__name__})")
                    continue
                for message in pulled:
                    waiting.pop(message_id, None)
                    self._take(got, name, nodes[name], asked[name], message)
            left = began + limit - time.monotonic()
            if waiting and left <= 0:
                for name in waiting.values():
                    self._problem(got, name, f"no reply within {limit:g} s")
                break
            if waiting:
                self.sleep(min(self.poll, left))
        got.seconds = time.monotonic() - began
        self.ledger.bill(got.wire)
        return got

    def _take(
        self, got: Exchange, name: str, node: int, request: Request, message: Message
    ) -> None:
        """Look at a reply, and let it count if it is what it has to be."""
        if message.has_error():
            error = message.error
            self._problem(got, name, f"error {error.code}: {error.reason or ''}")
            return
        try:
            if message.metadata.src_node_id != node:
                raise Refused("the reply comes from another node")
            got.wire[name]["up"] = wire.message_bytes(message)
            answer, reply = check_answer(
                message.content, request, self.config.method.name, self.expected
            )
        except Refused as error:
            self._problem(got, name, f"refused: {error.message}")
            return
        except Exception as error:
            self._problem(got, name, f"refused: cannot be read ({error!r:.300})")
            return
        got.answers[name] = answer
        if reply is not None:
            self._accept(got, name, reply)

    def _accept(self, got: Exchange, name: str, reply: Reply) -> None:
        self.server.accept(name, reply)
        self.ledger.artifacts.receive(self.server.round, name, reply.message)
        got.losses[name] = reply.losses
        got.up += tree.nbytes(reply.message)
        log.info("round %d: site %s has replied", self.server.round + 1, name)

    def _problem(self, got: Exchange, name: str, why: str) -> None:
        why = why[:MOST_WORDS]
        # one line, in the log too: a site's words must not look like the server's
        why = "".join(c if c.isprintable() else " " for c in why)
        got.problems[name] = why
        log.warning("round %d: site %s: %s", self.server.round + 1, name, why)


def _odd(got: Exchange) -> str:
    """What was wrong at which site, to stand behind an error's words."""
    return "".join(f"; {name}: {why}" for name, why in got.problems.items())
