"""The figure of a search: validation accuracy over each parameter, and the chosen point."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from protofed.report.palette import BLUE, VERMILION
from protofed.report.plot import Key, Panel, Plot
from protofed.studies.definition import Line, Study, show
from protofed.studies.tables import AVERAGE, Spread, TableRow

LOG_FROM = 8.0
"""Positive values that span at least this factor are drawn on a logarithmic axis."""


def tuning(study: Study, rows: Sequence[TableRow], choices: Sequence[Line], heading: str) -> Plot:
    """A panel for each row and parameter of it.

    ``rows`` have the validation accuracies of the study's lines, ``choices`` are the best ones.
    """
    there = {row.label: row.accuracy[AVERAGE] for row in rows if row.accuracy}
    swept = [line for line in choices if line.sweep is not None]
    several = len(swept) > 1

    def panel(chosen: Line, name: str) -> Panel:
        assert chosen.sweep is not None
        values = study.sweeps[chosen.sweep].over[name]
        points = [
            (line, there[line.label])
            for line in study.lines
            if line.row.label == chosen.row.label and line.label in there and name in line.point
        ]

        def draw(axis: Axes) -> None:
            numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
            for line, spread in points:
                x = line.point[name] if numbers else values.index(line.point[name])
                _draw_point(axis, x, spread, line == chosen)
            if not numbers:
                axis.set_xticks(range(len(values)), [show(v) for v in values])
                axis.set_xlim(-0.5, len(values) - 0.5)
            elif min(values) > 0 and max(values) >= LOG_FROM * min(values):
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.xaxis.set_minor_locator(NullLocator())
            else:
                axis.xaxis.set_major_locator(MaxNLocator(4))  # more would run into each other
            axis.set(xlabel=name, ylabel="validation accuracy, %")
            axis.grid(axis="y")
            axis.yaxis.set_major_locator(MaxNLocator(5))

        at, best = show(chosen.point[name]), there[chosen.label].mean
        whose = f"{chosen.row.label}: " * several
        alt = f"{whose}Validation accuracy over {name}: best {best:.1f} % at {name} = {at}."
        return Panel(f"{whose}{name} = {at}{' is chosen' * (not several)}", alt, draw)

    many = any(spread.seeds > 1 for spread in there.values())
    seeds = "; bars: standard deviation over seeds" * many
    return Plot(
        "tune",
        f"Validation accuracy in %, average over domains, of every point that was tried{seeds}.",
        tuple(panel(line, name) for line in swept for name in line.point),
        (Key("tried", BLUE, "o"), Key("chosen", VERMILION, "D")),
        columns=2 if several else 3,
        heading=heading,
    )


def _draw_point(axis: Axes, x: float, spread: Spread, chosen: bool) -> None:
    color, marker = (VERMILION, "D") if chosen else (BLUE, "o")
    order, size = 2 + chosen, 6 if chosen else 4
    axis.errorbar(
        x, spread.mean, yerr=spread.std, color=color, marker=marker, markersize=size,
        elinewidth=0.8, zorder=order,
    )  # fmt: skip
