"""A site's reply is checked before it counts: who sent it, what for, and what it contains.

No method has to declare what its replies look like. The server trains two clients of its own on a
few noise images (noise also stands in for public images, if the method has some) and compares each
reply with what those two would send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import RecordDict

from protofed.deploy.counts import Count, expected_work
from protofed.deploy.messages import Answer, Request, read
from protofed.deploy.spec import RunSpec
from protofed.deploy.wire import Refused, read_tree
from protofed.federation.bounds import prototypes_of
from protofed.federation.client_round import Reply
from protofed.federation.dry_run import enough_images, noise_message
from protofed.federation.server import Server
from protofed.federation.setup import Setup
from protofed.federation.simulation import initial_network, make_setup
from protofed.method import Sizes
from protofed.tree import Tree

MAX_TERMS = 100
"""Loss terms in a reply, and characters in the name of a term or of a state."""
MAX_LOSS = 1e9
"""The largest mean of a loss term, in either direction: records average it over the sites."""
SLACK_BYTES = 64 << 20
"""Bytes that a reply may have beyond four times the expected size."""
CHANGED = "if its images have changed: protofed deploy confirm --again SITE, and start a new run"

NOISE_PUBLIC = (13, 17)
"""How many noise images stand in for a round's public ones, for the first and the second client.

A size in their messages that changes in exactly this way is the number of public images.
"""

Shape = tuple[int | str, ...]
"""Sizes. A string stands for a size that the site's data decide; equal strings are equal sizes."""


@dataclass(frozen=True)
class ExpectedReply:
    """The entries of a reply (slot and name → dtype and shape), and its maximal size in bytes.

    What a site reports about its work follows from how it trains and on how many ``public`` images.
    """

    entries: Mapping[tuple[str, str], tuple[torch.dtype, Shape]]
    limit: int
    setup: Setup
    public: int
    releases: int
    """The most messages of a site under the run's privacy budget; 0 without one."""


def expected_reply(spec: RunSpec, server: Server) -> ExpectedReply:
    """What a client of this run sends, found by training two clients on noise."""
    config, task = spec.config, spec.task
    total = sum(spec.public.values()) or None
    network = initial_network(config, task)
    setup = make_setup(config, task, network)
    classes = len(task.classes)
    fewer = enough_images(setup, max(12, classes))
    more = enough_images(setup, max(fewer + 2 * classes, 3 * classes + 12))
    few, many = (
        # only shapes matter, so with steps too small for noise to make them diverge
        noise_message(setup, initial_network(config, task), server, n, seen, lr=1e-8)
        for n, seen in zip((fewer, more), NOISE_PUBLIC, strict=True)
    )
    model = {name: tuple(t.shape) for name, t in few.get("model", {}).items()}
    entries: dict[tuple[str, str], tuple[torch.dtype, Shape]] = {}
    largest = 0
    for slot, slots in few.items():
        for name, t in slots.items():
            own, other = tuple(t.shape), tuple(many[slot][name].shape)
            exact = slot == "model" or model.get(name) == own
            table = prototypes_of(slots) is not None
            shape = own if exact else _shape(slot, own, other, setup.sizes, total, table)
            entries[slot, name] = (t.dtype, shape)
            largest += t.dtype.itemsize * math.prod(
                max(x, y) if isinstance(size, str) else size
                for size, x, y in zip(shape, own, other, strict=True)
            )
    releases = max((b.releases for b in setup.privacy.budgets), default=0)
    return ExpectedReply(entries, 4 * largest + SLACK_BYTES, setup, total or 0, releases)


def _shape(
    slot: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    sizes: Sizes,
    public: int | None,
    table: bool,
) -> Shape:
    """The shape of an entry that has shape ``a`` at one noise client and ``b`` at the other.

    The data decide a size if the two differ in it. Such sizes may also be equal by chance: how many
    prototypes a ``table`` has of a class (between the classes, which come first, and the features,
    which come last), and a size of 1, as the least of something. What is said about each public
    image has the same sizes at all sites.
    """
    pairs = list(zip(a, b, strict=True))
    shape: list[int | str] = []
    for i, (x, y) in enumerate(pairs):
        ends = (x == sizes.classes and i == 0) or (x == sizes.features and i == len(a) - 1)
        per_image = public is not None and NOISE_PUBLIC in pairs
        if public is not None and (x, y) == NOISE_PUBLIC:
            shape.append(public)
        elif x == y and (ends or per_image or not (table or x == 1)):
            shape.append(x)
        else:
            shape.append(f"{slot}.{i}: {x} or {y}")
    return tuple(shape)


def check_answer(
    content: RecordDict, request: Request, expected: ExpectedReply, count: Count | None
) -> tuple[Answer, Reply | None]:
    """The answer in a message, and the reply it carries if training was requested.

    ``count`` is how many images the site has; None if it is asked to declare them. Raises
    ``Refused`` for anything that does not fit the request.
    """
    answer = read(content, Answer)
    for what, got, want in (
        ("site", answer.site, request.site),
        ("run", answer.run, request.run),
        ("method", answer.method, expected.setup.method.name),
        ("round", answer.round, request.round),
        ("training", answer.trained, request.train),
    ):
        if got != want:
            raise Refused(f"the reply is for {what} {got!r}, not {want!r}")
    if not 0 <= answer.right <= answer.tested:
        raise Refused(f"the reply has {answer.right} of {answer.tested} test images right")
    if count is not None and answer.tested != (count.tests if request.evaluate else 0):
        raise Refused(
            f"the reply is about {answer.tested} test images, and the site has {count}", CHANGED
        )
    message = read_tree(content, expected.limit)
    if not request.train:
        if message:
            raise Refused("the reply carries tensors that were not requested")
        return answer, None
    assert count is not None
    work = expected_work(expected.setup, count.samples, expected.public, request.round)
    if (answer.samples, answer.steps, answer.lr) != work:
        raise Refused(
            f"the reply has {answer.samples} samples, {answer.steps} steps, lr {answer.lr}; "
            f"with {count} it must be {work[0]}, {work[1]}, {work[2]}",
            CHANGED,
        )
    if not min(1, expected.releases) <= answer.releases <= expected.releases:
        raise Refused(
            f"the reply is number {answer.releases} of {expected.releases} under a privacy budget"
        )
    if not all(map(math.isfinite, answer.loss_totals)):
        raise Refused("a loss in the reply is not finite")
    names = (answer.state, answer.version, *answer.loss_terms)
    if len(names) > MAX_TERMS or any(len(name) > MAX_TERMS for name in names):
        raise Refused("the reply has too many loss terms, or names that are too long")
    if not all(name.isprintable() for name in names):
        raise Refused("a name in the reply has characters that cannot be printed")
    if not all(1 <= n <= answer.steps for n in answer.loss_steps):
        raise Refused("a loss in the reply has no steps, or more than the reply")
    if not all(abs(total) <= MAX_LOSS * n for total, n in answer.losses.values()):
        raise Refused(f"a loss in the reply is larger than {MAX_LOSS:g}")
    _check_tree(message, expected, count.samples)
    losses = {term: (float(total), n) for term, (total, n) in answer.losses.items()}
    return answer, Reply(message, {}, answer.samples, answer.steps, float(answer.lr), losses)


def _check_tree(message: Tree, expected: ExpectedReply, samples: int) -> None:
    """Refuse other entries, dtypes or shapes than expected, and numbers that are not finite.

    No size that a site's data decide is larger than the number of its ``samples``.
    """
    got = {(slot, name): t for slot, entries in message.items() for name, t in entries.items()}
    if not got and expected.entries:
        raise Refused("the reply is empty: it carries no tensor")
    missing, extra = expected.entries.keys() - got.keys(), got.keys() - expected.entries.keys()
    for wrong, words in ((missing, "lacks"), (extra, "has an unexpected")):
        if wrong:
            slot, name = sorted(wrong)[0]
            raise Refused(f"the reply {words} entry '{name}' of slot '{slot}'")
    if empty := sorted(message.keys() - {slot for slot, _ in expected.entries}):
        raise Refused(f"the reply has an unexpected slot {empty[0]!r:.100}")
    sizes: dict[str, int] = {}
    """The sizes that the site's data decided, by what stands for them in a shape."""
    for (slot, name), (dtype, shape) in expected.entries.items():
        t = got[slot, name]
        where = f"entry '{name}' of slot '{slot}'"
        if t.dtype != dtype:
            raise Refused(f"{where} is {t.dtype}, not {dtype}")
        fits = len(t.shape) == len(shape) and all(
            n == (sizes.setdefault(want, n) if isinstance(want, str) else want)
            for n, want in zip(t.shape, shape, strict=True)
        )
        if not fits:
            wanted = (sizes.get(n, "any") if isinstance(n, str) else n for n in shape)
            words = "×".join(map(str, wanted)) or "a scalar"
            raise Refused(f"{where} has the shape {tuple(t.shape)}, not {words}")
        if any(n > samples for n, want in zip(t.shape, shape, strict=True) if type(want) is str):
            raise Refused(f"{where} has the shape {tuple(t.shape)}; the site has {samples} samples")
        if t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise Refused(f"{where} is not finite")
