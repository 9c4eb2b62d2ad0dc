"""Figures of studies: bars of an ablation, the line or heat map of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from protofed.report.curves import COLOURS
from protofed.study.plan import AVERAGE
from protofed.study.spec import Study, point_label, show
from protofed.study.tables import Row

if TYPE_CHECKING:
    from protofed.study.folder import TaskTable

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def bars(table: TaskTable, file: Path, title: str) -> None:
    """The rows' accuracy per domain and average, with the deviation over seeds as whiskers."""
    rows = [row for row in table.rows if row.accuracy]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 1.3 * len(table.columns), 3.4), layout="constrained")
        axis = figure.subplots()
        width = 0.8 / len(rows)
        x = np.arange(len(table.columns))
        for i, row in enumerate(rows):
            spreads = [row.accuracy[c] for c in table.columns]
            axis.bar(
                x + (i - (len(rows) - 1) / 2) * width,
                [s.mean for s in spreads],
                width * 0.92,
                yerr=[s.std or 0 for s in spreads],
                color=COLOURS[i % len(COLOURS)],
                label=row.method,
                error_kw={"linewidth": 0.8},
            )
        axis.set_xticks(x, table.columns)
        axis.set_ylabel("test accuracy, %")
        axis.set_ylim(0, 100)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(frameon=False, ncols=min(3, len(rows)), loc="upper center",
                    bbox_to_anchor=(0.5, -0.1))  # fmt: skip
        figure.suptitle(f"{title}: {table.task}", fontsize=9)
        figure.savefig(file, dpi=150)


def sweep(study: Study, number: int, table: TaskTable, file: Path) -> bool:
    """Draw a sweep: a line for one parameter, a heat map for two; False if it has no picture."""
    parameters = list(study.sweeps[number].over)
    if len(parameters) > 2:
        return False
    rows = {row.method: row for row in table.rows}
    if not any(rows[line.label].accuracy for line in study.lines if line.sweep == number):
        return False
    with matplotlib.rc_context(STYLE):
        if len(parameters) == 1:
            figure = _lines(study, number, table, rows)
        else:
            figure = _heat(study, number, rows)
        figure.suptitle(f"{study.title}: {table.task}", fontsize=9)
        figure.savefig(file, dpi=150)
    return True


def _lines(study: Study, number: int, table: TaskTable, rows: dict[str, Row]) -> Figure:
    """Average over the parameter, the domains thinner; rows that are not swept are dashed."""
    swept = study.sweeps[number]
    ((name, values),) = swept.over.items()
    x, ticks = _axis(values)
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axis = figure.subplots()
    for i, label in enumerate(swept.rows):
        found = [rows[point_label(label, {name: v})] for v in values]
        colour = COLOURS[i % len(COLOURS)]
        for column in table.columns:
            points = [(a, r.accuracy[column]) for a, r in zip(x, found, strict=True) if r.accuracy]
            if not points:
                continue
            mean = np.array([s.mean for _, s in points])
            at = [a for a, _ in points]
            if column == AVERAGE:
                axis.plot(at, mean, "o-", color=colour, label=f"{label}, average", markersize=4)
                std = np.array([s.std or 0 for _, s in points])
                axis.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15)
            elif len(swept.rows) == 1:
                other = COLOURS[(1 + table.columns.index(column)) % len(COLOURS)]
                axis.plot(at, mean, color=other, label=column, linewidth=0.8, alpha=0.8)
        paper = [(a, r.paper[AVERAGE]) for a, r in zip(x, found, strict=True) if AVERAGE in r.paper]
        if paper:
            axis.plot(*zip(*paper, strict=True), "D", color=colour, fillstyle="none",
                      label=f"{label}, paper")  # fmt: skip
    still = [line.label for line in study.lines if line.sweep is None]
    for i, label in enumerate(still):
        if AVERAGE in rows[label].accuracy:
            style = ("--", ":", "-.")[i % 3]
            mean_ = rows[label].accuracy[AVERAGE].mean
            axis.axhline(mean_, linestyle=style, color="black", linewidth=1, label=label)
    axis.set_xticks(x, ticks)
    axis.set_xlabel(name)
    axis.set_ylabel("test accuracy, %")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _heat(study: Study, number: int, rows: dict[str, Row]) -> Figure:
    """The average over two parameters, a panel for each row."""
    swept = study.sweeps[number]
    (first, ys), (second, xs) = swept.over.items()
    figure = Figure(
        figsize=((1.4 + 0.8 * len(xs)) * len(swept.rows) + 0.8, 1.4 + 0.5 * len(ys)),
        layout="constrained",
    )
    axes = figure.subplots(1, len(swept.rows), squeeze=False).ravel()
    for axis, label in zip(axes, swept.rows, strict=True):
        values = np.full((len(ys), len(xs)), np.nan)
        for i, a in enumerate(ys):
            for j, b in enumerate(xs):
                accuracy = rows[point_label(label, {first: a, second: b})].accuracy
                if accuracy:
                    values[i, j] = accuracy[AVERAGE].mean
        image = axis.imshow(values, cmap="viridis", aspect="auto")
        middle = np.nanmin(values) + (np.nanmax(values) - np.nanmin(values)) / 2
        for (i, j), value in np.ndenumerate(values):
            text = "—" if np.isnan(value) else f"{value:.1f}"
            colour = "white" if value < middle else "black"
            axis.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
        axis.set_xticks(range(len(xs)), [show(v) for v in xs])
        axis.set_yticks(range(len(ys)), [show(v) for v in ys])
        axis.set_xlabel(second)
        axis.set_ylabel(first)
        axis.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axis, label="average accuracy, %")
    return figure


def _axis(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Even steps: swept values are rarely even on any scale."""
    return [float(i) for i in range(len(values))], [show(v) for v in values]
