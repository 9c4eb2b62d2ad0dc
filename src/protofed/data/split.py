"""Splitting the domains of a task into clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed import keys
from protofed.data.task import Images, Task
from protofed.errors import ProtofedError, unknown

Ints = NDArray[np.int64]

UNUSED = "unused"
"""Instead of a source of images: the training images that no client holds."""
VAL_FOLDERS = "folder"
"""``validate = "folder"``: the images in a folder's val/, next to train/ and test/."""
FEWEST_TO_VALIDATE = 20
"""An accuracy on fewer images of a domain moves by more than 5 points with each of them."""


@dataclass(frozen=True)
class Share:
    """A client's rows of its domain's training images; ``note`` says how a rule changed them.

    ``held_out`` are rows for validation, on which nobody trains.
    """

    name: str
    domain: str
    rows: Tensor
    note: str = ""
    held_out: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def split(
    task: Task,
    clients: Mapping[str, int],
    samples: Mapping[str, float],
    seed: int,
    *,
    leftover: bool | None = None,
    repair: bool | None = None,
    dirichlet: float | None = None,
    quantity: float | None = None,
) -> list[Share]:
    """Give each client its own random samples of one domain, without overlap.

    ``samples`` is, per domain, a count (int) or a fraction of the training images (float). A
    domain without clients is only tested on. Clients are named ``domain-0``, ``domain-1``, ...
    Asking for more than a domain has is an error, unless a rule allows it. None is the task's rule.

    - ``leftover``: if a domain has too few samples, its last client gets what the others left.
    - ``repair``: every client gets each class of its domain. For one that it misses, a sample from
      the whole training split (perhaps also another client's) replaces one of a class that it has
      at least twice. Off by default with label skew.
    - ``quantity`` (β): the sizes of a domain's clients are drawn from Dirichlet(β). Their total
      stays the same, and each has at least one sample.
    - ``dirichlet`` (α): clients differ in their classes, not in their sizes. Each draws preferences
      from a Dirichlet distribution around the domain's class frequencies (concentration α for a
      class of average size) and takes its samples accordingly, one client after the other. If its
      classes run out, it takes those it prefers next, and in the end any that are left.
    """
    for domain in [*clients, *samples]:
        if domain not in task.domains:
            raise unknown(f"domain of {task.name}", domain, task.domains)
    leftover = task.leftover if leftover is None else leftover
    repair = (task.repair and dirichlet is None) if repair is None else repair
    shares: list[Share] = []
    for domain, images in task.domains.items():
        if not clients.get(domain, 0):
            continue
        if domain not in samples:
            raise ProtofedError(f"no sample count for the clients of domain '{domain}'")
        sizes, notes = _sizes(domain, clients[domain], samples[domain], len(images.train), leftover)
        if quantity is not None:
            rng = keys.generator(seed, domain, "quantity")
            skew = rng.dirichlet(np.full(len(sizes), quantity))
            total = sum(sizes)
            sizes = [1 + int(n) for n in apportion(total - len(sizes), skew)]
            if any(notes):
                notes[-1] = f"{domain}'s clients share {total} samples: all there are"
        order = keys.generator(seed, domain, "split").permutation(len(images.train))
        labels: Ints = images.train.y.numpy()
        if dirichlet is None:
            parts = np.split(order, np.cumsum(sizes))[:-1]
        else:
            parts = _label_skew(order, labels, sizes, dirichlet, (seed, domain))
        places = _places(labels)
        for i, (rows, note) in enumerate(zip(parts, notes, strict=True)):
            if repair:
                rows, repaired = _repair(f"{domain}-{i}", rows, labels, places, task.classes, seed)
                note = "; ".join(filter(None, (note, repaired)))
            shares.append(Share(f"{domain}-{i}", domain, torch.from_numpy(rows), note))
    if not shares:
        raise ProtofedError("no domain has a client", "give --clients at least one, e.g. scan=1")
    return shares


def hold_out(task: Task, shares: Sequence[Share], fraction: float, seed: int) -> list[Share]:
    """The shares without a part of each for validation: that fraction of each of its classes.

    A client keeps at least one image of each class, and those that another client holds as well
    (see ``repair``): nobody trains on what is held out.
    """
    holders = {s.domain: np.zeros(len(task.domains[s.domain].train), np.int64) for s in shares}
    for share in shares:
        holders[share.domain][share.rows] += 1
    found = []
    for share in shares:
        rows = share.rows.numpy()
        labels = task.domains[share.domain].train.y.numpy()[rows]
        rng = keys.generator(seed, share.name, "validation")
        classes, counts = np.unique(labels, return_counts=True)
        order = rng.permutation(len(classes))  # or the first classes would always be rounded up
        sizes = apportion(int(fraction * len(rows) + 0.5), counts[order].astype(np.float64))
        out = np.zeros(len(rows), np.bool_)
        for label, size, count in zip(classes[order], sizes, counts[order], strict=True):
            sole = np.flatnonzero((labels == label) & (holders[share.domain][rows] == 1))
            out[rng.permutation(sole)[: min(size, count - 1)]] = True
        kept, held_out = (torch.from_numpy(rows[mask]) for mask in (~out, out))
        found.append(replace(share, rows=kept, held_out=held_out))
    return found


def unused(task: Task, shares: Sequence[Share]) -> dict[str, Tensor]:
    """The training images that no client holds, for each domain that has clients."""
    free = {
        s.domain: torch.ones(len(task.domains[s.domain].train), dtype=torch.bool) for s in shares
    }
    for share in shares:
        free[share.domain][torch.cat([share.rows, share.held_out])] = False
    return {domain: mask.nonzero()[:, 0] for domain, mask in free.items()}


def validation_rows(
    task: Task, shares: Sequence[Share], validate: float | str | None
) -> dict[str, Tensor]:
    """The rows of the images to validate on, of domains with clients: see ``validation_source``.

    A domain without clients has none: what is chosen with its images would not be unseen there.
    """
    if validate is None:
        return {}
    domains = dict.fromkeys(s.domain for s in shares)
    if validate == UNUSED:
        found = unused(task, shares)
    elif validate == VAL_FOLDERS:
        found = {d: torch.arange(len(task.domains[d].validation or ())) for d in domains}
    else:
        found = {d: torch.cat([s.held_out for s in shares if s.domain == d]) for d in domains}
    if few := {d: len(rows) for d, rows in found.items() if len(rows) < FEWEST_TO_VALIDATE}:
        enough = ""
        if isinstance(validate, float):
            held = {
                d: sum(len(s.rows) + len(s.held_out) for s in shares if s.domain == d) for d in few
            }
            each = (max(validate / max(1, n), 1 / held[d]) for d, n in few.items())
            part = math.ceil(100 * (FEWEST_TO_VALIDATE + 1) * max(each) - 1e-9) / 100
            enough = f" to {part:.2f}" * (part < 1)
        raise ProtofedError(
            f"validate = {validate} leaves too few images to validate on: "
            + ", ".join(f"{n} of domain '{d}'" for d, n in few.items())
            + f" (at least {FEWEST_TO_VALIDATE} of each)",
            {
                UNUSED: "--validate 0.1 holds out a part of each client's images instead, "
                "--samples gives clients fewer",
                VAL_FOLDERS: "put them into domain/val/class/image, next to train and test; "
                "--validate 0.1 holds out a part of each client's images instead",
            }.get(
                str(validate), f"raise --validate{enough}, or give clients more images: --samples"
            ),
        )
    return found


def validation_source(task: Task, domain: str, validate: float | str | None) -> Images:
    """The images that rows to validate on refer to: a folder's own, or else the training images."""
    own = task.domains[domain]
    return own.validation if validate == VAL_FOLDERS and own.validation else own.train


def apportion(total: int, weights: NDArray[np.float64]) -> Ints:
    """Whole numbers in proportion to the weights, with this total (largest remainder method)."""
    exact = total * weights / weights.sum()
    # slightly less, so that rounding errors cannot make the whole parts exceed the total
    whole: Ints = np.floor(exact * (1 - 1e-12)).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole


def _sizes(
    domain: str, count: int, samples: float, pool: int, leftover: bool
) -> tuple[list[int], list[str]]:
    """How many samples each client of the domain gets, and a note for those that get fewer."""
    # 0.29 · 100 is 28.999… in floating point but means 29
    each = samples if isinstance(samples, int) else int(samples * pool + 1e-9)
    sizes = [min(each, pool - i * each) for i in range(count)]
    if each < 1:
        raise ProtofedError(
            f"{samples:g} of the {pool} training images of domain '{domain}' is less than one",
            f"raise --samples: at most {pool // count} each for {count} clients",
        )
    if sizes[-1] < (1 if leftover else each):
        raise ProtofedError(
            f"domain '{domain}' has {pool} training images: too few for {count} clients "
            f"with {each} each"
            + (f"; nothing is left for {domain}-{-(-pool // each)}" if leftover else ""),
            f"lower --clients or --samples: at most {pool // count} each for {count} clients",
        )
    notes = [f"gets {n} of {each} samples: what was left" if n < each else "" for n in sizes]
    return sizes, notes


def _places(labels: Ints) -> dict[int, Ints]:
    """The rows of each label, both in ascending order."""
    order = np.argsort(labels, kind="stable")
    values, first = np.unique(labels[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, first[1:]), strict=True))


def _label_skew(
    order: Ints, labels: Ints, sizes: list[int], alpha: float, key: tuple[int, str]
) -> list[Ints]:
    """Rows of each client by its own Dirichlet draw of classes; see ``split``."""
    places = list(_places(labels[order]).values())  # positions in ``order``
    frequency = np.array([len(place) for place in places])
    taken = np.zeros(len(places), np.int64)
    parts = []
    for i, size in enumerate(sizes):
        rng = keys.generator(*key, i, "dirichlet")
        prefers = rng.dirichlet(alpha * frequency / frequency.mean())
        mine: list[Ints] = []
        missing = size
        while missing:  # each pass meets the demand or empties a class
            left = frequency - taken
            weights = np.where(left > 0, prefers, 0.0)
            if weights.sum() < 1e-300:  # everything it prefers is used up
                weights = left.astype(np.float64)
            counts = np.minimum(apportion(missing, weights), left)
            for c in np.flatnonzero(counts):
                mine.append(places[c][taken[c] : taken[c] + counts[c]])
            taken += counts
            missing -= int(counts.sum())
        parts.append(order[np.sort(np.concatenate(mine))])
    return parts


def _repair(
    name: str,
    rows: Ints,
    labels: Ints,
    places: Mapping[int, Ints],
    classes: tuple[str, ...],
    seed: int,
) -> tuple[Ints, str]:
    """The client's rows, completed so that they have each class of the domain, and a note."""
    missing = np.setdiff1d(list(places), labels[rows])
    if not len(missing):
        return rows, ""
    rows = rows.copy()
    rng = keys.generator(seed, name, "repair")
    for label in missing:
        own, inverse, counts = np.unique(labels[rows], return_inverse=True, return_counts=True)
        spare = np.flatnonzero(counts[inverse] >= 2)
        if not len(spare):
            raise ProtofedError(
                f"{name} has {len(rows)} samples of {len(own)} classes, too few for the "
                f"{len(places)} classes of its domain",
                "raise --samples, or allow missing classes with --no-repair",
            )
        rows[rng.choice(spare)] = rng.choice(places[label])
    names = ", ".join(classes[label] for label in missing)
    return rows, f"had no sample of {names}: given one each, drawn from the whole training split"
