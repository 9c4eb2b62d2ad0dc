"""What a message says besides its Tree: the site, the run and round, the request or the answer."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

from flwr.app import ConfigRecord, RecordDict

from protofed.deploy.wire import Refused

SITE_FAILED, SITE_WAITS = 100, 101
"""Error codes above those of Flower: a site refuses or fails, or a person has yet to approve."""
RECORD = "protofed"
MAX_ITEMS = 1000
"""The longest list that a message may hold."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one site in a round."""

    site: str
    run: str
    """The run's hash."""
    round: int
    train: bool
    evaluate: bool
    accepted: str
    """The private state to continue from: that of the site's last accepted reply ("" = none)."""
    kept: list[str] = field(default_factory=list)
    """Those that the server's checkpoints name: the site must be able to return to them."""


@dataclass(frozen=True)
class Answer:
    """What a site reports about a round."""

    site: str
    run: str
    method: str
    round: int
    trained: bool
    state: str = ""
    """The name of the private state after this round."""
    samples: int = 0
    steps: int = 0
    lr: float = 0.0
    right: int = 0
    """Test images that the received model classified correctly, of ``tested``."""
    tested: int = 0
    releases: int = 0
    """Messages under the run's privacy budget that the site has sent, this one included."""
    loss_terms: list[str] = field(default_factory=list)
    loss_totals: list[float] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    version: str = ""

    def __post_init__(self) -> None:
        if not len(self.loss_terms) == len(self.loss_totals) == len(self.loss_steps):
            raise Refused("the message's losses do not match each other")

    @property
    def losses(self) -> dict[str, tuple[float, int]]:
        """For each loss term, its sum over the steps that have it, and how many these are."""
        pairs = zip(self.loss_totals, self.loss_steps, strict=True)
        return dict(zip(self.loss_terms, pairs, strict=True))


Said = TypeVar("Said", Request, Answer)


def write(said: Request | Answer) -> RecordDict:
    """The content of a message that says this, with no Tree yet."""
    values = {k: v for k, v in asdict(said).items() if v != []}  # an empty list has no type
    return RecordDict({RECORD: ConfigRecord(values)})


_ITEM_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def read(content: RecordDict, cls: type[Said]) -> Said:
    """The request or answer in a message: all required fields, no others, each of its type."""
    record = content.config_records.get(RECORD)
    if record is None:
        raise Refused("the message is empty: it has no record 'protofed'")
    values: dict[str, Any] = dict(record.items())
    types = {f.name: str(f.type) for f in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    if missing := sorted(required - values.keys()):
        raise Refused(f"the message lacks {', '.join(missing)}")
    if unexpected := sorted(values.keys() - types.keys()):
        raise Refused(f"the message has unexpected fields: {', '.join(unexpected)}")
    for name, value in values.items():
        item = types[name].removeprefix("list[").removesuffix("]")
        items: Any = value if item != types[name] else [value]
        fits = isinstance(items, list) and all(type(i) in _ITEM_TYPES[item] for i in items)
        if not fits or len(items) > MAX_ITEMS:
            raise Refused(f"'{name}' in the message is not {types[name]}")
    return cls(**values)
