"""The file of a trained model: its tensors, and all that is needed to use them.

``model/`` has the entries that all share, ``client/NAME/`` what clients with models of their own
have of theirs, and ``received.SLOT/`` what else the server sends, if the method predicts with it.
What single clients sent is not in it. The metadata is a ``ModelCard``, without time, host or
engine: equal runs give equal files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from protofed import keys, tree
from protofed.config import Config, check_settings, short_option, shown_task
from protofed.data import Task
from protofed.errors import ProtofedError, unknown
from protofed.federation.facts import DTYPES
from protofed.files import Damaged
from protofed.method import Method, Sizes
from protofed.methods import known_class, reference
from protofed.models import Network, build
from protofed.shape import require_shape
from protofed.tree import Slot, Tree
from protofed.user_code import code_withheld

CARD_SHAPE = {
    **dict.fromkeys(("hash", "holds", "task", "method", "precision"), str),
    **dict.fromkeys(("image_size", "seed", "rounds"), int),
    "classes": [str],
    "mean": [float],
    "std": [float],
    "models": {str: str},
    "domains": {str: str},
    "width": int | None,
    "norm": str | None,
    "options": {},
    "accuracy": {str: float},
    "pixel_range?": str | None,
    "temperature?": {str: float},
    "start?": str,
}
CLIENT_SLOT = "client"
RECEIVED = "received."


@dataclass(frozen=True)
class ModelCard:
    """What a model's file says about the model."""

    hash: str
    """The run's."""
    holds: str
    """In words, which entries the file has."""
    task: str
    classes: tuple[str, ...]
    """In the order of the scores."""
    image_size: int
    mean: tuple[float, ...]
    """Images are scaled to [0, 1], then normalized per channel with ``mean`` and ``std``."""
    std: tuple[float, ...]
    models: Mapping[str, str]
    """The architecture of each client."""
    domains: Mapping[str, str]
    """The domain of each client."""
    width: int | None
    norm: str | None
    method: str
    options: Mapping[str, Any]
    """Of a path among them, the last part alone: the file may be handed on."""
    seed: int
    rounds: int
    precision: str
    accuracy: Mapping[str, float]
    """Test accuracy in % by domain, and ``average``: what the run's summary has."""
    pixel_range: str | None = None
    """In images with more than 8 bits, the values ``LOW:HIGH`` that become black and white."""
    temperature: Mapping[str, float] = field(default_factory=dict)
    """By client, or under ``""`` for the global model: what scores are divided by, if fitted."""
    start: str = ""
    """In words, which weights training started from and what was frozen; empty if neither."""

    @classmethod
    def of(
        cls,
        config: Config,
        task: Task,
        hash: str,
        clients: Sequence[Mapping[str, Any]],
        accuracy: Mapping[str, float],
        holds: str,
    ) -> ModelCard:
        """``config`` has the precision as it was found; ``clients`` is the run's table of them."""
        return cls(
            hash=hash,
            holds=holds,
            task=shown_task(config.task),
            classes=task.classes,
            image_size=task.image_size,
            mean=task.augment.mean,
            std=task.augment.std,
            models={row["client"]: row["model"] for row in clients},
            domains={row["client"]: row["domain"] for row in clients},
            width=config.width,
            norm=config.norm,
            method=reference(config.method),
            options={n: short_option(v) for n, v in config.method.options().items()},
            seed=config.seed,
            rounds=config.rounds,
            precision=config.precision,
            accuracy=dict(accuracy),
            pixel_range=config.pixel_range,
            start=config.start_in_words,
        )


@dataclass(frozen=True)
class StoredModel:
    """The content of a model's file."""

    card: ModelCard
    model: Slot
    clients: Mapping[str, Slot] = field(default_factory=dict)
    received: Tree = field(default_factory=dict)
    trained_by: Method | None = field(default=None, compare=False)
    """The method that trained it, if this process did: it may be from a notebook."""

    @property
    def method(self) -> Method:
        if self.trained_by is not None:
            return self.trained_by
        known = known_class(self.card.method)
        if known is None:
            name = self.card.method.rpartition(":")[2].lower()
            raise code_withheld(f"method {name}", self.card.method)
        method = known.create(self.card.options)
        mixed = len({*self.card.models.values()}) > 1
        return method.for_mixed_models() if mixed else method

    def network(self, client: str | None = None) -> Network:
        """The trained network in evaluation mode: the global one, or a client's own."""
        card, method = self.card, self.method
        if client is not None and client not in card.models:
            raise unknown("client", client, card.models)
        if client is not None and client not in self.clients:
            raise ProtofedError(
                f"client {client} has no model of its own here", f"the file has {card.holds}"
            )
        name = card.models[client] if client else next(iter(card.models.values()))
        with keys.torch_draws("to be replaced"):
            backbone = build(name, len(card.classes), card.image_size, card.width, card.norm)
            sizes = Sizes.of(backbone, len(card.classes), card.image_size)
            network = method.network(backbone, sizes).to(DTYPES[card.precision])
        # with FedBN, a network without BatchNorm is the same for all
        kept_back = method.evaluates != "global" and network.state_dict().keys() - self.model.keys()
        if client is None and (method.evaluates == "everyone" or kept_back):
            raise ProtofedError(
                f"{method.name} has no global model: every client has its own",
                f"name one of them, e.g. '{next(iter(card.models))}'",
            )
        own = self.clients[client] if client else {}
        try:
            network.load_state_dict({**network.state_dict(), **own, **self.model})
        except RuntimeError as error:
            raise ProtofedError(f"the model's entries do not fit {name}: {error!s:.500}") from None
        return network.eval()

    @classmethod
    def of(
        cls, card: ModelCard, received: Tree, method: Method, clients: Mapping[str, Slot]
    ) -> StoredModel:
        """The model at the end of a run: of what the server sends, what predictions need."""
        kept = tree.copy(received)
        model = kept.pop("model", {})
        hooks, own = ("predict", "forward"), type(method)
        own_rule = any(getattr(own, hook) is not getattr(Method, hook) for hook in hooks)
        return cls(card, model, clients, kept if own_rule else {}, method)

    def of_client(self, client: str) -> StoredModel:
        """The model of one client alone: without what the others have of theirs."""
        holds = f"{client}'s own entries (client/{client}/...), and what all share (model/...)"
        card, own = replace(self.card, holds=holds), {client: self.clients[client]}
        return replace(self, card=card, clients=own)

    def save(self, path: Path, private: bool = False) -> None:
        own = {f"{c}/{name}": t for c, slot in self.clients.items() for name, t in slot.items()}
        content = {"model": self.model, CLIENT_SLOT: own}
        content |= {f"{RECEIVED}{slot}": entries for slot, entries in self.received.items()}
        tree.save(content, path, asdict(self.card), private)


def read_model(path: Path) -> StoredModel:
    slots, metadata = tree.load(path)
    needed = [f.name for f in fields(ModelCard) if f.default is f.default_factory is MISSING]
    names = [f.name for f in fields(ModelCard) if f.name in needed or f.name in metadata]
    if missing := [name for name in names if name not in metadata]:
        raise ProtofedError(
            f"'{path}' does not say what is needed to use it: it lacks {', '.join(missing)}",
            "an earlier version wrote it; run it again",
        )
    require_shape(path, metadata, CARD_SHAPE)
    known = ("image_size", "width", "norm", "precision", "pixel_range")
    settings = {n: metadata[n] for n in known if n in metadata}
    check_settings({**settings, "model": metadata["models"]})
    if metadata["precision"] not in DTYPES:
        raise Damaged(path, "it does not say what precision the model has")
    if not all(0 < t < math.inf for t in metadata.get("temperature", {}).values()):
        raise Damaged(path, "a temperature is not a number above 0")
    for name in ("classes", "mean", "std"):
        metadata[name] = tuple(metadata[name])
    clients: dict[str, Slot] = {}
    for name, t in slots.get(CLIENT_SLOT, {}).items():
        client, _, entry = name.rpartition("/")
        clients.setdefault(client, {})[entry] = t
    received = {s.removeprefix(RECEIVED): e for s, e in slots.items() if s.startswith(RECEIVED)}
    card = ModelCard(**{name: metadata[name] for name in names})
    return StoredModel(card, slots.get("model", {}), clients, received)
