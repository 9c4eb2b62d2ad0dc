"""The contract of a method. The defaults are FedAvg; a method overrides what its paper changes.

A method is a frozen dataclass of hyper-parameters with a few functions on named tensors. It never
loops over data, clients or devices, and nothing outside ``methods/`` mentions a method by name.

    round t:  broadcast(server) ─► each client: phases ─► forward, loss ─► upload
              ─► weights, aggregate ─► the server's next state ─► predict on every test set

*Hot* hooks (``forward``, ``loss``, ``predict``) are plain tensor expressions: no ``.item()``, no
``if`` on a tensor's value; whatever changes between steps or rounds comes as a tensor from the
client view (``client.round``, ``client.progress``, ``client.received`` ...), because an engine may
record the step once and replay it. ``protofed methods check`` proves that for any method.
All other hooks are *cold*: ordinary Python, once per client or round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import ProtofedError, unknown
from protofed.federation.tree import Slot, Tree
from protofed.models import Network, Output

if TYPE_CHECKING:  # the views are handed in by the system; a method needs only their names
    from protofed.federation.client import Client
    from protofed.federation.server import ServerView, Update

Terms = dict[str, Tensor]
"""The named terms of a loss; the objective is their sum, and each is recorded by its name."""


class Batch(NamedTuple):
    """Images x [B, C, H, W] as the network takes them, labels y [B], rows [B] in the data."""

    x: Tensor
    y: Tensor
    rows: Tensor


class Entry(NamedTuple):
    """One entry of the model: its name, and its kind (``weight``, ``bn`` or ``buffer``)."""

    name: str
    kind: str


class Sizes(NamedTuple):
    """What a method may need to make state: classes K, feature size d, image side, and the names
    of the model's trainable entries (its other entries are buffers)."""

    classes: int
    features: int
    image: int
    parameters: tuple[str, ...] = ()


class PublicImages(NamedTuple):
    """Unlabelled images that all clients may see: where from, and how many a round.

    ``source`` is ``unused`` (training images that no client holds, as many of each domain that has
    clients), one domain's name (those of that domain alone), a task's name (its training images),
    or ``folder:PATH`` (all images below that folder). Test images of the task are never among
    them. A method that leaves the choice to its user has it as a hyper-parameter ``public``.
    """

    source: str
    images: int


@dataclass(frozen=True)
class Phase:
    """A stretch of local training; ``None`` means what the protocol says.

    Optimiser state starts anew in each phase. ``trainable`` tells by name which parameters move.
    With ``data="public"`` the batches are of the round's public images, without augmentation;
    their labels say nothing (all are 0), and ``rows`` are places in the round's draw.
    """

    loss: Callable[[Client, Batch], Terms]
    epochs: int | None = None
    trainable: Callable[[str], bool] | None = None
    batch: int | None = None
    lr: float | None = None
    momentum: float | None = None
    clip: float | None = None
    optimiser: Literal["sgd", "adam"] | None = None
    data: Literal["own", "public"] = "own"


@dataclass(frozen=True)
class Hyper:
    """What is known of a hyper-parameter: its symbol in the paper, its meaning, its range.

    ``weight`` marks the factor of a loss term: with all of a method's weights at 0 the method
    must be FedAvg, bit for bit (``protofed methods check`` tests that). ``per_task`` holds the
    defaults that the paper gives for certain tasks.
    """

    symbol: str
    meaning: str
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] | None = None
    weight: bool = False
    per_task: Mapping[str, Any] = field(default_factory=dict)


def hyper(default: float | int | bool | str, symbol: str, meaning: str, **limits: Any) -> Any:
    """A hyper-parameter of a method: ``tau: float = hyper(0.02, "τ", "temperature", above=0)``."""
    return field(default=default, metadata={"hyper": Hyper(symbol, meaning, **limits)})


@dataclass(frozen=True)
class Method:
    """Base of all methods; as it stands it is FedAvg."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Authors, venue and year."""
    travels: ClassVar[str] = "model"
    """What a client and the server exchange, in words."""

    # ---- what the system does on the method's behalf -------------------------------------------

    @property
    def proto_pass(self) -> str:
        """When features are summed for ``client.class_means()``: none, last_epoch or post.

        ``last_epoch``: while training the last epoch of the last phase (augmented images, weights
        still moving, BatchNorm in training mode). ``post``: a clean pass after training.
        """
        return "none"

    @property
    def evaluates(self) -> str:
        """Who is tested: the server's model (``global``), or the clients' own models.

        ``clients``: each domain by its own clients. ``everyone``: every client on every domain, a
        domain's figure being the mean over all clients, with the own domain's beside it; for
        methods that have no global model at all.
        """
        return "global"

    @property
    def holdout(self) -> float:
        """Fraction of a client's samples kept from training for ``client.evaluate``."""
        return 0.0

    @property
    def public_images(self) -> PublicImages | None:
        """The public images the method needs: ``client.public_logits``, phases on public data."""
        return None

    @property
    def weighing(self) -> str:
        """What ``weights`` weighs the updates by, in words; empty: the protocol's rule."""
        return "" if type(self).weights is Method.weights else "a rule of its own"

    @property
    def constant_parts(self) -> tuple[str, ...]:
        """Terms of the loss that hold a part of themselves constant.

        A ``detach`` of something that depends on the weights: the gradient then rightly differs
        from the finite difference, and the battery of checks does not compare the two.
        """
        return ()

    # ---- cold hooks ----------------------------------------------------------------------------

    def apart(self) -> Self:
        """The method as it is where clients have different models; default: the same.

        Nothing may travel then that the models do not have in common (``shared``).
        """
        return self

    def network(self, backbone: Network, sizes: Sizes) -> Network:
        """The backbone, with the extra modules the method needs."""
        return backbone

    def shared(self, entry: Entry) -> Literal["both", "down", "no"]:
        """Whether an entry of the model travels: both ways, only down, or never."""
        return "both"

    def init_server(self, model: Slot, sizes: Sizes) -> Tree:
        """The server's extra slots before round 0; ``model``: the initial network, all of it."""
        return {}

    def init_client(self, model: Slot, sizes: Sizes) -> Tree:
        """A client's private slots before its first round."""
        return {}

    def phases(self, round: int, epochs: int) -> tuple[Phase, ...]:
        """The local training of a round; ``epochs`` is what the protocol gives it in all."""
        return (Phase(self.loss),)

    def draws(self, rng: np.random.Generator, steps: int) -> Mapping[str, NDArray[Any]]:
        """Random numbers of an epoch that have no closed form, drawn on the host.

        Arrays [steps, ...]; a step finds its row in ``client.drawn``.
        """
        return {}

    def upload(self, client: Client) -> tuple[Tree, Tree]:
        """After training: what is sent beside the shared model, and the next private slots."""
        return {}, {}

    def weights(self, server: ServerView, updates: Sequence[Update]) -> Sequence[float] | None:
        """Averaging weights of the updates, not yet normalised; None: the protocol's rule."""
        return None

    def aggregate(self, server: ServerView, mean: Slot, updates: Sequence[Update]) -> Tree:
        """The server's next state, from the averaged model and the clients' slots.

        In new tensors: what ``server.state`` and ``updates`` hold stays as it is.
        """
        return {**server.state, "model": mean}

    def broadcast(self, server: ServerView) -> Tree:
        """What goes down to every client of the round; default: all the server has."""
        return server.state

    # ---- hot hooks -----------------------------------------------------------------------------

    def forward(self, client: Client, x: Tensor) -> Output:
        """Feature [B, d] and logits [B, K] of a batch."""
        return client.network(x)  # type: ignore[no-any-return]

    def loss(self, client: Client, batch: Batch) -> Terms:
        """The local objective, term by term."""
        return {"ce": F.cross_entropy(client.forward(batch.x).logits, batch.y)}

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Class scores [B, K]. When the server evaluates, ``client.mine`` is empty."""
        return client.forward(x).logits

    def rules(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        """Scores [B, K] of every inference rule whose accuracy is recorded, by its name.

        ``accuracy`` is ``predict``; others are recorded beside it.
        """
        return {"accuracy": self.predict(client, x)}

    # ---- hyper-parameters ----------------------------------------------------------------------

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(self.name, f, getattr(self, f.name)))

    @classmethod
    def hypers(cls) -> dict[str, Hyper]:
        """The hyper-parameters by name."""
        return {f.name: f.metadata.get("hyper", Hyper("", "")) for f in dataclasses.fields(cls)}

    @classmethod
    def defaults(cls, task: str = "") -> dict[str, Any]:
        """The default of every hyper-parameter on that task."""
        return {
            f.name: cls.hypers()[f.name].per_task.get(task, f.default)
            for f in dataclasses.fields(cls)
        }

    @classmethod
    def require_plain(cls) -> None:
        """An error if config.toml and --set could not say one of the hyper-parameters."""
        for f in dataclasses.fields(cls):
            if type(f.default) not in _KINDS:
                has = f"the default {f.default!r}"
                if f.default is dataclasses.MISSING:
                    has = "no default"
                raise ProtofedError(
                    f"hyper-parameter {f.name} of {cls.name} has {has}",
                    f"it must be {' or '.join(_KINDS.values())}; several values are several "
                    "hyper-parameters, or a word like '1,2' that the method takes apart",
                )

    @classmethod
    def create(cls, options: Mapping[str, Any], task: str = "") -> Self:
        """The method with these hyper-parameters, the others as its paper has them on the task."""
        cls.require_plain()
        for name in options:
            if name not in cls.hypers():
                if not cls.hypers():
                    raise ProtofedError(
                        f"method '{cls.name}' has no hyper-parameter '{name}'", "it has none at all"
                    )
                raise unknown(f"hyper-parameter of {cls.name}", name, cls.hypers())
        return cls(**{**cls.defaults(task), **options})

    def options(self) -> dict[str, Any]:
        """All hyper-parameters with their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def with_public(self, source: str) -> Self:
        """The same method with its public images from there."""
        return type(self)(**{**self.options(), "public": source})

    def without_weights(self) -> Self:
        """The same method with every loss weight at 0."""
        weights = {name: 0.0 for name, h in self.hypers().items() if h.weight}
        return dataclasses.replace(self, **weights)


def _checked(method: str, f: dataclasses.Field[Any], value: Any) -> Any:
    """The value as the field's type, or an error that says what is allowed."""
    hyper: Hyper = f.metadata.get("hyper", Hyper("", ""))
    where = f"hyper-parameter {f.name} of {method}"
    kind = type(f.default)
    if not isinstance(value, bool):  # numbers of numpy, too
        if kind is float and isinstance(value, Real):
            value = float(value)
        elif kind is int and isinstance(value, Integral):
            value = int(value)
    if f.default is not dataclasses.MISSING and type(value) is not kind:
        raise ProtofedError(f"{where} must be {_KINDS.get(kind, kind.__name__)}, got {value!r}")
    if hyper.choices is not None and value not in hyper.choices:
        raise unknown(f"value for {where}", value, hyper.choices)
    limits = [
        (hyper.above, "above", lambda v, limit: v > limit),
        (hyper.least, "at least", lambda v, limit: v >= limit),
        (hyper.most, "at most", lambda v, limit: v <= limit),
    ]
    for limit, words, holds in limits:
        # `not holds` so that nan, which compares false with everything, is refused too
        if limit is not None and not holds(value, limit):
            raise ProtofedError(
                f"{where} must be {words} {limit:g}, got {value}",
                f"its default is {f.default}; see `protofed methods {method}`",
            )
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtofedError(f"{where} must be a finite number, got {value}")
    return value


_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}
