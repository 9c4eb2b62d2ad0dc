"""How much memory a run takes, estimated before it starts.

The kernel ends a process that takes more than there is without a word, perhaps after hours. The
estimate is what any method needs; one that passes an image through its network several times in a
step needs more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from protofed.config import Config
from protofed.data import Task
from protofed.errors import ProtofedError
from protofed.federation import client_state, spool
from protofed.federation.batches import EVALUATION_BATCH, PREPARED_BYTES, evaluation_batch
from protofed.federation.cpu import one_thread
from protofed.federation.facts import DTYPES
from protofed.method import Sizes
from protofed.models import build

SERVER_COPIES = 4
"""Of the weights: the server's, their mean, and a checkpoint's tensors and bytes."""
CLIENT_COPIES = 4
"""Of the weights, beside the network: gradients, momentum, what a step changes, the reply."""
THIN, SMALL = 4, 32
"""The width and the image size at which activations are counted."""
EVALUATION_ACTIVATIONS = 4
"""How many of the largest activations are in memory at a time where no gradient is needed."""


@dataclass(frozen=True)
class Memory:
    """An estimate in bytes."""

    weights: int
    activations: int
    images: int
    loaded: int
    """The part of the images that is in memory already."""
    free: int | None
    """What there is beside the loaded images, if that is known."""
    gpu: bool

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.images

    def __str__(self) -> str:
        parts = (f"{name} {_gb(getattr(self, name))}" for name in _ADVICE)
        return f"about {_gb(self.total)} GB of {'GPU ' * self.gpu}memory ({', '.join(parts)})"

    def require(self) -> None:
        """An error if it is more than there is."""
        if self.free is not None and self.total - self.loaded > self.free:
            raise ProtofedError(
                f"the run takes {self}, and {_gb(self.free + self.loaded)} GB can be had",
                f"{_ADVICE[max(_ADVICE, key=lambda name: getattr(self, name))]}; "
                f"--max-memory-gb {_gb(self.total)} runs it all the same",
            )


_ADVICE = {
    "weights": "use a smaller --model or --width",
    "activations": "use a smaller --batch, --image-size or --model, or fewer --workers",
    "images": "use a smaller --image-size, fewer --samples or less --participation",
}


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f}"


def estimate(config: Config, task: Task, in_folder: bool = True) -> Memory:
    """The memory of a run whose config has device, precision and engine as they were found.

    Without a folder, clients' states cannot be kept on disk. On a GPU it is the least that lanes
    can do with: one client at a time, tested with small batches.
    """
    gpu, size = config.device == "cuda", DTYPES[config.precision].itemsize
    cores = (config.workers or os.cpu_count() or 1) if config.engine == "workers" else 1
    held = [_samples(config, task, d) for d, n in config.domain_clients.items() for _ in range(n)]
    most = max(held, default=0)
    training = math.ceil(len(held) * config.participation)
    # the clients' own passes without a gradient are not made smaller for large images
    passes = config.method.proto_pass == "post" or config.method.public_images is not None
    tested = EVALUATION_BATCH if passes else evaluation_batch(task.image_size)
    largest = max(most, *(len(domain.test) for domain in task.domains.values()))
    states, activations = [], 0
    for model in config.models:
        state, saved = _measured(config, task, model)
        states.append(size * state)
        train = sum(saved) * min(config.batch, most)
        test = EVALUATION_ACTIVATIONS * max(saved) * min(tested, largest)
        activations = max(activations, size * (train if gpu else max(train, test)))
    state = max(states)
    private = state * len(held) * bool(config.method.slots.client)
    weights = (1 + cores) * sum(states) + (SERVER_COPIES + cores * CLIENT_COPIES) * state
    weights += min(training * state, spool.MEMORY_LIMIT)
    weights += min(private, client_state.MEMORY_LIMIT) if in_folder else private
    loaded = sum(i.x.nbytes for d in task.domains.values() for i in (d.train, d.test))
    image = 3 * task.image_size**2
    copies = image * sum(sorted(held)[-training:])
    ready = min(PREPARED_BYTES, image * most) * (1 + task.augment.flip)
    return Memory(
        weights,
        cores * activations // (2 if config.precision == "bf16" else 1),
        loaded + copies + cores * ready,
        0 if gpu else loaded,
        _free(config),
        gpu,
    )


def _samples(config: Config, task: Task, domain: str) -> int:
    """How many images a client of a domain holds at most."""
    asked, there = config.domain_samples.get(domain, 1.0), len(task.domains[domain].train)
    return min(there, math.ceil(asked * there) if isinstance(asked, float) else asked)


def _measured(config: Config, task: Task, model: str) -> tuple[int, list[int]]:
    """Numbers in a model's state, and in each tensor that it keeps of an image for its gradient.

    The state is counted without memory, on PyTorch's device for shapes. Activations are those of a
    thin model on small images, times as many channels and pixels as there are more.
    """
    classes, side = len(task.classes), task.image_size
    with torch.device("meta"):
        network = backbone = build(model, classes, side, config.width, config.norm)
        with suppress(Exception):  # a network of one's own may need tensors with numbers
            network = config.method.network(backbone, Sizes(classes, backbone.features, side))
    state = sum(t.numel() for t in network.state_dict().values())
    with torch.random.fork_rng(devices=[]):
        thin = build(model, classes, SMALL, THIN, config.norm)
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with one_thread(), saved_tensors_hooks(keep, lambda saved: saved):
        thin(torch.zeros(2, 3, SMALL, SMALL))
    own = {t.data_ptr() for t in thin.state_dict().values()}
    each = {t.data_ptr(): t.numel() for t in kept if t.data_ptr() not in own}
    width = next(backbone.parameters()).shape[0]
    scale = width / THIN * (side / SMALL) ** 2 / 2
    return state, [math.ceil(scale * count) for count in each.values()]


# ---- what there is -------------------------------------------------------------------------------


def _free(config: Config) -> int | None:
    if config.max_memory_gb is not None:
        return int(config.max_memory_gb * 1e9)
    if config.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return free_memory()


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, by the machine and by the groups that limit it.

    None where the system does not say (it is not Linux).
    """
    found = list(_group_free(root))
    with suppress(OSError, ValueError, KeyError):
        found.append(_table(root / "proc/meminfo")["MemAvailable:"] << 10)
    return min(found, default=None)


def _group_free(root: Path) -> Iterator[int]:
    """What the control groups of this process (a container, a batch job) leave it."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            base, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            base = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.strip("/")
        while group.is_relative_to(base):
            with suppress(OSError, ValueError, KeyError):  # "max": no limit
                limit, used = (int((group / name).read_text()) for name in names[:2])
                yield limit - used + _table(group / "memory.stat")[names[2]]
            group = group.parent


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
