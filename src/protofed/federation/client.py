"""The client view: what a method sees of the client it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from protofed import keys
from protofed.federation.tree import Slot, Tree
from protofed.models import Network, Output
from protofed.prototypes import class_means, class_sums, widened

if TYPE_CHECKING:
    from protofed.methods.base import Method, Sizes

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
    """BatchNorm normalises with the batch, as in training, but its buffers do not move."""
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True
