"""The report: one HTML page that loads nothing from elsewhere.

This module collects what the page shows; ``templates/`` has the HTML, where every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from protofed.config import EACH
from protofed.files import write_atomic
from protofed.report import figures, plot, run_details
from protofed.report.collect import Group, Progress, ReportInput
from protofed.report.group_analysis import analyze
from protofed.report.page_table import PageTable, result_table
from protofed.report.palette import STYLES, TONES, Look, looks_of
from protofed.report.plot import Key, Panel, Plot
from protofed.report.run_details import Clients
from protofed.report.stored_analysis import GroupAnalysis
from protofed.studies.definition import Study
from protofed.studies.folder import TaskTable
from protofed.studies.history import RunHistory, join_left_out
from protofed.studies.tables import BASELINE, TableRow, baseline_name, caption, seed_warning
from protofed.version import __version__

MOST_SKIPPED = 8
"""So many skipped folders are listed."""
MOST_RANKS = 12


def write_report(
    given: ReportInput,
    page: Path,
    folder: Path | None = None,
    *,
    images: int = 500,
    title: str = "",
    progress: Progress = lambda text: None,
    kinds: Sequence[str] = plot.KINDS,
    dpi: int = plot.DPI,
) -> list[Path]:
    """Write the page, and every figure as files of these kinds into ``folder``.

    Returns the paths of all files.
    """
    painter = Painter(folder, progress, kinds, dpi)
    many = len(given.groups) > 1
    sections = []
    for number, group in enumerate(given.groups):
        if joint := _joint_groups(given.groups, number):
            sections.append(_joint_section(joint, painter, f"t{number}"))
        painter.start(f"g{number}", f"{figures.slug(group.title)}-" if many else "")
        found = analyze(group, images, progress)
        sections.append(_section(group, found, painter, f"g{number}"))
    versions = given.groups[0].results[0].summary.get("versions", {})
    text = (
        environment()
        .get_template("report.html.j2")
        .render(
            title=title or _title(given),
            papers=[p for p in dict.fromkeys(g.study.paper for g in given.groups if g.study) if p],
            sections=sections,
            many=many,
            skipped=[f"{path.name}: {reason}" for path, reason in given.skipped],
            most_skipped=MOST_SKIPPED,
            made_with=", ".join(f"{name} {version}" for name, version in versions.items()),
            version=__version__,
            tones=TONES,
        )
    )
    write_atomic(page, text)
    return [page, *painter.written]


@cache
def environment() -> Environment:
    """The templates, with every text escaped."""
    made = Environment(
        loader=PackageLoader("protofed.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["themed"] = plot.themed
    made.globals["styles"] = STYLES
    return made


# ---- what the templates show --------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnPanel:
    """A panel of a figure, drawn."""

    panel: Panel
    svg: Markup


@dataclass(frozen=True)
class DrawnFigure:
    """A figure on the page; ``narrowest`` is the width in pixels below which panels wrap."""

    id: str
    caption: str
    legend: Sequence[Key]
    panels: Sequence[DrawnPanel]
    narrowest: int
    heading: str = ""


@dataclass(frozen=True)
class Headline:
    """The main result of a table, and what it is worth."""

    label: str
    mean: float
    scope: str
    alone: bool
    """There is no other row to compare with."""
    is_baseline: bool
    baseline: str
    difference: float | None
    half: float | None
    """Half the 95 % interval of the difference."""
    noise: bool
    hardest: tuple[str, float] | None
    """The domain with the lowest accuracy."""
    printed: float | None
    """What the paper prints."""
    warning: str


@dataclass(frozen=True)
class Rank:
    """A bar of the ranking."""

    label: str
    mean: float
    std: float | None
    look: Look


@dataclass
class Details:
    """What only the section of a single group has."""

    facts: dict[str, str]
    traffic: DrawnFigure | str
    analysis: GroupAnalysis
    features: list[DrawnFigure]
    over_rounds: bool
    """The features are shown after several rounds."""
    gaps: PageTable | None
    confusions: list[DrawnFigure]
    clusters: list[DrawnFigure]
    missing: dict[str, list[str]]
    """Part of the page → why something is missing there."""
    clients: Clients | None
    runs: PageTable
    settings: dict[str, str]


@dataclass
class Section:
    """A table and what belongs to it: of one group, or of all that left out a domain each."""

    id: str
    title: str
    headline: Headline | None
    ranks: list[Rank]
    table: PageTable
    seeds: int
    baseline: str
    printed: bool
    """The table has the paper's numbers."""
    notes: Sequence[str]
    caption: str
    sweeps: list[DrawnFigure]
    curves: DrawnFigure | str | None
    """A text says why there is no figure."""
    bars: DrawnFigure | None
    details: Details | None = None
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Ids and names of the links at the top."""


class Painter:
    """Draws figures for the page, and into the folder if there is one."""

    def __init__(
        self, folder: Path | None, progress: Progress, kinds: Sequence[str], dpi: int
    ) -> None:
        self.folder, self.progress, self.kinds, self.dpi = folder, progress, kinds, dpi
        self.written: list[Path] = []
        self.start("", "")
        self.count = 0

    def start(self, section: str, prefix: str) -> None:
        """Start a section: its id, and the prefix of its files' names."""
        self.section, self.prefix = section, prefix

    def draw(self, drawn: Plot, narrowest: int = 300, heading: str = "") -> DrawnFigure:
        """Draw a plot; its files have no heading of their own."""
        self.progress(f"drawing {drawn.name}")
        if self.folder is not None:
            plain = replace(drawn, heading="")
            self.written += plot.save(plain, self.folder, self.prefix, self.kinds, self.dpi)
        panels = []
        for panel in drawn.panels:
            self.count += 1
            svg = plot.svg(panel, f"{self.section}-{self.count}")
            panels.append(DrawnPanel(panel, Markup(svg)))
        id = f"{self.section}-{drawn.name}"
        return DrawnFigure(id, drawn.caption, drawn.legend, panels, narrowest, heading)

    def draw_lines(
        self,
        figure: Callable[[Sequence[RunHistory], figures.Looks], Plot],
        runs: Sequence[RunHistory],
        looks: figures.Looks,
    ) -> DrawnFigure | str:
        """Draw a line for each label, unless they are too many."""
        count = len({run.label for run in runs})
        if count > figures.MOST_LINES:
            return f"Not drawn: {count} lines are too many for one figure; see the table."
        return self.draw(figure(runs, looks))


# ---- sections -----------------------------------------------------------------------------------


def _title(given: ReportInput) -> str:
    studies = list(dict.fromkeys(g.study.title for g in given.groups if g.study is not None))
    if len(studies) == 1 and all(g.study is not None for g in given.groups):
        return studies[0]
    tasks = list(dict.fromkeys(g.results[0].config.task for g in given.groups))
    methods = {m for g in given.groups for m in g.methods}
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(tasks)}" if len(tasks) < 5 else f"{what}, {len(tasks)} tasks"


def _joint_groups(groups: Sequence[Group], number: int) -> list[Group]:
    """The groups that left out a domain each and share a table, at the first of them."""
    table = groups[number].table
    own = [g for g in groups if table is not None and g.table is table]
    first = bool(own) and own[0] is groups[number]
    return own if first and all(g.unseen is not None for g in own) else []


def _joint_section(groups: Sequence[Group], painter: Painter, id: str) -> Section:
    """All runs that left out a domain each: every column of the table is another run."""
    table = groups[0].table
    assert table is not None
    painter.start(id, f"{figures.slug(table.task)}-unseen-")
    every = [run for group in groups for run in group.histories]
    looks = looks_of([*every, *(row for row in table.rows if row.method)])
    runs = join_left_out(every)
    made = _table_section(
        id, f"{table.task}: each domain left out in turn", table.rows, looks,
        len(groups[0].seeds), table.baseline, table, groups[0].study, painter,
    )  # fmt: skip
    made.caption = table.caption
    made.ranks = []
    if runs:
        made.curves = painter.draw_lines(figures.curves, runs, looks)
        made.bars = painter.draw(figures.bars(table.rows, looks))
    return made


def _section(group: Group, found: GroupAnalysis, painter: Painter, id: str) -> Section:
    whole = group.table if group.unseen is None else None
    made = _table_section(
        id, group.title, group.rows, group.looks, len(group.seeds), group.baseline, whole,
        group.study, painter,
    )  # fmt: skip
    made.caption = whole.caption if whole is not None else caption(group.results)
    made.curves = painter.draw_lines(figures.curves, group.histories, group.looks)
    made.bars = painter.draw(figures.bars(group.rows, group.looks))
    made.details = Details(
        facts=run_details.facts(group),
        traffic=painter.draw_lines(figures.traffic, group.histories, group.looks),
        analysis=found,
        features=_features(found, painter),
        over_rounds=any(e.title for every in found.embeddings.values() for e in every),
        gaps=_gaps(found),
        confusions=[
            painter.draw(figures.confusions(label, counts, found.classes), 250, label)
            for label, counts in found.confusions.items()
        ],
        clusters=[
            painter.draw(figures.clusters(label, rounds, found.distances[label]), 290, label)
            for label, rounds in found.clusters.items()
        ],
        missing={
            part: found.reasons(part, group.methods)
            for part in ("features", "confusion", "clusters")
        },
        clients=run_details.clients(group),
        runs=run_details.run_table(group),
        settings=run_details.settings(group),
    )
    made.parts = [("sweep", "Parameters")] * bool(made.sweeps) + list(_PARTS)
    return made


_PARTS = (
    ("table", "Table"), ("over-rounds", "Over rounds"), ("by-domain", "By domain"),
    ("traffic", "Bytes"), ("features", "Features"), ("confusion", "Confusions"),
    ("clusters", "Prototypes"), ("clients", "Clients"), ("configuration", "Configuration"),
)  # fmt: skip


def _table_section(
    id: str,
    title: str,
    rows: Sequence[TableRow],
    looks: dict[str, Look],
    seeds: int,
    baseline: str,
    table: TaskTable | None,
    study: Study | None,
    painter: Painter,
) -> Section:
    """The parts of a section that come from its table."""
    return Section(
        id=id,
        title=title,
        headline=headline(rows, seeds, baseline),
        ranks=_ranks(rows, looks),
        table=result_table(rows, looks, table.columns if table is not None else (), baseline),
        seeds=seeds,
        baseline=baseline_name(baseline),
        printed=any(row.paper for row in rows),
        notes=table.notes if table is not None else (),
        caption="",
        sweeps=[painter.draw(plot) for plot in _sweeps(study, table)],
        curves=None,
        bars=None,
    )


def _sweeps(study: Study | None, table: TaskTable | None) -> list[Plot]:
    if study is None or table is None:
        return []
    found = (figures.sweep(study, i, table) for i in range(len(study.sweeps)))
    return [plot for plot in found if plot is not None]


def headline(rows: Sequence[TableRow], seeds: int, baseline: str = BASELINE) -> Headline | None:
    """The main result; None as long as no row is complete."""
    there = [r for r in rows if r.accuracy]
    if not there:
        return None
    main = there[0].main
    best = max(there, key=lambda r: r.accuracy[main].mean)
    domains = {d: s.mean for d, s in best.accuracy.items() if d != "average"}
    hardest = min(domains, key=lambda d: domains[d])
    scope = f"on average over {len(domains)} domains"
    if best.unseen == EACH:
        scope += ", each by models trained without it"
    elif main != "average":
        scope = f"on {main}, which no client has"
    difference = best.differences.get(main)
    printed = best.paper.get(main)
    warning = seed_warning(min(seeds, best.seeds)).strip(" ()")
    return Headline(
        label=best.label,
        mean=best.accuracy[main].mean,
        scope=scope,
        alone=len(there) == 1,
        is_baseline=best.label == baseline,
        baseline=baseline_name(baseline),
        difference=difference.mean if difference is not None else None,
        half=difference.half if difference is not None else None,
        noise=difference is not None and difference.noise,
        hardest=(hardest, domains[hardest]) if main == "average" else None,
        printed=None if printed is None or math.isnan(printed) else printed,
        warning=warning[:1].upper() + warning[1:],
    )


def _ranks(rows: Sequence[TableRow], looks: dict[str, Look]) -> list[Rank]:
    """The rows from the best down."""
    there = [(row, row.accuracy[row.main]) for row in rows if row.accuracy]
    there.sort(key=lambda pair: -pair[1].mean)
    return [Rank(row.label, s.mean, s.std, looks[row.label]) for row, s in there[:MOST_RANKS]]


def _features(found: GroupAnalysis, painter: Painter) -> list[DrawnFigure]:
    drawn = []
    for label, embeddings in found.embeddings.items():
        for embedding in embeddings:
            heading = " · ".join(filter(None, (label, embedding.title)))
            plot = figures.embedding(label, embedding, found.classes)
            drawn.append(painter.draw(plot, 330, heading))
    return drawn


def _gaps(found: GroupAnalysis) -> PageTable | None:
    if not found.gaps:
        return None
    header = ("method", "between domains", "between classes", "ratio", "domain probe, %")
    rows: list[list[Any]] = [
        [label, f"{g.distance:.3f}", f"{g.classes:.3f}", f"{g.ratio:.2f}", f"{g.probe:.1f}"]
        for label, g in found.gaps.items()
    ]
    return PageTable.of(header, rows, kind="narrow")
