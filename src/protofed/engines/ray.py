"""The ray engine: clients on the cores or GPUs of a cluster.

An actor for each core or GPU has an engine of its own, the loop or lanes, and is given groups of
clients. What all of them receive is put into Ray's object store once a round: a machine fetches it
once, and its actors read it there. If an actor dies, or takes far longer than the others, another
one is given its group. A client's round is a function of what it is given, so the result is the
same whoever answers first. An actor that hangs in an earlier round is replaced if nobody else
answers: its core may be the last one.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from protofed import tree
from protofed.cluster import AUTO, connected, require_ray
from protofed.errors import ProtofedError
from protofed.federation.client_round import Reply
from protofed.federation.engine import Engine, MakeNetworks, PrivateStates, engine_factory
from protofed.federation.evaluation import EvalJob, Scores
from protofed.federation.facts import ask_for_work_queues
from protofed.federation.public_images import PublicSampler
from protofed.federation.setup import ClientData, Setup
from protofed.models import Network
from protofed.tree import Tree
from protofed.version import __version__

ENGINES = {"cpu": ("loop", "cpu"), "cuda": ("lanes", "cuda")}
"""The engine that an actor has, and its device."""
GROUPS = {"cpu": 4, "cuda": 1}
"""Groups of clients for each actor in a round; lanes do best with all of them at once."""
SLOW_SECONDS, SLOWER = 30.0, 3
"""After this long without an answer, and this many times the longest earlier wait, others try."""


def _teach_ray() -> Any:
    """Let tensors travel as arrays, which Ray does not pickle, and public images without locks."""
    ray = require_ray()
    ray.util.register_serializer(
        Tensor, serializer=lambda t: t.detach().cpu().numpy(), deserializer=torch.tensor
    )
    ray.util.register_serializer(
        PublicSampler,
        serializer=lambda p: (p.pools, p.seed, "cpu", p.digest),
        deserializer=lambda given: PublicSampler(*given),
    )
    return ray


class RemoteEngine:
    """An actor: an engine on a core or a GPU of some machine."""

    def __init__(
        self, setup: Setup, networks: Mapping[str, Network], engine: str, device: str, tf32: bool
    ) -> None:
        self._ray = _teach_ray()
        if device != "cpu":
            ask_for_work_queues()
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = tf32
        self._device = torch.device(device)
        if (public := setup.public) is not None:
            moved = PublicSampler(public.pools, public.seed, self._device, public.digest)
            setup = replace(setup, public=moved)

        def make_networks() -> dict[str, Network]:
            made = {name: copy.deepcopy(network) for name, network in networks.items()}
            form = torch.channels_last
            return {n: made[n].to(self._device, memory_format=form) for n in made}  # type: ignore[call-overload]

        self._engine = engine_factory(engine)(setup, make_networks, self._device, None, ())
        self._on_gpu: dict[str, ClientData] = {}

    def version(self) -> str:
        return _version()

    def train(
        self, clients: Mapping[str, Any], received: Tree, mine: Mapping[str, Tree], round: int
    ) -> list[tuple[str, Reply]]:
        """Train a group of clients; their images are in the object store."""
        group = [self._on_gpu.get(name) or self._fetch(ref) for name, ref in clients.items()]
        replies = []
        for name, reply in self._engine.train(group, received, mine.__getitem__, round):
            reply.message, reply.mine = tree.to(reply.message, "cpu"), tree.to(reply.mine, "cpu")
            replies.append((name, reply))
        return replies

    def evaluate(
        self, job: EvalJob, tests: Mapping[str, Any], received: Tree, mine: Tree, round: int
    ) -> Scores:
        found = {name: self._moved(self._ray.get(ref)) for name, ref in tests.items()}
        job = replace(job, tests=found)
        (scores,) = self._engine.evaluate([job], received, lambda _: mine, round)
        return scores

    def _fetch(self, ref: Any) -> ClientData:
        data: ClientData = self._ray.get(ref)
        data = data.with_images(self._moved(data.images))
        if self._device.type == "cuda":
            self._on_gpu[data.name] = data
        return data

    def _moved(self, images: Any) -> Any:
        return replace(images, x=images.x.to(self._device), y=images.y.to(self._device))


@dataclass(eq=False)
class Seat:
    """An actor, and what it has yet to answer: the number of the call, the part of it, and when.

    Call 0 asks whether it has started: it may have to wait for room.
    """

    actor: Any
    asked: dict[Any, tuple[int, int, float]]
    started: bool = False


class Ray(Engine):
    """Actors on all cores, or all GPUs, of the cluster; or as many as ``workers`` says."""

    def __init__(
        self, setup: Setup, networks: MakeNetworks, device: torch.device, workers: int | None = None
    ) -> None:
        self._setup, self._networks, self._workers = setup, networks, workers
        self._kind = device.type
        self._start()

    def _start(self) -> None:
        stack, self._seats = ExitStack(), list[Seat]()
        self._end = weakref.finalize(self, stack.close)
        ray = self._ray = stack.enter_context(connected(AUTO))
        stack.callback(_end_actors, ray, self._seats)  # or they keep their cores
        _teach_ray()
        for name, module in sys.modules.items():
            if name.startswith("protofed_user_"):  # a file of the user's own, which nodes lack
                ray.cloudpickle.register_pickle_by_value(module)
        engine, place = ENGINES[self._kind]
        self._made = (
            ray.put(self._setup),
            ray.put(dict(self._networks())),
            *(engine, place, torch.backends.cudnn.allow_tf32),
        )
        there = int(ray.cluster_resources().get(self._unit, 0))
        if not there:
            raise ProtofedError(f"the Ray cluster has no {self._unit}s", "see ray status")
        self._seats += [self._new_seat() for _ in range(self._workers or there)]
        self._call, self._longest, self._lost = 0, 0.0, 0
        self._data: dict[str, Any] = {}
        self._tests: dict[int, tuple[Any, Any]] = {}

    def close(self) -> None:
        self._end()

    @property
    def _unit(self) -> str:
        return "GPU" if self._kind == "cuda" else "CPU"

    def train(
        self, clients: Sequence[ClientData], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[tuple[str, Reply]]:
        self._prepare()
        for data in clients:
            if data.name not in self._data:
                self._data[data.name] = self._ray.put(data.with_images(data.images))
        broadcast = self._ray.put(received)

        def ask(actor: Any, group: Sequence[str]) -> Any:
            images = {name: self._data[name] for name in group}
            return actor.train.remote(images, broadcast, {n: mine(n) for n in group}, round)

        for _, replies in self._spread(self._groups(clients), ask):
            yield from replies

    def evaluate(
        self, jobs: Sequence[EvalJob], received: Tree, mine: PrivateStates, round: int
    ) -> Generator[Scores]:
        self._prepare()
        broadcast = self._ray.put(received)
        parts = [(n, [test]) for n, job in enumerate(jobs) for test in job.tests]
        if len(jobs) >= len(self._seats):
            parts = [(n, list(job.tests)) for n, job in enumerate(jobs)]

        def ask(actor: Any, part: tuple[int, list[str]]) -> Any:
            job = jobs[part[0]]
            tests = {name: self._put_test(job.tests[name]) for name in part[1]}
            own = {} if job.client is None else mine(job.client)
            return actor.evaluate.remote(replace(job, tests={}), tests, broadcast, own, round)

        found: list[Scores] = [{} for _ in jobs]
        for (number, _), scores in self._spread(parts, ask):
            for rule, scored in scores.items():
                found[number].setdefault(rule, {}).update(scored)
        for job, scores in zip(jobs, found, strict=True):  # test sets in their order
            yield {rule: {name: s[name] for name in job.tests} for rule, s in scores.items()}

    def _prepare(self) -> None:
        if not self._end.alive:
            self._start()

    def _put_test(self, images: Any) -> Any:
        if id(images) not in self._tests:
            self._tests[id(images)] = (images, self._ray.put(images))
        return self._tests[id(images)][1]

    def _groups(self, clients: Sequence[ClientData]) -> list[list[str]]:
        """The clients' names in groups of about as many images each, the largest first."""
        count = min(len(clients), len(self._seats) * GROUPS[self._kind])
        groups: list[list[str]] = [[] for _ in range(count)]
        sizes = [0] * count
        for data in sorted(clients, key=lambda data: -len(data)):
            smallest = sizes.index(min(sizes))
            groups[smallest].append(data.name)
            sizes[smallest] += len(data)
        return groups

    def _new_seat(self) -> Seat:
        gpus = 1 if self._kind == "cuda" else 0
        actor = self._ray.remote(RemoteEngine).options(
            num_cpus=1, num_gpus=gpus, scheduling_strategy="SPREAD"
        )
        made = actor.remote(*self._made)
        return Seat(made, {made.version.remote(): (0, 0, time.perf_counter())})

    def _spread(
        self, parts: Sequence[Any], ask: Callable[[Any, Any], Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Ask the actors for all parts, up to two at a time each; yields the answers as they come.

        Of several errors, that of the first part is raised, whichever came first.
        """
        self._call += 1
        waiting, left = deque(range(len(parts))), set(range(len(parts)))
        errors: dict[int, Exception] = {}
        exceptions = self._ray.exceptions  # an answer that nobody has fetched is lost with its node
        lost_errors = (exceptions.RayActorError, exceptions.ObjectLostError)
        while left:
            self._give_out(waiting, lambda actor, part: ask(actor, parts[part]))
            seats = {answer: seat for seat in self._seats for answer in seat.asked}
            patience = max(SLOW_SECONDS, SLOWER * self._longest)
            answered, _ = self._ray.wait([*seats], timeout=patience)
            if not answered and not any(seat.started for seat in self._seats):
                warnings.warn("the Ray cluster has no room yet: see ray status", stacklevel=1)
            if not answered and any(seat.started and not seat.asked for seat in self._seats):
                waiting.extend(sorted(self._pending(left) - set(waiting)))
            if not answered:  # the others may be waiting for the room of one that hangs
                for seat in filter(self._is_late, [*self._seats]):
                    self._replace(seat)
            for answer in answered:
                seat = seats[answer]
                try:
                    found = self._ray.get(answer)
                except lost_errors as error:
                    self._count_loss(error)
                    lost = self._replace(seat)
                    waiting.extendleft(sorted(lost & left - set(waiting), reverse=True))
                    continue
                except exceptions.RayTaskError as error:
                    found = error.cause if isinstance(error.cause, ProtofedError) else error
                call, part, asked = seat.asked.pop(answer)
                self._lost = 0
                if not call:
                    _require_version(found)
                    seat.started = True
                    continue
                if call != self._call or part not in left:
                    continue  # of a round that was given up, or answered by another actor before
                self._longest = max(self._longest, time.perf_counter() - asked)
                left.remove(part)
                if isinstance(found, Exception):
                    errors[part] = found
                    left = {other for other in left if other < part}
                    waiting = deque(other for other in waiting if other < part)
                elif not errors:
                    yield parts[part], found
        if errors:
            raise errors[min(errors)]

    def _give_out(self, waiting: deque[int], ask: Callable[[Any, int], Any]) -> None:
        for depth in (1, 2):  # the second is there when the first is done
            for place, seat in enumerate(self._seats):
                free = seat.started and not self._is_late(seat)
                if waiting and free and len(seat.asked) < depth:
                    # an actor on a GPU has the images of the clients it had in the last round
                    mine = (part for part in waiting if part % len(self._seats) == place)
                    waiting.remove(part := next(mine, waiting[0]))
                    answer = ask(seat.actor, part)
                    seat.asked[answer] = (self._call, part, time.perf_counter())

    def _pending(self, parts: set[int]) -> set[int]:
        """Those of these parts of the call that some actor has."""
        asked = {
            part for s in self._seats for call, part, _ in s.asked.values() if call == self._call
        }
        return asked & parts

    def _is_late(self, seat: Seat) -> bool:
        """Whether it is still at work for an earlier call, which needs no answer any more."""
        return seat.started and any(call != self._call for call, _, _ in seat.asked.values())

    def _count_loss(self, error: Exception) -> None:
        self._lost += 1
        if self._lost > 3 * len(self._seats):
            why = str(error).strip().splitlines()
            raise ProtofedError(f"Ray loses actor after actor: {why[0]}", "see docs/cluster.md")

    def _replace(self, seat: Seat) -> set[int]:
        """Put another actor in place of a lost one; returns what the lost one had of this call."""
        self._ray.kill(seat.actor)
        self._seats[self._seats.index(seat)] = self._new_seat()
        return {part for call, part, _ in seat.asked.values() if call == self._call}


def _end_actors(ray: Any, seats: Sequence[Seat]) -> None:
    if ray.is_initialized():  # else they have ended
        for seat in seats:
            ray.kill(seat.actor)


def _require_version(found: Any) -> None:
    if found != (here := _version()):
        raise ProtofedError(
            f"a machine of the cluster has {found}, but this one has {here}",
            "install the same versions on all machines",
        )


def _version() -> str:
    return f"protofed {__version__}, torch {torch.__version__}"
