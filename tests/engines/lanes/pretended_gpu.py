"""A pretended GPU: its tensors are on the CPU, but say that they are on another device.

As on a GPU, an operation on tensors of several devices is an error. While an epoch is recorded,
whatever a CUDA graph cannot hold is one too: a value that the host reads, a result whose size
depends on values, a copy from the host, a number that the host would only read once.

PyTorch cannot forget a device, so this is a program. It runs two rounds of the methods it is given:

    python -m tests.engines.lanes.pretended_gpu fpl scaffold
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engines.lanes import cpu_stand_in
from tests.some_methods import made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from protofed.config import make_config
from protofed.engines.lanes import engine
from protofed.federation import simulation
from protofed.federation.facts import discover
from protofed.method import Batch, Method, Terms
from protofed.methods import FedAvg
from protofed.testing.checks import TINY, tiny_task

NAME = "pretended"
aten = torch.ops.aten
READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default),
    *(aten.masked_select.default, aten.bincount.default, aten.repeat_interleave.Tensor),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
}
"""Operations for whose result the host waits."""
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}

recording = False


class OnGpu(Tensor):
    is_cuda = True  # type: ignore[assignment]
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendedGpu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ours = [t for t in tensors if isinstance(t, OnGpu)]
    device = kwargs.get("device")
    goes = None if device is None else torch.device(device).type
    _require_possible(func, args, ours, [t for t in tensors if not isinstance(t, OnGpu)], goes)
    of = {id(t.held): t for t in ours}
    args, kwargs = tree_map(lambda t: t.held if isinstance(t, OnGpu) else t, (args, kwargs))
    kwargs = {n: v for n, v in kwargs.items() if n not in ("device", "pin_memory")}
    result = func(*args, **kwargs)
    if goes == "cpu" or not (ours or goes == NAME):
        return result
    if func is aten.copy_.default and id(args[0]) not in of:  # into a tensor of the host
        return result

    def wrapped(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return of[id(t)] if id(t) in of else OnGpu(t)  # an operation in place returns its own

    return tree_map(wrapped, result)


def _require_possible(
    func: Any, args: Any, ours: list[OnGpu], others: list[Tensor], goes: str | None
) -> None:
    if not ours and not (others and goes == NAME):
        return
    problem = ""
    if not ours or (func in COPIES and (others or goes == "cpu")):
        problem = "copies between host and GPU"
    elif func in INDEXES:
        index = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
        if not isinstance(args[0], OnGpu):
            raise RuntimeError(f"{func} indexes a tensor of the host by one on a GPU")
        if any(t.dtype in (torch.bool, torch.uint8) for t in index):
            problem = "selects by a mask"
        if others:
            problem = "has an index or a value from the host"
    elif func in READS:
        problem = "is waited for by the host"
    elif any(t.dim() for t in others):
        raise RuntimeError(f"{func} has tensors on several devices")
    elif others:
        problem = "has a number of the host, which a graph reads only once"
    if problem and recording:
        raise RuntimeError(f"{func} {problem}")


# ---- a run on it ---------------------------------------------------------------------------------


class _AtOnce:
    """In place of a pool of threads, in which the pretended GPU would not be there."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *_: object) -> None: ...
    def submit(self, function: Callable[..., Any], *args: Any) -> _AtOnce:
        self.found = function(*args)
        done = _AtOnce()
        done.result = lambda found=self.found: found  # type: ignore[attr-defined]
        return done


class _Torch:
    """PyTorch, except that a run's device is the pretended one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(_: str) -> torch.device:
        return torch.device(NAME, 0)


def _pretend(patch: pytest.MonkeyPatch) -> None:
    cpu_stand_in.pretend(patch)
    patch.setattr(engine, "ThreadPoolExecutor", _AtOnce)
    patch.setattr(simulation, "torch", _Torch())
    start = cpu_stand_in.Replay.__init__

    def record(self: Any, program: Any) -> None:
        global recording
        recording = True
        try:
            start(self, program)
        finally:
            recording = False

    patch.setattr(cpu_stand_in.Replay, "__init__", record)
    for name in ("tensor", "as_tensor"):  # where they make a tensor on a device, no mode sees it
        patch.setattr(torch, name, partial(_moved, getattr(torch, name)))


def _moved(make: Callable[..., Tensor], data: Any, *, device: Any = None, **more: Any) -> Tensor:
    """A tensor that is made on the CPU and then copied."""
    made = make(data, **more)
    return made if device is None or torch.device(device).type != NAME else made.to(device)


def run(method: Method, rounds: int = 2, **settings: Any) -> None:
    task = tiny_task(samples=22, clients=3, spare=12)
    common = {"clients": {"left": 1, "right": 2}, "samples": {"left": 20, "right": 12}}
    given = {**TINY, **common, "epochs": 1, "precision": "fp32", "rounds": rounds, **settings}
    config = make_config(task, method, **given)
    facts = replace(discover(config, task), engine="lanes")
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autograd.set_multithreading_enabled(False),
        PretendedGpu(),
    ):
        _pretend(patch)
        federation = simulation.Federation(config, task, facts=facts)
        assert all(isinstance(data.images.x, OnGpu) for data in federation.clients.values())
        for _ in range(rounds):
            federation.run_round()


# ---- what must be found --------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong(FedAvg):
    """A method with a loss that cannot be recorded."""

    name = "wrong"
    what: str = ""

    def loss(self, client: Any, batch: Batch) -> Terms:
        ce = super().loss(client, batch)["ce"]
        return {"ce": WRONG[self.what](ce, batch)}


WRONG: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "is waited for": lambda ce, batch: ce * float(ce.detach() < 9),
    "selects by a mask": lambda ce, batch: ce + batch.x[batch.y > 0].sum() * 0,
    "copies between": lambda ce, batch: ce * torch.tensor(2.0, device=ce.device),
    "has a number of the host": lambda ce, batch: ce * torch.tensor(2.0),
    "from the host": lambda ce, batch: ce + batch.x[torch.arange(2)].sum() * 0,
    "on several devices": lambda ce, batch: ce + (batch.y + torch.arange(len(batch.y))).sum() * 0,
}


def main() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    backend = getattr(torch, NAME)
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for words in WRONG:
        try:
            run(Wrong(words), 1)
        except Exception as error:
            if words not in repr(error.__cause__ or error):
                raise
        else:
            sys.exit(f"not found: {words}")
    for name in sys.argv[1:]:
        print(name, flush=True)
        run(made(name))


if __name__ == "__main__":
    main()
