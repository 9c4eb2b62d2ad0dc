"""The server: its state, the clients of a round, the average, the method's own step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from protofed import tree
from protofed.errors import ProtofedError
from protofed.federation.bounds import Bounds, shortened
from protofed.federation.client_round import Reply
from protofed.federation.model_state import travel
from protofed.federation.participants import participants
from protofed.federation.robust import outlyingness, robust_updates
from protofed.federation.spool import MEMORY_LIMIT, Spool
from protofed.method import Method, ServerView, Sizes, Update, weighted_mean
from protofed.models import Network
from protofed.models.network import tied
from protofed.tree import Slot, Tree


class Server:
    """The server's side of every round, the same in simulations and deployments."""

    def __init__(
        self,
        method: Method,
        network: Network,
        sizes: Sizes,
        clients: Sequence[str],
        *,
        rounds: int,
        seed: int,
        domains: Sequence[str] = (),
        participation: float = 1.0,
        average: str = "samples",
        robust: str = "none",
        robust_fraction: float = 0.2,
        memory_limit: int = MEMORY_LIMIT,
        device: torch.device | str = "cpu",
    ) -> None:
        self.method, self.sizes, self.clients = method, sizes, tuple(clients)
        self.domains = tuple(domains or clients)
        """The domain of each client; if none is given, each has its own."""
        self.rounds, self.seed = rounds, seed
        self.participation, self.average = participation, average
        self.robust, self.robust_fraction = robust, robust_fraction
        self.memory_limit, self.device = memory_limit, device
        self.bounds: Bounds | None = None
        """What replies are checked against; None: nothing."""
        state = network.state_dict()
        self.travels, self._tied = travel(method, network), tied(network)
        model = {n: state[n] for n, way in self.travels.items() if way != "no"}
        slots = _own_slots("init_server", method, method.init_server(state, sizes))
        self.state: Tree = tree.copy({**slots, "model": model}, device)
        self.round = 0
        """The next round to run."""
        self._spool = Spool(memory_limit, device)
        self._updates: dict[str, Update] = {}
        self._slots: set[str] = set()

    def view(self) -> ServerView:
        now = (self.state, self.round, self.rounds)
        return ServerView(*now, self.clients, self.sizes, self.seed, self.domains)

    def sample(self) -> list[str]:
        """The clients of this round, in the federation's order."""
        at = participants(self.seed, self.round, len(self.clients), self.participation)
        return [self.clients[i] for i in at]

    def broadcast(self) -> Tree:
        """What every client of this round receives."""
        sent = self.method.broadcast(self.view())
        model = sent.get("model", {}) if isinstance(sent, Mapping) else {}
        expected = {name for name, way in self.travels.items() if way != "no"}
        if wrong := sorted(model.keys() ^ expected):
            what = "has entries that do not travel" if model.keys() > expected else "lacks entries"
            raise ProtofedError(
                f"the model that {self.method.name} broadcasts {what}: {', '.join(wrong[:3])} ...",
                'aggregate must return it, {**server.state, "model": mean}, and broadcast must '
                "send it",
            )
        return sent

    def initial_client(self, model: Slot, sizes: Sizes | None = None) -> Tree:
        """A client's private state before its first round; ``model`` is its initial network.

        ``sizes`` are those of its network, if it differs from the server's. The entries that
        travel are the same in all networks of a federation.
        """
        private = {n: t for n, t in model.items() if self.travels.get(n, "no") == "no"}
        slots = self.method.init_client(model, sizes or self.sizes)
        slots = _own_slots("init_client", self.method, slots)
        return tree.copy({**slots, "model": private})

    def accept(self, name: str, reply: Reply) -> None:
        """Accept a client's reply; its message stays in the spool until the round ends.

        Raises ``OutOfBounds``, and changes nothing, if it has numbers that no client can have.
        """
        if self.bounds is not None:
            self.bounds.admit(name, reply, self.state.get("model", {}))
        self._spool.put(name, reply.message)
        self._slots |= reply.message.keys()
        self._updates[name] = Update(name, reply.samples, reply.steps, reply.lr, self._spool)

    def screen(self) -> dict[str, str]:
        """Once all replies are in: refuse, or clip, those out of bounds; returns whose, and why."""
        found: dict[str, str] = {}
        bounds, start = self.bounds, self.state.get("model", {})
        for name, slots in (bounds.outside() if bounds is not None else {}).items():
            assert bounds is not None
            found[name] = next(iter(slots.values()))[1]
            if not bounds.clip:
                self.refuse(name)
                continue
            found[name] += "; clipped"
            message = {slot: self._spool.get(name, slot) for slot in self._slots}
            for slot, (limit, _) in slots.items():
                message[slot] = shortened(slot, message[slot], start, limit, bounds.rows)
            self._spool.put(name, message)
            bounds.settle(name, {slot: limit for slot, (limit, _) in slots.items()})
        return found

    def outlying(self) -> dict[str, float]:
        """How far each accepted reply of the round is from the others; about 1 is usual."""
        updates = self.updates()
        return outlyingness(updates, self._slots, (len(updates) - 1) // 2)

    def finish(self, state: Tree | None = None) -> dict[str, float]:
        """End the round with the replies received; without any, the state does not change.

        ``state`` is that of ``aggregated``, if it was called before. Returns the median size of
        each slot, if there are bounds.
        """
        if self._updates:
            self.state = self.aggregated() if state is None else state
        medians = self.bounds.close() if self.bounds is not None else {}
        self.abandon()
        self.round += 1
        return medians

    def aggregated(self, updates: list[Update] | None = None) -> Tree:
        """The state after the replies of the round, or after these of them; nothing changes yet.

        Updates are taken in the federation's order: the order of arrival cannot change a bit.
        """
        updates, start = updates or self.updates(), self.state.get("model", {})
        updates = robust_updates(
            self.robust,
            self.robust_fraction,
            updates,
            self._slots,
            start,
            self.method.slots.rows,
        )
        # if the round fails halfway, it is repeated from them, at once or by a resumed run
        given = {"the server's state": self.state, **self._spool.in_memory()}
        with tree.unchanged(given, self._changed):
            weights = self.method.weights(self.view(), updates)
            if weights is None:
                weights = [1.0 if self.average == "uniform" else u.samples for u in updates]
            if len(weights) != len(updates) or math.fsum(weights) == 0:
                raise ProtofedError(
                    f"weights of {self.method.name} are {[*map(float, weights)]!s:.100} for "
                    f"{len(updates)} updates",
                    "there must be one for each, and their sum must not be 0",
                )
            # entries that only go down are the server's own: the mean leaves them as they are
            averaged = start | weighted_mean(updates, "model", weights)
            state = self.method.aggregate(self.view(), averaged, updates)
        if not isinstance(state, Mapping) or not all(
            isinstance(s, Mapping) for s in state.values()
        ):
            raise ProtofedError(
                f"aggregate of {self.method.name} returns {tree.in_words(state):.200}",
                'it must return the server\'s next state, {**server.state, "model": mean}',
            )
        if self._tied:
            state = {**state, "model": self._tie(state.get("model", {}))}
        return tree.copy(state, self.device)

    def _tie(self, model: Slot) -> Slot:
        """The model with one value for all names of an entry."""
        return {n: model.get(self._tied.get(n, n), t) for n, t in model.items()}

    def spoilers(self, works: Callable[[list[Update]], bool]) -> list[str]:
        """Whose replies are at fault if they do not work together; none if it cannot be told.

        Those that do not work alone, if they are fewer than the others; or else the one without
        which the others work.
        """
        updates = self.updates()
        alone = [u.name for u in updates if not works([u])]
        if alone:
            return alone if 2 * len(alone) < len(updates) else []
        others = {u.name: [v for v in updates if v is not u] for u in updates}
        found = [name for name, rest in others.items() if len(rest) > 1 and works(rest)]
        return found if len(found) == 1 else []

    def refuse(self, name: str) -> None:
        """Leave an accepted reply out of the round after all."""
        del self._updates[name]
        if self.bounds is not None:
            self.bounds.settle(name, None)

    def updates(self) -> list[Update]:
        """The accepted replies of the round, in the federation's order."""
        return [self._updates[name] for name in self.clients if name in self._updates]

    def _changed(self, what: str) -> ProtofedError:
        return ProtofedError(
            f"{self.method.name} changes {what} in place",
            "weights and aggregate must return new tensors and not modify their inputs",
        )

    def abandon(self) -> None:
        """Discard the replies of an unfinished round."""
        self._spool.close()
        self._spool = Spool(self.memory_limit, self.device)
        self._updates, self._slots = {}, set()
        if self.bounds is not None:
            self.bounds.abandon()


def _own_slots(hook: str, method: Method, slots: Tree) -> Tree:
    """The slots that a method starts with, which are those beside the model."""
    if not isinstance(slots, Mapping) or "model" in slots:
        found = "a slot 'model'" if isinstance(slots, Mapping) else tree.in_words(slots)
        raise ProtofedError(
            f"{hook} of {method.name} returns {found}",
            "it must return the slots beside the model, which starts as network makes it",
        )
    return slots
