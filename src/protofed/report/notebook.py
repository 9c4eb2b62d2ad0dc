"""What a result does in a notebook. Importing this does not import matplotlib yet."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from protofed import analysis
from protofed.data import Task
from protofed.inference.model import TrainedModel
from protofed.runs.records import SELECTION, shown
from protofed.studies.history import RunHistory

if TYPE_CHECKING:
    from protofed.runs.result import Result

DPI = 150


def plot(result: Result) -> bytes:
    """The accuracy curves as PNG."""
    from protofed.config import shown_task
    from protofed.report.figures import curves
    from protofed.report.plot import render

    config = result.config
    clients = result.summary.get("clients")
    held = f"{len(clients)} clients, " if clients is not None else ""
    heading = f"{shown_task(config.task)}, protocol {config.protocol}, {held}seed {config.seed}"
    return render(curves([RunHistory.of_result(result)], heading=heading), ("png",), DPI)["png"]


def html(result: Result) -> str:
    """The result's accuracies as a table, with the curves below it."""
    from protofed.report.page import environment

    accuracy = shown(result.accuracy, result.config.leave_out)
    picture = base64.b64encode(plot(result)).decode()
    template = environment().get_template("notebook.html.j2")
    return template.render(result=result, accuracy=accuracy, selection=SELECTION, picture=picture)


def predict(result: Result, images: Any, client: str | None) -> list[str]:
    return TrainedModel(result.need_model(), client).predict(images)


def prototypes(result: Result, round: int | None) -> analysis.RoundPrototypes:
    return analysis.prototypes(result, round)


def confusion(result: Result, domain: str, task: Task | None) -> analysis.Ints:
    return analysis.confusion(result, domain, task=task)
