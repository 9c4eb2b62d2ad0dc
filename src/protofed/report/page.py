"""The report as one HTML page: nothing of it comes from elsewhere, and every text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from protofed.config import EACH
from protofed.files import write_atomic
from protofed.report import figures, plots
from protofed.report.curves import together
from protofed.report.findings import find
from protofed.report.gather import Gathered, Group
from protofed.report.html import html_table, legend
from protofed.report.kept import Findings
from protofed.report.plots import Plot
from protofed.report.setting import clients, configuration, facts
from protofed.runs.result import Result
from protofed.studies import figures as study_figures
from protofed.studies.definition import Study
from protofed.studies.folder import TaskTable
from protofed.studies.tables import BASELINE, Row, caption, few, grid
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
    kinds: Sequence[str] = plots.KINDS,
    dpi: int = plots.DPI,
) -> list[Path]:
    """Write the page, and every plot as PDF and PNG into ``folder``; returns what was written."""
    writer = _Writer(folder, tell, kinds, dpi)
    many = len(gathered.groups) > 1
    sections = []
    for number, group in enumerate(gathered.groups):
        if joint := _joint(gathered.groups, number):
            sections.append(_together(joint, writer, number))
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


def _joint(groups: Sequence[Group], number: int) -> list[Group]:
    """The groups that left out a domain each of one table, at the first of them; else none."""
    table = groups[number].table
    own = [g for g in groups if table is not None and g.table is table]
    first = bool(own) and own[0] is groups[number]
    return own if first and all(g.unseen is not None for g in own) else []


class _Writer:
    """Draws plots for the page, and for the folder if there is one."""

    def __init__(self, folder: Path | None, tell: Tell, kinds: Sequence[str], dpi: int) -> None:
        self.folder, self.tell, self.kinds, self.dpi = folder, tell, kinds, dpi
        self.written: list[Path] = []
        self.prefix = self.short = ""
        self.count = 0

    def plot(self, plot: Plot, least: int = 300) -> str:
        """The plot as HTML."""
        self.tell(f"drawing {plot.name}")
        if self.folder is not None:
            self.written += plots.save(plot, self.folder, self.prefix, self.kinds, self.dpi)
        panels = []
        for panel in plot.panels:
            self.count += 1
            drawn = plots.svg(panel, f"{self.short}-{self.count}")
            panels.append(
                f'<div class="panel" style="max-width: {panel.width * 122:.0f}px">'
                f"<h5>{escape(panel.title)}</h5>{legend(panel.legend)}{drawn}</div>"
            )
        note = f"<figcaption>{escape(plot.caption)}</figcaption>" if plot.caption else ""
        return (
            f'<figure id="{self.short}-{plot.name}">{legend(plot.legend)}'
            f'<div class="panels" style="--least: {least}px">{"".join(panels)}</div>{note}</figure>'
        )


# ---- the first screen --------------------------------------------------------------------------


def _heading(gathered: Gathered) -> str:
    studies = list(dict.fromkeys(g.study.title for g in gathered.groups if g.study is not None))
    if len(studies) == 1 and all(g.study is not None for g in gathered.groups):
        return studies[0]
    tasks = list(dict.fromkeys(g.results[0].config.task for g in gathered.groups))
    methods = {m for g in gathered.groups for m in g.methods}
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(tasks)}" if len(tasks) < 5 else f"{what}, {len(tasks)} tasks"


def _top(gathered: Gathered, heading: str) -> str:
    groups = gathered.groups
    parts = [f'<p class="eyebrow">protofed report</p><h1>{escape(heading)}</h1>']
    papers = dict.fromkeys(g.study.paper for g in groups if g.study is not None)
    parts += [f'<p class="note">{escape(paper)}</p>' for paper in papers if paper]
    if len(groups) == 1:
        parts.append(f'<p class="lead">{_headline(groups[0])}</p>')
        parts += [_ranks(groups[0].rows), _links("g0", groups[0])]
    else:
        items = ""
        for i, g in enumerate(groups):
            if g.table is not None and _joint(groups, i):
                text = headline(g.table.rows, len(g.seeds), g.baseline)
                items += f'<li><a href="#t{i}">{escape(_unseen_title(g.table))}</a> {text}</li>'
            items += f'<li><a href="#g{i}">{escape(g.title)}</a> {_headline(g)}</li>'
        parts.append(f'<ul class="groups">{items}</ul>')
    if gathered.left_out:
        listed = "; ".join(f"{p.name}: {why}" for p, why in gathered.left_out[:8])
        more = " …" if len(gathered.left_out) > 8 else ""
        text = f"Not in this report: {listed}{more}"
        parts.append(f'<p class="absent">{escape(text)}</p>')
    return f'<header class="top">{"".join(parts)}</header>'


def _headline(group: Group) -> str:
    return headline(group.rows, len(group.seeds), group.baseline)


def headline(table: Sequence[Row], seeds: int, baseline: str = BASELINE) -> str:
    """The main result in a sentence or two, as HTML, with what it is worth."""
    there = [r for r in table if r.accuracy]
    if not there:
        return "No row is complete yet."
    main = there[0].main
    best = max(there, key=lambda r: r.accuracy[main].mean)
    domains = {d: s.mean for d, s in best.accuracy.items() if d != "average"}
    hardest = min(domains, key=lambda d: domains[d])
    name, mean = escape(best.method), best.accuracy[main].mean
    over = f"on average of {len(domains)} domains"
    if best.unseen == EACH:
        over += ", each by models trained without it"
    elif main != "average":
        over = f"on {escape(main)}, which no client has"
    if len(there) == 1:
        text = f"<b>{name}</b> reaches <b>{mean:.1f}&nbsp;%</b> {over}."
    else:
        text = f"<b>{name}</b> is best {over}: <b>{mean:.1f}&nbsp;%</b>"
        difference = best.differences.get(main)
        if difference is not None:
            reference = "FedAvg" if baseline == BASELINE else escape(baseline)
            text += f", {difference.mean:+.1f} points from {reference}"
            if difference.half is not None:
                text += f" (95&nbsp;% interval ±&nbsp;{difference.half:.1f}, paired by seed)"
            if difference.noise and difference.half is not None:
                text += "; that difference may be noise"
        elif best.method == baseline:
            text += "; no method is beyond it"
        text += "."
    if main == "average":
        text += f" Its hardest domain is {escape(hardest)} with {domains[hardest]:.1f}&nbsp;%."
    if (printed := best.paper.get(main)) is not None and not math.isnan(printed):
        text += f" The paper prints {printed:.1f}&nbsp;% for it."
    warning = few(min(seeds, best.seeds)).strip(" ()")
    return text + (f" {escape(warning[:1].upper() + warning[1:])}." if warning else "")


def _ranks(table: Sequence[Row]) -> str:
    there = enumerate(r for r in table if r.accuracy)  # numbered as the curves are
    ranked = sorted(there, key=lambda pair: -pair[1].accuracy[pair[1].main].mean)
    items = []
    for place, (i, row) in enumerate(ranked[:12]):
        spread = row.accuracy[row.main]
        std = f"± {spread.std:.1f}" if spread.std is not None else ""
        items.append(
            f'<li class="{"first" if place == 0 else "other"}" style="--c: var(--c{i % 8})">'
            f'<span class="name">{escape(row.method)}</span>'
            f'<span class="bar"><i style="width: {spread.mean:.2f}%"></i></span>'
            f'<span class="value"><b>{spread.mean:.1f} %</b><small>{std}</small></span></li>'
        )
    return f'<ol class="ranks" aria-label="methods by accuracy">{"".join(items)}</ol>'


_PARTS = (
    ("table", "Table"), ("over-rounds", "Over rounds"), ("by-domain", "By domain"),
    ("traffic", "Bytes"), ("features", "Features"), ("confusion", "Confusions"),
    ("clusters", "Prototypes"), ("clients", "Clients"), ("configuration", "Configuration"),
)  # fmt: skip


def _links(short: str, group: Group) -> str:
    whole = group.table if group.unseen is None else None
    parts = [("sweep", "Parameters")] * bool(_sweeps(group.study, whole)) + list(_PARTS)
    links = "".join(f'<a href="#{short}-{part}">{name}</a>' for part, name in parts)
    return f'<nav aria-label="sections">{links}</nav>'


# ---- a group -----------------------------------------------------------------------------------


def _section(group: Group, found: Findings, writer: _Writer, number: int, many: bool) -> str:
    short, table, methods = f"g{number}", group.rows, group.methods
    parts = [f'<section id="{short}">']
    if many:
        parts += [f"<h2>{escape(group.title)}</h2>", _ranks(table), _links(short, group)]

    def part(name: str, heading: str, *content: str) -> None:
        parts.append(f'<h3 id="{short}-{name}">{heading}</h3>{"".join(content)}')

    whole = group.table if group.unseen is None else None
    if swept := _sweeps(group.study, whole):
        part("sweep", "Over parameters", *(writer.plot(plot, 300) for plot in swept))
    text = whole.caption if whole is not None else caption(group.results)
    columns = whole.columns if whole is not None else ()
    table_of = result_table(table, columns, group.baseline)
    notes = _notes(group) if whole is not None else ""
    marks = _marks(table, len(group.seeds), group.baseline)
    part("table", "Accuracy", table_of, marks, notes, facts(group), _paragraph(text))
    part("over-rounds", "Over rounds", _few(writer, figures.curves, methods))
    part("by-domain", "By domain", writer.plot(figures.bars(table)))
    part("traffic", "Accuracy for its bytes", _few(writer, figures.traffic, methods))
    for name, heading, content in (
        ("features", "What the features look like", _features(found, writer)),
        ("confusion", "What is mistaken for what", _confusions(found, writer)),
        ("clusters", "Prototypes and their clusters", _clusters(found, writer)),
    ):
        part(name, heading, *content, *_absent(found, name, methods))
    part("clients", "Clients", clients(group))
    part("configuration", "Configuration and runs", configuration(group))
    return "\n".join(parts) + "</section>"


def _few(writer: _Writer, plot: Callable[[figures.Methods], Plot], methods: figures.Methods) -> str:
    """The plot, unless it has more lines than can be told apart."""
    if len(methods) <= figures.LOOKS:
        return writer.plot(plot(methods), 300)
    text = f"Not drawn: {len(methods)} lines cannot be told apart; see the table."
    return f'<p class="absent">{escape(text)}</p>'


def _paragraph(text: str) -> str:
    return (
        "<details><summary>What the numbers are, in one paragraph</summary>"
        f'<p class="note">{escape(text)}</p></details>'
    )


def _together(groups: Sequence[Group], writer: _Writer, number: int) -> str:
    """All runs that left out a domain each: the table of which each column is of one's runs."""
    table = groups[0].table
    assert table is not None
    short = writer.short = f"t{number}"
    writer.prefix = f"{figures.slug(table.task)}-unseen-"
    methods: dict[str, list[Result]] = {}
    for run in together([run for group in groups for run in group.results]):
        methods.setdefault(run.summary["method"], []).append(run)
    parts = [
        f'<section id="{short}"><h2>{escape(_unseen_title(table))}</h2>',
        result_table(table.rows, table.columns, table.baseline),
        _marks(table.rows, len(groups[0].seeds), table.baseline),
        _notes(groups[0]),
        _paragraph(table.caption),
    ]
    if swept := _sweeps(groups[0].study, table):
        parts.append(f'<h3 id="{short}-sweep">Over parameters</h3>')
        parts += [writer.plot(plot) for plot in swept]
    if methods:
        parts.append(f'<h3 id="{short}-over-rounds">Over rounds</h3>')
        parts.append(_few(writer, figures.curves, methods))
        parts.append(f'<h3 id="{short}-by-domain">By domain</h3>')
        parts.append(writer.plot(figures.bars(table.rows)))
    return "\n".join(parts) + "</section>"


def _unseen_title(table: TaskTable) -> str:
    return f"{table.task}: each domain left out in turn"


def result_table(
    table: Sequence[Row], columns: Sequence[str] = (), baseline: str = BASELINE
) -> str:
    """Accuracy per domain and average, with the difference to FedAvg; best and second marked.

    What the paper prints stands below each number, so that a row stays whole when it is sorted.
    """
    header, body = grid(table, columns, baseline)
    lines: list[list[tuple[str, str, str]]] = []
    for line in body:
        if line[0].text.startswith(" "):
            below = ["paper", *(cell.text for cell in line[1:])]
            for i, name in enumerate(header):
                if name.startswith("Δ") and below[i]:
                    below[i] = f"paper {below[i]}"
            lines[-1] = [
                (text, mark, " · ".join(filter(None, (small, more))))
                for (text, mark, small), more in zip(lines[-1], below, strict=True)
            ]
        else:
            texts = [_halves(cell.text) for cell in line]
            marks = [cell.mark for cell in line]
            lines.append([(t, m, small) for (t, small), m in zip(texts, marks, strict=True)])
    return html_table(header, lines, kind="result")


def _halves(text: str) -> tuple[str, str]:
    """``+2.3 ± 0.2 (±0.7, noise)`` in two lines; the table would be too wide."""
    whole = re.fullmatch(r"([+-].*) \((±.*)\)", text)
    return (whole[1], whole[2]) if whole else (text, "")


def _sweeps(study: Study | None, table: TaskTable | None) -> list[Plot]:
    """The pictures of what the study sweeps."""
    if study is None or table is None:
        return []
    found = (study_figures.sweep(study, i, table) for i in range(len(study.sweeps)))
    return [plot for plot in found if plot is not None]


def _notes(group: Group) -> str:
    """What to know about the paper's numbers."""
    notes = group.table.notes if group.table is not None else ()
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="note">{items}</ul>' if items else ""


def _marks(table: Sequence[Row], seeds: int, baseline: str) -> str:
    """How to read the table."""
    text = "Test accuracy in %; bold is the best, underlined the second."
    name = "FedAvg" if baseline == BASELINE else baseline
    if seeds > 1:
        text += (
            f" ± standard deviation over seeds; Δ: to {name} with the same seeds, ± standard "
            "error, below it ± half its 95 % interval (noise: that contains 0)."
        )
    if any(row.paper for row in table):
        text += " Small: what the paper prints (ours − paper)."
    return f'<p class="note">{escape(text)}</p>'


def _absent(found: Findings, part: str, methods: Collection[str]) -> list[str]:
    return [f'<p class="absent">{escape(why)}</p>' for why in found.reasons(part, methods)]


def _looked_at(found: Findings) -> str:
    shown = ", ".join(
        f"{d} {n}" if n == of else f"{d} {n} of {of}" for d, (n, of) in found.tested.items()
    )
    runs = "each method's run with the first seed that has its model"
    return f"Test images of {runs} ({shown}), at its end"


def _features(found: Findings, writer: _Writer) -> list[str]:
    parts = []
    if found.embeddings:
        rounds = any(e.title for every in found.embeddings.values() for e in every)
        when = " and after the rounds named below." if rounds else "."
        model = "that round's" if rounds else "the final"
        text = (
            f"{_looked_at(found)}{when} t-SNE of unit-length features, prototypes embedded with "
            "them. Prototypes come from the clients' own models while these train, the images pass "
            f"{model} model: they need not coincide."
        )
        parts.append(f'<p class="note">{escape(text)}</p>')
    for label, embeddings in found.embeddings.items():
        for embedding in embeddings:
            plot = figures.embedding(label, embedding, found.classes)
            heading = " · ".join(filter(None, (label, embedding.title)))
            parts.append(f"<h4>{escape(heading)}</h4>{writer.plot(plot, 330)}")
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
    return parts


def _confusions(found: Findings, writer: _Writer) -> list[str]:
    parts = []
    if found.confusions:
        text = f"Percent of each true class. {_looked_at(found)}."
        parts.append(f'<p class="note">{escape(text)}</p>')
    for label, confusion in found.confusions.items():
        plot = figures.confusions(label, confusion, found.classes)
        parts.append(f"<h4>{escape(label)}</h4>{writer.plot(plot, 250)}")
    return parts


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
    return parts


def _footer(gathered: Gathered) -> str:
    versions = gathered.groups[0].results[0].summary.get("versions", {})
    made = ", ".join(f"{k} {v}" for k, v in versions.items())
    text = f"Runs made with {made}. " if made else ""
    return f"<footer>{escape(text)}Page by protofed {escape(__version__)}.</footer>"
