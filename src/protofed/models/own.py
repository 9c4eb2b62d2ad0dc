"""The user's own models: encoders made by functions in Python files.

``path/to/file.py:factory`` names a function that takes the image size and returns a module from
images [B, 3, H, W] to features [B, d]. The linear head is added here. The module may name its
stages by an attribute, a dictionary ``stages`` from a name to that of a submodule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protofed.errors import ProtofedError, raised_at
from protofed.files import expand_user
from protofed.models.network import PIXELS, Network, Stage
from protofed.user_code import code_withheld, execute, is_trusted, parts_of

_LOADED: dict[str, Callable[..., Any]] = {}
"""The functions of files that this process has executed, by ``absolute/path.py:factory``."""


def full_name(name: str) -> str:
    """The name with an absolute path, which means the same in every working directory."""
    file, wanted = parts_of(name, "function", "factory")
    return f"{expand_user(file).absolute()}:{wanted}"


def short_name(name: str) -> str:
    """The name without folders: what initial weights are drawn from, and a run's hash has."""
    return name.rpartition("/")[2]


def load_factory(name: str) -> Callable[..., Any]:
    """The function of a file that the user named, which is executed."""
    name = full_name(name)
    file, wanted = parts_of(name, "function", "factory")
    made: Callable[..., Any] | None = getattr(execute(file, f"model {wanted}"), wanted, None)
    if not callable(made):
        raise ProtofedError(
            f"there is no function {wanted} in {file}",
            f"write def {wanted}(image_size): ..., which returns an encoder",
        )
    _LOADED[name] = made
    return made


def known_factory(name: str) -> Callable[..., Any] | None:
    """The function that a file names; None if code would have to be executed to get it.

    It is known if this process has loaded it before, or if code is trusted.
    """
    return load_factory(name) if is_trusted() else _LOADED.get(full_name(name))


def own_model(name: str, classes: int, image_size: int) -> Network:
    """The network of a file that the user named, or that is trusted."""
    factory = known_factory(name)
    if factory is None:
        raise code_withheld(f"model {short_name(name)}", name)
    file = Path(full_name(name).rpartition(":")[0])
    try:
        encoder = factory(image_size)
        if not isinstance(encoder, nn.Module):
            raise ProtofedError(f"it returns {encoder!r:.100}", "it must return a torch module")
        named = getattr(encoder, "stages", None)
        named = named if isinstance(named, dict) else {}  # it may well be a module
        if bad := [n for n in named if n == PIXELS or not re.fullmatch(r"[\w-]+", str(n))]:
            raise ProtofedError(
                f"it calls a stage {bad[0]!r}",
                f"use letters, digits, _ and -, and not '{PIXELS}', which are its images",
            )
        seen: dict[str, list[Any]] = {}
        with torch.no_grad(), ExitStack() as hooks:
            for stage, module in named.items():
                see = partial(_see, seen.setdefault(stage, []))
                hooks.enter_context(encoder.get_submodule(module).register_forward_hook(see))
            feature = encoder.eval()(torch.zeros(2, 3, image_size, image_size))
        if not isinstance(feature, Tensor) or feature.ndim != 2 or len(feature) != 2:
            shape = list(feature.shape) if isinstance(feature, Tensor) else type(feature).__name__
            raise ProtofedError(
                f"it makes {shape} of 2 images of {image_size}×{image_size}",
                "it must return an encoder without a head, whose features are [2, d]",
            )
        for stage, shapes in seen.items():
            if len(shapes) != 1 or len(shapes[0]) != 4:
                raise ProtofedError(
                    f"its stage {stage}, the module {named[stage]}, gives {shapes} for 2 images",
                    "a stage is a module that is called once and gives maps [B, C, H, W]",
                )
    except ProtofedError as error:
        raise ProtofedError(f"model {short_name(name)}: {error.message}", error.hint) from error
    except Exception as error:
        at = raised_at(error, [str(file)]) or short_name(name)
        raise ProtofedError(
            f"model {short_name(name)} fails with images of {image_size}×{image_size}: {error!r}",
            f"see {at}",
        ) from error
    stages = {stage: Stage(named[stage], shapes[0][1]) for stage, shapes in seen.items()}
    return Network(encoder.train(), feature.shape[1], classes, stages)


def _see(shapes: list[Any], module: nn.Module, inputs: Any, output: Any) -> None:
    shapes.append(list(output.shape) if isinstance(output, Tensor) else [type(output).__name__])
