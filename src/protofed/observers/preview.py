"""What a run on your own images will do and why, before it starts: choices, memory, time."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch.nn import functional as F

from protofed.config import Config, client_sizes
from protofed.cores import core_count
from protofed.data import Task
from protofed.data.augment import Choices, cropped, normalized
from protofed.federation.cpu import one_thread
from protofed.federation.facts import DTYPES, discover
from protofed.federation.memory import estimate
from protofed.federation.simulation import initial_network
from protofed.observers.progress import duration

PROBE_IMAGES = 8
"""How many images a step is measured with; a step's time is proportional to its images."""
PROBE_SECONDS = 1.0
"""How long a step is repeated, at least twice: the fastest counts."""
FORWARD_PART = 1 / 3
"""The part of a training step that a test takes: the forward pass, without the backward one."""
IMBALANCE, FEW = 3, 5
"""Classes with this many times the images of others, or with fewer images than this, are named."""


def preview(asked: Config, task: Task) -> list[str]:
    """Lines for the user: what was chosen to suit the images, what is unusual, memory and time."""
    complete = asked.for_task(task.info)
    facts = discover(complete, task)
    config = facts.applied(complete)
    # choices look at what was given, with clients and samples of each domain
    chosen = asked.for_clients(task.info).choices(task.info)
    words = {name: f"{choice.value}: {choice.reason}" for name, choice in chosen.items()}
    if "augment" in words and config.flip:
        words["augment"] += "; mirrored too, --no-flip if left and right differ"
    rows = {name.replace("_", " "): text for name, text in words.items()}
    if config.train == "head":
        rows["train"] = (
            "head: the backbone is frozen, so a loss on features (of FPL or MOON, say) changes "
            "nothing; --train all trains everything"
        )
    if told := _imbalance(task):
        rows["classes"] = told
    rows["memory"] = str(estimate(config, task))
    rows["time"] = _time(config, task)
    width = max(map(len, rows))
    return [f"{task.name}: {task.note}", *(f"  {n:<{width}}  {text}" for n, text in rows.items())]


def _imbalance(task: Task) -> str:
    """Classes that have few training images, or far fewer than others; empty if none."""
    counts = {
        domain: torch.bincount(images.train.y, minlength=len(task.classes)).tolist()
        for domain, images in task.domains.items()
    }
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    most, fewest = totals.index(max(totals)), totals.index(min(totals))
    words = []
    if totals[most] >= IMBALANCE * totals[fewest]:
        words.append(
            f"{totals[most]} training images of {task.classes[most]}, {totals[fewest]} of "
            f"{task.classes[fewest]}; the average accuracy hides this, but protofed evaluate shows "
            "every class, and --sampling balanced evens it out"
        )
    few = [
        f"{n} of {task.classes[label]} in {domain}"
        for domain, column in counts.items()
        for label, n in enumerate(column)
        if 0 < n < FEW
    ]
    if few:
        more = f" and {len(few) - 3} more" if len(few) > 3 else ""
        words.append(f"few training images: {', '.join(few[:3])}{more}")
    return "; ".join(words)


def _time(config: Config, task: Task) -> str:
    """How long the run takes, from a step that is measured here and now."""
    sizes = client_sizes(config, task.info)
    clients = math.ceil(len(sizes) * config.participation)
    at_once = 1
    if config.engine == "workers":
        at_once = max(1, min(config.workers or core_count(), clients))
    image = _seconds_an_image(config, task)
    trained = sum(sizes) * config.participation * config.epochs
    tested = sum(len(images.test) for images in task.domains.values())
    a_round = image * (trained + FORWARD_PART * tested) / at_once
    most = "at most " if config.engine == "lanes" else ""  # its graphs are faster than this step
    return (
        f"{most}about {duration(config.rounds * a_round)} a run: {config.rounds} × "
        f"{duration(a_round)}, "
        f"as {' and '.join(config.models)} takes {1000 * image:.1f} ms an "
        f"image here ({at_once} client{'s' * (at_once > 1)} at a time); methods with "
        "further passes take longer"
    )


def _seconds_an_image(config: Config, task: Task) -> float:
    """The time of a training step on this machine, augmentation included, by its images."""
    device, dtype = torch.device(config.device), DTYPES[config.precision]
    network = initial_network(config, task, weights=config.weights)
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = next(d.train for d in task.domains.values() if len(d.train))
    n = config.batch if device.type == "cuda" else min(config.batch, PROBE_IMAGES)
    rows = torch.arange(n) % len(images)
    x, y = images.x[rows].to(device), images.y[rows].to(device)
    seconds = math.inf
    with one_thread():
        start = time.perf_counter()
        for repeat in range(6):  # the first also allocates
            began = time.perf_counter()
            if repeat > 1 and began - start > PROBE_SECONDS:
                break
            choices = Choices.draw(np.random.default_rng(0), n, task.augment, task.image_size)
            augmented = cropped(x, choices.rows(torch.arange(n), device), task.augment)
            inputs = normalized(augmented, task.augment, dtype)
            with torch.autocast(device.type, torch.bfloat16, config.precision == "bf16"):
                loss = F.cross_entropy(network(inputs).logits, y)
            loss.backward()
            loss.item()  # waits for a GPU
            seconds = min(seconds, time.perf_counter() - began)
    return seconds / n
