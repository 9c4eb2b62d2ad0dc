"""The result of a run, and how it is read back from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from protofed.config import Config, task_settings
from protofed.data import Task, load_task
from protofed.errors import ProtofedError, unknown
from protofed.federation.facts import Facts
from protofed.federation.simulation import initial_network
from protofed.models import Network
from protofed.runs.folder import RunFolder, stored_config
from protofed.runs.records import Records, last_mean, shown
from protofed.tree import Slot


class Notebook(Protocol):
    """Draws a result."""

    def plot(self, result: Result) -> bytes:
        """The accuracy curves as PNG."""

    def html(self, result: Result) -> str:
        """The table and the curves."""


@dataclass
class Result:
    """The result of a run. In a notebook it shows its table and its curves."""

    notebook: ClassVar[Notebook]
    """How results are drawn. ``protofed/__init__.py`` sets it: runs do not import reports."""

    config: Config
    rounds: Records
    model: Slot
    summary: dict[str, Any]
    folder: Path | None = None
    lean: bool = False
    """Read without its model: not asked for, or a folder as ``protofed study pack`` leaves it."""
    clients: Mapping[str, Slot] = field(default_factory=dict)
    """What each client has of its model, if clients are tested with models of their own."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found when the run started; empty for runs that did not write it down."""
    analysis: Mapping[str, Any] | None = None
    """What a report shows of the model, if that was stored when the run's study was packed."""

    @property
    def found_config(self) -> Config:
        """The config with device, precision and engine as the run found them."""
        return Facts.from_dict(self.facts).applied(self.config)

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy per domain and ``average``: means of the last five rounds."""
        return last_mean(self.rounds)

    @property
    def validation(self) -> dict[str, float]:
        """As ``accuracy``, on the images to choose by; empty if ``validate`` asked for none."""
        there = "validation" in self.rounds[-1].get("beside", ())
        return last_mean(self.rounds, "validation") if there else {}

    def need_model(self) -> None:
        """An error if the run was read without its model."""
        if self.lean:
            raise ProtofedError(
                f"'{self.folder}' was read without its model",
                "a packed study has none: use the folder it was packed from",
            )

    def task(self) -> Task:
        """The run's task, with its images: those of the run, or an error."""
        task = load_task(self.config.task, **task_settings(self.config))
        if (task.digest or None) != self.facts.get("digest"):
            raise ProtofedError(
                f"the images of task '{task.name}' are not those of the run",
                "point --data or PROTOFED_DATA at the same files",
            )
        return task

    def network(self, client: str | None = None, task: Task | None = None) -> Network:
        """The trained network, in evaluation mode: the global one, or a client's own.

        Entries that clients do not share have their initial values in the global one. ``task`` is
        the run's task, if it is at hand; else it is loaded.
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
        network = initial_network(self.found_config, task or self.task(), model)
        own = self.clients[client] if client else {}
        network.load_state_dict({**network.state_dict(), **own, **self.model})
        return network.eval()

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        return self.notebook.plot(self)

    def __repr__(self) -> str:
        accuracy = shown(self.accuracy, self.config.leave_out)
        text = ", ".join(f"{d} {a:.1f}" for d, a in accuracy.items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {text}>"

    def _repr_html_(self) -> str:
        return self.notebook.html(self)

    def save_model(self, folder: RunFolder) -> None:
        """Write the model, and the clients' own: their entries, to be overlaid with the model's."""
        holds = "the global model"
        if self.config.method.evaluates != "global":
            holds = "each client's own entries (client/NAME/...), and what all share (model/...)"
            if not self.clients:
                holds = "what all clients share (model/...); their own entries are in clients/"
        folder.save_model(self.summary["hash"], holds, self.model, self.clients)


def load_run(folder: str | Path, model: bool = True) -> Result:
    """A finished run, read back from its folder; without its model if there is none.

    This needs neither the task's images nor the device that the run used, and executes no code:
    a method of one's own is there by name, unless its file has been loaded (``known_class``).
    """
    found = RunFolder(folder)
    if not found.is_finished():
        if not found.path.is_dir():
            raise ProtofedError(f"there is no folder '{folder}'")
        if (found.path / "study.toml").is_file():
            raise ProtofedError(f"'{folder}' is a study's folder", "name one of the runs in it")
        raise ProtofedError(f"'{folder}' holds no finished run", "finish it with --resume")
    summary, records = found.summary(), found.records()
    config = stored_config(found.settings(), summary["method"])
    lean = not (model and found.has_model)
    slots, clients = ({}, {}) if lean else found.model()
    return Result(config, records, slots, summary, found.path, lean, clients, found.facts())


def has_model(folder: Path | None) -> bool:
    """Whether a run's folder has its model."""
    return folder is not None and RunFolder(folder).has_model
