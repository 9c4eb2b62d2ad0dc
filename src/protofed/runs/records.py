"""The records of a run's rounds: how they are stored, and the accuracies made from them."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from protofed.errors import ProtofedError
from protofed.files import Damaged, checksum, sealed, unsealed
from protofed.shape import mismatch

LAST = 5
"""The papers' metric is the mean over this many last rounds, never the best round on test data."""

SELECTION = f"mean of the last {LAST} rounds (of all, if there are fewer)"


def selection(last: int = LAST) -> str:
    """What a number is taken from: the mean of that many last rounds, or the last one."""
    if last == 1:
        return "last round"
    return SELECTION.replace(str(LAST), str(last))


SEEN = "seen average"
"""For a run that leaves a domain out: the average of the other domains."""

VALIDATION = "validation average"
"""For a run with ``validate``: the average over the domains of the accuracy to choose by."""

BESIDE = {"own": "own domain", "validation": VALIDATION}
"""Display names of what a round records under ``beside``: accuracies next to the main one.

Names without an entry are shown as they are.
"""

BY_CLIENT = "by_client"
Record = dict[str, Any]

RECORD = {
    "round": int,
    "accuracy": {str: float},
    "average": float,
    "beside?": {str: {str: float}},
    "loss?": {str: float},
    f"{BY_CLIENT}?": {str: {"loss?": {str: float}, "accuracy?": float}},
    "bytes_up?": int,
    "bytes_down?": int,
    "privacy?": {str: {"level": str, "epsilon": float, "delta": float}},
    "seconds?": {str: float},
    "norms?": {str: float},
    "problems?": {str: str},
}
"""The shape of a record. Rounds count from 1; ``by_client`` has the losses of those that trained,
and the accuracy on its own domain of each that is tested with a model of its own, or that is a site
of a deployment (with the number of its test images, ``tested``)."""


class Records(list[Record]):
    """A line per round; ``records["average"]`` or ``records["accuracy.scan"]`` is a column."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [_lookup(record, key) for record in self]
        return super().__getitem__(key)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for record in self for name in _flat(record)))

    def rows(self) -> list[dict[str, Any]]:
        """Flat rows, ready for ``pandas.DataFrame(records.rows())``."""
        return [_flat(record) for record in self]

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(_short(row.get(c, '')))}</td>" for c in self.columns)
            + "</tr>"
            for row in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def last_mean(
    records: Sequence[Mapping[str, Any]], beside: str | None = None, last: int = LAST
) -> dict[str, float]:
    """Accuracy per domain and ``average``, as means over the ``last`` rounds.

    A domain that no site of a deployment measured in a round (NaN) does not count in that round.
    ``beside`` names another accuracy that the rounds have, e.g. ``own``.
    """
    counted = records[-last:]
    found = [r["accuracy"] if beside is None else r["beside"][beside] for r in counted]
    means = {d: _mean([accuracy[d] for accuracy in found]) for d in found[0]}
    if beside is not None:
        return {**means, "average": _mean(list(means.values()))}
    return {**means, "average": _mean([r["average"] for r in counted])}


def beside(record: Mapping[str, Any]) -> dict[str, float]:
    """The averages of the accuracies that a round has next to the main one, by display name.

    ``own domain`` is that of clients with their own models, each tested on its own domain;
    ``validation average`` that on other images than the test images. The others come from other
    ways to predict that the method has, e.g. by the nearest prototype.
    """
    found = record.get("beside", {}).items()
    return {BESIDE.get(name, name): _mean(list(each.values())) for name, each in found}


def shown(accuracy: Mapping[str, float], unseen: str | None) -> dict[str, float]:
    """Accuracies by display name: unchanged, unless a domain is left out.

    Then that domain comes first, as ``inverse (unseen)``, and the ``seen average`` of the others
    replaces the average, which would mix domains that were trained on with one that was not.
    """
    if unseen is None or unseen not in accuracy:
        return dict(accuracy)
    seen = {d: a for d, a in accuracy.items() if d not in (unseen, "average")}
    return {f"{unseen} (unseen)": accuracy[unseen], **seen, SEEN: _mean(list(seen.values()))}


def stops_early(records: Sequence[Mapping[str, Any]], patience: int | None) -> bool:
    """Whether the validation average has not improved for ``patience`` rounds."""
    if patience is None:
        return False
    averages = [beside(record)[VALIDATION] for record in records]
    return bool(averages) and len(averages) - 1 - averages.index(max(averages)) >= patience


def over_rounds(
    records: Sequence[Mapping[str, Any]], unseen: str | None = None
) -> dict[str, list[float]]:
    """The accuracies of every round by display name; the average or the unseen domain first.

    The last one is that on the validation images, if there are any.
    """
    each = [
        shown({"average": r["average"], **r["accuracy"]}, unseen)
        | {name: a for name, a in beside(r).items() if name == VALIDATION}
        for r in records
    ]
    return {name: [values[name] for values in each] for name in (each[0] if each else ())}


def joined(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Records:
    """Join runs that each left out a different domain; its accuracy is from the run without it.

    ``average`` is over these unseen domains.
    """
    found = Records()
    each = zip(*runs.values(), strict=False)  # rounds that all have
    for round, lines in enumerate(each, start=1):
        accuracy = {d: r["accuracy"][d] for d, r in zip(runs, lines, strict=True)}
        average = _mean(list(accuracy.values()))
        found.append({"round": round, "accuracy": accuracy, "average": average})
    return found


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def to_line(record: Record) -> str:
    """A record as a line of ``rounds.jsonl``, with its checksum."""
    return json.dumps(sealed(record), ensure_ascii=False) + "\n"


def read_records(path: Path, count: int | None = None) -> Records:
    """The first ``count`` lines of a ``rounds.jsonl``, or all that are complete.

    A last line that a crash cut off is ignored. If there is only a ``rounds.jsonl.gz``, as in an
    old packed study, that is read.
    """
    packed = path.with_name(f"{path.name}.gz")
    try:
        if packed.is_file() and not path.is_file():
            content = gzip.decompress(packed.read_bytes())
        else:
            content = path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Damaged(packed, str(error)) from None
    except OSError as error:
        raise ProtofedError(f"cannot read '{path}': {error.strerror}") from None
    lines = content.split(b"\n")[:-1][:count]  # what follows the last newline is not a whole line
    found = Records()
    for number, line in enumerate(lines):
        try:
            found.append(unsealed(path, json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise Damaged(path, f"line {number + 1}: {error}") from None
    require_records(path, found)
    if len(found) < (count or 0):
        raise Damaged(path, f"it has {len(found)} rounds of {count}")
    return found


def require_records(path: Path, records: Any) -> None:
    """Raise an error if these are not the records of one run, line by line.

    Earlier versions counted rounds from 0: such records are renumbered.
    """
    first = records[0].get("round") if records and isinstance(records[0], dict) else 1
    for number, record in enumerate(records, start=1):
        if wrong := mismatch(record, RECORD):
            raise Damaged(path, f"line {number} is not the record of a round: {wrong}")
        if not record["accuracy"]:
            raise Damaged(path, f"line {number} is the record of a round without any accuracy")
        if record["round"] != number - (first == 0):
            raise Damaged(path, f"line {number} is not the record of round {number}")
        record["round"] = number
        for name in ("accuracy", "beside"):
            if record.get(name, {}).keys() != records[0].get(name, {}).keys():
                raise Damaged(path, f"line {number} does not have the same {name} as the first")


def without_times(records: Iterable[Record]) -> list[Record]:
    """The records without the seconds, which differ between two runs that are otherwise equal."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def digest(records: Iterable[Record]) -> str:
    """A hash that stands for the numbers of a run's rounds in the files that go with them."""
    # rounds from 0, as in earlier versions: the digests that these stored stay valid
    numbers = [{**r, "round": r["round"] - 1} for r in without_times(records)]
    return checksum(json.dumps(numbers))


def _lookup(record: Record, key: str) -> Any:
    return record[key] if key in record else _flat(record)[key]


def _flat(record: Record) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if name == BY_CLIENT:  # ``Result.clients`` has it
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{k}": v for k, v in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
