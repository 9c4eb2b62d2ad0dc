"""The report's plots, from runs and from what ``protofed.analysis`` finds in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.ticker import MaxNLocator

from protofed.analysis import Clusters, Distances, Floats, Ints, RoundPrototypes
from protofed.report.curves import COLORS, panel_title
from protofed.report.plots import CLASS_COLORS, INK, Key, Panel, Plot, faint, ink
from protofed.runs.records import over_rounds
from protofed.runs.result import Result
from protofed.studies.tables import Row

MARKERS = ("o", "s", "^", "v", "P", "X")
LOOKS = 2 * len(COLORS)
"""So many lines can be told apart: each color drawn through, and dashed."""
SHOWN_CLASSES = 20
"""So many classes have their names beside a plot; more would not be readable."""
Methods = Mapping[str, Sequence[Result]]
"""The runs of each method, by its label."""


def curves(methods: Methods) -> Plot:
    """Accuracy over rounds: what counts (the average, or an unseen domain) and each domain.

    A band spans the seeds.
    """
    by_seed = {m: [_over_rounds(run) for run in runs] for m, runs in methods.items()}
    columns = list(next(iter(by_seed.values()))[0])
    unseen = _unseen(methods)
    values = {(m, c): _cut([r[c] for r in runs]) for m, runs in by_seed.items() for c in columns}
    limits = _limits(list(values.values()))
    keys = _keys(methods)

    def panel(column: str) -> Panel:
        def draw(axis: Axes) -> None:
            for key, method in zip(keys, methods, strict=True):
                v = values[method, column]
                x = np.arange(1, v.shape[1] + 1)
                style = "-" if key.shape == "line" else "--"
                mark = "o" if v.shape[1] == 1 else ""
                axis.plot(x, v.mean(0), style, marker=mark, color=key.color, linewidth=1.7)
                if len(v) > 1:
                    axis.fill_between(
                        x, v.min(0), v.max(0), color=key.color, alpha=0.16, linewidth=0
                    )
            _accuracy_axis(axis, limits)
            axis.set_xlabel("round")
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))

        ends = ", ".join(f"{m} ends at {values[m, column][:, -1].mean():.1f} %" for m in methods)
        title = panel_title(column, unseen)
        return Panel(title, f"Accuracy on {title} over rounds: {ends}.", draw)

    return Plot(
        "curves", "Accuracy over rounds",
        "Test accuracy in % after each round: mean over seeds; the band spans the seeds.",
        tuple(map(panel, columns)), keys,
    )  # fmt: skip


def bars(table: Sequence[Row]) -> Plot:
    """Accuracy of each method, a panel for each domain; what counts comes first."""
    there = [row for row in table if row.accuracy]
    columns = sorted(there[0].columns, key=lambda c: c != there[0].main)
    left_out = {row.unseen for row in there}
    unseen = left_out.pop() if len(left_out) == 1 else None
    colors = dict(zip((row.method for row in there), _looks(len(there)), strict=True))
    height = 0.9 + 0.27 * len(there)

    def panel(column: str) -> Panel:
        found = {row.method: s for row in there if (s := row.at(column)) is not None}
        title = panel_title(column, unseen)

        def draw(axis: Axes) -> None:
            y = list(range(len(found)))
            means = [s.mean for s in found.values()]
            errors = [s.std or 0.0 for s in found.values()]
            axis.barh(y, means, color=[colors[m][0] for m in found], height=0.66, alpha=0.88)
            axis.errorbar(means, y, xerr=errors, fmt="none", ecolor=ink(), elinewidth=0.9)
            for at, mean, error in zip(y, means, errors, strict=True):
                _text(axis, mean + error + 1.5, at, f"{mean:.1f}", va="center", fontsize=8)
            axis.set_yticks(y, list(found))
            axis.invert_yaxis()
            axis.set_xlim(0, 118)
            axis.set_xticks([0, 25, 50, 75, 100])
            axis.set_xlabel("test accuracy, %")
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="x")

        said = ", ".join(f"{m} {s.mean:.1f} %" for m, s in found.items())
        return Panel(title, f"Accuracy on {title}: {said}.", draw, height=height)

    return Plot(
        "domains", "Accuracy by domain",
        "Test accuracy in %, mean over seeds; the line is the standard deviation between seeds.",
        tuple(map(panel, columns)),
    )  # fmt: skip


def traffic(methods: Methods) -> Plot:
    """What counts against what has traveled so far, and each method's end."""
    keys = _keys(methods)
    by_seed = {m: [_over_rounds(run) for run in runs] for m, runs in methods.items()}
    counts = next(iter(next(iter(by_seed.values()))[0]))
    accuracy = {m: _cut([r[counts] for r in runs]).mean(0) for m, runs in by_seed.items()}
    megabytes = {
        m: _cut([list(accumulate(_sent(run))) for run in runs]).mean(0) / 1e6
        for m, runs in methods.items()
    }
    title = panel_title(counts, _unseen(methods))

    def draw(axis: Axes) -> None:
        for key, m in zip(keys, methods, strict=True):
            style = "-" if key.shape == "line" else "--"
            axis.plot(megabytes[m], accuracy[m], style, color=key.color, linewidth=1.7)
            axis.plot(megabytes[m][-1], accuracy[m][-1], "o", color=key.color, markersize=5)
        _accuracy_axis(axis, _limits([v[None] for v in accuracy.values()]))
        axis.set_xlabel("MB sent so far, up and down")
        axis.set_xlim(left=0)

    per_round = {m: 1e3 * v[-1] / len(v) for m, v in megabytes.items()}
    base = min(per_round.values())

    def extra(axis: Axes) -> None:
        y = list(range(len(per_round)))
        more = [v - base for v in per_round.values()]
        axis.barh(y, more, color=[k.color for k in keys], height=0.66, alpha=0.88)
        top = max([*more, 1e-9])
        for at, value in zip(y, more, strict=True):
            _text(axis, value + 0.02 * top, at, f"{value:,.0f}", va="center", fontsize=8)
        axis.set_yticks(y, list(per_round))
        axis.invert_yaxis()
        axis.set_xlim(0, 1.22 * top)
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set_xlabel(f"kB a round beyond the cheapest ({base:,.0f} kB)")
        axis.grid(axis="x")

    ends = ", ".join(
        f"{m} {accuracy[m][-1]:.1f} % after {megabytes[m][-1]:.0f} MB" for m in methods
    )
    costs = ", ".join(f"{m} {v - base:,.0f} kB" for m, v in per_round.items())
    panels = [Panel(title, f"Accuracy on {title} against megabytes: {ends}.", draw)]
    if max(per_round.values()) - base >= 0.5:  # kB: else there is nothing to compare
        alt = f"Bytes a round beyond the cheapest: {costs}."
        panels.append(Panel("what a method adds", alt, extra))
    return Plot(
        "bytes", "Accuracy for its bytes",
        "All that traveled between server and clients, as tensors without a wire's overhead.",
        tuple(panels), keys,
    )  # fmt: skip


def confusions(label: str, found: Mapping[str, Ints], classes: Sequence[str]) -> Plot:
    """How each domain's test images are mistaken for one another."""
    small = len(classes) <= SHOWN_CLASSES

    def panel(domain: str) -> Panel:
        counts = found[domain]
        shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
        right = 100 * counts.trace() / max(1, counts.sum())

        def draw(axis: Axes) -> None:
            _heat(axis, shares, 1.0)
            if len(classes) <= 12:
                for row, column in zip(*np.nonzero(shares >= 0.005), strict=True):
                    share = shares[row, column]
                    _text(
 axis,
                        column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=6.5,
                        color="#ffffff" if share > 0.55 else ink(),
                    )  # fmt: skip
            names = _short(classes) if small else []
            axis.set_xticks(range(len(names)), names, rotation=90 if _long(names) else 0)
            axis.set_yticks(range(len(names)), names)
            axis.set_xlabel("predicted")
            axis.set_ylabel("true class")

        off = shares - np.diag(shares.diagonal())
        row, column = np.unravel_index(off.argmax(), off.shape)
        worst = f"{classes[row]} taken for {classes[column]} in {100 * off.max():.0f} %"
        alt = f"Confusion matrix of {label} on {domain}: {right:.1f} % right; most often {worst}."
        return Panel(f"{domain}: {right:.1f} % right", alt, draw, 3.4, 3.2)

    return Plot(
        f"confusion-{slug(label)}", label, "", tuple(map(panel, found)), columns=4
    )  # fmt: skip


@dataclass(frozen=True)
class Embedding:
    """Places of images and prototypes on a plane, with what colors them."""

    places: Floats
    labels: Ints
    domains: tuple[str, ...]
    """The domain of each image; of each prototype that of its client."""
    kind: tuple[str, ...]
    """image, sent or made, for each place."""
    title: str = ""
    """What tells it from others of the same run: round 10."""


def embedding(label: str, found: Embedding, classes: Sequence[str]) -> Plot:
    """t-SNE of the features, colored by class and by domain, prototypes drawn in."""
    kinds, at = np.array(found.kind), found.places
    names = list(dict.fromkeys(d for d in found.domains if d))
    of_domain = np.array([names.index(d) if d else -1 for d in found.domains])

    def scatter(axis: Axes, group: Ints, colors: Sequence[str], shapes: bool) -> None:
        for kind, size, alpha in (("image", 7, 0.55), ("sent", 15, 1.0), ("made", 85, 1.0)):
            for g in range(-1, int(group.max()) + 1):
                own = (kinds == kind) & (group == g)
                if not own.any():
                    continue
                turn = MARKERS[(g // len(colors)) % len(MARKERS)] if shapes else "o"
                axis.scatter(
                    at[own, 0],
                    at[own, 1], s=size, alpha=alpha,
                    marker={"image": turn, "sent": "D", "made": "*"}[kind],
                    color=colors[g % len(colors)] if g >= 0 else ink(),
                    edgecolors="none" if kind == "image" else ink(),
                    linewidths=0 if kind == "image" else 0.6,
                )  # fmt: skip
        axis.set_xticks([])
        axis.set_yticks([])
        for side in axis.spines.values():
            side.set_visible(True)
            side.set_color(faint())

    def by_class(axis: Axes) -> None:
        scatter(axis, found.labels, CLASS_COLORS, True)

    def by_domain(axis: Axes) -> None:
        scatter(axis, of_domain, COLORS, False)

    n = int((kinds == "image").sum())
    alt = f"t-SNE of {n} test images under {label}, colored by "
    marks = [
        Key(word, INK, mark)
        for kind, word, mark in (
            ("sent", "a client's prototype", "D"),
            ("made", "what the server made", "*"),
        )
        if kind in found.kind
    ]
    of_classes = tuple(
        Key(c, CLASS_COLORS[i % 10], MARKERS[(i // 10) % len(MARKERS)])
        for i, c in enumerate(classes)
    )
    of_domains = tuple(Key(d, COLORS[i % len(COLORS)], "dot") for i, d in enumerate(names))
    if len(classes) > SHOWN_CLASSES:
        of_classes = ()
    panels = (
        Panel("by class", f"{alt}class; prototypes are drawn in.", by_class, 4.2, 3.9, of_classes),
        Panel("by domain", f"{alt}domain ({', '.join(names)}).", by_domain, 4.2, 3.9, of_domains),
    )
    name = slug(f"{label} {found.title}")
    return Plot(f"tsne-{name}", label, "", panels, tuple(marks), columns=2)


def clusters(label: str, found: Sequence[Clusters], distances: Distances) -> Plot:
    """FINCH's clusters over rounds, their members at the end, and how far clients are apart."""
    classes, last = list(found[-1].members)[:SHOWN_CLASSES], found[-1]
    order = sorted(last.domains, key=lambda c: list(last.domains.values()).index(last.domains[c]))
    numbers = np.array([[f.counts.get(k, 0) for f in found] for k in classes], dtype=float)
    height = 0.9 + 0.2 * max(len(classes), 6)

    def over_rounds(axis: Axes) -> None:
        _heat(axis, numbers / max(1.0, numbers.max()), 1.0, top=0.75)
        _write(axis, numbers, 6.5)
        axis.set_xticks(range(len(found)), [str(f.round) for f in found])
        axis.set_yticks(range(len(classes)), _short(classes))
        axis.set_xlabel("round")
        axis.set_ylabel("class")

    def members(axis: Axes) -> None:
        for j in range(max(len(last.members[k]) for k in classes)):
            dots = [
                (order.index(client), row)
                for row, k in enumerate(classes)
                for client in (last.members[k][j : j + 1] or ((),))[0]
            ]
            axis.scatter(
                [x for x, _ in dots],
                [y for _, y in dots],
                s=44,
                marker=MARKERS[j % len(MARKERS)],
                color=COLORS[j % len(COLORS)],
                linewidths=0,
            )
        _client_ticks(axis, order)
        axis.set_yticks(range(len(classes)), _short(classes))
        axis.set_xlim(-0.6, len(order) - 0.4)
        axis.set_ylim(len(classes) - 0.5, -0.5)
        axis.set_ylabel("class")
        axis.grid(axis="y")
        _domain_lines(axis, order, last.domains)

    with np.errstate(all="ignore"):
        index = [distances.clients.index(c) for c in order]
        known = ~np.isnan(distances.cosine)
        total = np.where(known, distances.cosine, 0).sum(0)
        mean = (total / np.maximum(1, known.sum(0)))[np.ix_(index, index)]

    def apart(axis: Axes) -> None:
        _heat(axis, mean / max(1e-9, float(mean.max())), 1.0)
        if len(order) <= 12:
            _write(axis, mean, 5.5, dark=0.6, digits=2)
        _client_ticks(axis, order)
        axis.set_yticks(range(len(order)), order)

    span = f"{int(numbers.min())} to {int(numbers.max())}"
    alone = sum(
        len({last.domains[c] for c in own}) == 1 for k in classes for own in last.members[k]
    )
    total_clusters = int(numbers[:, -1].sum())
    panels = (
        Panel(
            "clusters of each class", f"Number of FINCH clusters a class by round: {span}.",
            over_rounds, 3.4, height,
        ),
        Panel(
            f"who is together, round {last.round}",
            f"Members of the clusters in round {last.round}: {alone} of {total_clusters} clusters "
            "hold clients of a single domain.",
            members, 3.8, height,
        ),
        Panel(
            f"distance of clients, round {last.round}",
            f"Mean cosine distance between clients' prototypes of a class: at most "
            f"{float(mean.max()):.2f}.",
            apart, 3.8, height,
        ),
    )  # fmt: skip
    return Plot(f"clusters-{slug(label)}", label, "", panels)


def prototypes_apart(kept: RoundPrototypes) -> list[tuple[str, Floats, Ints, str]]:
    """Every prototype with its kind and the domain of the client that sent it."""
    sent = [("sent", z, y, kept.domains[c]) for c, (z, y) in kept.sent.items()]
    return sent + [("made", z, y, "") for z, y in kept.made.values()]


def slug(text: str) -> str:
    """A label as part of a file's name."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(part for part in plain.split("-") if part) or "x"


# ---- helpers -----------------------------------------------------------------------------------


def _unseen(methods: Methods) -> str | None:
    """The domain that the runs left out."""
    return next(iter(methods.values()))[0].config.leave_out


def _over_rounds(run: Result) -> dict[str, list[float]]:
    return over_rounds(run.rounds, run.config.leave_out)


def _sent(run: Result) -> list[int]:
    return [record["bytes_up"] + record["bytes_down"] for record in run.rounds]


def _cut(runs: Sequence[Sequence[float]]) -> Floats:
    """A row for each run, of as many rounds as all of them have."""
    length = min(map(len, runs))
    return np.array([run[:length] for run in runs], dtype=float)


def _limits(values: Sequence[Floats]) -> tuple[float, float]:
    low, high = (float(f([f(v) for v in values])) for f in (np.min, np.max))
    return max(0.0, 10 * np.floor((low - 2) / 10)), min(102.0, 10 * np.ceil((high + 2) / 10) + 0.5)


def _accuracy_axis(axis: Axes, limits: tuple[float, float]) -> None:
    axis.set_ylim(*limits)
    axis.set_ylabel("test accuracy, %")
    axis.grid(axis="y")
    axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _looks(n: int) -> list[tuple[str, str]]:
    return [
        (COLORS[i % len(COLORS)], "line" if (i // len(COLORS)) % 2 == 0 else "dash")
        for i in range(n)
    ]


def _keys(methods: Methods) -> tuple[Key, ...]:
    return tuple(Key(m, *look) for m, look in zip(methods, _looks(len(methods)), strict=True))


def _heat(axis: Axes, shares: Floats, most: float, top: float = 1.0) -> None:
    """Squares in one color, more opaque for more: right on light and on dark paper."""
    strong = to_rgb(COLORS[0])
    shades = LinearSegmentedColormap.from_list("", [(*strong, 0.0), (*strong, top)])
    edges = [np.arange(n + 1) - 0.5 for n in (shares.shape[1], shares.shape[0])]
    many = shares.size > SHOWN_CLASSES**2
    visible = np.ma.masked_less(shares, 0.005)
    axis.pcolormesh(*edges, visible, cmap=shades, vmin=0, vmax=most, rasterized=many, linewidth=0)
    axis.invert_yaxis()
    axis.tick_params(length=0, labelsize=7)
    for side in axis.spines.values():
        side.set_visible(True)
        side.set_color(faint())


def _write(axis: Axes, values: Floats, size: float, dark: float = 2.0, digits: int = 0) -> None:
    top = float(values.max()) or 1.0
    for (row, column), value in np.ndenumerate(values):
        _text(
 axis,
            column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=size,
            color="#ffffff" if value / top > dark else ink(),
        )  # fmt: skip


def _text(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text inside the axes: nothing need make room for it, and layout is quick without it."""
    axis.text(x, y, text, **style).set_in_layout(False)


def _client_ticks(axis: Axes, clients: Sequence[str]) -> None:
    axis.set_xticks(range(len(clients)), clients, rotation=90)
    axis.tick_params(length=0, labelsize=7)


def _domain_lines(axis: Axes, order: Sequence[str], domains: Mapping[str, str]) -> None:
    for i in range(1, len(order)):
        if domains[order[i]] != domains[order[i - 1]]:
            axis.axvline(i - 0.5, color=faint(), linewidth=0.8)


def _short(names: Sequence[str]) -> list[str]:
    return [n if len(n) <= 12 else n[:11] + "…" for n in names]


def _long(names: Sequence[str]) -> bool:
    return any(len(n) > 2 for n in names)
