"""What a run gave, and how it is read back from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protofed import tree
from protofed.config import Config, config_task, make_config
from protofed.data import DataMissing, outline
from protofed.errors import ProtofedError, unknown
from protofed.federation.simulation import initial_network
from protofed.models import Network
from protofed.runs.finished import read_finished, read_settings, read_summary
from protofed.runs.records import Records, last_mean, shown
from protofed.tree import Slot

CLIENT = "client"
"""The slot of a model file that has the clients' own entries."""


@dataclass
class Result:
    """What a run gave. In a notebook it shows its table and its curves."""

    config: Config
    rounds: Records
    model: Slot
    summary: dict[str, Any]
    folder: Path | None = None
    lean: bool = False
    """Read without its model: not asked for, or a folder as ``protofed study pack`` leaves it."""
    clients: Mapping[str, Slot] = field(default_factory=dict)
    """Where clients are tested with models of their own: what each has of it."""

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy per domain and ``average``: means of the last five rounds."""
        return last_mean(self.rounds)

    def need_model(self) -> None:
        """An error where the run was read without its model."""
        if self.lean:
            raise ProtofedError(
                f"'{self.folder}' was read without its model",
                "a packed study has none: use the folder it was packed from",
            )

    def network(self, client: str | None = None) -> Network:
        """The trained network, in evaluation mode: the global one, or a client's own.

        In the global one, what clients keep private is as it began.
        """
        self.need_model()
        models = {row["client"]: row.get("model", "") for row in self.summary["clients"]}
        if client is None and self.config.method.evaluates == "everyone":
            raise ProtofedError(
                f"{self.config.method.name} has no global model: every client has its own",
                f"name one of them, e.g. network('{next(iter(models))}')",
            )
        if client is not None and client not in models:
            raise unknown("client", client, models)
        if client is not None and client not in self.clients:
            raise ProtofedError(
                f"client {client} has no model of its own here", "network() gives the global one"
            )
        model = models[client] if client else ""
        network = initial_network(self.config, config_task(self.config), model)
        own = self.clients[client] if client else {}
        network.load_state_dict({**network.state_dict(), **own, **self.model})
        return network.eval()

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        from protofed.report import notebook

        return notebook.plot(self)

    def __repr__(self) -> str:
        text = ", ".join(f"{d} {a:.1f}" for d, a in self._shown().items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {text}>"

    def _shown(self) -> dict[str, float]:
        return shown(self.accuracy, self.config.leave_out)

    def _repr_html_(self) -> str:
        from protofed.report import notebook

        return notebook.html(self)


def load_run(folder: str | Path, model: bool = True) -> Result:
    """A finished run, read back from its folder; without its model where there is none.

    Where no model is asked for, the task's images are not looked for either.
    """
    folder = Path(folder)
    if not (folder / "summary.json").is_file():
        if not folder.is_dir():
            raise ProtofedError(f"there is no folder '{folder}'")
        if (folder / "study.toml").is_file():
            raise ProtofedError(f"'{folder}' is a study's folder", "name one of the runs in it")
        raise ProtofedError(f"'{folder}' holds no finished run", "finish it with --resume")
    settings = read_settings(folder)
    # results can be read where there is no GPU, and where the images are not
    of_machine = {k: settings.pop(k) for k in ("device", "engine") if k in settings}
    settings["device"] = "cpu"
    try:
        config = make_config(**settings) if model else _without_data(settings)
    except DataMissing:
        config = _without_data(settings)
    config = replace(config, **of_machine)
    summary = read_summary(folder)
    lean = not (model and has_model(folder))
    slots = {} if lean else tree.load(folder / "model.safetensors")[0]
    records = read_finished(folder)
    clients: dict[str, Slot] = {}
    for name, t in slots.get(CLIENT, {}).items():
        client, _, entry = name.rpartition("/")
        clients.setdefault(client, {})[entry] = t
    return Result(config, records, slots.get("model", {}), summary, folder, lean, clients)


def save_model(result: Result, folder: Path) -> None:
    """Write ``model.safetensors``: ``model/ENTRY``, and ``client/NAME/ENTRY`` of own models.

    A client's model is its own entries and, over them, the server's.
    """
    own = {f"{c}/{name}": t for c, slot in result.clients.items() for name, t in slot.items()}
    holds = "the global model"
    if result.config.method.evaluates != "global":
        holds = "each client's own entries (client/NAME/...), and what all share (model/...)"
        if not result.clients:
            holds = "what all clients share (model/...); their own entries are in clients/"
    metadata = {"hash": result.config.hash, "holds": holds}
    tree.save({"model": result.model, CLIENT: own}, folder / "model.safetensors", metadata)


def has_model(folder: Path | None) -> bool:
    """Whether a run's folder has its model."""
    return folder is not None and (folder / "model.safetensors").is_file()


def _without_data(settings: dict[str, Any]) -> Config:
    """The configuration of a run whose images are not on this machine."""
    of_data = {k: settings.pop(k, None) for k in ("image_size", "flip", "test_split", "digest")}
    task = outline(settings.pop("task"), settings["samples"])
    return replace(make_config(task=task, **settings), **of_data)


def is_finished(folder: Path, config: Config) -> bool:
    """Whether this very run is complete in that folder."""
    try:
        return bool(read_summary(folder)["hash"] == config.hash)
    except ProtofedError:  # none, or a damaged one
        return False
