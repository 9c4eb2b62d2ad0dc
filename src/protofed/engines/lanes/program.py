"""One local epoch as a recorded CUDA graph, for all clients of one size."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.data.augment import Choices, cropped, crops, normalized
from protofed.engines.lanes.step import Descent, HalfDescent
from protofed.errors import NoSecondDerivative
from protofed.federation.client_round import Data, Site, load, loss_terms, optimizer
from protofed.federation.optimizers import Adam
from protofed.method import Batch, Client, Phase, Terms
from protofed.models import Network
from protofed.prototypes import class_sums

if TYPE_CHECKING:
    from protofed.engines.lanes.engine import Lane


class Program:
    """One epoch of a phase for clients of one size: static tensors, and a graph over them."""

    def __init__(
        self,
        lane: Lane,
        site: Site,
        client: Client,
        number: int,
        phase: Phase,
        trainable: Mapping[str, bool],
        last: bool,
    ) -> None:
        setup, device = lane.setup, lane.device
        training, method = setup.training, setup.method
        self.lane, self.client = lane, client
        self.number, self.phase = number, phase
        self.epochs = training.epochs if phase.epochs is None else phase.epochs
        self.batch = phase.batch or training.batch
        self.lr = training.lr if phase.lr is None else phase.lr
        data = lane.tables.data(site)
        self.setup = data.setup  # public images are not augmented
        self.steps = -(-len(data.parts["train"]) // self.batch)
        self.collects = method.proto_pass == "last_epoch" and last
        self.trainable = trainable
        self.parameters = [p for n, p in lane.network.named_parameters() if trainable[n]]
        self.optimizer = optimizer(training, phase, self.parameters)
        parts = (self.parameters, self.optimizer, phase.clip)
        self.descent = (
            Descent(*parts) if lane.halves is None else HalfDescent(*parts, lane.halves, self.steps)
        )
        # what a replay reads
        ready = data.ready()
        self.padded = ready is not None
        self.x = (site.images.x if ready is None else ready).clone()
        self.y = site.images.y.clone()
        drawn = lane.tables.draw(site, 0, number, self.epochs, self.steps)
        self.tables = {name: t.to(device) for name, t in drawn.items()}
        self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
        # what it writes, beside the network
        self.names: list[str] = []
        self.sums = torch.zeros(0, device=device)
        sizes = setup.sizes
        kinds: dict[str, Any] = {"dtype": setup.dtype, "device": device}
        self.features = torch.zeros(len(data.parts["train"]), sizes.features, **kinds)
        self.class_sums = torch.zeros(sizes.classes, sizes.features, **kinds)
        self.class_counts = torch.zeros(sizes.classes, **kinds)
        self.draws = client.draws
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, site: Site, data: Data, round: int) -> None:
        """Queue all epochs for a client."""
        ready = data.ready()
        self.x.copy_(site.images.x if ready is None else ready)
        self.y.copy_(site.images.y)
        drawn = self.lane.tables.take(site, round, self.number, self.epochs, self.steps)
        for name, table in drawn.items():
            self.tables[name].copy_(table, non_blocking=True)
        self._reset()
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

    def record(self) -> None:
        """Warm up, then record an epoch; a method that cannot be recorded runs eagerly."""
        client = self.client
        load(self.lane.network, client.start)
        self.lane.network.train()
        try:
            self._warm_up()
        except NoSecondDerivative:
            _unfuse(self.lane.network)
            self._tell("has a gradient in its loss: BatchNorm runs in PyTorch's own kernels")
            self._warm_up()
        if isinstance(self.optimizer, Adam):
            self.optimizer.count_in(self.setup.dtype)
        self._reset()
        torch.cuda.synchronize(self.lane.device)
        graph = torch.cuda.CUDAGraph()
        cause: Exception | None = None
        try:
            with (
                _no_garbage_collection(),
                torch.cuda.graph(graph, pool=self.lane.pool, stream=self.lane.stream),
            ):
                try:
                    self._epoch(range(self.steps))
                except Exception as error:  # the end of a spoilt recording raises another one
                    cause = error
                    raise
            self.graph = graph
            self.descent.recorded()
        except Exception as error:  # the reason is told; the lane goes on without a graph
            cause = cause or error
            if isinstance(cause, torch.cuda.OutOfMemoryError):
                raise cause from None
            torch.cuda.synchronize(self.lane.device)
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            how = "runs eagerly, several times slower"
            self._tell(f"cannot be recorded as a CUDA graph and {how}: {reason}")
        finally:
            cause = None  # its traceback has this frame: a circle that would keep the program

    def _warm_up(self) -> None:
        """Kernels are chosen and workspaces made outside the recording."""
        for _ in range(2):
            self._reset()
            self._epoch(sorted({0, self.steps - 1}))

    def _tell(self, what: str) -> None:
        warnings.warn(f"{self.setup.method.name} {what}", stacklevel=3)

    def _epoch(self, steps: Sequence[int]) -> None:
        """The steps of an epoch as tensor operations on static memory."""
        setup, client, tables = self.setup, self.client, self.tables
        now = {name: t.index_select(0, self.epoch)[0] for name, t in tables.items()}
        order = now["order"]
        choices = Choices(*(now.get(f"choice.{n}") for n in Choices._fields))  # type: ignore[arg-type]
        if self.padded:
            images = crops(self.x, order, choices, setup.augment)
        else:
            images = cropped(self.x[order], choices, setup.augment)
        images = normalized(images, setup.augment, setup.dtype)
        labels = self.y[order]
        drawn = {n.removeprefix("drawn."): t for n, t in now.items() if n.startswith("drawn.")}
        for name, parameter in self.lane.network.named_parameters():
            parameter.requires_grad_(self.trainable[name])
        self.descent.begin()
        with _counting_on_the_host(self.lane.network):
            for i in steps:
                part = slice(i * self.batch, (i + 1) * self.batch)
                client.begin_step(now["key"][i])
                client.drawn = {n: t[i] for n, t in drawn.items()}
                terms = self._loss(Batch(images[part], labels[part], order[part]))
                values = torch.stack([t.to(setup.dtype) for t in terms.values()])
                self.descent.step(values.sum(), i)
                if not self.names:
                    self.names = list(terms)
                    self.sums = torch.zeros_like(values, requires_grad=False)
                self.sums += values.detach()
                if self.collects:
                    self.features[part] = client.main_feature()
        if self.collects:  # in every epoch; those of the last one stay
            sums, counts = class_sums(self.features, labels, client.classes)
            self.class_sums.copy_(sums)
            self.class_counts.copy_(counts)
        self.epoch += 1
        self.draws = client.draws

    def _loss(self, batch: Batch) -> Terms:
        with self.setup.autocast(self.lane.device):
            return self.descent.compute(lambda: loss_terms(self.phase, self.client, batch))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An earlier run's graph that is collected while another is recorded spoils the recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _counting_on_the_host(network: Network) -> Iterator[None]:
    """BatchNorm's counters of batches lie on the host while an epoch is recorded.

    On the GPU each would be a kernel of its own in every step; so the epoch adds its number of
    batches at once.
    """
    norms = [
        (m, m.num_batches_tracked, torch.zeros((), dtype=torch.int64))
        for m in network.modules()
        if isinstance(m, _BatchNorm)
        and m.num_batches_tracked is not None
        and m.momentum is not None  # without one it averages over all batches and needs their count
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
    """Back to the modules' own forward passes, which can be differentiated twice."""
    for module in network.modules():
        module.__dict__.pop("forward", None)
