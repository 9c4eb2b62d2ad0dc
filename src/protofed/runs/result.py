"""The result of a run, and how it is read back from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from protofed.config import Config, task_settings
from protofed.data import Task, load_task
from protofed.data.info import FOLDER, TASKS
from protofed.errors import ProtofedError
from protofed.federation.facts import Facts
from protofed.models import Network
from protofed.runs.folder import RunFolder, stored_config
from protofed.runs.model_file import StoredModel
from protofed.runs.records import BY_CLIENT, Records, last_mean, shown
from protofed.tree import Slot


class Notebook(Protocol):
    """What a result can do that needs packages above this one."""

    def plot(self, result: Result) -> bytes: ...

    def html(self, result: Result) -> str: ...

    def predict(self, result: Result, images: Any, client: str | None) -> list[str]: ...

    def prototypes(self, result: Result, round: int | None) -> Any: ...

    def confusion(self, result: Result, domain: str, task: Task | None) -> Any: ...


def _notebook() -> Notebook:
    """``protofed.report.notebook``, by name: runs do not import what draws and analyzes them."""
    return cast(Notebook, import_module("protofed.report.notebook"))


@dataclass(frozen=True)
class ClientHistory:
    """What a run recorded about one client. Rounds count from 1.

    ``loss`` has the mean of each loss term in the rounds in which the client trained. ``accuracy``
    is that of the model it would use, on the test images of its domain: the global model, or its
    own if clients keep their own (then only in the rounds in which it was tested).
    """

    domain: str
    samples: int
    loss: Mapping[int, Mapping[str, float]]
    accuracy: Mapping[int, float]


@dataclass
class Result:
    """The result of a run. In a notebook it shows its table and its curves."""

    config: Config
    rounds: Records
    summary: dict[str, Any]
    stored: StoredModel | None = None
    """The model; None if it was not asked for, or is not in a folder that was packed."""
    folder: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found when the run started; empty for runs that did not record it."""
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
        """The model and what it says about itself; an error if the run was read without it."""
        if self.stored is not None:
            return self.stored
        if has_model(self.folder):
            raise ProtofedError(
                f"'{self.folder}' was read without its model", "use protofed.load_run"
            )
        where = f"'{self.folder}'" if self.folder is not None else "this run"
        raise ProtofedError(
            f"{where} has no model here",
            "packed studies have none: use the folder that the study was packed from",
        )

    @property
    def model(self) -> Slot:
        """The global model's entries."""
        return self.stored.model if self.stored else {}

    @property
    def client_models(self) -> Mapping[str, Slot]:
        """What each client has of its model, if clients are tested with models of their own."""
        return self.stored.clients if self.stored else {}

    @property
    def clients(self) -> dict[str, ClientHistory]:
        """The clients by name: what they hold, their losses and accuracies over the rounds.

        Runs of earlier versions did not record losses by client.
        """
        shared = self.summary.get("evaluated", "global") == "global"
        found = {}
        for row in self.summary.get("clients", ()):
            name, domain = row["client"], row["domain"]
            own = {r["round"]: r.get(BY_CLIENT, {}).get(name, {}) for r in self.rounds}
            accuracy = {t: o["accuracy"] for t, o in own.items() if "accuracy" in o}
            if shared and not accuracy:
                all_rounds = ((r["round"], r["accuracy"].get(domain)) for r in self.rounds)
                accuracy = {t: a for t, a in all_rounds if a is not None}
            loss = {t: o["loss"] for t, o in own.items() if "loss" in o}
            found[name] = ClientHistory(domain, row["samples"], loss, accuracy)
        return found

    def task(self) -> Task:
        """The run's task, with its images: those of the run, or an error."""
        if self.config.task not in TASKS and not self.config.task.startswith(FOLDER):
            raise ProtofedError(
                f"task '{self.config.task}' was made by a program: the run did not keep its images",
                "pass the same Task again: task=...",
            )
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

    def predict(self, images: Any, client: str | None = None) -> list[str]:
        """The class of each image, as ``protofed.load_model`` predicts it."""
        return _notebook().predict(self, images, client)

    def prototypes(self, round: int | None = None) -> Any:
        """The prototypes of a round that was kept (None: the last), as in ``protofed.analysis``."""
        return _notebook().prototypes(self, round)

    def confusion(self, domain: str, task: Task | None = None) -> Any:
        """Counts [K, K] on a domain's test images: row = true class, column = predicted."""
        return _notebook().confusion(self, domain, task)

    def plot(self) -> bytes:
        """The accuracy curves as PNG."""
        return _notebook().plot(self)

    def __repr__(self) -> str:
        accuracy = shown(self.accuracy, self.config.leave_out)
        text = ", ".join(f"{d} {a:.1f}" for d, a in accuracy.items())
        return f"<{self.summary['method']} on {self.config.task}, seed {self.config.seed}: {text}>"

    def _repr_html_(self) -> str:
        return _notebook().html(self)


def no_folder(named: str | Path) -> ProtofedError:
    hint = "runs are in runs/, or where --runs or --out says"
    return ProtofedError(f"there is no folder '{named}'", hint)


def load_run(folder: str | Path, model: bool = True) -> Result:
    """A finished run, read back from its folder; without its model if there is none.

    This needs neither the task's images nor the device that the run used, and executes no code: of
    a method of your own there is only the name, unless its file was loaded (``known_class``).
    """
    found = RunFolder(folder)
    if not found.is_finished():
        if not found.path.is_dir():
            raise no_folder(folder)
        if (found.path / "study.toml").is_file():
            raise ProtofedError(
                f"'{folder}' is a study's folder", "name one of the runs in its pool"
            )
        if not found.exists:
            raise ProtofedError(f"'{folder}' is not a run's folder")
        raise ProtofedError(f"'{folder}' holds no finished run", "finish it with --resume")
    summary, records = found.summary(), found.records()
    config = stored_config(found.settings(), summary["method"])
    stored = found.model() if model and found.has_model else None
    return Result(config, records, summary, stored, found.path, found.facts(), found.analysis())


def has_model(folder: Path | None) -> bool:
    """Whether a run's folder has its model."""
    return folder is not None and RunFolder(folder).has_model
