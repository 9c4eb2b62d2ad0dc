"""Differential privacy of what a client sends: bounded parts, Gaussian noise, the budget spent.

Two parts of a message can be protected, each with a budget (ε, δ) for the whole run:

    prototypes  ``proto_epsilon``, sample level: one image more or less at the client. Each feature
                is clipped to ``proto_clip``; class sums and counts get noise. The features are
                those of the received model in evaluation mode, so an image changes one row only,
                and the guarantee is conditional on that model.
    model       ``update_epsilon``, client level: all of the client's data replaced by any other.
                The change of the model is clipped to ``update_clip`` and gets noise.

The noise is the client's, so the guarantee holds against the server too. Everything else in a
message (numbers of samples and steps, losses, accuracies) has no guarantee.

A release is one noised message. k releases with noise multiplier z are exactly one with z/√k, so
the noise is planned for the rounds in which a client trains, and the ε of any number of releases
is known. The arithmetic is that of real numbers: attacks on the last bits of floating-point noise
are not covered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed import keys, tree
from protofed.config import Config
from protofed.errors import ProtofedError
from protofed.federation.model_state import private_as_nan, travel
from protofed.federation.participants import participants
from protofed.method import Client, Method, Sizes
from protofed.models import Network, entries
from protofed.tree import Slot, Tree

PROTOTYPES, MODEL = "prototypes", "model"
NONE = "no guarantee"

COUNT_SHARE = 0.1
"""The part of z⁻² that goes to the counts: a count is one number, a sum has hundreds."""
CERTAIN = 2.0
"""A class is sent as absent if its noised count is below this many standard deviations."""

Normal = Callable[[tuple[int | str, ...], tuple[int, ...]], NDArray[np.float64]]
"""Standard normal numbers of a shape; a simulation's are a function of the key."""


def keyed_normal(key: tuple[int | str, ...], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """For simulations: the same numbers for the same key."""
    return keys.generator(*key, "privacy").standard_normal(shape)


def system_normal(key: tuple[int | str, ...], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """For deployments: from the operating system's generator, whatever the key (Box and Muller)."""
    bits = np.frombuffer(os.urandom(16 * math.prod(shape)), np.uint64) >> np.uint64(11)
    u, v = ((bits + 0.5) * 2.0**-53).reshape(2, -1)
    normal: NDArray[np.float64] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    return normal.reshape(shape)


@dataclass(frozen=True)
class Budget:
    """The (ε, δ) of one part of a client's messages, planned for a number of releases."""

    part: str
    epsilon: float
    delta: float
    clip: float
    releases: int

    @property
    def level(self) -> str:
        return "sample" if self.part == PROTOTYPES else "client"

    @property
    def multiplier(self) -> float:
        """z: the noise's standard deviation, in units of the most that the protected can change."""
        return _sigma(self.epsilon, self.delta) * math.sqrt(self.releases)

    @property
    def count_noise(self) -> float:
        """The standard deviation of the noise in a class's count."""
        return self.multiplier / math.sqrt(COUNT_SHARE)

    def spent(self, releases: int) -> float:
        """The ε of that many releases, at the budget's δ."""
        return _epsilon(self.multiplier / math.sqrt(releases), self.delta) if releases else 0.0

    def require(self, releases: int) -> None:
        """Raise an error if that many releases are more than the budget allows."""
        if releases > self.releases:
            raise ProtofedError(
                f"the privacy budget of the {self.part} is spent: ε {self.epsilon:g} allows "
                f"{self.releases} messages of a client, and this is number {releases}",
                "start another run with a budget for more rounds",
            )

    def words(self) -> str:
        """The guarantee as summaries and reports state it."""
        unit = "one image more or less, given the received model"
        if self.part == MODEL:
            unit = "all data of the client replaced"
        return (
            f"({self.epsilon:g}, {self.delta:g})-DP at {self.level} level ({unit}): clipped at "
            f"{self.clip:g}, noise multiplier {self.multiplier:.4g} for {self.releases} messages"
        )


@dataclass(frozen=True)
class Privacy:
    """Which parts of a client's messages are protected, and where the noise comes from."""

    prototypes: Budget | None = None
    model: Budget | None = None
    normal: Normal = keyed_normal

    @property
    def budgets(self) -> list[Budget]:
        return [budget for budget in (self.prototypes, self.model) if budget is not None]

    def require(self, releases: int) -> None:
        for budget in self.budgets:
            budget.require(releases)

    def spent(self, releases: int) -> dict[str, dict[str, Any]]:
        """For a round's record: ε and δ spent so far by part; levels are never added up."""
        return {
            b.part: {"level": b.level, "epsilon": b.spent(releases), "delta": b.delta}
            for b in self.budgets
        }

    def words(self, method: Method) -> dict[str, str]:
        """Which part of a message has which guarantee; empty if nothing is protected."""
        if not self.budgets:
            return {}
        found = {b.part: b.words() for b in self.budgets}
        sent = ([MODEL] if method.slots.model else []) + list(method.slots.up)
        rest = ("samples and steps", "losses", "accuracies")
        return {part: found.get(part, NONE) for part in (*sent, *rest)}


def make_privacy(config: Config, network: Network, sizes: Sizes) -> Privacy:
    """The protection that a config asks for, or an error if its method cannot have it."""
    method = config.method
    if config.proto_epsilon is None and config.update_epsilon is None:
        return Privacy()
    if others := sorted(method.slots.up.keys() - {PROTOTYPES}):
        raise _no_privacy(method, f"also sends {', '.join(others)}, which would get no noise")
    if config.proto_epsilon is not None:
        _require_class_means(method, network, sizes)
    if config.update_epsilon is not None:
        _require_plain_updates(method, network)
    releases = planned_releases(config)

    def budget(part: str, epsilon: float | None, clip: float) -> Budget | None:
        return None if epsilon is None else Budget(part, epsilon, config.delta, clip, releases)

    return Privacy(
        budget(PROTOTYPES, config.proto_epsilon, config.proto_clip),
        budget(MODEL, config.update_epsilon, config.update_clip),
    )


def planned_releases(config: Config) -> int:
    """The most rounds in which a client of the run trains."""
    if config.participation == 1:
        return config.rounds
    count = sum(config.domain_clients.values())
    trained = np.zeros(count, np.int64)
    for round in range(config.rounds):
        trained[participants(config.seed, round, count, config.participation)] += 1
    return int(trained.max())


def _require_class_means(method: Method, network: Network, sizes: Sizes) -> None:
    if PROTOTYPES not in method.slots.up or method.proto_pass == "none":
        raise _no_privacy(method, "sends no class means", "proto_epsilon")
    if method.holdout:
        raise _no_privacy(
            method,
            "holds out a part of the images; with one more, it would be another part",
            "proto_epsilon",
        )
    model = network.state_dict()
    own, received = private_as_nan(method, network), method.init_server(model, sizes)
    mine = tree.map_tensors(method.init_client(model, sizes), _as_nan)
    view = Client(method, network, sizes, received=received, mine=mine)
    drawn = keys.generator("features", "privacy").standard_normal((3, 3, sizes.image, sizes.image))
    images = torch.from_numpy(drawn).to(next(network.parameters()))
    kept = [*own, *mine]
    if kept and not bool(view.forward_with(own, images).feature.isfinite().all()):
        raise _no_privacy(
            method,
            f"computes features with entries that clients keep ({kept[0]} ...); the "
            "guarantee is for those of a received model",
            "proto_epsilon",
        )
    with_another, alone = (view.forward_with({}, x).feature for x in (images, images[:2]))
    if not torch.allclose(with_another[:2], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
        raise ProtofedError(
            f"proto_epsilon: features of {method.name}'s network depend on the other images of "
            "the batch, so one image would change them all",
            "use layers that see one image at a time in evaluation mode, such as BatchNorm with "
            "running statistics",
        )


def _as_nan(t: Tensor) -> Tensor:
    return torch.full_like(t, math.nan) if t.is_floating_point() else t


def _require_plain_updates(method: Method, network: Network) -> None:
    sent = [name for name, way in travel(method, network).items() if way == "both"]
    if not sent:
        raise _no_privacy(method, "sends no model", "update_epsilon")
    parameters, kinds = dict(network.named_parameters()), entries(network)
    for buffer in (name for name in sent if name not in parameters):
        if kinds[buffer] != "bn":
            why = f"sends the buffer {buffer}, and only weights get noise"
            raise _no_privacy(method, why, "update_epsilon")
        raise ProtofedError(
            f"with update_epsilon no BatchNorm statistics may travel, and {method.name} sends "
            f"{buffer}",
            "use --norm group, --freeze-bn, or fedbn, whose clients keep theirs",
        )


def _no_privacy(method: Method, why: str, setting: str = "") -> ProtofedError:
    text = f"{setting or 'proto_epsilon and update_epsilon'}: {method.name} {why}"
    return ProtofedError(text, "choose another method, or run it without a privacy budget")


# ---- the noise -----------------------------------------------------------------------------------


def collect_private(
    privacy: Privacy, client: Client, key: tuple[int | str, ...], least: int
) -> None:
    """Fill the class sums from the network as it is, the received model, with noise.

    A class is absent if its noised count is below ``least``, not clearly above 0, or so small that
    the noise of its mean is expected to be longer than any feature.
    """
    budget = privacy.prototypes
    assert budget is not None
    sum_Kd, count_K = (t.double() for t in client.clipped_sums(budget.clip))
    classes, size = sum_Kd.shape
    drawn = privacy.normal((*key, PROTOTYPES), (classes, size + 1))
    noise = torch.from_numpy(drawn).to(sum_Kd.device)
    # (clip/σ_sum)² + (1/σ_count)² = z⁻²: one image moves one row of sums by clip, one count by 1
    of_sum = budget.multiplier * budget.clip / math.sqrt(1 - COUNT_SHARE)
    sum_Kd = sum_Kd + of_sum * noise[:, :-1]
    count_K = count_K + budget.count_noise * noise[:, -1]
    enough = max(least, CERTAIN * budget.count_noise, of_sum * math.sqrt(size) / budget.clip)
    count_K = count_K.masked_fill(count_K < enough, 0)
    # no mean is longer than the features it is made of
    longest_K = budget.clip * count_K
    sum_Kd = sum_Kd * (longest_K / sum_Kd.norm(dim=1)).clamp(max=1)[:, None]
    dtype = next(client.network.parameters()).dtype
    client.use_sums(sum_Kd.to(dtype), count_K.to(dtype))


def noised_model(
    budget: Budget, normal: Normal, key: tuple[int | str, ...], trained: Slot, received: Slot
) -> Slot:
    """The received model and the clipped, noised change that training made to it."""
    start = {n: received[n].double() for n in trained}
    change = {n: torch.nan_to_num(t.double() - start[n]) for n, t in trained.items()}
    length = torch.stack([t.norm() for t in change.values()]).norm()
    factor = (budget.clip / length).clamp(max=1)
    # two clipped changes differ by at most twice the bound
    scale = 2 * budget.clip * budget.multiplier
    noised = {}
    for name, t in change.items():
        noise = torch.from_numpy(normal((*key, MODEL, name), tuple(t.shape))).to(t.device)
        # the received model last: huge entries would round the change before the noise is added
        noised[name] = (start[name] + (factor * t + scale * noise)).to(trained[name].dtype)
    return noised


def protected(privacy: Privacy, client: Client, key: tuple[int | str, ...], message: Tree) -> Tree:
    """A client's message with noise on its model, after checking that it holds nothing else."""
    if not privacy.budgets:
        return message
    name = client.method.name
    if others := sorted(message.keys() - {PROTOTYPES, MODEL}):
        raise ProtofedError(f"{name} sends {', '.join(others)}, which its slots do not declare")
    if privacy.prototypes is not None and not _equal(message.get(PROTOTYPES, {}), client):
        raise ProtofedError(
            f"proto_epsilon: the prototypes that {name} sends are not its class means",
            "its upload must send upload_class_means(client)",
        )
    if privacy.model is None:
        return message
    received = client.received[MODEL]
    return {
        **message,
        MODEL: noised_model(privacy.model, privacy.normal, key, message[MODEL], received),
    }


def _equal(slot: Mapping[str, Tensor], client: Client) -> bool:
    means = dict(zip(("mean", "count"), client.class_means(), strict=True))
    return slot.keys() == means.keys() and all(torch.equal(slot[n], t) for n, t in means.items())


# ---- the accountant ------------------------------------------------------------------------------


def _accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ProtofedError(
            "a privacy budget needs dp-accounting, which is not installed",
            "pip install 'protofed[privacy]'",
        ) from None
    return dp_accounting


@cache
def _sigma(epsilon: float, delta: float) -> float:
    return float(_accounting().get_sigma_gaussian(epsilon, delta))


@cache
def _epsilon(sigma: float, delta: float) -> float:
    return float(_accounting().get_epsilon_gaussian(sigma, delta))
