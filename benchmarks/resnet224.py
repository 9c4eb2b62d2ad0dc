"""Lanes against plain eager PyTorch on a GPU: a round of FedAvg with ResNet-18 at 224 pixels.

    python benchmarks/resnet224.py [--clients 6] [--images 320] [--repeat 5]

Each client has the same number of random images and trains one epoch in batches of 32. Three ways
to do the same work, in one process and in alternating repetitions:

    lanes     this package's GPU engine, bf16
    loop      its loop engine on the GPU: eager PyTorch, bf16 autocast, channels last
    plain     a training loop written here, without the package: bf16 autocast, channels last,
              cudnn.benchmark, PyTorch's fused SGD, images on the GPU as uint8, a batch at a time
              padded, cropped, mirrored and normalized there

and two of them with a frozen backbone (``train = head``). Times are of local training and, but for
plain, of averaging; the first round of each is warm-up.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from protofed.config import make_config
from protofed.data.task import Augment, Domain, Images, Task
from protofed.federation.cpu import one_thread
from protofed.federation.simulation import Federation

SIDE, CLASSES, BATCH, LR, DECAY = 224, 10, 32, 0.01, 1e-5
GFLOP = 3 * 2 * 1.82
"""Per image, forward and backward."""


def made_task(clients: int, images: int) -> Task:
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Images:
        x = torch.randint(256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        return Images(x, torch.arange(count) % CLASSES)

    domains = {"one": Domain(random(clients * images), random(BATCH))}
    names = tuple(str(c) for c in range(CLASSES))
    return Task("random", names, domains, Augment(), {"one": clients}, {"one": images})


def package(task: Task, engine: str, train: str) -> Callable[[], float]:
    config = make_config(
        task, rounds=100, epochs=1, batch=BATCH, lr=LR, device="cuda", engine=engine,
        precision="bf16", train=train,
    )  # fmt: skip
    federation = Federation(config, task)
    assert config.model == "resnet18_imagenet"

    def a_round() -> float:
        return float(federation.run_round()["seconds"]["train"])

    return a_round


def plain(task: Task, clients: int, images: int) -> Callable[[], float]:
    config = make_config(task, precision="fp32", device="cuda")
    start = Federation(config, task).make_network("resnet18_imagenet")
    start = start.to(memory_format=torch.channels_last)
    train = task.domains["one"].train
    x, y = train.x.cuda(), train.y.cuda()
    mean, std = (
        torch.tensor(v, device="cuda")[:, None, None] for v in (task.augment.mean, task.augment.std)
    )
    pad = task.augment.padding

    def batch(rows: torch.Tensor) -> torch.Tensor:
        around = F.pad(x[rows], (pad, pad, pad, pad))
        top, left = torch.randint(2 * pad + 1, (2,)).tolist()
        cut = around[:, :, top : top + SIDE, left : left + SIDE]
        heads = torch.rand(len(rows), 1, 1, 1, device="cuda") < 0.5
        mirrored = torch.where(heads, cut.flip(3), cut)
        inputs = (mirrored.float() / 255 - mean) / std
        return inputs.contiguous(memory_format=torch.channels_last)

    def a_round() -> float:
        torch.backends.cudnn.benchmark = True
        torch.cuda.synchronize()
        began = time.perf_counter()
        for client in range(clients):
            network = copy.deepcopy(start).train()
            sgd = torch.optim.SGD(
                network.parameters(), LR, momentum=0.9, weight_decay=DECAY, fused=True
            )
            order = client * images + torch.randperm(images, device="cuda")
            for rows in order.split(BATCH):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = F.cross_entropy(network(batch(rows)).logits, y[rows])
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        torch.cuda.synchronize()
        torch.backends.cudnn.benchmark = False
        return time.perf_counter() - began

    return a_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    clients, images = arguments.clients, arguments.images
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{clients} clients with {images} images of {SIDE}×{SIDE}, batch {BATCH}", flush=True)
    task = made_task(clients, images)
    with one_thread():
        ways = {
            "lanes": package(task, "lanes", "all"),
            "loop": package(task, "loop", "all"),
            "plain": plain(task, clients, images),
            "lanes, head": package(task, "lanes", "head"),
            "loop, head": package(task, "loop", "head"),
        }
        for a_round in ways.values():
            a_round()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.repeat):
            for name, a_round in ways.items():
                times[name].append(a_round())
    steps = clients * -(-images // BATCH)
    for name, found in times.items():
        median = statistics.median(found)
        tflops = 1e-3 * GFLOP * clients * images / median
        card = "" if "head" in name else f"; {tflops:.0f} TFLOP/s"
        print(
            f"{name:12} {1e3 * median / steps:7.3f} ms per client-step, "
            f"{clients * images / median:7.0f} images/s  "
            f"(rounds: {' '.join(f'{t:.3f}' for t in found)} s{card})"
        )
    for fast, slow in (("lanes", "loop"), ("lanes", "plain"), ("lanes, head", "loop, head")):
        ratio = statistics.median(times[slow]) / statistics.median(times[fast])
        print(f"{fast} is {ratio:.2f} times as fast as {slow}")
    print(f"GPU memory: {torch.cuda.max_memory_reserved() / 1e9:.1f} GB reserved at most")


if __name__ == "__main__":
    main()
