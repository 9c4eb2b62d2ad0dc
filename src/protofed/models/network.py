"""What every model is: an encoder and a linear head, with named entries of three kinds.

The encoder has named *stages*, between which a method may look at the features or change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from protofed.errors import ProtofedError
from protofed.models.dropout import draws_unkeyed

NORMS = ("batch", "group", "none")


@dataclass(frozen=True)
class Output:
    """What a network says about a batch: ``feature`` [B, d] and ``logits`` [B, K].

    It unpacks into these two, even if a subclass carries more.
    """

    feature: Tensor
    logits: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        yield self.feature
        yield self.logits


class Stage(NamedTuple):
    """The name of a module of the encoder, whose output is [B, channels, H, W]."""

    module: str
    channels: int


PIXELS = "pixels"
"""The stage that every network has: its images."""

Between = Callable[[str, Tensor], Tensor]
"""From a stage's name and its features to those that the next stage gets."""


class Network(nn.Module):
    """An encoder and a linear head on its feature, whose size is ``features``.

    Stages are kept with the encoder: a method may build another network around it.
    """

    def __init__(
        self,
        encoder: nn.Module,
        features: int,
        classes: int,
        stages: Mapping[str, Stage] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        if stages is not None:
            encoder._stages = dict(stages)  # type: ignore[assignment]
        self.head = nn.Linear(features, classes)
        self.features = features

    def forward(self, x: Tensor) -> Output:
        """Feature and logits of images ``x`` [B, 3, H, W]."""
        feature = self.encoder(x)
        return Output(feature, self.head(feature))

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in their order; ``pixels`` is the encoder's input."""
        return {PIXELS: Stage("", 3), **getattr(self.encoder, "_stages", {})}

    @contextmanager
    def between(self, stages: Iterable[str], function: Between) -> Iterator[None]:
        """Within this context, features of these stages go through ``function(stage, x)``."""

        def changed(stage: str, x: Tensor) -> Tensor:
            found = function(stage, x)
            if isinstance(found, Tensor):  # PyTorch takes None for x unchanged
                return found
            raise ProtofedError(
                f"between returns {found!r:.100} at stage {stage}",
                "it must return what the next stage gets",
            )

        def after(stage: str) -> Callable[..., Tensor]:
            return lambda module, inputs, x: changed(stage, x)

        def before(module: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
            return changed(PIXELS, *inputs)

        with ExitStack() as hooks:
            for stage in stages:
                module = self.encoder.get_submodule(self.stages[stage].module)
                if stage == PIXELS:
                    hooks.enter_context(module.register_forward_pre_hook(before))
                else:
                    hooks.enter_context(module.register_forward_hook(after(stage)))
            yield


def require_registered(network: nn.Module) -> None:
    """Raise an error if a module or a parameter is kept where PyTorch does not see it.

    It would not be trained, averaged, stored or moved to the GPU, and nothing would say so.
    """
    there = {id(p) for p in (*network.modules(), *network.parameters(), *network.buffers())}
    for prefix, module in network.named_modules():
        for name, kept in vars(module).items():
            if name in _REGISTERED or not isinstance(kept, list | tuple | dict | Tensor):
                continue
            for part in _parts(kept, set()):
                if any(id(state) not in there for state in _state(part)):
                    where = ".".join(filter(None, (prefix, name)))
                    raise ProtofedError(
                        f"{where} of the network holds a {type(part).__name__} that PyTorch does "
                        "not see: it would not be trained, sent or saved",
                        "use nn.ModuleList, nn.ModuleDict, nn.Parameter or register_buffer",
                    )


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _parts(kept: Any, seen: set[int]) -> Iterator[nn.Module | Tensor]:
    """The modules and parameters in a value that is an attribute of a module."""
    if isinstance(kept, nn.Module) or (isinstance(kept, Tensor) and kept.requires_grad):
        yield kept
    elif isinstance(kept, dict | list | tuple) and id(kept) not in seen:
        seen.add(id(kept))  # it may contain itself
        for part in kept.values() if isinstance(kept, dict) else kept:
            yield from _parts(part, seen)


def _state(part: nn.Module | Tensor) -> list[object]:
    """What PyTorch must see of it: an activation, or other modules in a row, have none."""
    if isinstance(part, Tensor):
        return [part]
    dropouts = [m for m in part.modules() if isinstance(m, _DropoutNd)]
    return [*part.parameters(), *part.buffers(), *dropouts]


def require_repeatable(network: Network, name: str, image_size: int) -> None:
    """Raise an error if training draws from PyTorch's own generator, which no run seeds."""
    buffers = {n: b.clone() for n, b in network.named_buffers()}
    images = torch.zeros(2, 3, image_size, image_size)
    if draws_unkeyed(network, lambda: functional_call(network, buffers, images)):
        raise ProtofedError(
            f"model {name} draws random numbers in training, so that no run could be repeated or "
            "resumed",
            "dropout must be nn.Dropout, nn.Dropout1d, 2d or 3d; set the rate of any other (of "
            "attention, drop path, stochastic depth) to 0",
        )


def freeze(network: Network, train: str, freeze_bn: bool) -> None:
    """Fix what does not change in training: all of the encoder, or its BatchNorm statistics.

    With ``train`` "head" the encoder stays in evaluation mode. With ``freeze_bn`` its BatchNorm
    layers do, and normalize with the statistics they have; their scale and shift train. A method
    may build another network around the encoder.
    """
    for module in network.encoder.modules():
        if train == "head" or (freeze_bn and isinstance(module, _BatchNorm)):
            module.eval()
            module.train = _stay_in_evaluation  # type: ignore[method-assign, assignment]
            module.fixed = "all" if train == "head" else "buffers"  # type: ignore[assignment]


def _stay_in_evaluation(mode: bool = True) -> None:
    """What ``train`` does in a frozen module."""


def frozen(network: nn.Module) -> set[str]:
    """The entries that training does not change, by name."""
    found = set[str]()
    for prefix, module in network.named_modules(remove_duplicate=False):
        if fixed := getattr(module, "fixed", ""):
            own = [name for name, _ in module.named_buffers(recurse=False)]
            if fixed == "all":
                own += [name for name, _ in module.named_parameters(recurse=False)]
            found |= {f"{prefix}.{name}" for name in own}
    return found


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training may change, by name."""
    fixed = frozen(network)
    return {name: p for name, p in network.named_parameters() if name not in fixed}


def tied(network: nn.Module) -> dict[str, str]:
    """The first name of each entry that has several, by its other names.

    Methods go by ``named_parameters``, which has the first name alone.
    """
    both = (network.named_parameters, network.named_buffers)
    named = [entry for each in both for entry in each(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: own for name, t in named if (own := first.setdefault(id(t), name)) != name}


def normalize(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(8, channels), channels)
    return nn.Identity()


def conv(inputs: int, outputs: int, kernel: int, stride: int, norm: str) -> nn.Conv2d:
    """A convolution that keeps the image size up to its stride, for use before ``norm``."""
    # A norm cancels any bias before it and has its own.
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=norm == "none")


def entries(network: nn.Module) -> dict[str, str]:
    """The kind of every name in ``network.state_dict()``: "bn", "weight" or "buffer".

    "bn" is a parameter or buffer of a BatchNorm layer, "weight" any other parameter. The module's
    type decides: the BatchNorm of a ResNet's shortcut has no "bn" in its name.
    """
    modules = dict(network.named_modules(remove_duplicate=False))
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    kinds = {}
    for name in network.state_dict():
        batch_norm = isinstance(modules[name.rpartition(".")[0]], _BatchNorm)
        kinds[name] = "bn" if batch_norm else "weight" if name in parameters else "buffer"
    return kinds
