"""How much memory a run takes, estimated before it starts.

A process that runs out of memory is killed without a message, perhaps after hours. The estimate
covers what every method needs; a method with several forward passes per step needs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from protofed import keys
from protofed.config import Config
from protofed.control_groups import control_groups
from protofed.cores import core_count
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation import client_state, spool
from protofed.federation.batches import PREPARED_BYTES, evaluation_batch
from protofed.federation.cpu import one_thread
from protofed.federation.facts import DTYPES
from protofed.method import Sizes
from protofed.models import build
from protofed.user_code import is_file

SERVER_COPIES = 4
"""Copies of the weights at the server: its own, their mean, a checkpoint's tensors and bytes."""
CLIENT_COPIES = 4
"""Copies of the weights at a client, besides its network: gradients, momentum, update, reply.

Adam has one more: it keeps two averages. And a worker process has what it received, and its reply
in shared memory.
"""
PROBE_WIDTH, PROBE_SIZE = 4, 32
"""Channels and image size of the small model on which activations are counted."""
EVALUATION_ACTIVATIONS = 4
"""How many tensors as large as the largest activation are in memory where no gradient is needed."""
MOST_KEPT = 192 << 20
"""What a process on a CPU keeps of freed blocks (``cpu.py``) that fit no later use: as much as the
activations of training and testing, at most so many bytes. Measured on small CNNs and ResNets.
"""

_ADVICE = {
    "weights": "use a smaller --model or --width",
    "activations": "use a smaller --batch, --image-size or --model, or fewer --workers",
    "images": "use a smaller --image-size, fewer --samples or less --participation",
}
"""What to try if this part of the estimate is the largest."""


@dataclass(frozen=True)
class Memory:
    """An estimate in bytes."""

    weights: int
    activations: int
    images: int
    loaded: int
    """The part of ``images`` that is already in memory."""
    free: int | None
    """What is available besides the loaded images; None if unknown."""
    gpu: bool

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.images

    def __str__(self) -> str:
        parts = (f"{name} {_gb(getattr(self, name))}" for name in _ADVICE)
        return f"about {_gb(self.total)} GB of {'GPU ' * self.gpu}memory ({', '.join(parts)})"

    def require(self) -> None:
        """Raise an error if the run needs more than is available."""
        if self.free is not None and self.total - self.loaded > self.free:
            raise ProtofedError(
                f"the run needs {self}, but only {_gb(self.free + self.loaded)} GB is available",
                f"{_ADVICE[max(_ADVICE, key=lambda name: getattr(self, name))]}; "
                f"--max-memory-gb {_gb(self.total)} starts it anyway",
            )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f}"


def estimate(config: Config, task: Task, in_folder: bool = True) -> Memory:
    """Estimate a run's memory; the config has the device, precision and engine actually used.

    Client states can move to disk only ``in_folder``. On a GPU this is the minimum for the lanes
    engine: one client at a time, evaluated in small batches.
    """
    gpu = config.device == "cuda" and config.engine != "ray"  # then it is not this machine's
    size = DTYPES[config.precision].itemsize
    workers = config.engine == "workers"
    cores = (config.workers or core_count()) if workers else 1
    sizes = [_samples(config, task, d) for d, n in config.domain_clients.items() for _ in range(n)]
    most = max(sizes, default=0)
    participants = math.ceil(len(sizes) * config.participation)
    test_batch = evaluation_batch(task.image_size)
    largest_set = max(most, *(len(domain.test) for domain in task.domains.values()))
    states, activations = [], 0
    for model in config.models:
        state, saved = _measure(config, task, model)
        states.append(size * state)
        without_gradient = EVALUATION_ACTIVATIONS * max(saved)
        step = sum(saved) if config.train == "all" else without_gradient
        train = step * min(config.batch, most)
        test = without_gradient * min(test_batch, largest_set)
        kept = min(size * (train + test), MOST_KEPT)
        needed = size * train if gpu else size * max(train, test) + kept
        activations = max(activations, needed)
    state = max(states)
    private = state * len(sizes) * bool(config.method.slots.client)
    client_copies = CLIENT_COPIES + (config.optimizer != "sgd") + 2 * workers
    server_copies = SERVER_COPIES + workers  # what all receive, in shared memory
    weights = (1 + cores) * sum(states) + (server_copies + cores * client_copies) * state
    weights += min(participants * state, spool.MEMORY_LIMIT)
    weights += min(private, client_state.MEMORY_LIMIT) if in_folder else private
    loaded = sum(i.x.nbytes for d in task.domains.values() for i in (d.train, d.test))
    image = 3 * task.image_size**2
    at_once = min(cores, participants) if workers else participants  # a worker frees them
    copies = image * sum(sorted(sizes)[-at_once:])
    prepared = min(PREPARED_BYTES, image * most) * (1 + task.augment.flip)
    if gpu:  # lanes have a whole epoch at once: cropped, then normalized
        prepared += image * most * (1 + size)
    return Memory(
        weights,
        cores * activations // (2 if config.precision == "bf16" else 1),
        loaded + copies + cores * prepared,
        0 if gpu else loaded,
        _free(config, gpu),
        gpu,
    )


def _samples(config: Config, task: Task, domain: str) -> int:
    """How many images a client of a domain holds at most."""
    asked, available = config.domain_samples.get(domain, 1.0), len(task.domains[domain].train)
    return min(available, math.ceil(asked * available) if isinstance(asked, float) else asked)


def _measure(config: Config, task: Task, model: str) -> tuple[int, list[int]]:
    """The size of a model's state, and of each tensor it saves per image for the backward pass.

    Sizes are numbers of elements. The state is counted on the meta device, which allocates nothing.
    Activations are counted on a narrow model with small images, then scaled up; for a model of your
    own they are counted at its real size.
    """
    classes, side, own = len(task.classes), task.image_size, is_file(model)
    with keys.torch_draws("to look at"):
        with nullcontext() if own else torch.device("meta"):
            network = backbone = build(model, classes, side, config.width, config.norm)
            with suppress(Exception):  # a custom network may need real values
                network = config.method.network(backbone, Sizes.of(backbone, classes, side))
        state = sum(t.numel() for t in network.state_dict().values())
        probe = backbone if own else build(model, classes, PROBE_SIZE, PROBE_WIDTH, config.norm)
    probed = side if own else PROBE_SIZE
    images = torch.zeros(2, 3, probed, probed)
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with one_thread(), saved_tensors_hooks(record, lambda tensor: tensor):
        probe(images)
    known = {t.data_ptr() for t in (images, *probe.state_dict().values())}
    activations = {t.data_ptr(): t.numel() for t in saved if t.data_ptr() not in known}
    wider = 1.0
    if not own:  # by the encoder: parameters that a method gives the network come before it
        width, probed_width = (len(next(n.encoder.parameters())) for n in (backbone, probe))
        wider = width / probed_width
    scale = wider * (side / probed) ** 2 / 2  # the probe saw two images
    return state, [3 * side**2, *(math.ceil(scale * count) for count in activations.values())]


# ---- available memory ----------------------------------------------------------------------------


def _free(config: Config, gpu: bool) -> int | None:
    if config.max_memory_gb is not None:
        return int(config.max_memory_gb * 1e9)
    if gpu:
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return free_memory()


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, as limited by the machine and by control groups.

    None if the system does not say (outside Linux).
    """
    found = list(_cgroup_free(root))
    with suppress(OSError, ValueError, KeyError):
        found.append(_read_numbers(root / "proc/meminfo")["MemAvailable:"] << 10)
    return min(found, default=None)


def _cgroup_free(root: Path) -> Iterator[int]:
    """What each control group of this process (a container, a batch job) leaves it."""
    for group in control_groups("memory", root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError, KeyError):  # "max": no limit
                free = int((group / limit).read_text()) - int((group / used).read_text())
                yield free + _read_numbers(group / "memory.stat")[cache]


def _read_numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
