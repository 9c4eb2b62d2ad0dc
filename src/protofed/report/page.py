"""The report as one HTML page: nothing of it comes from elsewhere, and every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from protofed.federation.records import SELECTION
from protofed.files import write_atomic
from protofed.report import figures, plots
from protofed.report.findings import Findings, find
from protofed.report.gather import Gathered, Group
from protofed.report.plots import Key, Plot
from protofed.study.tables import BASELINE, Row, caption, few, grid, rows
from protofed.version import __version__

Tell = Callable[[str], None]


def write(
    gathered: Gathered,
    page: Path,
    folder: Path | None = None,
    *,
    images: int = 500,
    title: str = "",
    tell: Tell = lambda text: None,
) -> list[Path]:
    """Write the page, and every plot as PDF and PNG into ``folder``; returns what was written."""
    writer = _Writer(folder, tell)
    many = len(gathered.groups) > 1
    sections = []
    for number, group in enumerate(gathered.groups):
        writer.prefix = f"{figures.slug(group.title)}-" if many else ""
        writer.short = f"g{number}"
        sections.append(_section(group, find(group, images, tell), writer, number, many))
    heading = title or _heading(gathered)
    body = _top(gathered, heading) + "\n<main>\n" + "\n".join(sections) + "\n</main>\n"
    assets = files("protofed.report") / "assets"
    text = Template((assets / "report.html").read_text("utf-8")).substitute(
        version=escape(__version__),
        title=escape(heading),
        css=(assets / "report.css").read_text("utf-8"),
        js=(assets / "report.js").read_text("utf-8"),
        body=body + _footer(gathered),
    )
    write_atomic(page, text)
    return [page, *writer.written]


class _Writer:
    """Draws plots for the page, and for the folder if there is one."""

    def __init__(self, folder: Path | None, tell: Tell) -> None:
        self.folder, self.tell = folder, tell
        self.written: list[Path] = []
        self.prefix = self.short = ""
        self.count = 0

    def plot(self, plot: Plot, least: int = 300) -> str:
        """The plot as HTML."""
        self.tell(f"drawing {plot.name}")
        if self.folder is not None:
            self.written += plots.save(plot, self.folder, self.prefix)
        panels = []
        for panel in plot.panels:
            self.count += 1
            drawn = plots.svg(panel, f"{self.short}-{self.count}")
            panels.append(
                f'<div class="panel" style="max-width: {panel.width * 122:.0f}px">'
                f"<h5>{escape(panel.title)}</h5>{_legend(panel.legend)}{drawn}</div>"
            )
        note = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
        return (
            f'<figure id="{self.short}-{plot.name}">{_legend(plot.legend)}'
            f'<div class="panels" style="--least: {least}px">{"".join(panels)}</div>{note}</figure>'
        )


# ---- the first screen --------------------------------------------------------------------------


def _heading(gathered: Gathered) -> str:
    tasks = list(dict.fromkeys(g.results[0].config.task for g in gathered.groups))
    methods = {m for g in gathered.groups for m in g.methods}
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(tasks)}" if len(tasks) < 5 else f"{what}, {len(tasks)} tasks"


def _top(gathered: Gathered, heading: str) -> str:
    groups = gathered.groups
    parts = [f'<p class="eyebrow">protofed report</p><h1>{escape(heading)}</h1>']
    if len(groups) == 1:
        table = rows(groups[0].results)
        parts.append(f'<p class="lead">{headline(table, len(groups[0].seeds))}</p>')
        parts += [_ranks(table), _links("g0")]
    else:
        items = "".join(
            f'<li><a href="#g{i}">{escape(g.title)}</a>: '
            f"{headline(rows(g.results), len(g.seeds))}</li>"
            for i, g in enumerate(groups)
        )
        parts.append(f"<ul>{items}</ul>")
    if gathered.left_out:
        listed = "; ".join(f"{p.name}: {why}" for p, why in gathered.left_out[:8])
        more = " …" if len(gathered.left_out) > 8 else ""
        text = f"Not in this report: {listed}{more}"
        parts.append(f'<p class="absent">{escape(text)}</p>')
    return f'<header class="top">{"".join(parts)}</header>'


def headline(table: Sequence[Row], seeds: int) -> str:
    """The main result in a sentence or two, as HTML, with what it is worth."""
    there = [r for r in table if r.accuracy]
    best = max(there, key=lambda r: r.accuracy["average"].mean)
    domains = {d: s.mean for d, s in best.accuracy.items() if d != "average"}
    hardest = min(domains, key=lambda d: domains[d])
    name, mean = escape(best.method), best.accuracy["average"].mean
    if len(there) == 1:
        text = (
            f"<b>{name}</b> reaches <b>{mean:.1f}&nbsp;%</b> on average of {len(domains)} domains."
        )
    else:
        text = (
            f"<b>{name}</b> is best on average of {len(domains)} domains: <b>{mean:.1f}&nbsp;%</b>"
        )
        difference = best.difference
        if difference is not None:
            text += f", {difference.mean:+.1f} points from FedAvg"
            if difference.half is not None:
                text += f" (95&nbsp;% interval ±&nbsp;{difference.half:.1f}, paired by seed)"
            if difference.noise and difference.half is not None:
                text += "; that difference may be noise"
        elif best.method == BASELINE:
            text += "; no method is beyond it"
        text += "."
    text += f" Its hardest domain is {escape(hardest)} with {domains[hardest]:.1f}&nbsp;%."
    warning = few(seeds).strip(" ()")
    return text + (f" {escape(warning[:1].upper() + warning[1:])}." if warning else "")


def _ranks(table: Sequence[Row]) -> str:
    there = [(i, r) for i, r in enumerate(table) if r.accuracy]
    ranked = sorted(there, key=lambda pair: -pair[1].accuracy["average"].mean)
    items = []
    for place, (i, row) in enumerate(ranked[:12]):
        spread = row.accuracy["average"]
        std = f"± {spread.std:.1f}" if spread.std is not None else ""
        items.append(
            f'<li class="{"first" if place == 0 else "other"}" style="--c: var(--c{i % 8})">'
            f'<span class="name">{escape(row.method)}</span>'
            f'<span class="bar"><i style="width: {spread.mean:.2f}%"></i></span>'
            f'<span class="value"><b>{spread.mean:.1f} %</b><small>{std}</small></span></li>'
        )
    return f'<ol class="ranks" aria-label="methods by average accuracy">{"".join(items)}</ol>'


_PARTS = (
    ("table", "Table"), ("over-rounds", "Over rounds"), ("by-domain", "By domain"),
    ("traffic", "Bytes"), ("features", "Features"), ("confusion", "Confusions"),
    ("clusters", "Prototypes"), ("clients", "Clients"), ("configuration", "Configuration"),
)  # fmt: skip


def _links(short: str) -> str:
    links = "".join(f'<a href="#{short}-{part}">{name}</a>' for part, name in _PARTS)
    return f'<nav aria-label="sections">{links}</nav>'


# ---- a group -----------------------------------------------------------------------------------


def _section(group: Group, found: Findings, writer: _Writer, number: int, many: bool) -> str:
    short, table, methods = f"g{number}", rows(group.results), group.methods
    parts = [f'<section id="{short}">']
    if many:
        parts += [f"<h2>{escape(group.title)}</h2>", _ranks(table), _links(short)]

    def part(name: str, heading: str, *content: str) -> None:
        parts.append(f'<h3 id="{short}-{name}">{heading}</h3>{"".join(content)}')

    note = (
        "<details><summary>What the numbers are, in one paragraph</summary>"
        f'<p class="note">{escape(caption(group.results))}</p></details>'
    )
    part("table", "Accuracy", result_table(table), _marks(group), _facts(group), note)
    part("over-rounds", "Over rounds", writer.plot(figures.curves(methods)))
    part("by-domain", "By domain", writer.plot(figures.bars(table)))
    part("traffic", "Accuracy for its bytes", writer.plot(figures.traffic(methods), 320))
    part("features", "What the features look like", *_features(found, writer))
    part("confusion", "What is mistaken for what", *_confusions(found, writer))
    part("clusters", "Prototypes and their clusters", *_clusters(found, writer))
    part("clients", "Clients", _clients(group))
    part("configuration", "Configuration and runs", _configuration(group))
    return "\n".join(parts) + "</section>"


def result_table(table: Sequence[Row]) -> str:
    """Accuracy per domain and average, with the difference to FedAvg; best and second marked."""
    header, body = grid(table)
    lines = [[(cell.text, cell.mark) for cell in line] for line in body]
    return html_table(header, lines)


def _marks(group: Group) -> str:
    """How to read the table."""
    text = "Test accuracy in %; bold is the best, underlined the second."
    if len(group.seeds) > 1:
        text += (
            " ± standard deviation over seeds; Δ: to FedAvg with the same seeds, ± standard error "
            "(± half its 95 % interval; noise: that contains 0)."
        )
    return f'<p class="note">{escape(text)}</p>'


def html_table(
    header: Sequence[str],
    lines: Sequence[Sequence[tuple[str, str]]],
    left: Sequence[int] = (0,),
    kind: str = "",
) -> str:
    """A table that sorts by a click; each cell is a text and a class."""
    head = "".join(
        f'<th scope="col"{" class=left" if i in left else ""}>'
        f'<button type="button">{escape(text)}</button></th>'
        for i, text in enumerate(header)
    )
    body = []
    for line in lines:
        cells = []
        for i, (text, mark) in enumerate(line):
            number = None if i in left else re.match(r"\s*([+-]?\d[\d,]*\.?\d*)", text)
            value = f' data-value="{number[1].replace(",", "")}"' if number else ""
            marks = f"{mark} left" if i in left else mark
            cells.append(f'<td class="{escape(marks.strip())}"{value}>{escape(text)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="sortable {kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _facts(group: Group) -> str:
    """What the numbers are, in short words."""
    config, summary = group.results[0].config, group.results[0].summary
    clients = ", ".join(f"{d} {n} × {config.samples[d]:g}" for d, n in config.clients.items() if n)
    if any(r.config.clients != config.clients for r in group.results):
        clients = "drawn by each seed"
    seeds = ", ".join(map(str, group.seeds))
    facts = {
        "Numbers": f"test accuracy in %, {SELECTION}; never the best round on test data",
        "Data": f"{config.task}: {summary.get('data', '')}",
        "Clients × samples": clients,
        "Seeds": seeds,
        "Training": f"protocol {config.protocol}: {config.rounds} rounds × {config.epochs} epochs, "
        f"batch {config.batch}, lr {config.lr:g}",
        "Model": f"{config.model}" + (f", norm {config.norm}" if config.norm else ""),
        "Precision": _each(group, lambda r: f"{r.config.precision} on {r.config.device}"),
        "BatchNorm": _each(group, lambda r: str(r.summary.get("batchnorm", "?"))),
        "Who is tested": _each(
            group, lambda r: _TESTED.get(str(r.summary.get("evaluated")), "the global model")
        ),
        "Weights of the average": f"by {config.average}",
    }
    items = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


_TESTED = {"global": "the global model", "clients": "each domain's clients' own models"}


def _each(group: Group, of: Callable[..., str]) -> str:
    """One word for all runs, or which methods differ."""
    found: dict[str, list[str]] = {}
    for method, runs in group.methods.items():
        for run in runs:
            names = found.setdefault(of(run), [])
            if method not in names:
                names.append(method)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in found.items())


def _absent(found: Findings, part: str) -> list[str]:
    return [f'<p class="absent">{escape(why)}</p>' for why in found.absent.get(part, ())]


def _looked_at(found: Findings) -> str:
    shown = ", ".join(
        f"{d} {n}" if n == of else f"{d} {n} of {of}" for d, (n, of) in found.tested.items()
    )
    return f"Test images of the run with each method's first seed, at its end ({shown})."


def _features(found: Findings, writer: _Writer) -> list[str]:
    parts = []
    if found.embeddings:
        text = (
            f"{_looked_at(found)} t-SNE of unit-length features, prototypes embedded with them. "
            "Prototypes come from the clients' own models while these train, the images pass the "
            "final model: they need not coincide."
        )
        parts.append(f'<p class="note">{escape(text)}</p>')
    for label, embedding in found.embeddings.items():
        plot = figures.embedding(label, embedding, found.classes)
        parts.append(f"<h4>{escape(label)}</h4>{writer.plot(plot, 330)}")
    if found.gaps:
        header = ("method", "domains apart", "classes apart", "ratio", "domain probe, %")
        lines = [
            [
                (label, ""), (f"{g.distance:.3f}", ""), (f"{g.classes:.3f}", ""),
                (f"{g.ratio:.2f}", ""), (f"{g.probe:.1f}", ""),
            ]
            for label, g in found.gaps.items()
        ]  # fmt: skip
        chance = next(iter(found.gaps.values())).chance
        text = (
            "Domains apart: cosine distance between the same class's mean features in two domains, "
            "averaged; classes apart: between two classes of one domain; a small ratio means that "
            "a class looks alike everywhere. Domain probe: how often a linear model tells the "
            f"domain from the feature (guessing: {chance:.0f} %)."
        )
        parts.append(f"<h4>The gap between domains</h4>{html_table(header, lines, kind='narrow')}")
        parts.append(f'<p class="note">{escape(text)}</p>')
    return parts + _absent(found, "features")


def _confusions(found: Findings, writer: _Writer) -> list[str]:
    parts = []
    if found.confusions:
        text = f"Percent of each true class. {_looked_at(found)}"
        parts.append(f'<p class="note">{escape(text)}</p>')
    for label, confusion in found.confusions.items():
        plot = figures.confusions(label, confusion, found.classes)
        parts.append(f"<h4>{escape(label)}</h4>{writer.plot(plot, 250)}")
    return parts + _absent(found, "confusion")


def _clusters(found: Findings, writer: _Writer) -> list[str]:
    parts = []
    if found.clusters:
        text = (
            "FINCH on the prototypes that clients sent in the rounds that were kept. For methods "
            "that cluster on the server these are its clusters, for others what FINCH would find. "
            "In the middle, equal marks in a row are one cluster. Distances are cosine distances, "
            "averaged over classes."
        )
        parts.append(f'<p class="note">{escape(text)}</p>')
    for label, rounds in found.clusters.items():
        plot = figures.clusters(label, rounds, found.distances[label])
        parts.append(f"<h4>{escape(label)}</h4>{writer.plot(plot, 290)}")
    return parts + _absent(found, "clusters")


def _clients(group: Group) -> str:
    first = group.results[0]
    table = first.summary.get("clients", [])
    if not table:
        return '<p class="absent">The runs do not say who held what.</p>'
    noted = any("note" in row for row in table)
    header = ["client", "domain", "samples", "classes", *["note"] * noted]
    lines = [
        [(str(row.get(c, "")), "") for c in header] for row in table if isinstance(row, Mapping)
    ]
    words = f"As seed {first.config.seed} has it."
    unseen = first.config.leave_out
    if unseen is not None:
        words += f" No client has {unseen}: it is only tested on."
    left = (0, 1, 4)
    return html_table(header, lines, left, "narrow") + f'<p class="note">{escape(words)}</p>'


def _configuration(group: Group) -> str:
    header = ("method", "seed", "average, %", "rounds", "MB", "s", "engine", "folder")
    lines = []
    folded = []
    for label, runs in group.methods.items():
        for run in runs:
            sent = (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6
            cells = (
                label, str(run.config.seed), f"{run.accuracy['average']:.2f}",
                str(len(run.rounds)), f"{sent:.1f}", f"{run.summary['seconds']:.0f}",
                str(run.summary.get("engine", "")), run.folder.name if run.folder else "",
            )  # fmt: skip
            lines.append([(text, "") for text in cells])
        folded.append(
            f"<details><summary>{escape(label)}, seed {runs[0].config.seed}: configuration"
            f"</summary><pre>{escape(runs[0].config.toml())}</pre></details>"
        )
    return html_table(header, lines, (0, 6, 7)) + "".join(folded)


def _footer(gathered: Gathered) -> str:
    versions = gathered.groups[0].results[0].summary.get("versions", {})
    made = ", ".join(f"{k} {v}" for k, v in versions.items())
    text = f"Runs made with {made}. " if made else ""
    return f"<footer>{escape(text)}Page by protofed {escape(__version__)}.</footer>"


# ---- legends -----------------------------------------------------------------------------------

_SHAPES = {
    "line": '<line x1="0" y1="6" x2="20" y2="6" stroke-width="2.4"/>',
    "dash": '<line x1="0" y1="6" x2="20" y2="6" stroke-width="2.4" stroke-dasharray="5 3"/>',
    "dot": '<circle cx="6" cy="6" r="4.5"/>',
    "o": '<circle cx="6" cy="6" r="4.5"/>',
    "s": '<rect x="2" y="2" width="8" height="8"/>',
    "^": '<path d="M6 1 11 10H1z"/>',
    "v": '<path d="M6 11 11 2H1z"/>',
    "D": '<path d="M6 1 11 6 6 11 1 6z"/>',
    "*": '<path d="M6 0 7.6 4.3 12 4.5 8.5 7.2 9.7 11.6 6 9.1 2.3 11.6 3.5 7.2 0 4.5 4.4 4.3z"/>',
}


def _legend(keys: Sequence[Key]) -> str:
    items = []
    for key in keys:
        colour = plots.themed(key.colour)
        wide = key.shape in ("line", "dash")
        shape = _SHAPES.get(key.shape, _SHAPES["dot"])
        items.append(
            f'<li class="{"stroke" if wide else "dot"}">'
            f'<svg viewBox="0 0 {20 if wide else 12} 12" aria-hidden="true" '
            f'style="{"stroke" if wide else "fill"}: {colour}">{shape}</svg>'
            f"{escape(key.label)}</li>"
        )
    return f'<ul class="keys">{"".join(items)}</ul>' if items else ""
