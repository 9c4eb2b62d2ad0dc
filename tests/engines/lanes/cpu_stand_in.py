"""The lanes engine without a GPU: everything except streams and graphs.

The stand-in for a graph computes the epoch again, but like a graph its replay changes tensors
only: what the method or the client hold in Python stays as it was when the epoch was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed.config import make_config
from protofed.engines.lanes import engine, lane
from protofed.engines.lanes.engine import Lanes
from protofed.engines.lanes.program import Program
from protofed.federation.model_state import load_model
from protofed.federation.simulation import Federation
from protofed.method import Method
from protofed.testing.checks import TINY, tiny_task

CPU = torch.device("cpu")
RECORD = Program.record


class Stream:
    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...


@contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


def no_graph(*_: object, **__: object) -> None:
    raise RuntimeError("there is no GPU")


class Replay:
    """In place of a program's graph."""

    def __init__(self, program: Any) -> None:
        self.program = program
        program._epoch(range(program.steps))
        self.key = program.client.key

    def replay(self) -> None:
        program, client = self.program, self.program.client
        python = client._draws, client._main, client.drawn, client.key, program.draws
        program._epoch(range(program.steps))
        self.key.copy_(client.key)
        client._draws, client._main, client.drawn, client.key, program.draws = python


def record(program: Any, *_: object) -> None:
    """In place of ``Program.record``."""
    load_model(program.network, program.client.start)
    program.network.train()
    program._epoch(range(program.steps))
    program._reset()
    program.graph = Replay(program)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU take the place of a GPU."""
    for name, fake in {
        "Stream": Stream,
        "stream": nothing,
        "current_stream": Stream,
        "synchronize": nothing,
        "empty_cache": nothing,
        "graph_pool_handle": nothing,
        "CUDAGraph": nothing,
        "graph": no_graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: t)
    threads = partial(ThreadPoolExecutor, initializer=partial(torch.set_num_threads, 1))
    monkeypatch.setattr(engine, "ThreadPoolExecutor", threads)
    monkeypatch.setattr(Program, "record", record)
    monkeypatch.setattr(lane, "_fuse", nothing)  # the kernels have tests of their own


def in_lanes(method: Method, lanes: int = 2, **settings: Any) -> Federation:
    """A federation of four small clients on this many lanes."""
    task = tiny_task()
    federation = Federation(make_config(task, method, **{**TINY, "epochs": 1, **settings}), task)
    federation.engine = Lanes(federation.setup, federation.make_networks, CPU, lanes)
    return federation


def both(method: Method, rounds: int = 2, **settings: Any) -> tuple[Federation, Federation]:
    """The same run by the loop and by two lanes, compared round by round.

    A lane has several clients of one size, and clients of both.
    """
    common = {**TINY, "clients": {"left": 2, "right": 3}, "samples": {"left": 18, "right": 10}}
    given = {**common, "precision": "fp64", "rounds": rounds, **settings}
    task = tiny_task(samples=18, clients=3, spare=12)
    loop, lanes = (Federation(make_config(task, method, **given), task) for _ in range(2))
    lanes.engine = Lanes(lanes.setup, lanes.make_networks, CPU, lanes=2)
    for _ in range(rounds):
        a, b = loop.run_round(), lanes.run_round()
        assert a["loss"].keys() == b["loss"].keys()
        assert all(abs(a["loss"][k] - b["loss"][k]) < 1e-8 for k in a["loss"]), (a, b)
        assert (a["steps"], a["accuracy"]) == (b["steps"], b["accuracy"])
    return loop, lanes


def difference(loop: Federation, lanes: Federation) -> float:
    """The largest difference between the server's states, and between the clients'."""
    trees = [(loop.server.state, lanes.server.state)]
    trees += [(loop.store.get(n), lanes.store.get(n)) for n in loop.clients]
    worst = 0.0
    for a, b in trees:
        assert a.keys() == b.keys()
        for slot, entries in a.items():
            for name, t in entries.items():
                other = b[slot][name]
                if t.shape == other.shape:  # ragged entries have been padded
                    worst = max(worst, float((t.double() - other.double()).abs().max()))
    return worst
