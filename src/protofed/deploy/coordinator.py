"""The server's side of a deployment: the simulator's ``Server`` over Flower's grid.

A round is one message to each site and one back. The message carries what the server broadcasts;
the sites of the round train on it, and all sites evaluate it on their own test images. That gives
the accuracy of the round *before*, since the server has no images. After the last round, one more
message without training closes the run.

A site that is lost, late or sends an invalid reply is named in the log and in the round's record,
and the round continues with the others. With fewer than the minimum nothing is averaged: the round
is tried again.

A lie that is within all bounds shows only afterwards: sites fail, or their losses jump. Then the
replies of the round before that stood out are named, and the run ends; or it goes back to the
checkpoint before them and repeats the round without them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from protofed import tree
from protofed.deploy import wire
from protofed.deploy.checks import check_answer, expected_reply
from protofed.deploy.counts import Count, Counts
from protofed.deploy.ledger import Ledger
from protofed.deploy.members import Members
from protofed.deploy.messages import RECORD, SITE_FAILED, SITE_WAITS, Answer, Request, write
from protofed.deploy.run_log import COMPLETE, log, one_line
from protofed.deploy.spec import RunSpec
from protofed.deploy.wire import Refused
from protofed.errors import ProtofedError
from protofed.federation.bounds import ROUNDS, OutOfBounds, recorded
from protofed.federation.server import Server
from protofed.federation.simulation import (
    initial_network,
    make_bounds,
    make_setup,
    mean_losses,
    round_to,
)
from protofed.method import Update
from protofed.models.mixed import client_models
from protofed.observers.progress import accuracies
from protofed.runs.folder import Checkpoint
from protofed.runs.records import Record
from protofed.tree import Tree

ATTEMPTS = 3
"""How often a round with too few replies is tried before the run ends, and how often a reply is
fetched before it counts as lost."""
POLLS_PER_SECOND = 20
"""How often to ask for replies at most: each takes the SuperLink milliseconds, and sites wait."""
APPROVAL_POLLS = 30
"""Polls between two attempts at a round that sites have yet to approve."""
JUMP = 4.0
"""A site's loss jumps if it is this many times the largest of its last rounds."""
OUTLYING = 4.0
"""A reply stands out if its squared distances to others are this many times the median ones."""
ON_POISON = ("stop", "rollback")
MAX_PROBLEM_LENGTH = 500
"""How many characters to record of what is wrong with a reply; some come from the site itself."""


@dataclass
class Exchange:
    """The outcome of a round's messages."""

    answers: dict[str, Answer] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """The sites that could not do what they were asked, or not within the bounds."""
    waiting: list[str] = field(default_factory=list)
    """The sites where a person has yet to approve the run."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of tensor data in each accepted reply, counted as in every run."""
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
        spec: RunSpec,
        folder: Path,
        *,
        counts: Counts | None = None,
        on_poison: str = ON_POISON[0],
        poll: float = 1.0,
    ) -> None:
        """``poll`` is how often to look for sites or replies, in seconds.

        ``counts`` are the sites' images; without any, what a site declares first is accepted.
        """
        config, task = spec.config, spec.task
        self.grid, self.members, self.spec, self.config = grid, members, spec, config
        self.poll, self.on_poison = poll, on_poison
        self.counts = counts or Counts(None, spec.counts, members.max_samples)
        self.fixed: dict[str, Count] = {}
        """The images of each site that has taken part; they do not change during a run."""
        self.asked: dict[str, float] = {}
        """When each site was asked for its images."""
        self.unready: dict[str, str] = {}
        """Why sites that are connected do not take part."""
        self.absent: dict[str, str] = {}
        """Why sites of the last round took no part in it."""
        self.pulls: dict[str, Future[list[Message]]] = {}
        """What fetches a site's reply. One that the site holds back may take Flower two hours."""
        self.excluded: dict[str, int] = {}
        """The sites that are left out, and up to which round."""
        self.releases = 0
        """The most messages that a site has sent."""
        self.suspects: list[str] = []
        """The sites whose replies stood out in the last round."""
        self.losses: dict[str, list[float]] = {}
        """Each site's losses in the last rounds."""
        self.rollbacks = 0
        models = client_models(config.model, list(members.sites))
        network = initial_network(config, task, next(iter(models.values())), config.weights)
        setup = make_setup(config, task, network)
        self.training, self.privacy = setup.training, setup.privacy
        self.server = Server(
            config.method,
            network,
            setup.sizes,
            list(members.sites),
            rounds=config.rounds,
            seed=config.seed,
            domains=[site.domain for site in members.sites.values()],
            participation=config.participation,
            average=config.average,
            robust=config.robust,
            robust_fraction=config.robust_fraction,
        )
        self.server.bounds = make_bounds(config, task, self.server, self.privacy)
        self.ledger = Ledger(folder, spec, members, network)
        if words := self.privacy.words(config.method):
            self.ledger.policies["privacy"] = words
        self.accepted: dict[str, str] = {}
        """For each site, the private state that belongs to its last accepted reply."""
        self.pending: Record | None = None
        """The record of the last round, which still lacks its accuracy."""
        self.expected = expected_reply(spec, self.server)
        self.failures = 0
        self.waiting_since: float | None = None
        self.norms: dict[str, float] = {}
        self.done = self._done()
        """The checkpoint of the last complete round."""

    def run(self, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        """Run the remaining rounds and the last evaluation; returns the summary."""
        with self.ledger.opened(resume, overwrite) as found:
            if found is not None:
                self._continue(found)
                log.info("resumed after round %d", self.server.round)
            return self._run()

    def _continue(self, found: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.server.state, self.server.round = tree.copy(found.state), found.round
        extra, self.pending = found.extra, found.pending
        self.accepted = dict(extra["accepted"])
        self.fixed = {name: Count(*both) for name, both in extra.get("counts", {}).items()}
        self.excluded = dict(extra.get("excluded", {}))
        if self.server.bounds is not None:
            pending = [found.pending] if found.pending is not None else []
            self.server.bounds.restore(recorded([*self.ledger.folder.records(), *pending]))
        self.done = self._done()

    def _run(self) -> dict[str, Any]:
        try:
            if not self.ledger.kept:
                self.ledger.checkpoint(self.done)  # to go back to
            self._wait(len(self.members.sites), self.members.gather_seconds)
            while self.server.round < self.config.rounds or not self._last_evaluation():
                if self._round():
                    self.done = self._done()
                    if self.server.round % self.config.checkpoint_every == 0:
                        self.ledger.checkpoint(self.done)
        except BaseException:
            self.ledger.checkpoint(self.done)  # complete rounds, and nothing else
            raise
        summary = self.ledger.finish(self._done(), self.server.broadcast())
        for name, count in summary["wire"].items():
            up, down = (f"{count[way] / 1000:,.1f} kB {way}" for way in ("up", "down"))
            log.info("site %s: %s, %s", name, up, down)
        log.info("%s: %s", COMPLETE, self.ledger.folder.path)
        return summary

    def _done(self) -> Checkpoint:
        server = self.server
        return self.ledger.completed(
            server.round,
            server.state,
            self.pending,
            accepted=dict(self.accepted),
            counts=dict(self.fixed),
            excluded=dict(self.excluded),
        )

    # ---- who is connected ----------------------------------------------------------------------

    def _connected(self) -> dict[str, int]:
        """Flower's node of each connected site, in the federation's order.

        A site is identified by its key, which Flower has checked, not by what it claims to be.
        """
        nodes = self.grid.get_nodes()
        found = {self.members.site_with_key(node.public_key): node.node_id for node in nodes}
        return {name: found[name] for name in self.members.sites if name in found}

    def _ready(self) -> dict[str, int]:
        """The connected sites that take part: they are not left out, and their images are known.

        Those whose images are not known are asked for them, and again if they have not answered.
        """
        left_out = {n for n, until in self.excluded.items() if self.server.round < until}
        nodes = {n: node for n, node in self._connected().items() if n not in left_out}
        new = [n for n in nodes if n not in self.fixed and self.counts.confirmed(n) is None]
        long_ago = time.monotonic() - self.poll * APPROVAL_POLLS
        free = [n for n in new if not self._is_sending(n)]
        if unasked := {n: nodes[n] for n in free if self.asked.get(n, -math.inf) < long_ago}:
            got = self._exchange(unasked, (), evaluate=False)
            answers = got.answers
            self.unready |= got.problems
            self.asked |= {n: math.inf if n in answers else time.monotonic() for n in unasked}
            for name, answer in answers.items():
                self._declare(name, Count(answer.samples, answer.tested))
        for name in nodes:
            if name not in self.fixed and (count := self.counts.confirmed(name)) is not None:
                self.fixed[name] = count
        self.unready = {n: why for n, why in self.unready.items() if n not in self.fixed}
        sending = [n for n in nodes if self._is_sending(n)]
        self.unready |= dict.fromkeys(sending, "is still sending an earlier reply")
        return {n: node for n, node in nodes.items() if n in self.fixed and n not in sending}

    def _declare(self, name: str, count: Count) -> None:
        if problem := self.counts.check(count):
            self.unready[name] = problem
            log.warning("site %s is not admitted: %s", name, problem)
        elif not self.counts.declare(name, count):
            self.unready[name] = f"declares {count}, which is not confirmed"
            text = "site %s declares %s; it takes part once you confirm: protofed deploy confirm %s"
            log.warning(text, name, count, name)

    def _wait_for_minimum(self) -> dict[str, int]:
        """The connected sites, once there are enough of them; an error after the time limit."""
        nodes = self._wait(self.members.minimum, self.members.wait_seconds)
        if len(nodes) < self.members.minimum:
            raise ProtofedError(
                f"{len(nodes)} sites are connected after {self.members.wait_seconds:g} s, "
                f"and a round needs {self.members.minimum}{_listed(self.unready)}",
                "start more sites, then: protofed deploy start ... --resume",
            )
        return nodes

    def _wait(self, count: int, limit: float) -> dict[str, int]:
        """The connected sites, once there are that many of them or the time limit has passed."""
        end, logged = time.monotonic() + limit, ""
        while True:
            nodes = self._ready()
            left = end - time.monotonic()
            if len(nodes) >= count or left <= 0:
                return nodes
            missing = ", ".join(n for n in self.members.sites if n not in nodes)
            text = f"waiting for sites: {len(nodes)} of {count} are ready; missing: {missing}"
            if text != logged:
                log.warning("%s (for at most %.0f s more)", text, left)
                logged = text
            time.sleep(min(self.poll, max(0.0, left)))

    # ---- a round -------------------------------------------------------------------------------

    def _round(self) -> bool:
        """Run one round; False if it failed and must be tried again."""
        server, nodes = self.server, self._wait_for_minimum()
        round, sampled = server.round, server.sample()
        left_out = [name for name in sampled if self.excluded.get(name, 0) > round]
        reasons = self.unready | dict.fromkeys(left_out, "left out")
        self._note_absent({n: reasons.get(n, "not connected") for n in sampled if n not in nodes})
        got = self._exchange(nodes, sampled, evaluate=self.pending is not None)
        for name, why in server.screen().items():
            got.failed.add(name)
            if self.config.bounds == "clip":
                self._problem(got, name, why)
            else:
                self._refuse(got, name, why)
        trained = [name for name in sampled if name in got.answers]
        got.problems |= self.absent
        if signs := self._signs_of_poison(got, trained):
            self._go_back(signs)
            return False
        sampled = [name for name in sampled if name not in left_out]
        needed = min(self.members.minimum, len(sampled))
        while len(trained) >= needed and (problem := self._aggregate()):
            found = server.spoilers(self._works)
            for name in found:
                server.refuse(name)
                self._refuse(got, name, problem)
            if not found:
                return self._failed(problem, got)
            trained = [name for name in trained if name not in found]
        if len(trained) < needed:
            return self._failed(f"only {len(trained)} of {needed} required replies", got)
        self.failures, self.waiting_since = 0, None
        if self.pending is not None:
            self._measure(got)
        for name in trained:
            kept = [*self.losses.get(name, []), _loss(got.answers[name])]
            self.losses[name] = kept[-ROUNDS:]
        self.accepted |= {name: got.answers[name].state for name in trained}
        self.ledger.samples |= {name: got.answers[name].samples for name in trained}
        self.pending = self._record(round, trained, got)
        self.ledger.artifacts.write(server)
        log.info(
            "round %d/%d: %d of %d sites trained, %.1f s",
            round + 1, self.config.rounds, len(trained), len(sampled), got.seconds,
        )  # fmt: skip
        return True

    def _note_absent(self, found: dict[str, str]) -> None:
        """Log why sites take no part in the round, unless it is as in the round before."""
        for name, why in found.items():
            if self.absent.get(name) != why:
                log.warning("round %d: site %s: %s", self.server.round + 1, name, why)
        self.absent = found

    def _aggregate(self) -> str:
        """Close the round with the accepted replies; returns what went wrong, if anything did.

        Replies that are each valid may not be valid together. The state then stays as it was.
        """
        server = self.server
        if not server.updates():  # all sites of this round are left out
            self.norms, self.suspects = server.finish(), []
            return ""
        try:
            scores, state = server.outlying(), server.aggregated()
        except Exception as error:
            log.exception("round %d: aggregation failed", server.round + 1)
            return f"the replies could not be aggregated: {error}"
        if where := _not_finite(state):
            return f"{where} is no longer finite"
        self.norms = server.finish(state)
        worst = max(scores, key=lambda name: scores[name])
        # of two replies, each is equally far from the other
        self.suspects = [n for n, s in scores.items() if s > OUTLYING] or [worst]
        self.suspects = self.suspects if len(scores) > 2 else []
        return ""

    def _works(self, updates: list[Update]) -> bool:
        """Whether these replies of the round could be aggregated."""
        try:
            return not _not_finite(self.server.aggregated(updates))
        except Exception:
            return False

    def _signs_of_poison(self, got: Exchange, trained: Sequence[str]) -> str:
        """What happened to most sites after the last round, in words; empty if nothing did."""
        if not self.losses:
            return ""
        least = min(2, len(self.members.sites))  # if there are several, no single site ends a run
        failed = [name for name in self.losses if name in got.failed]
        if 2 * len(failed) > len(self.losses) and len(failed) >= least:
            return f"most sites failed ({', '.join(failed)})"
        known = [name for name in trained if len(self.losses.get(name, [])) > 1]
        jumped = [n for n in known if _loss(got.answers[n]) > JUMP * max(map(abs, self.losses[n]))]
        # out of all that trained: those whose losses are not known yet have not seen a jump
        if 2 * len(jumped) > len(trained) and len(jumped) >= least:
            return f"the loss of most sites jumped ({', '.join(jumped)})"
        return ""

    def _go_back(self, signs: str) -> None:
        """Return to the checkpoint before the last round, without sites whose replies stood out."""
        self.server.abandon()
        self.ledger.artifacts.abandon()
        last, names = self.server.round, ", ".join(self.suspects) or "none"
        problem = f"after round {last} {signs}; replies of that round that stood out: {names}"
        log.error(problem)
        self.rollbacks += 1
        if self.on_poison != "rollback" or not self.suspects or self.rollbacks > ATTEMPTS:
            without = f" --without {','.join(self.suspects)}" if self.suspects else ""
            raise ProtofedError(
                problem,
                f"protofed deploy rollback --rounds 1{without}, then deploy start ... --resume",
            )
        # sites that were left out before are not let in again
        whole = self.config.rounds + 1  # the last evaluation comes after the last round
        until = {n: whole if n in self.excluded else last for n in self.suspects}
        self._continue(self.ledger.go_back(last - 1, {**self.excluded, **until}))
        self.losses, self.suspects = {}, []
        each = ", ".join(f"{n} up to round {min(r, whole - 1)}" for n, r in until.items())
        log.warning("went back to the end of round %d; left out: %s", self.server.round, each)

    def _failed(self, problem: str, got: Exchange) -> bool:
        self.server.abandon()
        self.ledger.artifacts.abandon()
        if self._wait_for_approval(got.waiting):
            return False
        self.failures += 1
        log.warning(
            "round %d failed: %s (attempt %d of %d)",
            self.server.round + 1, problem, self.failures, ATTEMPTS,
        )  # fmt: skip
        if self.failures >= ATTEMPTS:
            all_of_it = f"{problem}{_listed(got.problems)}"
            raise ProtofedError(
                f"round {self.server.round + 1} failed {ATTEMPTS} times: {all_of_it}",
                "fix the sites, then: protofed deploy start ... --resume",
            )
        return False

    def _wait_for_approval(self, sites: Sequence[str]) -> bool:
        """Give people at the sites time to approve; False if no site waits, or the time is up."""
        if not sites:
            return False
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
        left = self.waiting_since + self.members.wait_seconds - time.monotonic()
        if left <= 0:
            return False
        text = "round %d waits for the run's approval at %s (for at most %.0f s more)"
        log.warning(text, self.server.round + 1, ", ".join(sites), left)
        time.sleep(min(self.poll * APPROVAL_POLLS, left))
        return True

    def _last_evaluation(self) -> bool:
        """Measure the accuracy after the last round, with a message without training.

        False if the last round turned out to be poisoned, and the run went back.
        """
        if self.pending is None:
            return True
        for _ in range(ATTEMPTS):
            got = self._exchange(self._wait_for_minimum(), (), evaluate=True)
            if signs := self._signs_of_poison(got, ()):
                self._go_back(signs)
                return False
            if got.answers:
                self._measure(got)
                self.pending = None
                return True
        raise ProtofedError(
            f"no site evaluated the last model{_listed(got.problems)}", "try again with --resume"
        )

    def _measure(self, got: Exchange) -> None:
        """Complete the previous round's record with what the sites measured."""
        assert self.pending is not None
        right, tested = (dict.fromkeys(self.members.clients(), 0) for _ in range(2))
        for name, answer in got.answers.items():
            domain = self.members.sites[name].domain
            right[domain] += answer.right
            tested[domain] += answer.tested
        # over all test images of a domain's sites: large test sets count more than small ones
        scores = {d: 100 * right[d] / n if n else float("nan") for d, n in tested.items()}
        known = [s for d, s in scores.items() if tested[d]]
        self.pending["accuracy"] = {d: round_to(s, 4) for d, s in scores.items()}
        self.pending["average"] = round_to(sum(known) / len(known), 4) if known else float("nan")
        # a site can say what it likes about its own images, so each stands for itself
        each = {n: a for n, a in got.answers.items() if a.tested}
        for name, a in each.items():
            own = self.pending.setdefault("by_client", {}).setdefault(name, {})
            own |= {"accuracy": round_to(100 * a.right / a.tested, 4), "tested": a.tested}
        self.ledger.tested = tested
        self.ledger.folder.append_record(self.pending)
        by_site = ", ".join(f"{n} {a.right}/{a.tested}" for n, a in each.items())
        text = "after round %d: %s; by site: %s"
        log.info(text, self.pending["round"], accuracies(self.pending), by_site)

    def _record(self, round: int, trained: list[str], got: Exchange) -> Record:
        record: Record = {
            "round": round + 1,
            "accuracy": {},
            "average": float("nan"),
            "loss": mean_losses(got.answers[name].losses for name in trained),
            **self.training.record(round),
            "bytes_up": sum(got.sent[name] for name in trained),
            "bytes_down": got.down,
            "clients": len(trained),
            "by_client": {
                name: {"loss": mean_losses([got.answers[name].losses])} for name in trained
            },
            "steps": sum(got.answers[n].steps for n in trained),
            "seconds": {"train": round_to(got.seconds, 3), "evaluate": 0.0},
            "wire": got.wire,
        }
        if self.privacy.budgets:
            self.releases = max([self.releases, *(got.answers[n].releases for n in trained)])
            record["privacy"] = self.privacy.spent(self.releases)
        if got.problems:
            record["problems"] = got.problems
        if self.norms:
            record["norms"] = self.norms
        return record

    # ---- messages ------------------------------------------------------------------------------

    def _exchange(
        self, nodes: Mapping[str, int], sampled: Sequence[str], evaluate: bool
    ) -> Exchange:
        """Let the sampled sites train, and all connected ones evaluate if that is asked for.

        If neither is asked for, all of them declare their images. Replies are taken as they arrive,
        until the time limit.
        """
        began, limit, got = time.monotonic(), self.members.round_seconds, Exchange()
        asked = {
            name: Request(
                name,
                self.spec.hash,
                self.server.round,
                train=name in sampled,
                evaluate=evaluate,
                accepted=self.accepted.get(name, ""),
                kept=self.ledger.states(name),
            )
            for name in nodes
            if name in sampled or evaluate or not sampled
        }
        waiting = self._send(got, asked, nodes)
        unreadable = Counter[str]()
        # one thread for each site: none can keep the others' replies from being taken
        pool = ThreadPoolExecutor(max(1, len(waiting)))
        for name in waiting:
            self.pulls.pop(name, None)  # of an earlier message, whose reply came too late
        while waiting:
            for name in waiting.keys() - self.pulls.keys():
                self.pulls[name] = pool.submit(self._pull, waiting[name])
            left = max(0.0, began + limit - time.monotonic())
            pause = min(max(self.poll, len(waiting) / POLLS_PER_SECOND), left)
            wait_for([self.pulls[name] for name in waiting], max(pause, self.poll))
            for name in [n for n in waiting if self.pulls[n].done()]:
                try:
                    pulled = self.pulls.pop(name).result()
                except Exception as error:  # a reply that Flower itself cannot read
                    unreadable[name] += 1
                    if unreadable[name] >= ATTEMPTS:
                        del waiting[name]
                        self._problem(got, name, f"refused: unreadable ({type(error).__name__})")
                    continue
                for message in pulled:
                    waiting.pop(name, None)
                    self._take(got, name, nodes[name], asked[name], message)
            if waiting and left <= 0:
                for name in waiting:
                    self._problem(got, name, f"no reply within {limit:g} s")
                break
            if waiting:
                time.sleep(pause)
        pool.shutdown(wait=False)
        got.seconds = time.monotonic() - began
        self.ledger.count_bytes(got.wire)
        return got

    def _send(
        self, got: Exchange, asked: Mapping[str, Request], nodes: Mapping[str, int]
    ) -> dict[str, str]:
        """Send each site its message; returns the number of each one that was sent."""
        received, round = self.server.broadcast(), self.server.round + 1
        what = f"round {round}" if round <= self.config.rounds else "last evaluation"
        if not any(request.train or request.evaluate for request in asked.values()):
            received, what = {}, "images to declare"
        log.info("%s: sent to %s", what, ", ".join(asked))
        records, messages = wire.add_tree(RecordDict(), received), {}
        for name, request in asked.items():
            content = RecordDict({**records, RECORD: write(request)[RECORD]})
            kind = MessageType.TRAIN if request.train else MessageType.EVALUATE
            # It expires with the round: a site that comes back does not get an old message. A bit
            # later, so that a late reply counts as late and not as one to an unknown message.
            life = self.members.round_seconds + 5
            messages[name] = Message(content, nodes[name], kind, ttl=life, group_id=str(round))
            got.down += tree.nbytes(received)
        for name, size in zip(messages, wire.message_bytes(messages.values()), strict=True):
            got.wire[name] = {"down": size, "up": 0}
        waiting: dict[str, str] = {}
        for name, message_id in zip_longest(messages, self.grid.push_messages(messages.values())):
            if message_id:
                waiting[name] = message_id
            else:
                self._problem(got, name, "the message could not be sent")
        return waiting

    def _pull(self, message_id: str) -> list[Message]:
        return list(self.grid.pull_messages([message_id]))

    def _is_sending(self, name: str) -> bool:
        """Whether a site's reply, perhaps to an earlier message, has arrived only in part."""
        return name in self.pulls and not self.pulls[name].done()

    def _take(
        self, got: Exchange, name: str, node: int, request: Request, message: Message
    ) -> None:
        """Check a reply, and accept it if it is valid."""
        if message.has_error():
            error = message.error
            if error.code == SITE_FAILED:
                got.failed.add(name)
            if error.code == SITE_WAITS:
                got.waiting.append(name)
            self._problem(got, name, f"error {error.code}: {error.reason or ''}")
            return
        try:
            if message.metadata.src_node_id != node:
                raise Refused("the reply came from another node")
            [got.wire[name]["up"]] = wire.message_bytes([message])
            answer, reply = check_answer(
                message.content, request, self.expected, self.fixed.get(name)
            )
            if reply is not None:
                self.server.accept(name, reply)
        except (Refused, OutOfBounds) as error:
            self._problem(got, name, f"refused: {error}")
            return
        except Exception as error:
            self._problem(got, name, f"refused: cannot be read ({error!r:.300})")
            return
        got.answers[name] = answer
        if reply is not None:
            self.ledger.artifacts.reply(self.server.round + 1, name, reply.message)
            got.sent[name] = tree.nbytes(reply.message)
            log.info("round %d: site %s replied", self.server.round + 1, name)

    def _refuse(self, got: Exchange, name: str, why: str) -> None:
        """Leave an accepted reply out of the round, and name its site."""
        self._problem(got, name, f"refused: {why}")
        del got.answers[name]
        self.ledger.artifacts.refused(self.server.round + 1, name, why)

    def _problem(self, got: Exchange, name: str, why: str) -> None:
        why = got.problems[name] = one_line(why, MAX_PROBLEM_LENGTH)
        log.warning("round %d: site %s: %s", self.server.round + 1, name, why)


def _not_finite(state: Tree) -> str:
    """The first entry that is not finite, in words; empty if all are."""
    for slot, entries in state.items():
        for name, t in entries.items():
            if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                return f"entry '{name}' of slot '{slot}'"
    return ""


def _loss(answer: Answer) -> float:
    """A site's mean loss in a round, all terms together."""
    return sum(mean_losses([answer.losses]).values())


def _listed(problems: Mapping[str, str]) -> str:
    """The problems by site, to follow an error's text."""
    return "".join(f"; {name}: {why}" for name, why in problems.items())
