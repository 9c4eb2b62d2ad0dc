"""Ways to spoil a reply, used in one process and by a real site (``rogue``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from protofed.deploy.messages import RECORD
from protofed.deploy.wire import add_tree, read_tree, to_array

Spoil = Callable[[RecordDict], None]


def _model(content: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    record = content["tree.model"]
    assert isinstance(record, ArrayRecord)
    name = next(n for n in record if n.endswith("weight"))
    record[name] = to_array(change(read_tree(content)["model"][name]))


def set_values(content: RecordDict, **values: Any) -> None:
    record = content[RECORD]
    assert isinstance(record, ConfigRecord)
    for name, value in values.items():
        record[name] = value


def _nan(t: torch.Tensor) -> torch.Tensor:
    t.view(-1)[0] = float("nan")
    return t


def _counter_as_float(content: RecordDict) -> None:
    record = content["tree.model"]
    assert isinstance(record, ArrayRecord)
    name = next(n for n in record if n.endswith("num_batches_tracked"))
    record[name] = to_array(torch.tensor(3.0))


def _drop(content: RecordDict) -> None:
    record = content["tree.model"]
    assert isinstance(record, ArrayRecord)
    del record[next(iter(record))]


def _add(content: RecordDict) -> None:
    add_tree(content, {"surprise": {"x": torch.zeros(1)}})


def _giant(content: RecordDict) -> None:
    content["tree.model"] = ArrayRecord({"w": to_array(torch.zeros(20 << 20))})


def _other_method(content: RecordDict) -> None:
    content.pop("tree.prototypes")
    set_values(content, method="fedavg")


def _entry(content: RecordDict, slot: str, end: str, value: float) -> None:
    record = content[f"tree.{slot}"]
    assert isinstance(record, ArrayRecord)
    name = next(n for n in record if n.endswith(end))
    record[name] = to_array(torch.full_like(read_tree(content)[slot][name], value))


SPOILED: dict[str, tuple[Spoil, str]] = {
    "nan": (lambda c: _model(c, _nan), "is not finite"),
    "shape": (lambda c: _model(c, lambda t: t[1:]), "has the shape"),
    "dtype": (lambda c: _model(c, lambda t: t.double()), "is torch.float64, not torch.float32"),
    "counter": (_counter_as_float, "is torch.float32, not torch.int64"),
    "missing": (_drop, "lacks entry"),
    "unexpected": (_add, "has an unexpected entry 'x' of slot 'surprise'"),
    "giant": (_giant, "more than the"),
    "no tensors": (lambda c: c.pop("tree.model") and c.pop("tree.prototypes"), "is empty"),
    "empty": (lambda c: c.clear(), "is empty"),
    "other method": (_other_method, "for method 'fedavg', not 'fpl'"),
    "other run": (lambda c: set_values(c, run="0123456789"), "for run '0123456789'"),
    "stale": (lambda c: set_values(c, round=0), "for round 0, not "),
    "other site": (lambda c: set_values(c, site="scan-0"), "for site 'scan-0', not 'print-0'"),
    "samples": (lambda c: set_values(c, samples=-5), "has -5 samples"),
    "many samples": (lambda c: set_values(c, samples=10**12), "samples"),
    "wrong type": (lambda c: set_values(c, samples="many"), "'samples' in the message is not int"),
    "losses": (lambda c: set_values(c, loss_totals=[1.0]), "do not match each other"),
    "loss": (lambda c: set_values(c, loss_totals=[float("inf")] * 3), "is not finite"),
    "billion samples": (lambda c: set_values(c, samples=10**9), "has 1000000000 samples"),
    "test images": (lambda c: set_values(c, right=10**6, tested=10**6), "is about 1000000 test"),
    "huge prototypes": (lambda c: _entry(c, "prototypes", "mean", 1e5), "'prototypes' has the nor"),
    "counts": (lambda c: _entry(c, "prototypes", "count", 1e8), "must be whole numbers from 0 to"),
    "huge model": (lambda c: _model(c, lambda t: t + 1e5), "its model changed by"),
    "variance": (lambda c: _entry(c, "model", "running_var", -1.0), "has negative entries"),
    "scores": (lambda c: set_values(c, right=10**6), "test images right"),
}
