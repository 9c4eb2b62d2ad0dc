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


def tuning(study: Study, rows: Sequence[TableRow], chosen: Line, heading: str) -> Plot:
    """A panel for each parameter; ``rows`` have the validation accuracies of the study's lines."""
    there = {row.label: row.accuracy[AVERAGE] for row in rows if row.accuracy}
    points = [(line, there[line.label]) for line in study.lines if line.label in there]
    (sweep,) = study.sweeps
    best = there[chosen.label].mean

    def panel(name: str) -> Panel:
        def draw(axis: Axes) -> None:
            values = sweep.over[name]
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
            axis.set(xlabel=name, ylabel="validation accuracy, %")
            axis.grid(axis="y")
            axis.yaxis.set_major_locator(MaxNLocator(5))

        at = show(chosen.point[name])
        alt = f"Validation accuracy over {name}: best {best:.1f} % at {name} = {at}."
        return Panel(f"{name} = {at} is chosen", alt, draw)

    seeds = "; bars: standard deviation over seeds" * (len(study.seeds) > 1)
    return Plot(
        "tune",
        f"Validation accuracy in %, average over domains, of every point that was tried{seeds}.",
        tuple(map(panel, sweep.over)),
        (Key("tried", BLUE, "o"), Key("chosen", VERMILION, "D")),
        heading=heading,
    )


def _draw_point(axis: Axes, x: float, spread: Spread, chosen: bool) -> None:
    color, marker = (VERMILION, "D") if chosen else (BLUE, "o")
    order, size = 2 + chosen, 6 if chosen else 4
    axis.errorbar(
        x, spread.mean, yerr=spread.std, color=color, marker=marker, markersize=size,
        elinewidth=0.8, zorder=order,
    )  # fmt: skip
