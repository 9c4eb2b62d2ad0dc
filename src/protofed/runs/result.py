"""The result of a run, and how it is read back from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from protofed.config import Config, task_settings
from protofed.data import Task, load_task
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts
from protofed.models import Network
from protofed.runs.folder import RunFolder, stored_config
from protofed.runs.model_file import StoredModel
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
    summary: dict[str, Any]
    stored: StoredModel | None = None
    """The model; None if it was not asked for, or is not in a folder that was packed."""
    folder: Path | None = None
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

    @property
    def lean(self) -> bool:
        """Whether this was read without its model."""
        return self.stored is None

    def need_model(self) -> StoredModel:
        """The model and what it says of itself; an error if the run was read without it."""
        if self.stored is None:
            raise ProtofedError(
                f"'{self.folder}' was read without its model",
                "a packed study has none: use the folder it was packed from",
            )
        return self.stored

    @property
    def model(self) -> Slot:
        """The global model's entries."""
        return self.stored.model if self.stored else {}

    @property
    def clients(self) -> Mapping[str, Slot]:
        """What each client has of its model, if clients are tested with models of their own."""
        return self.stored.clients if self.stored else {}

    def task(self) -> Task:
        """The run's task, with its images: those of the run, or an error."""
        task = load_task(self.config.task, **task_settings(self.config))
        if (task.digest or None) != self.facts.get("digest"):
            raise ProtofedError(
                f"the images of task '{task.name}' are not those of the run",
                "point --data or PROTOFED_DATA at the same files",
            )
        return task

    def network(self, client: str | None = None) -> Network:
        """The trained network, in evaluation mode: the global one, or a client's own."""
        return self.need_model().network(client)

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        return self.notebook.plot(self)

    def __repr__(self) -> str:
        accuracy = shown(self.accuracy, self.config.leave_out)
        text = ", ".join(f"{d} {a:.1f}" for d, a in accuracy.items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {text}>"

    def _repr_html_(self) -> str:
        return self.notebook.html(self)


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
    stored = found.model() if model and found.has_model else None
    return Result(config, records, summary, stored, found.path, found.facts())


def has_model(folder: Path | None) -> bool:
    """Whether a run's folder has its model."""
    return folder is not None and RunFolder(folder).has_model
