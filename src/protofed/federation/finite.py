"""Checks that training has not diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from protofed.errors import Diverged
from protofed.tree import Slot


def require_finite_losses(client: str, round: int, phase: int, losses: Mapping[str, float]) -> None:
    """Raise an error that names client, round, phase and terms if a loss is not finite."""
    bad = [f"'{name}' is {value}" for name, value in losses.items() if not math.isfinite(value)]
    if bad:  # all of them: once a term diverges, the others soon follow
        raise Diverged(
            f"client {client}, round {round + 1}, phase {phase}: loss term {', '.join(bad)}",
            "try a smaller --lr, or check the method's hyper-parameters",
        )


def require_finite_model(model: Slot, what: str) -> None:
    """Raise an error if a model has entries that are not finite. Losses show it a step later."""
    floats = {name: t for name, t in model.items() if t.is_floating_point() and t.numel()}
    if not floats or bool(torch.stack(torch._foreach_norm(list(floats.values()))).isfinite().all()):
        return
    bad = [name for name, t in floats.items() if not bool(t.isfinite().all())]
    if bad:  # a norm can overflow while every entry is finite
        raise Diverged(
            f"{what} is not finite: {len(bad)} of its entries, including {bad[0]}",
            "a client's last step diverged: try a smaller --lr, or check the method's "
            "hyper-parameters; or the method's weights or aggregate returned non-finite values",
        )
