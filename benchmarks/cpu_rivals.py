"""A round of FedAvg on the CPU: protofed against pfl and Flower's simulation, on the same work.

    python -m venv rivals
    rivals/bin/pip install torch==2.13.0 pfl==0.6.0 'flwr[simulation]==1.41.0' .
    rivals/bin/python benchmarks/cpu_rivals.py [--rounds 7] [--workload silo] [--only NAME ...]

A small CNN (cnn3, width 16) on 32×32 images, SGD with momentum. Workloads:

    silo    10 clients × 100 images, batch 32, 5 epochs, the CNN without BatchNorm: all have the
            same network, in channels-last memory
    plain   as silo, but the rivals have the CNN as their users would write it (``Plain``, images
            as tensors usually lie in memory: channel by channel)
    device  50 clients × 50 images, batch 10, 1 epoch, and the network of silo: the shape of pfl's
            own CIFAR10 benchmark
    glyphs  as plain, the CNN with BatchNorm: this package's embedded task with its own model

Everyone starts from the same weights and takes the same minibatches in the same order; after three
rounds the global weights must agree to 1e-4, or the benchmark fails (not BatchNorm's running
statistics: pfl does not average them, and training does not read them). The rivals' images are in
memory as normalized float32, which protofed makes from bytes in every epoch. Nothing is evaluated
inside the clock (pfl evaluates once, in the first round, which warms up).

Each contender is a process of its own (with its own children) that waits for a signal to run a
round; the rounds of all contenders take turns, so that noise affects all alike. Beside the seconds
of a round stands the CPU time of all its processes: on a machine with other work it means more, but
it does not see a core that waits. Start-up is listed separately: from the start of the process
until it is ready for its first round, plus that round. Memory is that after the last round; what
processes share counts once.

    protofed workers    2 processes, 1 thread each        protofed loop     1 thread
    PyTorch loop        1 thread, no library: our network in a loop over clients, epochs and batches
    pfl 2 processes     torchrun, gloo, 1 thread each     pfl 1 process     with 2 threads
    Flower 2 actors     Ray, 1 CPU and 1 thread each      Flower 1 actor    2 CPUs and 2 threads
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofed import keys
from protofed.data.augment import normalized
from protofed.data.task import Augment, Domain, Images, Task
from protofed.federation.cpu import keep_freed_memory
from protofed.models import build

# A small step: the order in which a rival adds up its clients changes the last bit of the mean, and
# a max-pool or ReLU that flips on it moves weights by a step. With 0.01 that alone makes 3e-4.
SEED, LR, MOMENTUM, DECAY, CLASSES = 0, 0.001, 0.9, 1e-5, 10
AGREE = 1e-4
MARK = "@@"  # marks a contender's answers among what its libraries print


@dataclass(frozen=True)
class Workload:
    clients: int
    samples: int
    batch: int
    epochs: int
    norm: str = "none"
    plain: bool = False
    """Whether the rivals have network and images as their users would write them."""


WORKLOADS = {
    "silo": Workload(10, 100, 32, 5),
    "plain": Workload(10, 100, 32, 5, plain=True),
    "device": Workload(50, 50, 10, 1),
    "glyphs": Workload(10, 100, 32, 5, "batch", plain=True),
    "tiny": Workload(4, 24, 16, 2, "batch", plain=True),  # to try the script
}


# ---- the same work for all ---------------------------------------------------------------------


def pixels(work: Workload) -> Images:
    rng = keys.generator(SEED, "pixels")
    count = work.clients * work.samples
    x = torch.from_numpy(rng.integers(0, 256, (count, 3, 32, 32), dtype="uint8"))
    return Images(x, torch.from_numpy(rng.integers(0, CLASSES, count)))


def federation(work: Workload, engine: str) -> Any:
    """Ours: also where the others take the initial weights and the clients' rows from."""
    from protofed.config import make_config
    from protofed.federation.simulation import Federation

    images = pixels(work)
    test = Images(images.x[:10], images.y[:10])
    task = Task(
        name="pixels",
        classes=tuple("0123456789"),
        domains={"all": Domain(images, test)},
        augment=Augment(padding=0, flip=False),
        clients={"all": work.clients},
        samples={"all": work.samples},
    )
    config = make_config(
        task,
        "fedavg",
        model="cnn3",
        width=16,
        norm=work.norm,
        batch=work.batch,
        epochs=work.epochs,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        rounds=1000,
        seed=SEED,
        device="cpu",
        engine=engine,
        workers=2 if engine == "workers" else None,
    )
    return Federation(config, task)


@functools.cache
def client_data(work: Workload) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Each client's images as normalized float32 with labels, and the initial weights."""
    # Without our setting of the C library's allocator, which would last in a rival's process.
    with mock.patch("protofed.engines.loop.keep_freed_memory"):
        ours = federation(work, "loop")
    data = {}
    for name, s in ours.clients.items():
        x = normalized(s.images.x, ours.task.augment, torch.float32)  # in channels-last memory
        data[name] = (x.contiguous() if work.plain else x, s.images.y)
    return data, {name: t.clone() for name, t in ours.model.items()}


class Plain(nn.Module):
    """The CNN as it is usually written; its entries have the names of ours."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        batch = norm == "batch"
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch)]
            # Identity, which costs a microsecond, only for the names
            layers += [nn.BatchNorm2d(outputs) if batch else nn.Identity()]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU())
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Same(nn.Module):
    """Our CNN, as we use it."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.network = build("cnn3", CLASSES, 32, 16, norm).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


def network(work: Workload, weights: dict[str, Tensor]) -> nn.Module:
    """A rival's network."""
    net = Plain(work.norm) if work.plain else Same(work.norm)
    entries(net).load_state_dict(weights)
    return net


def entries(net: nn.Module) -> nn.Module:
    """The module whose entries have the names of ours."""
    return net.network if isinstance(net, Same) else net


def batches(
    data: tuple[Tensor, Tensor], name: str, round: int, epoch: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch's minibatches in the order that protofed draws for this client and round."""
    x, y = data
    rng = keys.generator(SEED, round, name, 0, epoch, "order")
    order = torch.from_numpy(rng.permutation(len(y)))
    yield from zip(x[order].split(batch), y[order].split(batch), strict=True)


def train(
    net: nn.Module, data: tuple[Tensor, Tensor], name: str, round: int, work: Workload
) -> None:
    """A client's local training as it is usually written."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for epoch in range(work.epochs):
        for x, y in batches(data, name, round, epoch, work.batch):
            loss = cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---- contenders --------------------------------------------------------------------------------


def serve(one_round: Callable[[int], float], weights: Callable[[], dict[str, Tensor]]) -> None:
    """Ready; then a round for each line "round", and the global weights for "save PATH"."""
    answer("ready")
    done = 0
    for order in sys.stdin:
        word, _, path = order.strip().partition(" ")
        if word == "round":
            answer(f"{one_round(done):.6f}")
            done += 1
        elif word == "save":
            save_file({n: t.contiguous() for n, t in weights().items()}, path)
            answer("saved")
        else:
            return


def answer(text: str) -> None:
    print(f"{MARK}{text}", flush=True)


def protofed(work: Workload, engine: str) -> None:
    ours = federation(work, engine)
    serve(lambda _: ours.run_round()["seconds"]["train"], lambda: ours.model)


def bare(work: Workload) -> None:
    """No library at all: our network, our layout and our allocator's settings in a plain loop."""
    work = replace(work, plain=False)
    data, model = client_data(work)
    keep_freed_memory()
    net = network(work, model)

    def one_round(round: int) -> float:
        nonlocal model
        began = time.perf_counter()
        trained = []
        for name, own in data.items():
            entries(net).load_state_dict(model)
            train(net, own, name, round, work)
            trained.append({n: t.clone() for n, t in entries(net).state_dict().items()})
        model = {n: sum(t[n] for t in trained) / len(trained) for n in model}
        return time.perf_counter() - began

    serve(one_round, lambda: model)


def pfl(work: Workload, threads: int) -> None:
    """Its own loop, from callback to callback; every process runs the same program."""
    import numpy
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.selector import get_framework_module
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(threads)
    numpy.random.seed(SEED)
    data, initial = client_data(work)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(work, initial)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.network(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    class User(PyTorchTensorDataset):
        """Its tensors in the order of the epoch; pfl's own data sets are never shuffled."""

        round = epoch = -1

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
            if batch_size != work.batch:  # pfl's evaluation of the first round
                yield data[self.user_id]
                return
            self.epoch = self.epoch + 1 if self.round == clock.done else 0
            self.round = clock.done
            yield from batches(data[self.user_id], self.user_id, self.round, self.epoch, batch_size)

    class Clock(TrainingProcessCallback):
        done = 0

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            seconds = time.perf_counter() - self.began
            self.done += 1
            if first:
                answer(f"{seconds:.6f}")
            return self.wait(), Metrics()

        def wait(self) -> bool:
            """Until the next round is asked for; True: there is none."""
            go = torch.zeros(1)
            if first:
                while (order := sys.stdin.readline().split()) and order[0] == "save":
                    state = entries(net.network).state_dict()
                    save_file({n: t.contiguous() for n, t in state.items()}, order[1])
                    answer("saved")
                go[0] = order[:1] == ["round"]
            if ops.distributed.world_size > 1:
                torch.distributed.broadcast(go, 0)
            self.began = time.perf_counter()
            return not go[0]

    users = {name: User((x, y), user_id=name) for name, (x, y) in data.items()}
    turn = iter(())

    def sampler() -> str:
        nonlocal turn
        name = next(turn, None)
        if name is None:
            turn = iter(users)
            name = next(turn)
        return name

    net, clock = Net(), Clock()
    model = PyTorchModel(
        model=net,
        local_optimizer_create=functools.partial(
            torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY
        ),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    ops = get_framework_module()
    first = ops.distributed.global_rank == 0
    dataset = FederatedDataset(users.__getitem__, sampler)
    if first:
        answer("ready")
    if clock.wait():
        return
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**9,
            train_cohort_size=work.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )


def flower(work: Workload, cpus: int) -> None:
    import cpu_rivals  # by its name, so that Ray's actors import it once and keep its caches
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    _, initial = client_data(work)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        grid.pull_interval = 0.01  # instead of 0.1 s
        arrays = ArrayRecord(entries(network(work, initial)).state_dict())
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients
        )

        def one_round(round: int) -> float:
            nonlocal arrays
            began = time.perf_counter()
            request = ConfigRecord({"round": round, "threads": cpus, **vars(work)})
            result = strategy.start(grid, arrays, num_rounds=1, train_config=request)
            arrays = result.arrays
            return time.perf_counter() - began

        serve(one_round, lambda: dict(arrays.to_torch_state_dict()))

    run_simulation(
        app,
        cpu_rivals.flower_client(),
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "log_to_driver": False},
        },
    )


def flower_client() -> Any:
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(flower_train)
    return app


@functools.cache
def actor_network(work: Workload, threads: int) -> nn.Module:
    torch.set_num_threads(threads)
    return network(work, client_data(work)[1])


def flower_train(message: Any, context: Any) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    request = dict(message.content["config"])
    work = Workload(**{f.name: request[f.name] for f in fields(Workload)})
    net = actor_network(work, request["threads"])
    entries(net).load_state_dict(message.content["arrays"].to_torch_state_dict())
    name = f"all-{context.node_config['partition-id']}"
    data = client_data(work)[0][name]
    train(net, data, name, request["round"], work)
    content = RecordDict(
        {
            "arrays": ArrayRecord(entries(net).state_dict()),
            "metrics": MetricRecord({"num-examples": len(data[1])}),
        }
    )
    return Message(content=content, reply_to=message)


CONTENDERS: dict[str, Callable[[Workload], None]] = {
    "protofed workers": lambda work: protofed(work, "workers"),
    "protofed loop": lambda work: protofed(work, "loop"),
    "PyTorch loop": bare,
    "pfl 2 processes": lambda work: pfl(work, 1),
    "pfl 1 process": lambda work: pfl(work, 2),
    "Flower 2 actors": lambda work: flower(work, 1),
    "Flower 1 actor": lambda work: flower(work, 2),
}


# ---- the referee -------------------------------------------------------------------------------


class Contender:
    """A process that runs a round when told to."""

    def __init__(self, name: str, workload: str, log: Path) -> None:
        self.name, self.seconds, self.cpu = name, list[float](), list[float]()
        self.log = log
        threads = "2" if name in ("pfl 1 process", "Flower 1 actor") else "1"
        program = [sys.executable]
        if name == "pfl 2 processes":
            program += ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [*program, __file__, "--contender", name, "--workload", workload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "FLWR_TELEMETRY_ENABLED": "0",
                "RAY_DEDUP_LOGS": "0",
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
                ),
            },
        )
        self.listen("ready")
        self.start_up = time.perf_counter() - self.began

    def listen(self, expected: str = "") -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                text = line.removeprefix(MARK).strip()
                assert text == expected or not expected, text
                return text
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise SystemExit(f"{self.name} ended without an answer:\n{end}")

    def tell(self, order: str, expected: str = "") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.listen(expected)

    def round(self) -> float:
        return float(self.tell("round"))

    def measured_round(self) -> None:
        before = self.cpu_seconds()
        self.seconds.append(self.round())
        self.cpu.append(self.cpu_seconds() - before)

    def cpu_seconds(self) -> float:
        """CPU time that the process and all below it have taken."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Megabytes of the process and all below it; what they share counts once."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:"))
        return total // 1024

    def tree(self) -> Iterator[int]:
        """The process and all below it."""
        children: dict[int, list[int]] = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except OSError:
                continue  # it has just ended
            children.setdefault(int(fields["PPid"]), []).append(int(status.parent.name))
        waiting = [self.process.pid]
        while waiting:
            yield (pid := waiting.pop())
            waiting += children.get(pid, [])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def referee(workload: str, rounds: int, names: list[str]) -> None:
    work = WORKLOADS[workload]
    passes = work.clients * work.samples * work.epochs
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"\n{workload}: {work}; {passes} images a round; load average at the start {load}")
    with tempfile.TemporaryDirectory(prefix="protofed-rivals-") as folder:
        contenders = []
        os.environ["RAY_TMPDIR"] = folder  # or Ray joins a cluster that this machine runs, or ran
        try:
            for name in names:
                log = Path(folder) / f"{name.replace(' ', '-')}.log"
                one = Contender(name, workload, log)
                contenders.append(one)
                first = one.round()
                print(f"  {name:18} start-up {one.start_up:5.1f} s, first round {first:.3f} s")
            for number in range(1, rounds + 1):
                for one in contenders:
                    time.sleep(0.5)  # threads of the one before may spin a while
                    one.measured_round()
                if number == 2:  # three rounds with the first
                    agree(contenders, Path(folder))
            table(contenders, passes)
        finally:
            for one in contenders:
                one.end()
    load = ", ".join(f"{v:.2f}" for v in os.getloadavg())
    print(f"  load average at the end {load}", flush=True)


def agree(contenders: list[Contender], folder: Path) -> None:
    models = {}
    for one in contenders:
        path = folder / f"{one.name.replace(' ', '-')}.safetensors"
        one.tell(f"save {path}", "saved")
        models[one.name] = load_file(path)
    first, *others = models
    for name in others:
        assert models[name].keys() == models[first].keys(), f"{name} has other entries"
        weights = {n: t for n, t in models[name].items() if not re.search("running|tracked", n)}
        worst = max(float((t - models[first][n]).abs().max()) for n, t in weights.items())
        print(f"  weights after 3 rounds: {name} differs from {first} by {worst:.1e}", flush=True)
        if not worst < AGREE:
            raise SystemExit(f"{name} did not do the same work as {first}: no result")


def table(contenders: list[Contender], passes: int) -> None:
    for one in contenders:
        middle = statistics.median(one.seconds)
        each = " ".join(f"{s:.3f}" for s in one.seconds)
        print(
            f"  {one.name:18} median {middle:.3f} s, min {min(one.seconds):.3f}, "
            f"max {max(one.seconds):.3f}; {passes / middle:6.0f} images/s; CPU time "
            f"{statistics.median(one.cpu):.2f} s; memory {one.memory()} MB ({each})"
        )
    ours = next(c for c in contenders if c.name == "protofed workers")
    for library in ("pfl", "Flower"):
        found = [c for c in contenders if c.name.startswith(library)]
        if not found:
            continue
        best = min(found, key=lambda c: statistics.median(c.seconds))
        ratios = [b / a for a, b in zip(ours.seconds, best.seconds, strict=True)]
        cpu = [b / a for a, b in zip(ours.cpu, best.cpu, strict=True)]
        print(
            f"  {ours.name} is {statistics.median(ratios):.2f} times as fast as {best.name} "
            f"({min(ratios):.2f} to {max(ratios):.2f}), which takes {statistics.median(cpu):.2f} "
            f"times the CPU time ({min(cpu):.2f} to {max(cpu):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        torch.set_num_threads(1)
        CONTENDERS[options.contender](WORKLOADS[options.workload])
        return
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "pfl", "flwr", "ray", "protofed"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    print(f"python {platform.python_version()}, {', '.join(found)}; {os.cpu_count()} cores")
    every = ["silo", "plain", "device", "glyphs"]
    names = every if options.workload == "all" else [options.workload]
    for name in names:
        referee(name, options.rounds, options.only)


if __name__ == "__main__":
    main()
