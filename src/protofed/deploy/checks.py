"""A site's reply is looked at before it counts: who sent it, what for, and what is in it.

What a reply must look like is not written down for any method: the server trains a client of its
own on a few noise images (and a few stand for the public ones, where a method has some) and
compares with what that client would send.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import RecordDict
from torch import Tensor

from protofed import tree
from protofed.config import Config
from protofed.data.task import Images, Task
from protofed.deploy.messages import Answer, Request, read_answer
from protofed.deploy.wire import Refused, read_tree
from protofed.federation.client_round import Reply, train_client
from protofed.federation.public_images import ImagePool, PublicSampler
from protofed.federation.server import Server
from protofed.federation.setup import ClientData, Setup
from protofed.federation.simulation import initial_network, make_setup
from protofed.keys import generator
from protofed.method import Sizes
from protofed.tree import Tree

MOST_SAMPLES = 10**9
MOST_TERMS = 100
"""Terms of a loss, and characters of a term's name or a state's: they are written down."""
ROOM = 64 << 20
"""Bytes a reply may have beyond four times what is expected."""

PUBLIC = (13, 17)
"""How many noise images stand for a round's public ones: for the first of two clients, and for the
second. A size of the message that changes in just this way is the number of public images."""

Shape = tuple[int | str, ...]
"""Sizes; a name stands for one that the site's data decide, the same wherever the name is."""


@dataclass(frozen=True)
class Expected:
    """Slots, names, dtypes and shapes of a reply, and its most bytes."""

    entries: Mapping[tuple[str, str], tuple[torch.dtype, Shape]]
    limit: int


def expect(
    config: Config, task: Task, server: Server, public: Mapping[str, int] | None = None
) -> Expected:
    """What a client sends, found out by training two on noise: 12 images and 3 of each class.

    ``public``: how many public images a round has, by where they are from.
    """
    network = initial_network(config, task)
    setup = make_setup(config, task, network)
    # a step so small that noise cannot make it diverge, and one epoch: only shapes matter
    quiet = dataclasses.replace(setup.training, epochs=1, lr=1e-8, batch=max(2, config.batch))
    setup = dataclasses.replace(setup, training=quiet)
    mine = server.initial_client(tree.copy({"model": network.state_dict()})["model"])
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    numbers = (max(12, len(task.classes)), 3 * len(task.classes) + 12)
    few, many = (
        train_client(
            dataclasses.replace(setup, public=_noise_public(task, seen)) if public else setup,
            network,
            _noise(setup, task, n),
            server.broadcast(),
            mine,
            0,
        ).message
        for n, seen in zip(numbers, PUBLIC, strict=True)
    )
    model = {name: tuple(t.shape) for name, t in few.get("model", {}).items()}
    total = sum(public.values()) if public else None
    entries: dict[tuple[str, str], tuple[torch.dtype, Shape]] = {}
    most = 0
    for slot, slots in few.items():
        for name, t in slots.items():
            own, other = tuple(t.shape), tuple(many[slot][name].shape)
            exact = slot == "model" or model.get(name) == own
            shape = own if exact else _shape(slot, own, other, setup.sizes, total)
            entries[slot, name] = (t.dtype, shape)
            most += t.dtype.itemsize * math.prod(
                max(x, y) if isinstance(size, str) else size
                for size, x, y in zip(shape, own, other, strict=True)
            )
    return Expected(entries, 4 * most + ROOM)


def _shape(
    slot: str, a: tuple[int, ...], b: tuple[int, ...], sizes: Sizes, public: int | None
) -> Shape:
    """Classes come first and features last; how many prototypes are between is the data's.

    What is said of each public image has the same sizes at all sites.
    """
    pairs = list(zip(a, b, strict=True))
    shape: list[int | str] = []
    for i, (x, y) in enumerate(pairs):
        ends = (x == sizes.classes and i == 0) or (x == sizes.features and i == len(a) - 1)
        if public is not None and (x, y) == PUBLIC:
            shape.append(public)
        elif x == y and (ends or (public is not None and PUBLIC in pairs)):
            shape.append(x)
        else:
            shape.append(f"{slot}.{i}: {x} or {y}")
    return tuple(shape)


def _noise(setup: Setup, task: Task, n: int) -> ClientData:
    own = Images(_pixels(task, n), torch.arange(n) % setup.sizes.classes)
    return ClientData("template", "none", own)


def _noise_public(task: Task, n: int) -> PublicSampler:
    return PublicSampler({"noise": ImagePool(_pixels(task, n), torch.arange(n), n)}, seed=0)


def _pixels(task: Task, n: int) -> Tensor:
    rng, size = generator("template", n), task.image_size
    return torch.from_numpy(rng.integers(0, 256, (n, 3, size, size), dtype="uint8"))


def check_answer(
    content: RecordDict, request: Request, method: str, expected: Expected
) -> tuple[Answer, Reply | None]:
    """The answer, and the reply it carries if training was asked for; else ``Refused``."""
    answer = read_answer(content)
    for what, got, want in (
        ("site", answer.site, request.site),
        ("run", answer.run, request.run),
        ("method", answer.method, method),
        ("round", answer.round, request.round),
        ("training", answer.trained, request.train),
    ):
        if got != want:
            raise Refused(f"the reply is of {what} {got!r}, not {want!r}")
    if not 0 <= answer.right <= answer.tested <= MOST_SAMPLES:
        raise Refused(f"the reply has {answer.right} of {answer.tested} test images right")
    if request.evaluate and not answer.tested:
        raise Refused("the reply has no evaluation, which was asked for")
    message = read_tree(content, expected.limit)
    if not request.train:
        if message:
            raise Refused("the reply carries tensors, which were not asked for")
        return answer, None
    if not (0 < answer.samples <= MOST_SAMPLES and answer.steps > 0 and answer.lr >= 0):
        raise Refused(
            f"the reply has {answer.samples} samples, {answer.steps} steps, lr {answer.lr}"
        )
    if not all(map(math.isfinite, (answer.lr, *answer.loss_totals))):
        raise Refused("a loss of the reply is not finite")
    words = (answer.state, *answer.loss_terms)
    long = len(words) > MOST_TERMS or any(len(word) > MOST_TERMS for word in words)
    if long or any(n < 1 for n in answer.loss_steps):
        raise Refused("the reply's report is odd")
    _check_tree(message, expected)
    losses = {term: (float(total), n) for term, (total, n) in answer.losses.items()}
    return answer, Reply(message, {}, answer.samples, answer.steps, float(answer.lr), losses)


def _check_tree(message: Tree, expected: Expected) -> None:
    got = {(slot, name): t for slot, entries in message.items() for name, t in entries.items()}
    if not got and expected.entries:
        raise Refused("the reply is empty: it carries no tensor")
    missing, strange = expected.entries.keys() - got.keys(), got.keys() - expected.entries.keys()
    for odd, words in ((missing, "lacks"), (strange, "has, unasked,")):
        if odd:
            slot, name = sorted(odd)[0]
            raise Refused(f"the reply {words} entry '{name}' of slot '{slot}'")
    open_sizes: dict[str, int] = {}
    for (slot, name), (dtype, shape) in expected.entries.items():
        t = got[slot, name]
        where = f"entry '{name}' of slot '{slot}'"
        if t.dtype != dtype:
            raise Refused(f"{where} is {t.dtype}, not {dtype}")
        fits = len(t.shape) == len(shape) and all(
            n == (open_sizes.setdefault(want, n) if isinstance(want, str) else want)
            for n, want in zip(t.shape, shape, strict=True)
        )
        if not fits:
            sizes = (open_sizes.get(n, "any") if isinstance(n, str) else n for n in shape)
            words = "×".join(map(str, sizes)) or "a number"
            raise Refused(f"{where} has the shape {tuple(t.shape)}, not {words}")
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise Refused(f"{where} is not finite")
