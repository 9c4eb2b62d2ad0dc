"""What stands in a message beside the Tree: who, which run and round, and what is asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from protofed.deploy.wire import Refused

RECORD = "protofed"


@dataclass(frozen=True)
class Request:
    """The server's side of a round, to one site."""

    site: str
    run: str
    """The configuration's hash."""
    round: int
    train: bool
    evaluate: bool
    accepted: str
    """The private state the site goes on from: that of its last accepted reply ("" = none yet)."""
    kept: str
    """The same at the server's last checkpoint: the site must be able to go back to it."""


@dataclass(frozen=True)
class Answer:
    """A site's side of a round."""

    site: str
    run: str
    method: str
    round: int
    trained: bool
    state: str = ""
    """What the server is to name when the site shall go on from here."""
    samples: int = 0
    steps: int = 0
    lr: float = 0.0
    right: int = 0
    """Test images that the received model gets right, of ``tested``."""
    tested: int = 0
    loss_terms: list[str] = field(default_factory=list)
    loss_totals: list[float] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    version: str = ""

    @property
    def losses(self) -> dict[str, tuple[float, int]]:
        """Of each loss term the sum over the steps that have it, and how many these are."""
        pairs = zip(self.loss_totals, self.loss_steps, strict=True)
        return dict(zip(self.loss_terms, pairs, strict=True))


def write(what: Request | Answer) -> RecordDict:
    """A message's content with this in it, and no Tree yet."""
    values = {k: v for k, v in asdict(what).items() if v != []}  # a list of nothing has no type
    return RecordDict({RECORD: ConfigRecord(values)})


def read_request(content: RecordDict) -> Request:
    """What the server asks."""
    return Request(**_values(content, Request))


def read_answer(content: RecordDict) -> Answer:
    """What the site answers."""
    answer = Answer(**_values(content, Answer))
    lengths = {len(answer.loss_terms), len(answer.loss_totals), len(answer.loss_steps)}
    if len(lengths) != 1:
        raise Refused("the message's losses do not belong together")
    return answer


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "list[str]": (str,),
    "list[float]": (float, int),
    "list[int]": (int,),
}


def _values(content: RecordDict, cls: type[Request] | type[Answer]) -> dict[str, Any]:
    """The record's values, of the right types and no others."""
    record = content.config_records.get(RECORD)
    if record is None:
        raise Refused("the message is empty: it has no record 'protofed'")
    values = dict(record.items())
    kinds = {f.name: str(f.type) for f in fields(cls)}
    needed = {f.name for f in fields(Request)} if cls is Request else {"site", "run", "round"}
    odd = sorted(needed - values.keys()) or sorted(values.keys() - kinds.keys())
    if odd or (cls is Answer and not {"method", "trained"} <= values.keys()):
        raise Refused(f"the message is not one of protofed's: {', '.join(odd) or 'method'}")
    for name, value in values.items():
        kind = kinds[name]
        parts: Any = value if kind.startswith("list") else [value]
        right = isinstance(parts, list) and all(type(p) in _KINDS[kind] for p in parts)
        if not right or len(parts) > 1000:
            raise Refused(f"'{name}' of the message is not {kind}")
    return values
