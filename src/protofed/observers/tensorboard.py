"""A run in TensorBoard: ``protofed run --tensorboard``, then ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protofed.errors import ProtofedError
from protofed.federation.simulation import Federation, Observer
from protofed.runs.records import SEEN, Record, beside, shown
from protofed.runs.result import Result

FOLDER = "tensorboard"


def require_tensorboard() -> Any:
    """TensorBoard's writer, or an error that says how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ProtofedError(
            "TensorBoard is not installed", "pip install 'protofed[tensorboard]'"
        ) from None
    return SummaryWriter


class TensorBoard(Observer):
    """Writes each round's accuracies, losses, bytes and seconds below the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.open = require_tensorboard()

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        """Open the file; what a crash left from later rounds is hidden."""
        self.unseen = federation.config.leave_out
        self.writer = self.open(str(self.folder), purge_step=len(records) + 1)
        self.writer.add_text("config", f"```toml\n{federation.config.toml()}```")

    def round(self, record: Record) -> None:
        step = record["round"]
        # with a domain left out the average would mix what was trained on with what was not
        average = shown({**record["accuracy"], "average": record["average"]}, self.unseen)
        scalars = {f"accuracy/{n}": average[n] for n in ("average", SEEN) if n in average}
        scalars |= {f"accuracy/{name}": v for name, v in beside(record).items()}
        for group in ("accuracy", "loss", "seconds"):
            scalars |= {f"{group}/{name}": v for name, v in record[group].items()}
        scalars |= {f"megabytes/{w}": record[f"bytes_{w}"] / 1e6 for w in ("up", "down")}
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, result: Result) -> None:
        self.writer.close()
