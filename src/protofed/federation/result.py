"""What a run gave, and how it is read back from its folder."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protofed.config import Config, config_task, make_config, read_config
from protofed.data import DataMissing, outline
from protofed.errors import ProtofedError
from protofed.federation import tree
from protofed.federation.federation import initial_network
from protofed.federation.records import SELECTION, Records, last_mean, read_records
from protofed.federation.tree import Slot
from protofed.models import Network


@dataclass
class Result:
    """What a run gave. In a notebook it shows its table and its curves."""

    config: Config
    rounds: Records
    model: Slot
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy per domain and ``average``: means of the last five rounds."""
        return last_mean(self.rounds)

    def network(self) -> Network:
        """The trained network, in evaluation mode; what clients keep private is as it began."""
        task = config_task(self.config)
        network = initial_network(self.config, task)
        network.load_state_dict({**network.state_dict(), **self.model})
        return network.eval()

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        from protofed.report.curves import curves  # matplotlib is slow to import

        buffer = io.BytesIO()
        curves([self], buffer)
        return buffer.getvalue()

    def __repr__(self) -> str:
        shown = ", ".join(f"{d} {a:.1f}" for d, a in self.accuracy.items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {shown}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{d}</th>" for d in self.accuracy)
        body = "".join(f"<td>{a:.2f}</td>" for a in self.accuracy.values())
        picture = base64.b64encode(self.plot()).decode()
        return (
            f"<p><b>{self.summary['method']}</b> on <b>{self.config.task}</b>, seed "
            f"{self.config.seed}, {len(self.rounds)} rounds; {SELECTION}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody></table>"
            f'<img alt="accuracy per domain over rounds" src="data:image/png;base64,{picture}">'
        )


def load_run(folder: str | Path) -> Result:
    """A finished run, read back from its folder."""
    folder = Path(folder)
    if not (folder / "summary.json").is_file():
        raise ProtofedError(f"'{folder}' holds no finished run", "finish it with --resume")
    settings = read_config(folder / "config.toml")
    # results can be read where there is no GPU, and where the images are not
    of_machine = {k: settings.pop(k) for k in ("device", "engine") if k in settings}
    settings["device"] = "cpu"
    try:
        config = make_config(**settings)
    except DataMissing:
        config = _without_data(settings)
    config = replace(config, **of_machine)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    model, _ = tree.load(folder / "model.safetensors")
    records = read_records(folder / "rounds.jsonl")
    return Result(config, records, model.get("model", {}), summary, folder)


def _without_data(settings: dict[str, Any]) -> Config:
    """The configuration of a run whose images are not on this machine."""
    of_data = {k: settings.pop(k, None) for k in ("image_size", "flip", "test_split", "digest")}
    task = outline(settings.pop("task"), settings["samples"])
    return replace(make_config(task=task, **settings), **of_data)


def is_finished(folder: Path, config: Config) -> bool:
    """Whether this very run is complete in that folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary.get("hash") == config.hash)
