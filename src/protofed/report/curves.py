"""Accuracy over rounds: one panel for the average, one for each domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from protofed.config import EACH
from protofed.runs.records import joined, over_rounds

if TYPE_CHECKING:
    from protofed.runs.result import Result

# Okabe and Ito's palette: told apart by color-blind readers too
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#111111", "#8C8C00")

LEGEND_ROWS = 8
"""Names of a legend under each other, at most."""


def curves(results: Sequence[Result], file: str | Path | IO[bytes]) -> None:
    """Draw runs, grouped by method: the mean over seeds, and the range between them as a band."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.summary["method"], []).append(result)
    unseen = results[0].config.leave_out
    values = {name: [over_rounds(r.rounds, unseen) for r in runs] for name, runs in groups.items()}
    panels = list(next(iter(values.values()))[0])
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    plain: Any = {"font.size": 9, "axes.spines.top": False, "text.parse_math": False}
    with matplotlib.rc_context(plain):
        figure = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
        for axis, column in zip(axes, panels, strict=False):
            for (name, runs), color, style in zip(
                values.items(), _cycle(COLORS, len(groups)), _styles(len(groups)), strict=True
            ):
                length = min(len(r[column]) for r in runs)
                v = np.array([r[column][:length] for r in runs], dtype=float)
                x = np.arange(1, length + 1)
                mark = "o" if length == 1 else ""
                axis.plot(x, v.mean(0), style, marker=mark, color=color, label=name, linewidth=1.6)
                if len(runs) > 1:
                    axis.fill_between(x, v.min(0), v.max(0), color=color, alpha=0.15)
            axis.set_title(panel_title(column, unseen))
            axis.spines["right"].set_visible(False)
            axis.grid(axis="y", alpha=0.3)
            axis.set_ylim(bottom=0, top=100)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        for axis in axes[len(panels) :]:
            axis.axis("off")
        for axis in axes[: len(panels)]:
            axis.tick_params(labelbottom=True)
        axes[0].set_ylabel("test accuracy, %")
        figure.supxlabel("round", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        spare = axes[len(panels)] if len(axes) > len(panels) else None
        if spare is not None:
            # in columns: a legend taller than its panel would squeeze all the others
            sides = -(-len(labels) // LEGEND_ROWS)
            size = 9 if sides == 1 else 7
            spare.legend(
                handles, labels, loc="center left", frameon=False, ncols=sides, fontsize=size,
                columnspacing=1.0,
            )  # fmt: skip
        elif len(labels) > LEGEND_ROWS:
            figure.legend(
                handles, labels, loc="outside lower center", frameon=False, ncols=LEGEND_ROWS,
                fontsize=7,
            )  # fmt: skip
        else:
            axes[0].legend(handles, labels, frameon=False)
        figure.suptitle(_title(results), fontsize=9)
        figure.savefig(file, dpi=150, format=None if isinstance(file, (str, Path)) else "png")


def panel_title(column: str, unseen: str | None) -> str:
    """A column's name above its panel; ``unseen``: the domain that the runs left out, or each."""
    if unseen == EACH:
        return f"unseen {column}" if column == "average" else f"{column} (unseen)"
    if column == "average":
        return "average of the domains"
    return f"{column} (unseen)" if column == unseen else column


def together(results: Sequence[Result]) -> list[Result]:
    """Runs that left out a domain each as one for each method and seed; see ``records.joined``.

    Where the run of a domain is not there yet, its method and seed are left out.
    """
    runs: dict[tuple[str, int], dict[str, Result]] = {}
    for r in results:
        runs.setdefault((r.summary["method"], r.config.seed), {})[str(r.config.leave_out)] = r
    made = []
    for parts in runs.values():
        first = next(iter(parts.values()))
        domains = list(first.rounds[0]["accuracy"])
        if set(parts) == set(domains):
            config = SimpleNamespace(**{**vars(first.config), "leave_out": EACH})
            rounds = joined({d: parts[d].rounds for d in domains})
            made.append(SimpleNamespace(config=config, rounds=rounds, summary=first.summary))
    return cast("list[Result]", made)


def _title(results: Sequence[Result]) -> str:
    first = results[0].config
    seeds = sorted({r.config.seed for r in results})
    shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds (band: their range)"
    left_out = ", each domain left out in turn" if first.leave_out == EACH else ""
    clients = sum(first.clients.values())
    return f"{first.task}, protocol {first.protocol}, {clients} clients{left_out}, {shown}"


def _cycle(values: Sequence[str], n: int) -> list[str]:
    return [values[i % len(values)] for i in range(n)]


def _styles(n: int) -> list[str]:
    """Another dash for each turn through the colors."""
    return [("-", "--", ":", "-.")[(i // len(COLORS)) % 4] for i in range(n)]
