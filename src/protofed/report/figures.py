"""Every figure: a function from data to a ``Plot``.

The command line, notebooks, studies and the report all draw with these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.ticker import MaxNLocator

from protofed.analysis import Clusters, Distances, Floats, Ints
from protofed.config import EACH
from protofed.report.palette import CLASS_COLORS, COLORS, OLIVE, SKY, Look, looks_of, method_look
from protofed.report.plot import INK, LINE, Key, Panel, Plot, faint, ink, linestyle, scaled
from protofed.runs.records import VALIDATION, over_rounds
from protofed.studies.definition import DIFFERENCES, TUNE, TUNED, Study, point_label, show
from protofed.studies.effects import Effects, effect_caption, parameters
from protofed.studies.history import RunHistory
from protofed.studies.tables import (
    AVERAGE,
    Spread,
    TableRow,
    column_title,
    comparable,
    paired,
)

if TYPE_CHECKING:
    from protofed.studies.folder import TaskTable

MARKERS = ("o", "s", "^", "v", "P", "X")
MOST_LINES = 16
"""The most lines that a reader can tell apart in one panel."""
LABELED_LINES, LABEL_LENGTH = 9, 16
"""This many lines, with names this short, have their names at their ends, and no legend."""
BAND = 0.15
"""The opacity of a band around a line."""
SHOWN_CLASSES = 20
"""With more classes than this their names are left out: they would not be readable."""
WRITTEN_CELLS = 12
"""With more rows than this a heat map has no numbers in its cells."""
Looks = Mapping[str, Look]
T = TypeVar("T")


# ---- runs over rounds ---------------------------------------------------------------------------


def curves(runs: Sequence[RunHistory], looks: Looks | None = None, heading: str = "") -> Plot:
    """Accuracy over rounds: what counts (the average, or an unseen domain), then each domain.

    A line is the mean over seeds; a band spans them.
    """
    keys = _keys(runs, looks)
    accuracies = [over_rounds(run.rounds, run.unseen) for run in runs]
    values = {
        column: _by_label(runs, [a[column] for a in accuracies])
        for column in accuracies[0]
        if all(column in a for a in accuracies)  # only some rows of a study may be validated
    }
    labeled = len(keys) <= LABELED_LINES and all(len(k.label) <= LABEL_LENGTH for k in keys)

    def panel(column: str) -> Panel:
        def draw(axis: Axes) -> None:
            own = values[column]
            for key in keys:
                v = own[key.label]
                rounds = np.arange(1, v.shape[1] + 1)
                marker = "o" if v.shape[1] == 1 else ""
                _draw_line(axis, key, rounds, v.mean(0), marker=marker)
                if len(v) > 1:
                    alpha = BAND if len(keys) < 5 else BAND / 2  # many cover the lines
                    _draw_band(axis, key.color, rounds, v.min(0), v.max(0), alpha)
            _accuracy_axis(axis, _limits(own.values()))
            if column == VALIDATION:
                axis.set_ylabel("validation accuracy, %")
            axis.set_xlabel("round")
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if labeled and len(keys) > 1:
                axis.set_xlim(right=max(v.shape[1] for v in own.values()))
                _label_ends(axis, {key: own[key.label][:, -1].mean() for key in keys})

        title = panel_title(column, runs[0].unseen)
        ends = ", ".join(
            f"{label} ends at {v[:, -1].mean():.1f} %" for label, v in values[column].items()
        )
        return Panel(title, f"Accuracy on {title} over rounds: {ends}.", draw)

    return Plot(
        "curves",
        "Test accuracy in % after each round: mean over seeds; the band spans the seeds. Each "
        "panel has a range of its own, which may leave out the first rounds."
        + " The last panel is of the validation images."
        * (VALIDATION in values),
        tuple(map(panel, values)),
        () if labeled and len(keys) > 1 else keys,
        heading=heading,
    )


def traffic(runs: Sequence[RunHistory], looks: Looks | None = None) -> Plot:
    """Accuracy against the bytes sent so far, and what each method sends beyond the cheapest."""
    keys = _keys(runs, looks)
    accuracies = [over_rounds(run.rounds, run.unseen) for run in runs]
    main = next(iter(accuracies[0]))
    shares = _by_label(runs, [a[main] for a in accuracies])
    accuracy = {label: each.mean(0) for label, each in shares.items()}
    sizes = _by_label(
        runs, [[r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in run.rounds] for run in runs]
    )
    megabytes = {label: each.cumsum(1).mean(0) / 1e6 for label, each in sizes.items()}
    title = panel_title(main, runs[0].unseen)

    def draw(axis: Axes) -> None:
        for key in keys:
            sent, reached = megabytes[key.label], accuracy[key.label]
            _draw_line(axis, key, sent, reached)
            axis.plot(sent[-1], reached[-1], "o", color=key.color, markersize=scaled(5))
        _accuracy_axis(axis, _limits(accuracy.values()))
        axis.set_xlabel("MB sent so far, up and down")
        axis.set_xlim(left=0)

    per_round = {label: 1e3 * sent[-1] / len(sent) for label, sent in megabytes.items()}
    cheapest = min(per_round.values())
    extra = {label: kilobytes - cheapest for label, kilobytes in per_round.items()}

    def draw_extra(axis: Axes) -> None:
        most = max(*extra.values(), 1e-9)
        _draw_bars(axis, extra, [key.color for key in keys], "{:,.0f}", 0.02 * most)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        label = f"kB per round beyond the cheapest ({cheapest:,.0f} kB)"
        axis.set(xlim=(0, 1.22 * most), xlabel=label)

    ends = ", ".join(
        f"{label} {accuracy[label][-1]:.1f} % after {megabytes[label][-1]:.0f} MB"
        for label in accuracy
    )
    height = max(2.6, _bars_height(extra))
    alt = f"Accuracy on {title} against megabytes: {ends}."
    panels = [Panel(title, alt, draw, height=height)]
    if max(extra.values()) >= 0.5:  # kB: otherwise there is nothing to compare
        costs = ", ".join(f"{label} {kilobytes:,.0f} kB" for label, kilobytes in extra.items())
        alt = f"Bytes per round beyond the cheapest: {costs}."
        panels.append(Panel("what a method adds", alt, draw_extra, height=height))
    return Plot(
        "bytes",
        "All traffic between server and clients, as tensors, without the overhead of the wire.",
        tuple(panels),
        keys,
    )


# ---- rows of a table ----------------------------------------------------------------------------


def bars(rows: Sequence[TableRow], looks: Looks | None = None, heading: str = "") -> Plot:
    """Accuracy of each row, a panel for each domain; what counts comes first."""
    there = [row for row in rows if row.accuracy]
    looks = looks or looks_of(there)
    columns = sorted(there[0].columns, key=lambda c: c != there[0].main)
    unseen = _only({row.unseen for row in there}, None)

    def panel(column: str) -> Panel:
        found = {row.label: s for row in there if (s := row.at(column)) is not None}
        title = panel_title(column, unseen)

        def draw(axis: Axes) -> None:
            means = {label: s.mean for label, s in found.items()}
            colors = [looks[label].color for label in found]
            seeds = [s.values if s.seeds > 1 else () for s in found.values()]
            _draw_bars(axis, means, colors, "{:.1f}", 1.5, seeds)
            axis.set(xlim=(0, 118), xticks=[0, 25, 50, 75, 100], xlabel="test accuracy, %")

        said = ", ".join(f"{label} {s.mean:.1f} %" for label, s in found.items())
        height = _bars_height([row.label for row in there])
        return Panel(title, f"Accuracy on {title}: {said}.", draw, height=height)

    return Plot(
        "domains",
        "Test accuracy in %: mean over seeds, and a dot for each seed.",
        tuple(map(panel, columns)),
        heading=heading,
    )


def sweeps(study: Study, table: TaskTable) -> list[Plot]:
    """The figures that a study has of a task besides curves and bars."""
    if study.kind == TUNE:  # it has a figure of its own
        return []
    if study.kind == DIFFERENCES:
        return [differences([table])] if gains(table) else []
    found = [sweep(study, i, table) for i in range(len(study.sweeps))]
    found += [effects(table.effects, study_heading(study, table))] * bool(table.effects)
    return [plot for plot in found if plot is not None]


def sweep(study: Study, number: int, table: TaskTable) -> Plot | None:
    """A sweep of a study: lines over one parameter, a heat map over two.

    None for more parameters (see ``effects``), and as long as no run is finished.
    """
    over = study.sweeps[number].over
    rows = {row.label: row for row in table.rows}
    swept = [s.label for s in study.lines if s.sweep == number and s.label in rows]
    if len(over) > 2 or not any(rows[label].accuracy for label in swept):
        return None
    name = f"sweep-{'-'.join(over)}" if len(study.sweeps) > 1 else "sweep"
    heading = study_heading(study, table)
    main, title = _main_column(table)
    if len(over) == 2:
        labels = _swept_rows(study, number, rows)
        validated = any(VALIDATION in rows[label].beside for label in swept)
        columns = (main, VALIDATION) if validated else (main,)
        panels = tuple(
            _sweep_heat_map(study, number, label, rows, column)
            for label in labels
            for column in columns
        )
        return Plot(name, f"Accuracy in %, {title}, mean over seeds.", panels, heading=heading)
    panel, keys = _sweep_lines(study, number, table, rows)
    caption = (
        "Mean over seeds; the band is the standard deviation over seeds. Steps on the horizontal "
        "axis are even, whatever the values."
    )
    return Plot(name, caption, (panel,), keys, heading=heading)


def _swept_rows(study: Study, number: int, rows: Collection[str]) -> list[str]:
    """The rows of a sweep that the task has."""
    own = (s for s in study.lines if s.sweep == number and s.label in rows)
    return list(dict.fromkeys(line.row.label for line in own))


def _sweep_lines(
    study: Study, number: int, table: TaskTable, rows: Mapping[str, TableRow]
) -> tuple[Panel, tuple[Key, ...]]:
    """What counts over the parameter, other columns thinner; rows that are not swept are flat."""
    main, title = _main_column(table)
    swept = study.sweeps[number]
    ((name, values),) = swept.over.items()
    points = {
        label: [rows[point_label(label, {name: v})] for v in values]
        for label in _swept_rows(study, number, rows)
    }
    levels = [rows[s.label] for s in study.lines if s.sweep is None and s.label in rows]
    swept_rows = {label: [row for row in own if row.accuracy] for label, own in points.items()}
    looks = looks_of(
        [replace(own[0], label=label, variant=False) for label, own in swept_rows.items() if own]
        + [row for row in levels if row.accuracy]
    )
    series: list[tuple[str, Key, dict[int, Spread]]] = []
    best_points = []
    for label, own in points.items():
        if not swept_rows[label]:
            continue
        color = looks[label].color
        others = [c for c in COLORS if c != color]
        validated = any(VALIDATION in row.beside for row in own)
        columns = sorted(table.columns, key=lambda c: c != main) if len(points) == 1 else [main]
        for i, column in enumerate([*columns, *[VALIDATION] * validated]):
            found = {x: s for x, row in enumerate(own) if (s := row.at(column)) is not None}
            if found and column == (VALIDATION if validated else main):
                best = max(found, key=lambda x: found[x].mean)
                at = f"{found[best].mean:.1f} % at {name} = {show(values[best])}"
                by = " on validation images" * validated
                best_points.append(f"{label} is best{by} with {at}")
            if found and column == main:
                series.append(("main", Key(f"{label}, {title}", *looks[label]), found))
            elif found and column == VALIDATION:
                whose = f"{label}, " * (len(points) > 1)
                series.append(("validation", Key(f"{whose}validation", color, "dotted"), found))
            elif found:
                series.append(("other", Key(column, others[(i - 1) % len(others)]), found))
        paper = {x: row.paper[main] for x, row in enumerate(own) if main in row.paper}
        if paper:
            printed = {x: Spread.of([value]) for x, value in paper.items()}
            series.append(("paper", Key(f"{label}, paper", color, "D"), printed))
    for row in levels:
        if (level := row.at(main)) is not None:
            key = Key(f"{row.label}, {title}", looks[row.label].color, "dashed")
            series.append(("level", key, {0: level}))

    def draw(axis: Axes) -> None:
        for kind, key, found in series:
            x, mean = list(found), np.array([s.mean for s in found.values()])
            if kind == "main":
                std = np.array([s.std or 0 for s in found.values()])
                _draw_line(axis, key, x, mean, marker="o", markersize=scaled(4))
                _draw_band(axis, key.color, x, mean - std, mean + std)
            elif kind == "other":
                axis.plot(
                    x,
                    mean,
                    color=key.color,
                    linewidth=scaled(0.9),
                    marker=".",
                    markersize=scaled(3),
                )
            elif kind == "validation":
                _draw_line(axis, key, x, mean, marker="o", markersize=scaled(4))
            elif kind == "paper":
                axis.plot(x, mean, "D", color=key.color, fillstyle="none", markersize=scaled(6))
            else:
                style = linestyle(key.shape)
                axis.axhline(mean[0], linestyle=style, color=key.color, linewidth=scaled(1.2))
        axis.set_xticks(range(len(values)), [show(v) for v in values])
        validated = any(kind == "validation" for kind, *_ in series)
        ylabel = "accuracy, %" if validated else "test accuracy, %"
        axis.set(xlim=(-0.3, len(values) - 0.7), xlabel=name, ylabel=ylabel)
        axis.grid(axis="y")

    alt = f"Accuracy over {name}: {'; '.join(best_points)}."
    return Panel(f"over {name}", alt, draw, 5.6, 3.4), tuple(key for _, key, _ in series)


def _sweep_heat_map(
    study: Study, number: int, label: str, rows: Mapping[str, TableRow], column: str
) -> Panel:
    """A column over two parameters, darker for more; a cross marks a run that is missing."""
    (first, ys), (second, xs) = study.sweeps[number].over.items()
    values = np.full((len(ys), len(xs)), np.nan)
    for (i, a), (j, b) in product(enumerate(ys), enumerate(xs)):
        found = rows[point_label(label, {first: a, second: b})].at(column)
        if found is not None:
            values[i, j] = found.mean
    there = values[~np.isnan(values)]
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)

    def draw(axis: Axes) -> None:
        _heat_map(axis, values, low, high, (0.06, 0.94), "{:.1f}", 8)
        axis.set_xticks(range(len(xs)), [show(v) for v in xs])
        axis.set_yticks(range(len(ys)), [show(v) for v in ys])
        axis.set(xlabel=second, ylabel=first)

    chooses = column == VALIDATION or not any(VALIDATION in row.beside for row in rows.values())
    best = np.unravel_index(np.nanargmax(values), values.shape) if there.size and chooses else None
    at = f"; best at {first} = {show(ys[best[0]])}, {second} = {show(xs[best[1]])}" if best else ""
    span = f"{low:.1f} to {high:.1f} %"
    alt = f"Accuracy ({column}) of {label} over {first} and {second}: {span}{at}."
    width, height = max(2.6, 1.6 + 0.62 * len(xs)), max(2.0, 1.1 + 0.42 * len(ys))
    return Panel(f"{label}: {column} accuracy, %", alt, draw, width, height)


def effects(found: Sequence[Effects], heading: str = "") -> Plot:
    """What each parameter moves: the accuracy of every row, and its difference to the baseline."""
    names = parameters(found)
    keys = tuple(
        Key(e.label, method_look(e.method).color, "D" if e.baseline else "o") for e in found
    )

    def draw(axis: Axes) -> None:
        step = 0.8 / len(found)
        for i, (key, e) in enumerate(zip(keys, found, strict=True)):
            at = [names.index(name) + step * (i - (len(found) - 1) / 2) for name in e.of]
            _draw_intervals(axis, key, at, list(e.of.values()))
        _interval_axis(axis, names, "points, second value − first")

    clear = (
        f"{e.label}, {name}: {s.mean:+.1f}"
        for e in found
        for name, s in e.of.items()
        if not s.noise
    )
    alt = f"Effects whose interval does not contain 0: {'; '.join(clear) or 'none'}."
    row = _row_height(names, 0.09 * (len(found) + 1))
    panel = Panel("effects", alt, draw, 6.4, 0.8 + row * len(names))
    return Plot("effects", effect_caption(found), (panel,), keys, heading=heading)


def differences(tables: Sequence[TaskTable], heading: str = "") -> Plot:
    """Every row minus the baseline, a panel for each task, in the order of the first task's gains.

    A row that is tuned shares the line of the same row without, and is compared with the tuned
    baseline where there is one.
    """
    there = [table for table in tables if table.runs]
    found = [gains(table) for table in there]
    names = list(dict.fromkeys(label.removesuffix(TUNED) for own in found for label in own))
    complete = found[0].keys() & {row.label for row in comparable(there[0].rows)}
    ranked = [name for name in names if complete & {name, name + TUNED}]
    any_tuned = any(label.endswith(TUNED) for own in found for label in own)
    plain, tuned = Key("default settings", INK, "o"), Key("tuned", INK, "D")
    base = there[0].baseline

    def panel(table: TaskTable, own: Mapping[str, Spread]) -> Panel:
        methods = {row.label: row.method for row in table.rows}

        def draw(axis: Axes) -> None:
            for label, value in own.items():
                name = label.removesuffix(TUNED)
                kind, shift = (plain, -0.18) if name == label else (tuned, 0.18)
                beside = name in own and name + TUNED in own
                at = names.index(name) + shift * beside
                key = replace(kind, color=method_look(methods[label]).color)
                _draw_intervals(axis, key, [at], [value])
            if len(ranked) < len(names):
                axis.axhline(len(ranked) - 0.5, color=faint(), linewidth=scaled(0.7))
            _interval_axis(axis, names, f"points above {table.baseline}")

        said = ", ".join(f"{label} {s.mean:+.1f}" for label, s in own.items())
        seeds = sorted({s.seeds for s in own.values()} or {0})
        few = f"{seeds[0]} to " if len(seeds) > 1 else ""
        title = f"{table.task}, {few}{seeds[-1]} seed{'s' * (seeds[-1] != 1)}"
        alt = f"Above {table.baseline} on {table.task}: {said}."
        return Panel(title, alt, draw, 4.6, _bars_height(names))

    caption = (
        f"Average accuracy minus that of {base} on the same seeds, in points, with 95 % intervals "
        "(hollow: the interval contains 0, or there is one seed). A line without a mark was not "
        "run on that task."
    )
    if len(ranked) < len(names):
        caption += (
            f" Rows below the line lack seeds of {there[0].task} and cannot be compared with those "
            "above: other seeds are other clients."
        )
    if any_tuned:
        caption += (
            f" Diamonds: with what validation chose, minus {base} with what it chose for that; on "
            f"{base}'s own line, minus {base} with its defaults."
        )
    return Plot(
        DIFFERENCES,
        caption,
        tuple(map(panel, there, found)),
        (plain, tuned) if any_tuned else (),
        columns=2,
        heading=heading,
    )


def gains(table: TaskTable) -> dict[str, Spread]:
    """By row: its difference to the baseline in the column that counts, tuned to tuned.

    The best comes first, except that tuned rows follow the others, and rows that lack seeds follow
    all that have them.
    """
    rows = {row.label: row for row in table.rows if row.accuracy}
    complete = {row.label for row in comparable(table.rows)}
    found = {}
    for label, row in rows.items():
        base = rows.get(table.baseline)
        if label.endswith(TUNED):
            base = rows.get(f"{table.baseline}{TUNED}", base)
        # the baseline that is tuned is compared with itself as published
        base = rows.get(table.baseline) if base is row else base
        value = paired(row, base, row.main) if base is not None and base is not row else None
        if value is not None:
            found[label] = value

    def order(label: str) -> tuple[bool, bool, float]:
        return label not in complete, label.endswith(TUNED), -found[label].mean

    return {label: found[label] for label in sorted(found, key=order)}


def against_paper(tables: Mapping[str, TaskTable]) -> Plot:
    """Ours − paper, of all that a paper prints and was measured, a line for each table."""
    names = list(tables)
    domains: list[tuple[float, int]] = []
    averages: list[tuple[float, int, str]] = []
    differences: list[tuple[Spread, int, str]] = []
    for y, table in enumerate(tables.values()):
        for row in (row for row in table.rows if row.accuracy):
            cells = {c: s.mean - row.paper.get(c, np.nan) for c, s in row.accuracy.items()}
            domains += [(v, y) for c, v in cells.items() if c != AVERAGE and np.isfinite(v)]
            if np.isfinite(cells.get(AVERAGE, np.nan)):
                averages.append((cells[AVERAGE], y, row.method))
            if (both := table.beside_paper().get(row.label)) is not None:
                ours, paper = both
                # a row that is the baseline, bit for bit, has no spread to judge a distance by
                values = ours.values if any(ours.values) else (ours.mean,)
                gap = Spread.of([v - paper for v in values])
                differences.append((gap, y, row.method))
    keys = {m: Key(label, method_look(m).color, "o") for m, label in _HEART.items()}
    other, one = Key("another method", OLIVE, "o"), Key("a domain", SKY, ".")

    def draw_cells(axis: Axes) -> None:
        for value, y in domains:
            axis.plot(value, y, ".", color=one.color, markersize=scaled(3.5), alpha=0.7)
        for value, y, method in averages:
            color = keys.get(method, other).color
            axis.plot(value, y, "o", color=color, markersize=scaled(4.5), alpha=0.9)
        _interval_axis(axis, names, "points, ours − paper")

    def draw_differences(axis: Axes) -> None:
        many = Counter(y for _, y, _ in differences)
        seen: Counter[int] = Counter()
        for value, y, method in differences:
            at = y + 0.8 * (seen[y] + 0.5) / many[y] - 0.4
            seen[y] += 1
            _draw_intervals(axis, keys.get(method, other), [at], [value])
        _interval_axis(axis, names, "points, (ours − baseline) − (paper's)")

    every = [v for v, _ in domains] + [v for v, *_ in averages]
    alt = (
        f"Ours − paper: {len(every)} cells between {min(every):+.1f} and {max(every):+.1f} points, "
        f"averages {np.mean([v for v, *_ in averages]):+.1f} in the mean."
    )
    apart = sum(not s.noise for s, *_ in differences)
    alt_2 = (
        f"Differences to the baseline, ours − paper: {apart} of {len(differences)} "
        "have an interval of our seeds without 0."
    )
    height = 0.9 + 0.5 * len(names)
    panels = (
        Panel("accuracy", alt, draw_cells, 5.1, height),
        Panel("difference to the baseline", alt_2, draw_differences, 5.1, height),
    )
    used = {method for *_, method in averages}
    legend = [key for m, key in keys.items() if m in used] + [other] * bool(used - keys.keys())
    caption = (
        "Every number that a paper prints and that was measured here, ours − paper. Right: of the "
        "differences to the baseline on average, paired by seed, with 95 % intervals of our seeds "
        "alone, without the paper's (hollow: the interval contains 0; without one: a single seed, "
        "or a row that is the baseline)."
    )
    return Plot("ours-minus-paper", caption, panels, (*legend, one), columns=2)


_HEART = {"fedavg": "FedAvg", "fpl": "FPL", "i2pfl": "I²PFL", "fedseproto": "FedSeProto"}
"""The methods that ``against_paper`` tells apart."""


def _main_column(table: TaskTable) -> tuple[str, str]:
    """The column that counts, the average or an unseen domain, and its title."""
    there = [row for row in table.rows if row.accuracy]
    column = _only({row.main for row in there}, AVERAGE)
    return column, column_title(column, _only({row.unseen for row in there}, None))


# ---- models and prototypes ----------------------------------------------------------------------


def confusions(label: str, counts: Mapping[str, Ints], classes: Sequence[str]) -> Plot:
    """The confusion matrix of each domain's test images."""
    names = _shortened(classes) if len(classes) <= SHOWN_CLASSES else []
    turned = 90 if any(len(name) > 2 for name in names) else 0

    def panel(domain: str) -> Panel:
        found = counts[domain]
        shares = found / np.maximum(1, found.sum(1, keepdims=True))
        right = 100 * found.trace() / max(1, found.sum())

        def draw(axis: Axes) -> None:
            percent = np.where(shares >= 0.005, 100 * shares, np.nan)
            _heat_map(axis, percent, 0, 100, (0, 1), "{:.0f}", 6.5, absent="")
            axis.set_xticks(range(len(names)), names, rotation=turned)
            axis.set_yticks(range(len(names)), names)
            axis.set(xlabel="predicted", ylabel="true class")

        off = shares - np.diag(shares.diagonal())
        row, column = np.unravel_index(off.argmax(), off.shape)
        worst = f"{classes[row]} taken for {classes[column]} in {100 * off.max():.0f} %"
        alt = f"Confusion matrix of {label} on {domain}: {right:.1f} % right; most often {worst}."
        return Panel(f"{domain}: {right:.1f} % right", alt, draw, 3.4, 3.2)

    return Plot(f"confusion-{slug(label)}", "", tuple(map(panel, counts)), columns=2)


@dataclass(frozen=True)
class Embedding:
    """Images and prototypes on a plane, with what colors them."""

    places: Floats
    labels: Ints
    domains: tuple[str, ...]
    """The domain of each image; of each prototype, that of its client."""
    kind: tuple[str, ...]
    """For each place: ``image``, ``sent`` by a client, or ``made`` by the server."""
    title: str = ""
    """What distinguishes it from others of the same run: ``round 10``."""


def embedding(label: str, found: Embedding, classes: Sequence[str]) -> Plot:
    """t-SNE of features and prototypes, colored by class and by domain."""
    kinds, at = np.array(found.kind), found.places
    names = list(dict.fromkeys(d for d in found.domains if d))
    of_domain = np.array([names.index(d) if d else -1 for d in found.domains])

    def scatter(axis: Axes, group: Ints, colors: Sequence[str], shapes: bool) -> None:
        # large stars below small diamonds: the server's are often where the clients' are
        for kind, size, alpha in (("image", 7, 0.55), ("made", 190, 1.0), ("sent", 11, 1.0)):
            for g in range(-1, int(group.max()) + 1):
                own = (kinds == kind) & (group == g)
                if not own.any():
                    continue
                shape = MARKERS[(g // len(colors)) % len(MARKERS)] if shapes else "o"
                axis.scatter(
                    at[own, 0], at[own, 1], s=scaled(scaled(size)), alpha=alpha,
                    marker={"image": shape, "sent": "D", "made": "*"}[kind],
                    color=colors[g % len(colors)] if g >= 0 else ink(),
                    edgecolors="none" if kind == "image" else ink(),
                    linewidths=0 if kind == "image" else 0.6,
                )  # fmt: skip
        axis.set(xticks=[], yticks=[])
        _faint_frame(axis)

    by_class = partial(scatter, group=found.labels, colors=CLASS_COLORS, shapes=True)
    by_domain = partial(scatter, group=of_domain, colors=COLORS, shapes=False)
    marks = {
        "sent": Key("a client's prototype", INK, "D"),
        "made": Key("made by the server", INK, "*"),
    }
    legend = tuple(key for kind, key in marks.items() if kind in found.kind)
    class_keys = tuple(
        Key(name, CLASS_COLORS[i % 10], MARKERS[(i // 10) % len(MARKERS)])
        for i, name in enumerate(classes if len(classes) <= SHOWN_CLASSES else ())
    )
    domain_keys = tuple(Key(d, COLORS[i % len(COLORS)], "o") for i, d in enumerate(names))
    alt = f"t-SNE of {int((kinds == 'image').sum())} test images under {label}, colored by "
    panels = (
        Panel("by class", f"{alt}class, with prototypes.", by_class, 4.2, 3.9, class_keys),
        Panel("by domain", f"{alt}domain ({', '.join(names)}).", by_domain, 4.2, 3.9, domain_keys),
    )
    return Plot(f"tsne-{slug(f'{label} {found.title}')}", "", panels, legend, columns=2)


def clusters(label: str, found: Sequence[Clusters], distances: Distances) -> Plot:
    """FINCH's clusters over rounds, their members in the last, and how far apart clients are."""
    last = found[-1]
    classes = list(last.members)[:SHOWN_CLASSES]
    domains = list(last.domains.values())
    order = sorted(last.domains, key=lambda client: domains.index(last.domains[client]))
    numbers = np.array([[f.counts.get(k, 0) for f in found] for k in classes], dtype=float)
    height = 0.9 + 0.2 * max(len(classes), 6)

    def draw_counts(axis: Axes) -> None:
        most = max(1.0, float(numbers.max()))
        _heat_map(axis, numbers, 0, most, (0, 0.75), "{:.0f}", 6.5, most_rows=SHOWN_CLASSES)
        axis.set_xticks(range(len(found)), [str(f.round) for f in found])
        axis.set_yticks(range(len(classes)), _shortened(classes))
        axis.set(xlabel="round", ylabel="class")

    def draw_members(axis: Axes) -> None:
        for j in range(max(len(last.members[k]) for k in classes)):
            dots = [
                (order.index(client), row)
                for row, k in enumerate(classes)
                for client in (last.members[k][j : j + 1] or ((),))[0]
            ]
            axis.scatter(
                [x for x, _ in dots], [y for _, y in dots], s=scaled(scaled(44)), linewidths=0,
                marker=MARKERS[j % len(MARKERS)], color=COLORS[j % len(COLORS)],
            )  # fmt: skip
        _client_ticks(axis, order)
        axis.set_yticks(range(len(classes)), _shortened(classes))
        axis.set(xlim=(-0.6, len(order) - 0.4), ylim=(len(classes) - 0.5, -0.5), ylabel="class")
        axis.grid(axis="y")
        for i in range(1, len(order)):
            if last.domains[order[i]] != last.domains[order[i - 1]]:
                axis.axvline(i - 0.5, color=faint(), linewidth=0.8)

    index = [distances.clients.index(client) for client in order]
    known = ~np.isnan(distances.cosine)
    total = np.where(known, distances.cosine, 0).sum(0)
    mean = (total / np.maximum(1, known.sum(0)))[np.ix_(index, index)]

    def draw_distances(axis: Axes) -> None:
        _heat_map(axis, mean, 0, max(1e-9, float(mean.max())), (0, 1), "{:.2f}", 5.5)
        _client_ticks(axis, order)
        axis.set_yticks(range(len(order)), order)

    alone = sum(
        len({last.domains[c] for c in own}) == 1 for k in classes for own in last.members[k]
    )
    then = f"in round {last.round}"
    span = f"{int(numbers.min())} to {int(numbers.max())}"
    counts = f"Number of FINCH clusters per class by round: {span}."
    share = f"{alone} of {int(numbers[:, -1].sum())} clusters hold clients of a single domain"
    members = f"Members of the clusters {then}: {share}."
    apart = (
        f"Mean cosine distance between clients' prototypes of a class: at most {mean.max():.2f}."
    )
    panels = (
        Panel("clusters per class", counts, draw_counts, 3.4, height),
        Panel(f"clusters {then}", members, draw_members, 3.8, height),
        Panel(f"distances between clients {then}", apart, draw_distances, 3.8, height),
    )
    return Plot(f"clusters-{slug(label)}", "", panels)


# ---- names --------------------------------------------------------------------------------------


def panel_title(column: str, unseen: str | None) -> str:
    """The title above a column's panel; ``unseen``: the domain that the runs left out."""
    if column == AVERAGE:
        return "unseen average" if unseen == EACH else "average over domains"
    return column_title(column, column if unseen == EACH else unseen)


def study_heading(study: Study, table: TaskTable) -> str:
    """The study's title, and the task if the title does not name it."""
    return study.title if table.task in study.title else f"{study.title}: {table.task}"


def file_name(name: str) -> str:
    """The name of a plot as that of a file, and never a path, whatever a study calls its parts."""
    return re.sub(r"[^\w.-]+", "-", name)


def slug(text: str) -> str:
    """A label as part of a file's name."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(part for part in plain.split("-") if part) or "x"


def _shortened(names: Sequence[str]) -> list[str]:
    return [n if len(n) <= 12 else n[:11] + "…" for n in names]


def _wrapped(names: Iterable[str]) -> list[str]:
    """Long names of rows on two lines: they would leave no room for what is drawn."""
    return [fill(name, 28, max_lines=2, placeholder="…") for name in names]


# ---- values -------------------------------------------------------------------------------------


def _only(values: set[T], otherwise: T) -> T:
    return next(iter(values)) if len(values) == 1 else otherwise


def _keys(runs: Sequence[RunHistory], looks: Looks | None) -> tuple[Key, ...]:
    """An entry for each label, in the order of the runs."""
    looks = looks or looks_of(runs)
    labels = dict.fromkeys(run.label for run in runs)
    return tuple(Key(label, *looks[label]) for label in labels)


def _by_label(runs: Sequence[RunHistory], series: Sequence[Sequence[float]]) -> dict[str, Floats]:
    """For each label, a row for each of its runs, with as many rounds as all of these have."""
    found: dict[str, list[Sequence[float]]] = {}
    for run, values in zip(runs, series, strict=True):
        found.setdefault(run.label, []).append(values)
    shortest = {label: min(map(len, own)) for label, own in found.items()}
    return {k: np.array([v[: shortest[k]] for v in own], float) for k, own in found.items()}


def _limits(values: Iterable[Floats]) -> tuple[float, float]:
    """The range of the accuracy axis, in steps of five.

    The first tenth of the rounds does not count: where all rise from chance, the rest would be
    squeezed into a corner.
    """
    late = [v[..., v.shape[-1] // 10 :] for v in values]
    every = np.concatenate([v[np.isfinite(v)] for v in late])
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 100.0)
    return max(0.0, 5 * np.floor((low - 1) / 5)), min(101.0, 5 * np.ceil((high + 1) / 5))


# ---- drawing ------------------------------------------------------------------------------------


def _draw_line(axis: Axes, key: Key, x: Any, y: Any, **style: Any) -> None:
    width = scaled(LINE)
    axis.plot(x, y, color=key.color, linestyle=linestyle(key.shape), linewidth=width, **style)


def _label_ends(axis: Axes, ends: Mapping[Key, float]) -> None:
    """Write the names of lines at their right ends, apart from each other, in their colors."""
    from sklearn.isotonic import isotonic_regression  # slow to import

    keys = sorted((key for key in ends if np.isfinite(ends[key])), key=lambda key: ends[key])
    if not keys:
        return
    size = scaled(7.5)
    inches = scaled(Panel.height - 0.75)  # about what title and ticks leave of a panel
    low, high = axis.get_ylim()
    step = (high - low) * 1.1 * size / 72 / inches
    steps = step * np.arange(len(keys))
    # the places nearest to the ends that are a step apart
    places = isotonic_regression(np.array([ends[key] for key in keys]) - steps) + steps
    places += min(0.0, high - places[-1])
    places += max(0.0, low - places[0])
    for key, place in zip(keys, places, strict=True):
        at, color = axis.get_yaxis_transform(), key.color
        axis.plot(
            (1, 1.03), (ends[key], place), transform=at, color=color, clip_on=False,
            linewidth=scaled(0.7),
        )  # fmt: skip
        axis.text(
            1.04, place, key.label, transform=at, color=color, fontsize=size, va="center_baseline"
        )


def _draw_band(axis: Axes, color: str, x: Any, low: Any, high: Any, alpha: float = BAND) -> None:
    axis.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0)


def _draw_bars(
    axis: Axes,
    bars: Mapping[str, float],
    colors: Sequence[str],
    form: str,
    gap: float,
    points: Sequence[Sequence[float]] = (),
) -> None:
    """Horizontal bars with their values next to them; ``gap``: between a bar and its value.

    ``points`` are drawn on each bar: what it is the mean of.
    """
    y, values = list(range(len(bars))), list(bars.values())
    axis.barh(y, values, color=colors, height=0.66, alpha=0.88)
    for at, value, own in zip(y, values, points or [()] * len(y), strict=True):
        axis.plot(
            own, [at] * len(own), "o", color=ink(), markersize=scaled(3.2), markeredgewidth=0,
            alpha=0.65,
        )  # fmt: skip
        end = max((value, *own)) + gap
        _draw_text(axis, end, at, form.format(value), va="center", fontsize=scaled(8))
    axis.set_yticks(y, _wrapped(bars))
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def _draw_intervals(axis: Axes, key: Key, at: Sequence[float], values: Sequence[Spread]) -> None:
    """Means with their 95 % intervals, hollow where the interval contains 0."""
    for y, value in zip(at, values, strict=True):
        axis.errorbar(
            value.mean, y, xerr=value.half, color=key.color, marker=key.shape,
            markersize=scaled(4.5), elinewidth=scaled(1.2),
            markerfacecolor="none" if value.noise else key.color,
        )  # fmt: skip


def _interval_axis(axis: Axes, names: Sequence[str], xlabel: str) -> None:
    axis.axvline(0, color=ink(), linewidth=scaled(0.7))
    axis.set_yticks(range(len(names)), _wrapped(names))
    axis.set(ylim=(len(names) - 0.5, -0.5), xlabel=xlabel)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def _bars_height(names: Collection[str]) -> float:
    return max(1.7, 0.9 + _row_height(names, 0.27) * len(names))


def _row_height(names: Collection[str], least: float) -> float:
    """What a row takes, in inches: more where a name is on two lines."""
    return max(least, 0.34 * any("\n" in name for name in _wrapped(names)))


def _heat_map(
    axis: Axes,
    values: Floats,
    low: float,
    high: float,
    alphas: tuple[float, float],
    form: str,
    size: float,
    absent: str = "×",
    most_rows: int = WRITTEN_CELLS,
) -> None:
    """Cells in one color, more opaque for more, which works on light and on dark paper.

    ``form`` formats the numbers in the cells; NaN is ``absent``. A tall map has no numbers.
    """
    strong = to_rgb(COLORS[0])
    shades = LinearSegmentedColormap.from_list("", [(*strong, alpha) for alpha in alphas])
    edges = [np.arange(n + 1) - 0.5 for n in (values.shape[1], values.shape[0])]
    span = max(high - low, 1e-9)
    many = values.size > SHOWN_CLASSES**2
    opacity = alphas[0] + (alphas[1] - alphas[0]) * (np.nan_to_num(values, nan=low) - low) / span
    shown = np.ma.masked_where(np.isnan(values) | (opacity < 0.005), values)
    axis.pcolormesh(
        *edges, shown, cmap=shades, vmin=low, vmax=low + span, rasterized=many, linewidth=0
    )
    axis.invert_yaxis()
    axis.tick_params(length=0, labelsize=scaled(7))
    _faint_frame(axis)
    for (row, column), value in np.ndenumerate(values):
        text = absent if np.isnan(value) else form.format(value)
        if text and len(values) <= most_rows:
            color = "#ffffff" if opacity[row, column] > 0.58 else ink()
            style = {"ha": "center", "va": "center", "fontsize": scaled(size), "color": color}
            _draw_text(axis, column, row, text, **style)


def _draw_text(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text inside the axes: nothing has to make room for it, which makes the layout fast."""
    axis.text(x, y, text, **style).set_in_layout(False)


def _accuracy_axis(axis: Axes, limits: tuple[float, float]) -> None:
    axis.set(ylim=limits, ylabel="test accuracy, %")
    axis.grid(axis="y")
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def _client_ticks(axis: Axes, clients: Sequence[str]) -> None:
    axis.set_xticks(range(len(clients)), clients, rotation=90)
    axis.tick_params(length=0, labelsize=scaled(7))


def _faint_frame(axis: Axes) -> None:
    for side in axis.spines.values():
        side.set_visible(True)
        side.set_color(faint())
