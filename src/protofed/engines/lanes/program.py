"""One local epoch as a recorded CUDA graph, for all clients of one size."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from protofed import fused
from protofed.data.augment import Choices, cropped, crops, normalized
from protofed.engines.lanes.bf16 import Bf16Weights
from protofed.engines.lanes.random_tables import RandomTables
from protofed.engines.lanes.step import Bf16OptimizerStep, OptimizerStep
from protofed.errors import NoSecondDerivative
from protofed.federation.client_round import loss_terms
from protofed.federation.model_state import load_model
from protofed.federation.optimizers import Adam, make_optimizer
from protofed.federation.setup import ClientData, Setup
from protofed.method import Batch, Client, Phase, Terms
from protofed.models import Network
from protofed.prototypes import class_sums


class Program:
    """One epoch of a phase for clients of one size: static tensors, and a graph over them."""

    def __init__(
        self,
        setup: Setup,
        network: Network,
        bf16: Bf16Weights | None,
        tables: RandomTables,
        data: ClientData,
        client: Client,
        number: int,
        phase: Phase,
        trainable: Mapping[str, bool],
        last: bool,
    ) -> None:
        self.setup, self.network, self.client = setup, network, client
        self.number, self.phase = number, phase
        training, self._random = setup.training.for_phase(phase), tables
        self.training, self.epochs, self.batch = training, training.epochs, training.batch
        batches = tables.batches(data)
        self.augment = batches.augment
        self.steps = -(-len(batches.parts["train"]) // self.batch)
        self.collects = setup.proto_pass == "last_epoch" and last
        self.trainable = trainable
        parameters = [p for n, p in network.named_parameters() if trainable[n]]
        # what changes between rounds is a tensor; what does not is part of the kernels' arguments
        self.lr: float | Tensor = training.lr
        if training.schedule.varies:
            self.lr = torch.tensor(training.lr, dtype=setup.dtype, device=data.images.x.device)
        self.optimizer = make_optimizer(training, parameters, self.lr)
        parts = (parameters, self.optimizer, training.clip)
        self.optimizer_step = (
            OptimizerStep(*parts) if bf16 is None else Bf16OptimizerStep(*parts, bf16, self.steps)
        )
        # what a replay reads
        self.device = device = data.images.x.device
        prepared = batches.prepared()
        self.is_prepared = prepared is not None
        self.x = (data.images.x if prepared is None else prepared).clone()
        self.y = data.images.y.clone()
        drawn = tables.draw(data, 0, number, self.epochs, self.steps)
        self.tables = {name: t.to(device) for name, t in drawn.items()}
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        # what a replay writes, besides the network
        self.names: list[str] = []
        self.sums = torch.zeros(0, device=device)
        sizes = setup.sizes
        kinds: dict[str, Any] = {"dtype": setup.dtype, "device": device}
        self.features = torch.zeros(len(batches.parts["train"]), sizes.features, **kinds)
        self.class_sums = torch.zeros(sizes.classes, sizes.features, **kinds)
        self.class_counts = torch.zeros(sizes.classes, **kinds)
        self.draws = client.draws
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kernels = _kernels(device)

    def run(self, data: ClientData, round: int) -> None:
        """Queue all epochs for a client."""
        prepared = self._random.batches(data).prepared()
        self.x.copy_(data.images.x if prepared is None else prepared)
        self.y.copy_(data.images.y)
        drawn = self._random.take(data, round, self.number, self.epochs, self.steps)
        for name, table in drawn.items():
            self.tables[name].copy_(table, non_blocking=True)
        self._reset()
        self.client.lr = self.training.lr_in(round)
        if isinstance(self.lr, Tensor):
            self.lr.fill_(self.client.lr)
        for _ in range(self.epochs):
            if self.graph is None:
                self._epoch(range(self.steps))
            else:
                self.graph.replay()
        self.client.draws = self.draws

    def _reset(self) -> None:
        self.epoch.zero_()
        self.sums.zero_()
        if self.collects:
            self.client.use_sums(self.class_sums, self.class_counts)
        self.optimizer.reset()

    def record(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Warm up, then record an epoch; a method that cannot be recorded runs eagerly."""
        load_model(self.network, self.client.start)
        self.network.train()
        try:
            self._warm_up()
        except NoSecondDerivative:
            _unfuse(self.network)
            self.kernels = {}
            self._warn("has a gradient in its loss: it runs with PyTorch's own kernels")
            self._warm_up()
        if isinstance(self.optimizer, Adam):
            self.optimizer.count_in(self.setup.dtype)
        self._reset()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        cause: Exception | None = None
        try:
            with (
                _no_garbage_collection(),
                torch.cuda.graph(graph, pool=pool, stream=stream),
            ):
                try:
                    self._epoch(range(self.steps))
                except Exception as error:  # ending a failed recording raises another error
                    cause = error
                    raise
            self.graph = graph
            self.optimizer_step.end_recording()
        except Exception as error:  # warn with the reason, and go without a graph
            cause = cause or error
            if isinstance(cause, torch.cuda.OutOfMemoryError):
                raise cause from None
            torch.cuda.synchronize(self.device)
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            how = "runs eagerly, several times slower"
            self._warn(f"cannot be recorded as a CUDA graph and {how}: {reason}")
        finally:
            cause = None  # its traceback has this frame: a cycle that would keep the program alive

    def _warm_up(self) -> None:
        """Choose kernels and allocate workspaces outside of the recording.

        Triton compiles a kernel once more for batches that are not aligned to 16 bytes. Where the
        images' sides are odd, these are some of the first four steps.
        """
        images = self.batch * 3 * self.setup.sizes.image**2 * self.setup.dtype.itemsize
        first = range(1 if images % 16 == 0 else min(4, self.steps))
        for _ in range(2):
            self._reset()
            self._epoch(sorted({*first, self.steps - 1}))

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self.setup.method.name} {what}", stacklevel=3)

    def _epoch(self, steps: Sequence[int]) -> None:
        """These steps of an epoch as tensor operations on static memory."""
        setup, client, tables = self.setup, self.client, self.tables
        now = {name: t.index_select(0, self.epoch)[0] for name, t in tables.items()}
        order = now["order"]
        choices = Choices(*(now.get(f"choice.{n}") for n in Choices._fields))  # type: ignore[arg-type]
        if self.is_prepared:
            images = crops(self.x, order, choices, self.augment)
        else:
            with fused.using(self.kernels):
                images = cropped(self.x[order], choices, self.augment)
        images = normalized(images, self.augment, setup.dtype)
        labels = self.y[order]
        drawn = {n.removeprefix("drawn."): t for n, t in now.items() if n.startswith("drawn.")}
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(self.trainable[name])
        self.optimizer_step.begin_epoch()
        with _batch_counters_on_host(self.network):
            for i in steps:
                part = slice(i * self.batch, (i + 1) * self.batch)
                client.begin_step(now["key"][i])
                client.drawn = {n: t[i] for n, t in drawn.items()}
                terms = self._loss(Batch(images[part], labels[part], order[part]))
                values = torch.stack([t.to(setup.dtype) for t in terms.values()])
                self.optimizer_step.step(values.sum(), i)
                if not self.names:
                    self.names = list(terms)
                    self.sums = torch.zeros_like(values, requires_grad=False)
                self.sums += values.detach()
                if self.collects:
                    self.features[part] = client.main_feature()
        if self.collects:  # in every epoch; those of the last one remain
            sums, counts = class_sums(self.features, labels, client.classes)
            self.class_sums.copy_(sums)
            self.class_counts.copy_(counts)
        self.epoch += 1
        self.draws = client.draws

    def _loss(self, batch: Batch) -> Terms:
        with self.setup.autocast(self.device), fused.using(self.kernels):
            return self.optimizer_step.compute(lambda: loss_terms(self.phase, self.client, batch))


def _kernels(device: torch.device) -> fused.Kernels:
    try:
        from protofed.engines.lanes.replacements import KERNELS
    except ImportError:  # Triton comes with PyTorch for CUDA on Linux, not elsewhere
        return {}
    return KERNELS if device.type == "cuda" else {}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collecting an earlier run's graph while another is recorded makes the recording fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _batch_counters_on_host(network: Network) -> Iterator[None]:
    """Keep BatchNorm's counters of batches on the host while an epoch is recorded.

    On the GPU each would be a kernel of its own in every step. Instead the epoch adds its number
    of batches once, at its end.
    """
    norms = [
        (m, m.num_batches_tracked, torch.zeros((), dtype=torch.int64))
        for m in network.modules()
        if isinstance(m, _BatchNorm)
        and m.num_batches_tracked is not None
        and m.momentum is not None  # without momentum it averages over all batches by their count
    ]
    for norm, _, count in norms:
        norm.num_batches_tracked = count
    try:
        yield
    finally:
        for norm, counter, _ in norms:
            norm.num_batches_tracked = counter
    for _, counter, count in norms:
        counter.add_(int(count))


def _unfuse(network: Network) -> None:
    """Restore the modules' own forward passes, which can be differentiated twice."""
    for module in network.modules():
        module.__dict__.pop("forward", None)
