"""The contract of a method: the hooks it may override, and what they see.

A method imports only this module, torch, ``prototypes``, ``styles``, ``augmix`` and ``adain``. It
is a frozen dataclass of hyper-parameters with a few functions on named tensors. The defaults of
``Method`` are FedAvg; a subclass overrides what its paper changes. It never loops over data,
clients or devices, and nothing outside ``methods/`` mentions a method by name.

    round t:  broadcast(server) ─► each client: phases ─► forward, loss ─► upload
              ─► weights, aggregate ─► the server's next state ─► predict on every test set

*Hot* hooks (``forward``, ``between``, ``loss``, ``predict``, ``rules``) are plain tensor
expressions: no ``.item()``, no ``if`` on a tensor's value. Whatever changes between steps or rounds
comes as a tensor from the client view (``client.round``, ``client.progress``,
``client.received``, ...), because an engine may record the step once and replay it. All other hooks
are *cold*: ordinary Python, called once per client or round. ``protofed methods check`` verifies
any method.

State is one type everywhere, a ``Tree``: named slots of named tensors. Server state, client state
and both messages are Trees. A client starts each round from ``mine["model"] | received["model"]``:
received entries override its own. That one line, with ``Method.shared``, is FedAvg, FedBN, private
modules and different models at different clients.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from numbers import Integral, Real
from types import CodeType, FunctionType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from protofed import keys, tree
from protofed.errors import NoSecondDerivative, unknown
from protofed.errors import ProtofedError as ProtofedError
from protofed.models.dropout import KeyedDropout
from protofed.models.network import Between as Between
from protofed.models.network import Network as Network
from protofed.models.network import Output as Output
from protofed.models.network import trainable
from protofed.prototypes import Prototypes, class_means, class_sums, widened
from protofed.styles import style_of
from protofed.tree import Slot as Slot
from protofed.tree import Tree as Tree

R = TypeVar("R")

# ---- small types ---------------------------------------------------------------------------------

Terms = dict[str, Tensor]
"""The named terms of a loss. The objective is their sum; each is recorded under its name."""

Shared = Literal["both", "down", "no"]
"""Whether an entry of the model travels: both ways, only down, or not at all."""

BatchSource = Callable[[str], Iterator[tuple[Tensor, Tensor]]]
"""Batches (x, y), not augmented, of a part of a client's data: ``train`` or ``holdout``."""


class Batch(NamedTuple):
    """Images x [B, C, H, W] as the network takes them, labels y [B], rows [B] in the data."""

    x: Tensor
    y: Tensor
    rows: Tensor


class Entry(NamedTuple):
    """One entry of the model: its name and its kind (``weight``, ``bn`` or ``buffer``)."""

    name: str
    kind: str


class Sizes(NamedTuple):
    """The sizes of a task and a model: K classes, d features, and the side of the images.

    ``parameters`` are the names of the model's trainable entries, ``channels`` the channels of each
    of its stages.
    """

    classes: int
    features: int
    image: int
    parameters: tuple[str, ...] = ()
    channels: Mapping[str, int] = {}

    @classmethod
    def of(cls, network: Network, classes: int, image: int) -> Self:
        """The sizes of a network for these classes and images."""
        channels = {name: stage.channels for name, stage in network.stages.items()}
        return cls(classes, network.features, image, tuple(trainable(network)), channels)


class PublicImages(NamedTuple):
    """Unlabeled images that all clients may see: their source, and how many per round.

    ``source`` is ``unused`` (training images that no client holds, equally many from each domain
    with clients), a domain (its unused images), a task (its training images) or ``folder:PATH``.
    Test images are never among them. A user chooses by a hyper-parameter ``public``.
    """

    source: str
    images: int


@dataclass(frozen=True)
class Phase:
    """A stretch of local training; ``None`` means what the protocol says.

    Each phase starts with a fresh optimizer. ``trainable`` selects the parameters that move by
    name. With ``data="public"`` the batches are of the round's public images, not augmented;
    their labels are all 0 and mean nothing, and ``rows`` index the round's draw.
    """

    loss: Callable[[Client, Batch], Terms]
    epochs: int | None = None
    trainable: Callable[[str], bool] | None = None
    batch: int | None = None
    lr: float | None = None
    momentum: float | None = None
    clip: float | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    data: Literal["own", "public"] = "own"


@dataclass(frozen=True)
class Slots:
    """A method's slots besides ``model``: each one's name, and what it holds in words.

    ``up`` and ``down`` are the messages; ``client`` is what a client keeps between rounds;
    ``server`` is what the server keeps and does not send (it also keeps all that goes down).
    ``model`` says what part of the model travels; empty: none does. ``rows`` are slots of ``up``
    that have a row for each of some images: their size (``--bounds``) is that of their rows.
    """

    up: Mapping[str, str] = field(default_factory=dict)
    down: Mapping[str, str] = field(default_factory=dict)
    client: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)
    model: str = "model"
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any("model" in slots for slots in (self.up, self.down, self.client, self.server)):
            raise ProtofedError(
                "slots declares 'model', which every method has",
                "leave it out; Slots(model=...) says in words which part of it travels",
            )

    def __str__(self) -> str:
        ways = {"up": self.up, "down": self.down}
        beside = [f"{words} ({way})" for way, slots in ways.items() for words in slots.values()]
        return "; ".join([self.model] * bool(self.model) + beside) or "nothing"


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: its symbol in the paper, its meaning, its range.

    ``weight`` marks the factor of a loss term: with all of its weights at 0, a method must equal
    FedAvg bit for bit (``protofed methods check`` tests it). ``per_task`` holds defaults that the
    paper gives for particular tasks. ``printed`` is the value of ``reading=printed``, the paper's
    equations and algorithm to the letter; None: that of the default, ``reading=published``.
    ``file`` marks one that names a file (``file:PATH``) without which the method cannot run.
    """

    symbol: str
    meaning: str
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] | None = None
    weight: bool = False
    per_task: Mapping[str, Any] = field(default_factory=dict)
    printed: Any = None
    file: bool = False


READING, READINGS = "reading", ("published", "printed")
"""The option that stands for several hyper-parameters when a method is made, and its values."""


def hyper(default: float | int | bool | str, symbol: str, meaning: str, **limits: Any) -> Any:
    """Declare a hyper-parameter: ``tau: float = hyper(0.02, "τ", "temperature", above=0)``."""
    return field(default=default, metadata={"hyper": Hyper(symbol, meaning, **limits)})


# ---- the method ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """The base of all methods; as it stands, it is FedAvg.

    Every public function and property below is a hook that a subclass may override. A property
    that is a constant is written as one: ``evaluates = "everyone"``.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Authors, venue and year."""
    protocol: ClassVar[str | Mapping[str, Any]] = ""
    """What its paper trains with: a protocol's name, or settings (batch, epochs, ...)."""

    # ---- what the system does on the method's behalf -------------------------------------------

    @property
    def slots(self) -> Slots:
        """What travels and what is kept, besides the model."""
        return Slots()

    @property
    def proto_pass(self) -> str:
        """When features are summed for ``client.class_means()``: none, last_epoch or post.

        ``last_epoch``: during the last epoch of the last phase (augmented images, weights still
        moving, BatchNorm in training mode). ``post``: in a clean pass after training.
        """
        return "none"

    @property
    def evaluates(self) -> str:
        """Whose model is tested: the server's (``global``), or the clients' own.

        ``clients``: each domain is tested by its own clients. ``everyone``: each client is tested
        on every domain, and a domain's accuracy is the mean over all clients, with that over its
        own clients recorded next to it; for methods without a global model.
        """
        return "global"

    @property
    def holdout(self) -> float:
        """The fraction of a client's samples held out of training for ``client.evaluate``."""
        return 0.0

    @property
    def public_images(self) -> PublicImages | None:
        """The public images needed by ``client.public_logits`` and by phases on public data."""
        return None

    @property
    def weighting(self) -> str:
        """What updates are weighted by, in words; empty: the protocol's rule.

        ``uniform`` is enough to make all updates count the same; other words describe ``weights``.
        """
        return "" if type(self).weights is Method.weights else "its own rule"

    @property
    def sgd_only(self) -> str:
        """Why clients must train with SGD, for an error message; empty: any optimizer will do."""
        return ""

    @property
    def detached_terms(self) -> tuple[str, ...]:
        """The loss terms that hold a part of themselves constant.

        They ``detach`` something that depends on the weights, so their gradient rightly differs
        from the finite difference, and the checks do not compare the two.
        """
        return ()

    @property
    def size_limit(self) -> float:
        """How large a client's slot may be, in multiples of the others' median (``--bounds``)."""
        return 10.0

    @property
    def uses_rounds(self) -> bool:
        """Whether a round depends on how many there are in all: such a run cannot be extended.

        By default, whether a function of the class reads ``client.progress`` or ``server.rounds``.
        """
        own = [f for cls in type(self).__mro__ for f in vars(cls).values()]
        todo: list[Any] = [f.__code__ for f in own if isinstance(f, FunctionType)]
        for code in todo:
            if {"progress", "rounds"} & {*code.co_names}:
                return True
            todo += [c for c in code.co_consts if isinstance(c, CodeType)]  # lambdas and the like
        return False

    # ---- cold hooks ----------------------------------------------------------------------------

    def for_mixed_models(self) -> Self:
        """The method as it runs where clients have different models; default: unchanged.

        Then only entries that all models have in common may travel (``shared``).
        """
        return self

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        """The backbone with whatever extra modules the method needs."""
        return backbone

    def shared(self, entry: Entry) -> Shared:
        """Which way an entry of the model travels."""
        return "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """The server's extra slots before round 0; ``model`` is the whole initial network."""
        return {}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        """A client's private slots before its first round."""
        return {}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """The local training of a round; ``epochs`` is the protocol's total for the round."""
        return (Phase(self.loss),)

    def restyles(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        """The stages at which ``between`` changes the features, out of those of the network.

        The first is ``pixels``; ResNets also have ``stem``, ``stage1`` to ``stage4``, CNNs
        ``stage1`` and so on, and a model of the user's own has those that it names.
        """
        return ()

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        """An epoch's random numbers that have no closed form, drawn on the host.

        Arrays [steps, ...]; a step finds its row in ``client.drawn``.
        """
        return {}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """After training: what is sent besides the shared model, and the next private slots."""
        return {}, {}

    def weights(self, server: ServerView, updates: Updates) -> Sequence[float] | None:
        """Averaging weights of the updates, not normalized; None: the protocol's rule."""
        return [1.0] * len(updates) if self.weighting == "uniform" else None

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        """The server's next state, from the averaged model and the clients' slots.

        Returns new tensors; those in ``server.state`` and ``updates`` must not change.
        """
        return {**server.state, "model": mean}

    def broadcast(self, server: ServerView) -> Tree:
        """What goes down to every client of the round; default: all of the server's state."""
        return server.state

    # ---- hot hooks -----------------------------------------------------------------------------

    def forward(self, client: Client, x: Tensor) -> Output:
        """Feature [B, d] and logits [B, K] of a batch."""
        return client.network(x)  # type: ignore[no-any-return]

    def between(self, client: Client, stage: str, x: Tensor) -> Tensor:
        """What the next stage gets of the features x [B, C, H, W] of this one.

        In training, every pass of ``client.forward`` calls it at the stages of ``restyles``;
        evaluation and clean passes do not.
        """
        return x

    def loss(self, client: Client, batch: Batch) -> Terms:
        """The local objective, term by term."""
        return {"ce": client.cross_entropy(client.forward(batch.x).logits, batch.y)}

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Logits [B, K]: their softmax gives the class probabilities.

        When the server evaluates, ``client.mine`` is empty.
        """
        return client.forward(x).logits

    def rules(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Scores [B, K] by inference rule; the accuracy of each is recorded.

        ``accuracy`` is the main one, ``predict``.
        """
        return {"accuracy": self.predict(client, x)}

    # ---- hyper-parameters ----------------------------------------------------------------------

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls).keys() - cls.__annotations__.keys():
            if name.startswith("_") or any(hasattr(base, name) for base in cls.__bases__):
                continue
            if near := difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.75):
                raise ProtofedError(
                    f"{cls.__name__}.{name} is not a hook of a method: did you mean {near[0]}?",
                    f"a helper of your own needs an underscore: _{name}",
                )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(self.name, f, getattr(self, f.name)))

    @classmethod
    def hypers(cls) -> dict[str, Hyper]:
        return {f.name: f.metadata.get("hyper", Hyper("", "")) for f in fields(cls)}

    @classmethod
    def switches(cls) -> dict[str, Any]:
        """The hyper-parameters that ``reading=printed`` sets; none: there is one reading."""
        return {name: h.printed for name, h in cls.hypers().items() if h.printed is not None}

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """All that ``create`` takes: the hyper-parameters, and ``reading`` if there are two."""
        return (*cls.hypers(), *([READING] if cls.switches() else []))

    @classmethod
    def defaults(cls, task: str = "", reading: str = READINGS[0]) -> dict[str, Any]:
        if reading not in READINGS:
            raise unknown(f"{READING} of {cls.name}", reading, READINGS)
        hypers = cls.hypers()
        found = {f.name: hypers[f.name].per_task.get(task, f.default) for f in fields(cls)}
        return found | cls.switches() if reading == "printed" else found

    @classmethod
    def require_plain_hypers(cls) -> None:
        """Raise an error if config.toml and --set could not express some hyper-parameter."""
        for f in fields(cls):
            if type(f.default) not in _KINDS:
                missing = f.default is dataclasses.MISSING
                has = "no default" if missing else f"the default {f.default!r}"
                raise ProtofedError(
                    f"hyper-parameter {f.name} of {cls.name} has {has}",
                    f"it must be {' or '.join(_KINDS.values())}; for several values, use several "
                    "hyper-parameters, or a word like '1,2' that the method splits",
                )

    @classmethod
    def create(cls, options: Mapping[str, Any], task: str = "") -> Self:
        """The method with these hyper-parameters; the others have the task's defaults.

        ``reading`` among the options chooses between the defaults and is not kept.
        """
        cls.require_plain_hypers()
        for name in options:
            if not cls.hypers():
                none = f"method '{cls.name}' has no hyper-parameter '{name}'"
                raise ProtofedError(none, "it has none at all")
            if name not in cls.option_names():
                raise unknown(f"hyper-parameter of {cls.name}", name, cls.option_names())
        given = dict(options)
        reading = given.pop(READING, READINGS[0]) if cls.switches() else READINGS[0]
        return cls(**{**cls.defaults(task, reading), **given})

    def options(self) -> dict[str, Any]:
        """All hyper-parameters with their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def with_options(self, **changes: Any) -> Self:
        """The same method with some hyper-parameters changed."""
        return dataclasses.replace(self, **changes)

    def without_weights(self) -> Self:
        """The same method with every loss weight at 0."""
        return self.with_options(**{name: 0.0 for name, h in self.hypers().items() if h.weight})


HOOKS = tuple(
    name
    for name, member in vars(Method).items()
    if isinstance(member, FunctionType | property)
    and not name.startswith("_")
    and name not in ("options", "with_options", "without_weights")
)
"""The names that a subclass may override."""

_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}
_MOST = 10**15
"""The largest hyper-parameter: its square must fit into float32, and it into 64 bits."""
_LIMITS = {"above": operator.gt, "least": operator.ge, "most": operator.le}


def _checked(method: str, f: dataclasses.Field[Any], value: Any) -> Any:
    """The value as the field's type, or an error that says what is allowed."""
    hyper: Hyper = f.metadata.get("hyper", Hyper("", ""))
    where = f"hyper-parameter {f.name} of {method}"
    kind: type = float if f.type in (float, "float") else type(f.default)  # float = hyper(1, ...)
    numbers = {float: Real, int: Integral}.get(kind)  # NumPy's included
    if numbers and isinstance(value, numbers) and not isinstance(value, bool):
        try:
            value = kind(value)
        except OverflowError:
            raise ProtofedError(f"{where} is too large a number") from None
    if f.default is not dataclasses.MISSING and type(value) is not kind:
        raise ProtofedError(
            f"{where} must be {_KINDS.get(kind, kind.__name__)}, got {value!r:.100}"
        )
    if hyper.choices is not None and value not in hyper.choices:
        raise unknown(f"value for {where}", value, hyper.choices)
    for name, holds in _LIMITS.items():
        limit = getattr(hyper, name)
        # `not holds` also rejects nan, which compares false with everything
        if limit is not None and not holds(value, limit):
            words = name if name == "above" else f"at {name}"
            raise ProtofedError(
                f"{where} must be {words} {limit:g}, got {value}",
                f"its default is {f.default}; see `protofed methods {method}`",
            )
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtofedError(f"{where} must be a finite number, got {value}")
    if numbers and abs(value) > _MOST:
        raise ProtofedError(f"{where} is too large a number: {value!r:.100}")
    return value


# ---- the client view -----------------------------------------------------------------------------


class Client:
    """One client during one round: a plain class of tensors, so that a step can be captured.

    Hot hooks may use ``network``, ``received``, ``mine``, ``start``, ``parameters``, ``round``,
    ``progress``, ``id``, ``domain``, ``pixel_mean``, ``pixel_std``, ``drawn``, ``forward``,
    ``forward_with``, ``cross_entropy``, ``uniform``, ``normal`` and ``beta``; the rest is for cold
    hooks.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        sizes: Sizes,
        *,
        received: Tree,
        mine: Tree,
        round: int = 0,
        rounds: int = 1,
        name: str = "server",
        domain: str = "",
        clean: BatchSource | None = None,
        public: BatchSource | None = None,
        samples: int = 0,
        lr: float = 0.0,
        min_class_count: int = 1,
        small_classes: Tensor | None = None,
        label_smoothing: float = 0.0,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        own = next(network.parameters())
        device = own.device
        self.method = method
        self.network = network
        self.classes = sizes.classes
        self.name = name
        self.received = received
        """What the server broadcast this round."""
        self.mine = mine
        """The client's private state; empty when the server evaluates."""
        self.start: Slot = mine.get("model", {}) | received.get("model", {})
        """The model local training started from."""
        self.parameters: dict[str, Tensor] = {**trainable(network)}
        """The live parameters by name, without those that are frozen."""
        self.sizes = sizes._replace(parameters=tuple(self.parameters))
        self.round = torch.tensor(round, device=device)
        """The number of this round, from 0."""
        self.progress = torch.tensor(round / max(1, rounds - 1), device=device)
        """0 in the first round, 1 in the last."""
        self.id = torch.tensor(keys.key(name), device=device)
        """The client's name as a number, for hot hooks; ``ServerView.client_ids`` has them all."""
        self.domain = torch.tensor(keys.key(domain), device=device)
        """Its domain as a number; ``ServerView.domain_ids`` has those of all clients."""
        self.pixel_mean, self.pixel_std = (
            torch.tensor(values, dtype=own.dtype, device=device)[:, None, None]
            for values in (mean, std)
        )
        """What images are normalized by: ``x * pixel_std + pixel_mean`` is in [0, 1]."""
        self.key = torch.zeros((), dtype=torch.int64, device=device)
        self.drawn: Slot = {}
        """This step's row of the method's ``draws``."""
        self.samples = samples
        self.steps = 0
        self.lr = lr
        self.clean, self.public = clean, public
        self.min_class_count = min_class_count
        """How many images a prototype must be made from to leave the client."""
        self.small_classes = small_classes
        """The classes [K] with fewer images than that, if there may be some."""
        self.label_smoothing = label_smoothing
        self.smoothed = False
        """Whether ``cross_entropy`` has been called."""
        self._draws = 0
        self._main: Tensor | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    # ---- hot -----------------------------------------------------------------------------------

    def forward(self, x: Tensor, between: Between | None = None) -> Output:
        """Feature and logits under the current weights.

        The first pass of a training step is the main one: it updates BatchNorm statistics, and
        its features make the prototypes. Further passes of the same step do neither. In training,
        the method's own ``between`` changes features between stages, unless one is given.
        """
        training = self.network.training
        if between is None and training:
            between = partial(self.method.between, self)
        if self._main is None or not training:
            out = self._pass(x, between)
            self._main = out.feature
            return out
        with _frozen_statistics(self.network):
            return self._pass(x, between)

    def forward_with(self, model: Slot, x: Tensor, between: Between | None = None) -> Output:
        """Feature and logits in evaluation mode, without gradient.

        The weights are those of ``model``; entries it does not have are the network's own. At the
        method's stages, features go through ``between``, if given.
        """
        was_training = self.network.training
        self.network.eval()
        try:
            with torch.no_grad():
                return call_with(self.network, model, partial(self._pass, x, between))
        finally:
            self.network.train(was_training)

    def _pass(self, x: Tensor, between: Between | None) -> Output:
        if between is None or not self.restyles:
            out = self.method.forward(self, x)
        else:
            with self.network.between(self.restyles, between):
                out = self.method.forward(self, x)
        if isinstance(out, Output):
            return out
        raise ProtofedError(
            f"forward of {self.method.name} returns {tree.in_words(out):.200}",
            "it must return Output(feature, logits), from protofed.method",
        )

    @cached_property
    def restyles(self) -> tuple[str, ...]:
        """The method's stages in this network."""
        return restyled_stages(self.method, self.network)

    @cached_property
    def _dropouts(self) -> list[KeyedDropout]:
        return [m for m in self.network.modules() if isinstance(m, KeyedDropout)]

    def cross_entropy(self, logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy of logits [B, K] and labels [B], with the run's label smoothing."""
        self.smoothed = True
        return F.cross_entropy(logits, y, reduction=reduction, label_smoothing=self.label_smoothing)

    def uniform(self, *shape: int) -> Tensor:
        """Keyed uniform numbers in (0, 1), different for each draw of a step."""
        self._draws += 1
        return keys.uniform(self.key, self._draws, shape)

    def normal(self, *shape: int) -> Tensor:
        """Keyed standard normal numbers, different for each draw of a step."""
        self._draws += 1
        return keys.normal(self.key, self._draws, shape)

    def beta(self, a: float, *shape: int) -> Tensor:
        """Keyed numbers of the Beta(a, a) distribution, different for each draw of a step."""
        self._draws += 1
        return keys.beta(self.key, self._draws, shape, a)

    # ---- cold ----------------------------------------------------------------------------------

    def model(self) -> Slot:
        """A copy of the current model, buffers included."""
        return {name: t.detach().clone() for name, t in self.network.state_dict().items()}

    def class_means(self, between: Between | None = None) -> tuple[Tensor, Tensor]:
        """The mean feature [K, d] of each class, and the number of samples [K] behind it.

        Both are 0 for a class that the client lacks, or has fewer than ``min_class_count`` of. With
        ``between``, they come from a clean pass in which it changes the features at the method's
        stages; otherwise they are those that were collected.
        """
        collected = self._sums
        if between is not None:
            self.begin_prototypes()
            self.collect_post(between)
            self._sums, collected = collected, self._sums
        if collected is None:
            raise RuntimeError(
                f"{type(self.method).__name__} asks for class means but collects none: "
                "its proto_pass must be 'last_epoch' or 'post'"
            )
        sum_Kd, count_K = collected
        if self.small_classes is not None:
            count_K = count_K.masked_fill(self.small_classes, 0)
        return class_means(sum_Kd, count_K), count_K

    def features(self) -> tuple[Tensor, Tensor]:
        """Features [n, d] and labels [n] of all training samples: a clean pass, no gradient.

        Without the classes that have fewer than ``min_class_count`` samples. In float32 even where
        the network computes in bfloat16: prototypes are made of them.
        """
        out = [(widened(self.forward_with({}, x).feature), y) for x, y in self.batches("train")]
        z_nd, y_n = map(torch.cat, zip(*out, strict=True))
        if self.small_classes is not None:
            large_n = ~self.small_classes[y_n]
            return z_nd[large_n], y_n[large_n]
        return z_nd, y_n

    def sample_styles(self, model: Slot | None = None) -> dict[str, Tensor]:
        """The style [n, 2, C] of each training sample at each of the method's stages.

        They come from a clean pass under the weights of ``model``, e.g. ``client.start``, those
        that training started from. None: the current ones.
        """
        found: dict[str, list[Tensor]] = {stage: [] for stage in self.restyles}

        def look(stage: str, x: Tensor) -> Tensor:
            found[stage].append(style_of(x))
            if len({len(styles) for styles in found.values()}) == 1:  # the last stage
                raise _AllSeen
            return x

        for x, _ in self.batches("train"):
            with suppress(_AllSeen):
                self.forward_with(model or {}, x, look)
        return {stage: torch.cat(styles) for stage, styles in found.items()}

    def styles(self, model: Slot | None = None) -> Slot:
        """Mean and standard deviation over the samples of ``sample_styles``: [2, 2, C] per stage.

        All 0 for a client with fewer than ``min_class_count`` samples; no other has a σ of 0.
        """
        styles = self.sample_styles(model)
        enough = self.samples >= self.min_class_count
        return {
            stage: torch.stack([s.mean(0), s.std(0, correction=0)]) * enough
            for stage, s in styles.items()
        }

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Images x and labels y of a part, ``train`` or ``holdout``, without augmentation."""
        if self.clean is None:
            raise RuntimeError("the server has no samples: only clients do")
        return self.clean(part)

    def public_logits(self) -> Tensor:
        """Logits [N, K] of the next round's public images: a clean pass, no gradient."""
        if self.public is None:
            raise RuntimeError(
                f"{type(self.method).__name__} asks for public images but has none: its "
                "public_images must say which"
            )
        out = [self.forward_with({}, x).logits for x, _ in self.public("train")]
        return torch.cat([*map(widened, out)])

    def evaluate(self, model: Slot, part: str = "holdout") -> dict[str, float]:
        """Accuracy (0 to 1) and mean cross-entropy of a model on a part of the client's data."""
        right = loss = count = 0.0
        for x, y in self.batches(part):
            logits = widened(self.forward_with(model, x).logits)
            right += float((logits.argmax(1) == y).sum())
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            count += len(y)
        if not count:
            raise RuntimeError(f"client {self.name} has no samples in its {part} part")
        return {"accuracy": right / count, "loss": loss / count}

    # ---- for the system ------------------------------------------------------------------------

    def begin_step(self, key: int | Tensor) -> None:
        """Start a step with its key; the next forward pass is the main one."""
        self.key = key if isinstance(key, Tensor) else self.key.fill_(key)
        self._draws = 0
        self._main = None
        for dropout in self._dropouts:
            dropout.uniform = self.uniform

    @property
    def draws(self) -> tuple[Tensor, int]:
        """The state of the step's draws: its key, and how many there have been."""
        return self.key, self._draws

    @draws.setter
    def draws(self, at: tuple[Tensor, int]) -> None:
        self.key, self._draws = at

    def begin_prototypes(self) -> None:
        self._sums = None

    def main_feature(self) -> Tensor:
        """The features of the step's main pass, without gradient."""
        if self._main is None:
            raise RuntimeError(
                f"the loss of {type(self.method).__name__} never calls client.forward, and its "
                "proto_pass is 'last_epoch': prototypes are made of that pass"
            )
        return self._main.detach()

    def collect(self, y: Tensor) -> None:
        """Add the step's main features to the class sums."""
        self._add(self.main_feature(), y)

    def use_sums(self, sum_Kd: Tensor, count_K: Tensor) -> None:
        """Use class sums that are kept elsewhere."""
        self._sums = sum_Kd, count_K

    def collect_post(self, between: Between | None = None) -> None:
        """Fill the class sums in a clean pass over the training samples."""
        for x, y in self.batches("train"):
            self._add(self.forward_with({}, x, between).feature, y)

    def clipped_sums(self, clip: float) -> tuple[Tensor, Tensor]:
        """Class sums of the network as it is, in a clean pass; no feature is longer than ``clip``.

        A feature that is not finite counts as 0: it must not show in the sum of the others.
        """
        self.begin_prototypes()
        for x, y in self.batches("train"):
            feature_Bd = widened(self.forward_with({}, x).feature).nan_to_num()
            length_B = feature_Bd.norm(dim=1)
            self._add(feature_Bd * (clip / length_B).clamp(max=1)[:, None], y)
        assert self._sums is not None
        return self._sums

    def _add(self, feature_Bd: Tensor, y: Tensor) -> None:
        added = class_sums(feature_Bd, y, self.classes)
        if self._sums is None:
            self._sums = added
        else:
            torch._foreach_add_(self._sums, added)


class _AllSeen(Exception):
    """The rest of a pass is not needed."""


def restyled_stages(method: Method, network: Network) -> tuple[str, ...]:
    """The method's stages in a network; an error if the network has no such stage."""
    names = tuple(network.stages)
    found = method.restyles(names)
    for name in found:
        if name not in names:
            raise ProtofedError(
                f"{method.name} asks for stage '{name}', which the model does not have",
                f"its stages are {', '.join(names)}",
            )
    return found


def call_with(network: nn.Module, tensors: Slot, function: Callable[[], R]) -> R:
    """Call ``function`` while these tensors replace the network's own."""
    named = {f"network.{name}": t for name, t in tensors.items()}
    result: R = functional_call(_Calls(network, function), named, ())
    return result


class _Calls(nn.Module):
    def __init__(self, network: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.network, self.forward = network, function


@contextmanager
def _frozen_statistics(network: nn.Module) -> Iterator[None]:
    """BatchNorm normalizes by the batch, as in training, without updating its buffers."""
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


# ---- the server view -----------------------------------------------------------------------------


class Messages(Protocol):
    """Where the round's messages wait; a slot is only read when it is asked for."""

    def get(self, name: str, slot: str) -> Slot:
        """A slot of a client's message; empty if the message has none of that name."""


@dataclass(frozen=True)
class ServerView:
    """What the server hooks see; ``clients`` are those of the whole federation."""

    state: Tree
    round: int
    rounds: int
    clients: tuple[str, ...]
    sizes: Sizes
    seed: int = 0
    domains: tuple[str, ...] = ()
    """The domain of each of ``clients``."""

    def client_ids(self) -> Tensor:
        """``client.id`` of every client [M], in the order of ``clients``."""
        return torch.tensor([keys.key(name) for name in self.clients])

    def domain_ids(self) -> Tensor:
        """``client.domain`` of every client [M], in the order of ``clients``."""
        return torch.tensor([keys.key(name) for name in self.domains])

    def each_client(self, slot: str) -> Slot:
        """A slot of ``state`` with a row for each client; a single row stands for all clients."""
        kept = self.state[slot]
        return {n: t.expand(len(self.clients), *t.shape[1:]) for n, t in kept.items()}

    def each_style(self, slot: str, sent: Mapping[str, Tensor]) -> Slot:
        """Such a slot of a ``style`` and a ``mask``, with what these clients sent in their places.

        A style of zeros is that of a client that has none to send: it keeps its earlier one.
        """
        kept = self.each_client(slot)
        style, mask = [*kept["style"]], kept["mask"].clone()
        for name, own in sent.items():
            if own.any():
                place = self.clients.index(name)
                style[place], mask[place] = own, 1
        return {"style": torch.stack(style), "mask": mask}

    def generator(self, *purpose: int | str) -> np.random.Generator:
        """A random generator keyed by the run's seed, the round and a purpose."""
        return keys.generator(self.seed, self.round, *purpose)


class _NotSent(dict[str, Tensor]):
    """A slot that is not in a message: empty, and an entry that is asked for is an error."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def __missing__(self, name: str) -> Tensor:
        raise ProtofedError(self.error, "the slots of a message are those that upload returns")


@dataclass(frozen=True)
class Update:
    """One client's contribution to a round; ``update["slot"]`` is a slot of its message."""

    name: str
    samples: int
    steps: int
    lr: float
    messages: Messages

    def __getitem__(self, slot: str) -> Slot:
        return self.messages.get(self.name, slot) or _NotSent(f"{self.name} sent no slot '{slot}'")


Updates = Sequence[Update]


# ---- what several methods share ------------------------------------------------------------------


def share_hyper() -> Any:
    """The hyper-parameter ``share`` of methods that work with and without a common model."""
    meaning = (
        "what travels: model (and prototypes), prototypes (alone), auto: the model unless the "
        "clients' models differ"
    )
    return hyper("auto", "", meaning, choices=("auto", "model", "prototypes"))


def proto_pass_hyper(features: str, default: str = "last_epoch", **limits: Any) -> Any:
    """The hyper-parameter ``proto_pass``; ``features`` names the equation it is about."""
    meaning = f"{features}: during the last training epoch, or in a clean pass afterwards"
    return hyper(default, "", meaning, choices=("last_epoch", "post"), **limits)


def stages_hyper(auto: str) -> Any:
    """The hyper-parameter ``stages``; ``auto`` says in words what its default means."""
    return hyper("auto", "", f"where: stages separated by commas; auto: {auto}")


def chosen_stages(names: str, auto: Iterable[str]) -> tuple[str, ...]:
    """What ``restyles`` returns: the stages named by that hyper-parameter, or those of ``auto``."""
    named = auto if names == "auto" else [name.strip() for name in names.split(",")]
    if found := tuple(dict.fromkeys(named)):
        return found
    raise ProtofedError(
        "the model has no stages for the method to work between",
        "use another model, name the stages of your own (encoder.stages), or --set stages=pixels",
    )


def upload_class_means(client: Client) -> Tree:
    """A client's class means with their counts; a class it does not have has count 0."""
    mean, count = client.class_means()
    return {"prototypes": {"mean": mean, "count": count}}


def clients_class_means(updates: Updates) -> Prototypes:
    """The class means that the round's M clients sent, as a table [K, M, d]: one row per owner."""
    mean_MKd = torch.stack([u["prototypes"]["mean"] for u in updates])
    count_MK = torch.stack([u["prototypes"]["count"] for u in updates])
    return Prototypes(mean_MKd.transpose(0, 1), count_MK.T)


@dataclass(frozen=True)
class PrototypeMethod(Method):
    """FedAvg with one global prototype per class, the mean of the class means of its owners.

    A subclass needs ``proto_pass`` and a loss that uses ``client.received["prototypes"]``. With a
    hyper-parameter ``share`` it also has the form in which prototypes travel alone.
    """

    @property
    def slots(self) -> Slots:
        return Slots(
            model="" if self.without_model else "model",
            up={"prototypes": "class means"},
            down={"prototypes": "global prototypes"},
        )

    @property
    def without_model(self) -> bool:
        """Whether prototypes travel alone."""
        return self.options().get("share") == "prototypes"

    @property
    def evaluates(self) -> str:
        return "everyone" if self.without_model else "global"

    def for_mixed_models(self) -> Self:
        auto = self.options().get("share") == "auto"
        return self.with_options(share="prototypes") if auto else self

    def shared(self, entry: Entry) -> Shared:
        return "no" if self.without_model else "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        return {"prototypes": Prototypes.empty(sizes.classes, sizes.features).slot()}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        return upload_class_means(client), {}

    def aggregate(self, server: ServerView, mean: Slot, updates: Updates) -> Tree:
        C = clients_class_means(updates).per_class_mean()
        return {"model": mean, "prototypes": C.slot()}


def zeros(model: Slot, names: Iterable[str]) -> Slot:
    return {n: torch.zeros_like(model[n]) for n in names if n in model}


def weighted_mean(updates: Updates, slot: str, weights: Sequence[float]) -> Slot:
    """The weighted mean of a slot, one update in memory at a time, in the given order.

    Sums are float64, so the mean of equal models is that model. Integers (BatchNorm's counter)
    are not averaged: the largest is taken.
    """
    total = math.fsum(weights)
    sums: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    entries: Slot = {}
    first: dict[str, torch.Size] = {}
    for update, weight in zip(updates, weights, strict=True):
        entries = update[slot]
        shapes = {name: t.shape for name, t in entries.items()}
        first = shapes if update is updates[0] else first
        if shapes != first:
            names = ", ".join(sorted(dict(shapes.items() ^ first.items()))[:3])
            both = f"{update.name} and {updates[0].name}"
            raise ProtofedError(f"{both} sent different entries in '{slot}': {names}")
        floats = {name: entries[name] for name in first if entries[name].is_floating_point()}
        # All entries at once: one by one, a round of twenty small networks is thousands of kernels.
        parts = [torch.empty_like(t, dtype=torch.float64) for t in floats.values()]
        if parts:
            torch._foreach_copy_(parts, list(floats.values()))
            torch._foreach_mul_(parts, weight / total)
        if sums:
            torch._foreach_add_(list(sums.values()), parts)
        else:
            sums = dict(zip(floats, parts, strict=True))
        for name in entries.keys() - floats.keys():
            t = entries[name]
            largest[name] = torch.maximum(largest[name], t) if name in largest else t.clone()
    return {
        name: sums[name].to(entries[name].dtype) if name in sums else largest[name]
        for name in first
    }


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient by each tensor is ``factor`` times a known direction.

    If autograd records a sum over all weights, that takes a dozen small operations for each tensor
    of the network, a quarter of a small step on a GPU; this is one call for all tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, factor: float, directions: Sequence[Tensor], *by: Tensor
    ) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(*directions)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # called with create_graph
            raise NoSecondDerivative(
                "this sum over all weights has no second derivative; where you need one, write it "
                "as tensor expressions: (p - start[n]).square().sum()"
            )
        return None, None, None, *torch._foreach_mul(ctx.saved_tensors, ctx.factor * gradient)


def squared_distance(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
    """‖θ − θ^t‖² over the trainable entries; its gradient is 2 (θ − θ^t), even at θ = θ^t."""
    by = list(parameters.values())
    with torch.no_grad():
        difference = torch._foreach_sub(by, [start[n] for n in parameters])
        value = torch.stack(torch._foreach_norm(difference)).square().sum()
    distance: Tensor = _KnownGradient.apply(value, 2.0, difference, *by)
    return distance


def inner_product(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """⟨direction, θ⟩: a linear term whose gradient is the direction itself."""
    by, directions = list(parameters.values()), [direction[n] for n in parameters]
    with torch.no_grad():
        value = torch.stack([p.sum() for p in torch._foreach_mul(by, directions)]).sum()
    product: Tensor = _KnownGradient.apply(value, 1.0, directions, *by)
    return product


def effective_steps(steps: int, momentum: float) -> float:
    """How many gradients add up to the change of ``steps`` SGD steps, per unit of learning rate.

    With momentum ρ, a step's gradient enters that step and all later ones, 1 + ρ + ρ² + ...
    times; over τ steps this gives Σ_k (1 − ρ^k)/(1 − ρ) = (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ).
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
