"""Images per second of the augmented training stream, against a DataLoader with Pillow.

    python benchmarks/augment.py [--images 4096] [--epochs 10] [--repetitions 5]

Both give batches of 64 random crops (32 pixels after padding by 4), randomly flipped, normalized,
from the same images, and for the same random choices the very same pixels (checked at the start).
Repetitions alternate. One of protofed's is what a client does in a round: images prepared once,
then all its epochs; a second line shows a single epoch, including the preparation.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from protofed.data.augment import Choices, cropped, crops, normalized, padded
from protofed.data.task import Augment, Images
from protofed.federation.batches import ClientBatches
from protofed.federation.setup import ClientData, Setup, Training
from protofed.method import Sizes
from protofed.methods import method_class

BATCH = 64
AUGMENT = Augment()
SIDE = 32


class Pillow(Dataset[tuple[Tensor, int]]):
    """torchvision's RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and Normalize.

    Written out, since torchvision is not a dependency: the same Pillow and torch calls in the same
    order. Images are in memory and decoded, so that neither side reads or decodes a file.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.images = [Image.fromarray(a) for a in x.permute(0, 2, 3, 1).contiguous().numpy()]
        self.labels = y.tolist()
        self.mean = torch.tensor(AUGMENT.mean)[:, None, None]
        self.std = torch.tensor(AUGMENT.std)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        reach = 2 * AUGMENT.padding + 1
        top, left = (int(torch.randint(0, reach, (1,))) for _ in range(2))
        return self.view(i, top, left, bool(torch.rand(1) < 0.5)), self.labels[i]

    def view(self, i: int, top: int, left: int, flip: bool) -> Tensor:
        image = ImageOps.expand(self.images[i], AUGMENT.padding)
        image = image.crop((left, top, left + SIDE, top + SIDE))
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image, copy=True)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255).sub_(self.mean).div_(self.std)


def check(x: Tensor, pillow: Pillow) -> float:
    """The largest difference between the two for the same choices.

    Multiplying by 1/255 instead of dividing by 255 differs in the last bit; nothing else may.
    """
    choices = Choices.draw(np.random.default_rng(7), len(x), AUGMENT)
    every = torch.arange(len(x))
    ours = crops(padded(x, AUGMENT), every, choices, AUGMENT)
    assert torch.equal(ours, cropped(x, choices, AUGMENT))
    theirs = torch.stack(
        [
            pillow.view(i, int(t), int(c), bool(f))
            for i, (t, c, f) in enumerate(zip(choices.top, choices.left, choices.flip, strict=True))
        ]
    )
    mean, std = pillow.mean, pillow.std
    assert torch.equal(theirs.mul(std).add(mean).mul(255).round().to(torch.uint8), ours)
    worst = float((normalized(ours, AUGMENT, torch.float32) - theirs).abs().max())
    assert worst < 1e-6, worst
    return worst


def streams(images: Images, epochs: int) -> dict[str, tuple[int, Callable[[], int]]]:
    """Each stream's passes over the images, and a function that drains it."""
    setup = Setup(
        method=method_class("fedavg")(),
        sizes=Sizes(10, 1, 1),
        augment=AUGMENT,
        training=Training(BATCH, epochs, 0.01, 0.9, 0.0),
        rounds=1,
        seed=0,
    )
    pillow = Pillow(images.x, images.y)

    def ours(passes: int) -> int:
        batches = ClientBatches(setup, ClientData("a", "a", images))
        return sum(len(b.y) for e in range(passes) for b in batches.epoch((0, 0, "a", e), BATCH))

    def loader(workers: int) -> Callable[[], int]:
        made = DataLoader(
            pillow,
            BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
        )
        return lambda: sum(len(y) for _, y in made)

    return {
        f"protofed, {epochs} epochs": (epochs, lambda: ours(epochs)),
        "protofed, 1 epoch": (1, lambda: ours(1)),
        "DataLoader, 0 workers": (1, loader(0)),
        "DataLoader, 2 workers": (1, loader(2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (options.images, 3, SIDE, SIDE), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, 10, options.images))
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, Pillow {PIL.__version__}"
    )
    print(f"{os.cpu_count()} cores ({platform.machine()}), load average at the start {load}")
    print(f"{options.images} images 3x{SIDE}x{SIDE} uint8, batch {BATCH}, one torch thread")
    worst = check(x[:512], Pillow(x[:512], y[:512]))
    print(f"same pixels for the same choices; largest difference as float32 {worst:.1e}")
    runs = streams(Images(x, y), options.epochs)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-1, options.repetitions):  # the first warms up: workers, allocator
        for name, (passes, drain) in runs.items():
            began = time.perf_counter()
            seen = drain()
            rate = seen / (time.perf_counter() - began)
            assert seen == passes * options.images
            if repetition >= 0:
                rates[name].append(rate)
    for name, values in rates.items():
        middle = statistics.median(values)
        each = " ".join(f"{v:.0f}" for v in values)
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name:24} median {middle:9.0f} images/s, {spread} ({each})")
    first = f"protofed, {options.epochs} epochs"
    for ours in (first, "protofed, 1 epoch"):
        for theirs in ("DataLoader, 0 workers", "DataLoader, 2 workers"):
            ratios = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
            print(
                f"{ours} / {theirs}: {statistics.median(ratios):.1f} x "
                f"({min(ratios):.1f} to {max(ratios):.1f})"
            )
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"load average at the end {load}")


if __name__ == "__main__":
    main()
