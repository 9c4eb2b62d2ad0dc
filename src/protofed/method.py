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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from protofed import keys
from protofed.errors import NoSecondDerivative, ProtofedError, unknown
from protofed.models import Network, Output
from protofed.prototypes import class_means, class_sums, cluster_means, widened
from protofed.tree import Slot, Tree

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
    """Unlabeled images that all clients may see: where from, and how many a round.

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

    Optimizer state starts anew in each phase. ``trainable`` tells by name which parameters move.
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
    optimizer: Literal["sgd", "adam"] | None = None
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


# ---- the method ----------------------------------------------------------------------------------


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
        """Averaging weights of the updates, not yet normalized; None: the protocol's rule."""
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


# ---- the client view -----------------------------------------------------------------------------


Clean = Callable[[str], Iterator[tuple[Tensor, Tensor]]]
"""Batches (x, y) without augmentation of a part of the client's data: ``train`` or ``holdout``."""


class Client:
    """One client during one round. A plain class with tensors, so that a step can be captured.

    Hot hooks may use ``network``, ``received``, ``mine``, ``start``, ``parameters``, ``round``,
    ``progress``, ``id``, ``drawn``, ``forward``, ``probe``, ``uniform`` and ``normal``; the rest
    is for cold hooks.
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
        clean: Clean | None = None,
        public: Clean | None = None,
        samples: int = 0,
        lr: float = 0.0,
    ) -> None:
        device = next(network.parameters()).device
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
        self.parameters = dict(network.named_parameters())
        """The live parameters by name."""
        self.sizes = sizes._replace(parameters=tuple(self.parameters))
        self.round = torch.tensor(round, device=device)
        """Number of this round, from 0."""
        self.progress = torch.tensor(round / max(1, rounds - 1), device=device)
        """0 in the first round, 1 in the last."""
        self.id = torch.tensor(keys.key(name), device=device)
        """``keys.key(name)``: the client's name for hot hooks, which cannot read text."""
        self.key = torch.zeros((), dtype=torch.int64, device=device)
        self.drawn: Slot = {}
        """This step's row of the method's ``draws``."""
        self.samples = samples
        self.steps = 0
        self.lr = lr
        self.clean, self.public = clean, public
        self._draws = 0
        self._main: Tensor | None = None
        self._sum_Kd: Tensor | None = None
        self._count_K: Tensor | None = None

    # ---- hot -----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Output:
        """Feature and logits under the current weights.

        The first pass of a training step is the main one: it moves BatchNorm statistics and its
        features make the prototypes. Further passes of the same step do neither.
        """
        if self._main is None or not self.network.training:
            out = self.method.forward(self, x)
            self._main = out.feature
            return out
        with _still(self.network):
            return self.method.forward(self, x)

    def probe(self, x: Tensor, model: Slot) -> Output:
        """Feature and logits under other weights, in evaluation mode and without gradient."""
        was_training = self.network.training
        self.network.eval()
        with torch.no_grad():
            out: Output = functional_call(
                _Swap(self, self.method), {f"network.{n}": t for n, t in model.items()}, (x,)
            )
        self.network.train(was_training)
        return out

    def uniform(self, *shape: int) -> Tensor:
        """Keyed uniform numbers in (0, 1); each draw of a step gives others."""
        self._draws += 1
        return keys.uniform(self.key, self._draws, shape)

    def normal(self, *shape: int) -> Tensor:
        """Keyed standard normal numbers; each draw of a step gives others."""
        self._draws += 1
        return keys.normal(self.key, self._draws, shape)

    # ---- cold ----------------------------------------------------------------------------------

    def model(self) -> Slot:
        """A copy of the model as it is now, buffers included."""
        return {name: t.detach().clone() for name, t in self.network.state_dict().items()}

    def class_means(self) -> tuple[Tensor, Tensor]:
        """Mean feature [K, d] of each class and how many samples [K] it is made of."""
        if self._sum_Kd is None or self._count_K is None:
            raise RuntimeError(
                f"{type(self.method).__name__} asks for class means but collects none: "
                "its proto_pass must be 'last_epoch' or 'post'"
            )
        return class_means(self._sum_Kd, self._count_K), self._count_K

    def features(self) -> tuple[Tensor, Tensor]:
        """Features [n, d] and labels [n] of all training samples: a clean pass, no gradient.

        In float32 also where the network computes in bfloat16: prototypes are made of them.
        """
        zs, ys = [], []
        for x, y in self._batches("train"):
            zs.append(widened(self._evaluate(x).feature))
            ys.append(y)
        return torch.cat(zs), torch.cat(ys)

    def public_logits(self) -> Tensor:
        """Logits [N, K] of the next round's public images: a clean pass, no gradient."""
        if self.public is None:
            raise RuntimeError(
                f"{type(self.method).__name__} asks for public images but has none: its "
                "public_images must say which"
            )
        return torch.cat([widened(self._evaluate(x).logits) for x, _ in self.public("train")])

    def evaluate(self, model: Slot, part: str = "holdout") -> dict[str, float]:
        """Accuracy (0 to 1) and mean cross-entropy of a model on a part of the client's data."""
        right = loss = count = 0.0
        for x, y in self._batches(part):
            logits = widened(self.probe(x, model).logits)
            right += float((logits.argmax(1) == y).sum())
            loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
            count += len(y)
        if not count:
            raise RuntimeError(f"client {self.name} has no samples in its {part} part")
        return {"accuracy": right / count, "loss": loss / count}

    # ---- for the system ------------------------------------------------------------------------

    def begin_step(self, key: int | Tensor) -> None:
        """Start a step: its key, and the next forward pass is the main one."""
        if isinstance(key, Tensor):
            self.key = key
        else:
            self.key.fill_(key)
        self._draws = 0
        self._main = None

    @property
    def draws(self) -> tuple[Tensor, int]:
        """Where the step's draws stand: its key, and how many there were."""
        return self.key, self._draws

    @draws.setter
    def draws(self, at: tuple[Tensor, int]) -> None:
        self.key, self._draws = at

    def begin_prototypes(self) -> None:
        """Empty buffers for the class sums."""
        self._sum_Kd = self._count_K = None

    def main_feature(self) -> Tensor:
        """The features of the step's main pass, without gradient."""
        assert self._main is not None, "the loss made no forward pass"
        return self._main.detach()

    def collect(self, y: Tensor) -> None:
        """Add the step's main features to the class sums."""
        self._add(self.main_feature(), y)

    def use_sums(self, sum_Kd: Tensor, count_K: Tensor) -> None:
        """Class sums that are kept elsewhere."""
        self._sum_Kd, self._count_K = sum_Kd, count_K

    def collect_post(self) -> None:
        """Fill the class sums in a clean pass over the training samples."""
        for x, y in self._batches("train"):
            self._add(self._evaluate(x).feature, y)

    def _add(self, feature_Bd: Tensor, y: Tensor) -> None:
        sum_Kd, count_K = class_sums(feature_Bd, y, self.classes)
        if self._sum_Kd is None or self._count_K is None:
            self._sum_Kd, self._count_K = sum_Kd, count_K
        else:
            self._sum_Kd += sum_Kd
            self._count_K += count_K

    def _evaluate(self, x: Tensor) -> Output:
        was_training = self.network.training
        self.network.eval()
        with torch.no_grad():
            out = self.method.forward(self, x)
        self.network.train(was_training)
        return out

    def _batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        if self.clean is None:
            raise RuntimeError("there are no samples here: the server evaluates")
        return self.clean(part)


class _Swap(nn.Module):
    """Lets ``functional_call`` replace the network's tensors while a method's forward runs."""

    def __init__(self, client: Client, method: Method) -> None:
        super().__init__()
        self.network = client.network
        self._call = lambda x: method.forward(client, x)

    def forward(self, x: Tensor) -> Output:
        return self._call(x)


@contextmanager
def _still(network: nn.Module) -> Iterator[None]:
    """BatchNorm normalizes with the batch, as in training, but its buffers do not move."""
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True


# ---- the server view -----------------------------------------------------------------------------


class Messages(Protocol):
    """Where the round's messages wait; a slot is read when it is asked for."""

    def get(self, name: str, slot: str) -> Slot:
        """A slot of a client's message; empty if it has none of that name."""


@dataclass(frozen=True)
class ServerView:
    """What a method's server hooks see: state, the round, and who takes part in the federation."""

    state: Tree
    round: int
    rounds: int
    clients: tuple[str, ...]
    sizes: Sizes
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """One client's contribution to a round; ``update["slot"]`` gives a slot of its message."""

    name: str
    samples: int
    steps: int
    lr: float
    messages: Messages

    def __getitem__(self, slot: str) -> Slot:
        return self.messages.get(self.name, slot)


# ---- what several methods share ------------------------------------------------------------------


def share_hyper() -> Any:
    """The hyper-parameter ``share`` of methods that exist with and without a common model."""
    return hyper(
        "auto",
        "",
        "what travels: model (and prototypes), prototypes (alone), auto: the model unless "
        "clients' models differ",
        choices=("auto", "model", "prototypes"),
    )


def proto_pass_hyper(features: str) -> Any:
    """The hyper-parameter ``proto_pass``; ``features`` names the equation it is about."""
    meaning = f"{features}: while training the last epoch, or a clean pass afterwards"
    return hyper("last_epoch", "", meaning, choices=("last_epoch", "post"))


def no_prototypes(sizes: Sizes) -> Slot:
    """The slot of one prototype a class before there is any: mask 0."""
    K, d = sizes.classes, sizes.features
    return {"mean": torch.zeros(K, d), "mask": torch.zeros(K)}


def upload_means(client: Client) -> Tree:
    """A client's class means and their counts; a class it does not have has count 0."""
    mean, count = client.class_means()
    return {"prototypes": {"mean": mean, "count": count}}


def uploaded_means(updates: Sequence[Update]) -> tuple[Tensor, Tensor]:
    """The class means [M, K, d] and counts [M, K] of a round's clients."""
    return (
        torch.stack([u["prototypes"]["mean"] for u in updates]),
        torch.stack([u["prototypes"]["count"] for u in updates]),
    )


def owned(means_MKd: Tensor, counts_MK: Tensor) -> list[Tensor]:
    """The class means of each class's owners, [M_k, d] each."""
    return [means_MKd[counts_MK[:, k] > 0, k] for k in range(means_MKd.shape[1])]


def clustered(classes: Iterable[Tensor], level: str = "last") -> list[Tensor]:
    """The means of FINCH's clusters of each class's rows; a class without rows stays without."""
    return [cluster_means(rows, level) if len(rows) else rows for rows in classes]


def zeros(model: Slot, names: Iterable[str]) -> Slot:
    """Zeros in the shape of these entries of a model."""
    return {n: torch.zeros_like(model[n]) for n in names if n in model}


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient by each tensor is ``factor`` times a known direction.

    Sums over all weights are a dozen small operations for each of a network's tensors if autograd
    records them, which on a GPU costs a quarter of a small step; this is one call for all tensors.
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
        if torch.is_grad_enabled():  # asked with create_graph
            raise NoSecondDerivative(
                "this sum over all weights has no second derivative: write it as tensor "
                "expressions, (p - start[n]).square().sum(), where one is needed"
            )
        return None, None, None, *torch._foreach_mul(ctx.saved_tensors, ctx.factor * gradient)


def squared_distance(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
    """‖θ − θ^t‖² over the trainable entries; its gradient is 2 (θ − θ^t), at θ = θ^t too."""
    by = list(parameters.values())
    with torch.no_grad():
        difference = torch._foreach_sub(by, [start[n] for n in parameters])
        value = torch.stack(torch._foreach_norm(difference)).square().sum()
    distance: Tensor = _KnownGradient.apply(value, 2.0, difference, *by)
    return distance


def inner(parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """⟨direction, θ⟩: a linear term whose gradient is the direction itself."""
    by, directions = list(parameters.values()), [direction[n] for n in parameters]
    with torch.no_grad():
        value = torch.stack([p.sum() for p in torch._foreach_mul(by, directions)]).sum()
    product: Tensor = _KnownGradient.apply(value, 1.0, directions, *by)
    return product


def effective_steps(steps: int, momentum: float) -> float:
    """How many gradients the change of ``steps`` SGD steps holds, in units of the learning rate.

    With momentum ρ the gradient of step k enters this step and all later ones, 1 + ρ + ρ² + ...
    times; over τ steps that makes Σ_k (1 − ρ^k)/(1 − ρ) = (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ).
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
