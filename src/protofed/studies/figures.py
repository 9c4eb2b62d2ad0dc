"""Figures of studies: bars of an ablation, the line or heat map of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from protofed.config import EACH
from protofed.report.curves import COLORS
from protofed.report.plots import Key, Panel, Plot, ink
from protofed.studies.definition import Study, point_label, show
from protofed.studies.plan import AVERAGE
from protofed.studies.tables import Row, Spread

if TYPE_CHECKING:
    from protofed.studies.folder import TaskTable

STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
              "text.parse_math": False}  # fmt: skip


def bars(table: TaskTable, file: Path, title: str) -> None:
    """The rows' accuracy per domain and average, with the deviation over seeds as whiskers."""
    rows = [row for row in table.rows if row.accuracy]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 1.3 * len(table.columns), 3.4), layout="constrained")
        axis = figure.subplots()
        width = 0.8 / len(rows)
        x = np.arange(len(table.columns))
        for i, row in enumerate(rows):
            spreads = [row.at(c) for c in table.columns]
            axis.bar(
                x + (i - (len(rows) - 1) / 2) * width,
                [s.mean if s else 0 for s in spreads],
                width * 0.92,
                yerr=[(s.std if s else 0) or 0 for s in spreads],
                color=COLORS[i % len(COLORS)],
                label=row.method,
                error_kw={"linewidth": 0.8},
            )
        axis.set_xticks(x, table.grid()[0][1 : 1 + len(table.columns)])
        axis.set_ylabel("test accuracy, %")
        axis.set_ylim(0, 100)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(frameon=False, ncols=min(3, len(rows)), loc="upper center",
                    bbox_to_anchor=(0.5, -0.1))  # fmt: skip
        figure.suptitle(f"{title}: {table.task}", fontsize=9)
        figure.savefig(file, dpi=150)


def sweep(study: Study, number: int, table: TaskTable) -> Plot | None:
    """A sweep: a line for one parameter, a heat map for two; None if it has no picture.

    There is none for three parameters and more, and as long as no run is there.
    """
    over = study.sweeps[number].over
    rows = {row.method: row for row in table.rows}
    lines = [line for line in study.lines if line.sweep == number]
    if len(over) > 2 or not any(rows[line.label].accuracy for line in lines):
        return None
    several = f"-{'-'.join(over)}" if len(study.sweeps) > 1 else ""
    name, title = f"sweep{several}", f"{study.title}: {table.task}"
    if len(over) == 2:
        counts, shown = _counting(table)
        labels = study.sweeps[number].rows
        panels = tuple(_heat(study, number, label, rows, counts) for label in labels)
        text = f"Accuracy in %, {shown}, mean over seeds."
        return Plot(name, title, text, panels)
    panel, keys = _lines(study, number, table, rows)
    text = (
        "Mean over seeds; the band is the standard deviation between them. Steps on the horizontal "
        "axis are even, whatever the values."
    )
    return Plot(name, title, text, (panel,), keys)


def _lines(
    study: Study, number: int, table: TaskTable, rows: Mapping[str, Row]
) -> tuple[Panel, tuple[Key, ...]]:
    """What counts over the parameter, the rest thinner; rows that are not swept are dashed."""
    counts, shown = _counting(table)
    swept = study.sweeps[number]
    ((name, values),) = swept.over.items()
    alone = len(swept.rows) == 1
    keys: list[Key] = []
    drawn: list[Callable[[Axes], object]] = []
    said = []
    for i, label in enumerate(swept.rows):
        found = dict(enumerate(rows[point_label(label, {name: v})] for v in values))
        color = COLORS[i % len(COLORS)]
        for column in sorted(table.columns, key=lambda c: c != counts) if alone else (counts,):
            points = {x: s for x, r in found.items() if (s := r.at(column)) is not None}
            if not points:
                continue
            main = column == counts
            own = color if main else COLORS[(1 + table.columns.index(column)) % len(COLORS)]
            keys.append(Key(f"{label}, {shown}" if main else column, own))
            drawn.append(partial(_line, points=points, color=own, main=main))
            if main:
                best = max(points, key=lambda x: points[x].mean)
                at = f"{points[best].mean:.1f} % at {name} = {show(values[best])}"
                said.append(f"{label} is best with {at}")
        paper = {x: r.paper[counts] for x, r in found.items() if counts in r.paper}
        if paper:
            keys.append(Key(f"{label}, paper", color, "D"))
            drawn.append(partial(_marks, points=paper, color=color))
    for line in study.lines:
        if line.sweep is None and (level := rows[line.label].at(counts)) is not None:
            color = COLORS[-1 - sum(key.shape == "dash" for key in keys) % len(COLORS)]
            keys.append(Key(f"{line.label}, {shown}", color, "dash"))
            drawn.append(partial(_level, mean=level.mean, color=color))

    def draw(axis: Axes) -> None:
        for one in drawn:
            one(axis)
        axis.set_xticks(range(len(values)), [show(v) for v in values])
        axis.set_xlim(-0.3, len(values) - 0.7)
        axis.set_xlabel(name)
        axis.set_ylabel("test accuracy, %")
        axis.grid(axis="y")

    alt = f"Accuracy over {name}: {'; '.join(said)}."
    return Panel(f"over {name}", alt, draw, 5.6, 3.4), tuple(keys)


def _line(axis: Axes, points: Mapping[int, Spread], color: str, main: bool) -> None:
    x, mean = list(points), np.array([s.mean for s in points.values()])
    if not main:
        axis.plot(x, mean, color=color, linewidth=0.9, marker=".", markersize=3)
        return
    std = np.array([s.std or 0 for s in points.values()])
    axis.plot(x, mean, "o-", color=color, markersize=4, linewidth=1.8)
    axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)


def _marks(axis: Axes, points: Mapping[int, float], color: str) -> None:
    axis.plot(list(points), list(points.values()), "D", color=color, fillstyle="none")


def _level(axis: Axes, mean: float, color: str) -> None:
    axis.axhline(mean, linestyle="--", color=color, linewidth=1.2)


def _heat(study: Study, number: int, label: str, rows: Mapping[str, Row], counts: str) -> Panel:
    """What counts over two parameters, darker for more; a cross is a run that is not there."""
    (first, ys), (second, xs) = study.sweeps[number].over.items()
    values = np.full((len(ys), len(xs)), np.nan)
    for (i, a), (j, b) in product(enumerate(ys), enumerate(xs)):
        found = rows[point_label(label, {first: a, second: b})].at(counts)
        if found is not None:
            values[i, j] = found.mean
    there = values[~np.isnan(values)]
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)

    def draw(axis: Axes) -> None:
        strong = to_rgb(COLORS[0])
        shades = LinearSegmentedColormap.from_list("", [(*strong, 0.06), (*strong, 0.94)])
        edges = [np.arange(n + 1) - 0.5 for n in (len(xs), len(ys))]
        shown = np.ma.masked_invalid(values)
        axis.pcolormesh(*edges, shown, cmap=shades, vmin=low, vmax=max(high, low + 1e-9))
        axis.invert_yaxis()
        for (i, j), value in np.ndenumerate(values):
            text = "×" if np.isnan(value) else f"{value:.1f}"
            dark = value - low > 0.62 * (high - low) > 0
            color = "#ffffff" if dark else ink()
            axis.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(xs)), [show(v) for v in xs])
        axis.set_yticks(range(len(ys)), [show(v) for v in ys])
        axis.set_xlabel(second)
        axis.set_ylabel(first)
        axis.tick_params(length=0)

    best = np.unravel_index(np.nanargmax(values), values.shape) if there.size else None
    at = f"; most at {first} = {show(ys[best[0]])}, {second} = {show(xs[best[1]])}" if best else ""
    alt = (
        f"Accuracy ({counts}) of {label} over {first} and {second}: {low:.1f} to {high:.1f} %{at}."
    )
    size = (1.6 + 0.62 * len(xs), 1.1 + 0.42 * len(ys))
    return Panel(f"{label}: {counts} accuracy, %", alt, draw, max(2.6, size[0]), max(2.0, size[1]))


def _counting(table: TaskTable) -> tuple[str, str]:
    """The column that counts, and in words: the average, or a domain that nobody trained on."""
    found = {row.main for row in table.rows if row.accuracy}
    counts = found.pop() if len(found) == 1 else AVERAGE
    if counts != AVERAGE:
        return counts, f"{counts} (unseen)"
    each = {row.unseen for row in table.rows if row.accuracy} == {EACH}
    return counts, f"unseen {counts}" if each else counts
