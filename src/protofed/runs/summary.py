"""The summary of a finished run, with the same keys whether it was simulated or deployed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from protofed.config import Config, short_option, shown_task
from protofed.federation.facts import Facts
from protofed.runs.records import SEEN, SELECTION, Records, digest, last_mean, shown

SUMMARY_SHAPE = {
    **dict.fromkeys(("hash", "method"), str),
    "accuracy": {str: float},
    **dict.fromkeys(("bytes_up", "bytes_down"), int),
    "seconds": float,
    "finished?": int,
    **dict.fromkeys(("task?", "data?", "evaluated?", "batchnorm?", "weights?", "engine?"), str),
    **dict.fromkeys(("average?", "precision?", "device?", "records?"), str),
    "beside?": {str: {"average": float, str: float}},
    "tested?": {str: int},
    "privacy?": {str: str},
    "split": {"clients": {str: int}, "samples": {str: float}},
    "clients?": [
        {"client": str, "domain": str, "samples": int, "model?": str, "per_class?": {str: int}}
    ],
    "pretrained?": {"digest": str | None, "train": str},
    "versions?": {str: str},
}
"""What tables and reports rely on in ``summary.json``."""


def summarize(
    config: Config,
    records: Records,
    *,
    hash: str,
    data: str,
    batchnorm: str,
    weights: str,
    engine: str,
    tested: Mapping[str, int],
    clients: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
    skipped: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """The content of ``summary.json``; ``config`` has device and precision as they were found.

    ``more`` are keys that only one kind of run has.
    """
    method, accuracy = config.method, last_mean(records)
    return {
        "task": shown_task(config.task),
        "data": data,
        "skipped": list(skipped),
        "method": method.name,
        "hyper_parameters": {n: short_option(v) for n, v in method.options().items()},
        "protocol": config.protocol,
        "seed": config.seed,
        "hash": hash,
        "accuracy": accuracy,
        **_unseen(accuracy, config.leave_out),
        "beside": {n: last_mean(records, n) for n in records[-1].get("beside", ())},
        "selection": SELECTION,
        "evaluated": method.evaluates,
        "rounds": len(records),
        "records": digest(records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "seconds": round(sum(sum(r["seconds"].values()) for r in records), 3),
        "finished": int(time.time()),
        "batchnorm": batchnorm,
        "average": config.average,
        "weights": weights,
        "precision": config.precision,
        "engine": engine,
        "device": config.device,
        "tested": dict(tested),
        **more,
        "split": {
            "clients": dict(config.domain_clients),
            "samples": dict(config.domain_samples),
        },
        "clients": list(clients),
        "versions": dict(versions),
    }


def pretrained(config: Config, facts: Facts) -> dict[str, Any]:
    """What a run started from, if from a file of weights, and what of it was trained."""
    if config.weights is None and config.train == "all":
        return {}
    return {"pretrained": {"digest": facts.weights_digest, "train": config.train}}


def _unseen(accuracy: Mapping[str, float], unseen: str | None) -> dict[str, Any]:
    """The domain that nobody trained on, and its accuracy apart from the others'."""
    if unseen is None:
        return {"unseen": None}
    return {
        "unseen": unseen,
        "unseen_accuracy": accuracy[unseen],
        "seen_average": shown(accuracy, unseen)[SEEN],
    }
