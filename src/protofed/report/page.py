"""The report: one HTML page that loads nothing from elsewhere.

This module collects what the page shows; ``templates/`` has the HTML, where every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from protofed.config import EACH, shown_task
from protofed.files import write_atomic
from protofed.report import figures, plot, run_details
from protofed.report.collect import Group, Progress, ReportInput
from protofed.report.group_analysis import analyze
from protofed.report.page_table import (
    PageTable,
    cells,
    cost_table,
    effect_table,
    result_table,
)
from protofed.report.palette import STYLES, TONES
from protofed.report.plot import Plot
from protofed.report.stored_analysis import PARTS, GroupAnalysis
from protofed.runs.records import VALIDATION
from protofed.studies import tables
from protofed.studies.effects import Effects
from protofed.studies.history import RunHistory, join_left_out
from protofed.studies.tables import BASELINE, Spread, TableRow
from protofed.version import __version__

MOST_SKIPPED = 8
"""How many skipped folders are listed at most."""
MOST_RANKS = 12
MOST_EFFECTS = 3


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
        if joint := _joint_group(given.groups, number):
            painter.section, painter.prefix = f"t{number}", f"{figures.slug(joint.title)}-unseen-"
            made = _section(joint, join_left_out(joint.histories), painter)
            made["title"] += ": each domain left out in turn"
            sections.append(made | {"ranks": []})
        painter.section = f"g{number}"
        painter.prefix = f"{figures.slug(group.title)}-" if many else ""
        found = analyze(group, images, progress)
        sections.append(_section(group, group.histories, painter) | _details(group, found, painter))
    versions = given.groups[0].results[0].summary.get("versions", {})
    template = environment().get_template("report.html.j2")
    text = template.render(
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


@dataclass(frozen=True)
class DrawnFigure:
    """A figure on the page; ``narrowest`` is the width in pixels below which panels wrap."""

    id: str
    plot: Plot
    svgs: Sequence[Markup]
    narrowest: int
    heading: str


@dataclass
class Painter:
    """Draws figures for the page, and into the folder if there is one."""

    folder: Path | None
    progress: Progress
    kinds: Sequence[str]
    dpi: int
    section: str = ""
    """The id of the section being drawn."""
    prefix: str = ""
    """That of the names of its files."""
    count: int = 0
    names: set[str] = field(default_factory=set)
    written: list[Path] = field(default_factory=list)

    def draw(self, drawn: Plot, narrowest: int = 300, heading: str = "") -> DrawnFigure:
        """Draw a plot; its files have no heading of their own."""
        # labels that differ may be alike in the name of a file, such as τ=0.1 and τ=-0.1
        first = figures.file_name(drawn.name)
        names = chain([first], (f"{first}-{n}" for n in count(2)))
        name = next(n for n in names if f"{self.prefix}{n}" not in self.names)
        self.names.add(f"{self.prefix}{name}")
        drawn = replace(drawn, name=name)
        self.progress(f"drawing {name}")
        if self.folder is not None:
            plain = replace(drawn, heading="")
            self.written += plot.save(plain, self.folder, self.prefix, self.kinds, self.dpi)
        svgs = []
        for panel in drawn.panels:
            self.count += 1
            svgs.append(Markup(plot.svg(panel, f"{self.section}-{self.count}")))
        return DrawnFigure(f"{self.section}-{name}", drawn, svgs, narrowest, heading)

    def draw_lines(
        self,
        figure: Callable[[Sequence[RunHistory], figures.Looks], Plot],
        runs: Sequence[RunHistory],
        looks: figures.Looks,
    ) -> DrawnFigure | str:
        """Draw a line for each label, or say that they are too many."""
        return too_many({run.label for run in runs}, "lines") or self.draw(figure(runs, looks))


def too_many(labels: Collection[str], what: str) -> str:
    """A note if a figure would show more than can be told apart; otherwise empty."""
    if len(labels) <= figures.MOST_LINES:
        return ""
    return f"Not drawn: {len(labels)} {what} are too many for one figure; see the table."


# ---- what the templates show --------------------------------------------------------------------


def _title(given: ReportInput) -> str:
    studies = {g.study.title if g.study is not None else None for g in given.groups}
    if len(studies) == 1 and (study := studies.pop()) is not None:
        return study
    tasks = list(dict.fromkeys(shown_task(g.results[0].config.task) for g in given.groups))
    methods = {m for g in given.groups for m in g.methods}
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(tasks)}" if len(tasks) < 5 else f"{what}, {len(tasks)} tasks"


def _joint_group(groups: Sequence[Group], number: int) -> Group | None:
    """The groups that left out a domain each and share a table, at the first of them."""
    first = groups[number]
    own = [g for g in groups if g.table is first.table]
    if first.table is None or own[0] is not first or any(g.unseen is None for g in own):
        return None
    results = tuple(run for group in own for run in group.results)
    return Group(first.table.task, results, first.study, first.table)


def _section(group: Group, runs: Sequence[RunHistory], painter: Painter) -> dict[str, Any]:
    """A table and its figures."""
    rows, looks, baseline = group.rows, group.looks, group.baseline
    seeds = len(group.seeds)
    table = group.table if group.unseen is None else None
    sweeps = figures.sweeps(group.study, table) if group.study and table else []
    swept = group.study is not None and bool(group.study.sweeps)
    crowded = too_many([row.label for row in rows if row.accuracy], "bars")
    # which of many settings is best says nothing, and their names fill a screen
    effects = table is not None and bool(table.effects)
    return {
        "id": painter.section,
        "title": group.title,
        "headline": largest_effects(table.effects)
        if table is not None and effects
        else headline(rows, seeds, baseline, swept),
        "ranks": [] if effects else _ranks(rows, looks),
        "ranked": all(row.was_run for row in rows),
        "validated": any(VALIDATION in row.beside for row in rows),
        "table": result_table(rows, looks, table.columns if table is not None else (), baseline),
        "effects": effect_table(table) if table is not None and table.effects else None,
        "costs": cost_table(rows, looks, baseline) if runs else None,
        "seeds": seeds,
        "baseline": tables.baseline_name(baseline),
        "printed": any(row.paper for row in rows),  # the table has the paper's numbers
        "notes": table.notes if table is not None else (),
        "caption": table.caption
        if table is not None
        else tables.caption(group.results, baseline, group.last_rounds),
        "sweeps": [painter.draw(plot) for plot in sweeps],
        "sweep_title": "Over parameters" if swept else f"Differences to {baseline}",
        "sweep_link": "Parameters" if swept else "Differences",
        "curves": painter.draw_lines(figures.curves, runs, looks) if runs else None,
        "bars": (crowded or painter.draw(figures.bars(rows, looks))) if runs else None,
        "details": None,
    }


def _details(group: Group, found: GroupAnalysis, painter: Painter) -> dict[str, Any]:
    """What only the section of a single group has."""
    embeddings = [(label, e) for label, own in found.embeddings.items() for e in own]
    details = {
        "facts": run_details.facts(group),
        "traffic": painter.draw_lines(figures.traffic, group.histories, group.looks),
        "analysis": found,
        "features": [
            painter.draw(
                figures.embedding(label, embedding, found.classes),
                330,
                f"{label} · {embedding.title}" if embedding.title else label,
            )
            for label, embedding in embeddings
        ],
        "over_rounds": any(embedding.title for _, embedding in embeddings),
        "gaps": _gaps(found),
        "confusions": [
            painter.draw(figures.confusions(label, counts, found.classes), 250, label)
            for label, counts in found.confusions.items()
        ],
        "clusters": [
            painter.draw(figures.clusters(label, rounds, found.distances[label]), 290, label)
            for label, rounds in found.clusters.items()
        ],
        "missing": {part: found.reasons(part, group.methods) for part in PARTS},
        "clients": run_details.clients(group),
        "runs": run_details.run_table(group),
        "settings": run_details.settings(group),
    }
    return {"details": details}


def largest_effects(found: Sequence[Effects]) -> str:
    """The main result of a study of switches: what moves the accuracy most."""
    clear = [
        (abs(s.mean), f"{e.label}, {name}: {s.mean:+.1f} ± {s.half:.1f}")
        for e in found
        for name, s in e.of.items()
        if not e.baseline and not s.noise
    ]
    largest = "; ".join(text for _, text in sorted(clear, reverse=True)[:MOST_EFFECTS])
    if not largest:
        return "No effect has a 95 % interval without 0."
    return f"The largest effects, in points, with their 95 % intervals: {largest}."


def headline(
    rows: Sequence[TableRow], seeds: int, baseline: str = BASELINE, swept: bool = False
) -> dict[str, Any] | None:
    """The main result, and how far to trust it; None until a row is complete.

    Until all rows have been run, no row is called the best, and never one that lacks seeds. Where
    there is a validation accuracy, it alone says which is best. ``swept``: the rows are settings.
    """
    every = [r for r in rows if r.accuracy]
    if not every:
        return None
    enough, there = tables.comparable(every), _ranking(every)
    best, main = there[0], there[0].main
    validated = VALIDATION in best.beside
    equal = [r.label for r in there if r.accuracy[main].mean == best.accuracy[main].mean]
    domains = {d: s.mean for d, s in best.accuracy.items() if d != "average"}
    scope = f"on average over {len(domains)} domains"
    if best.unseen == EACH:
        scope += ", each by models trained without it"
    elif main != "average":
        scope = f"on {main}, which no client has"
    printed = best.paper.get(main)
    warning = tables.seed_warning(min(seeds, best.seeds)).strip(" ()")
    return {
        "label": best.label,
        "validated": validated,
        "by_test": swept and not validated,
        "equal": [] if validated else equal[1:],
        "mean": best.accuracy[main].mean,
        "scope": scope,
        "alone": len(there) == 1,
        "some": "" if all(r.was_run for r in rows) else f"{len(every)} of {len(rows)} rows",
        "values": [(r.label, r.accuracy[r.main].mean) for r in every],
        "unranked": [r.label for r in every if r not in enough and r.unseen == best.unseen],
        "is_baseline": best.label == baseline,
        "baseline": tables.baseline_name(baseline),
        "difference": best.differences.get(main),
        "hardest": min(domains.items(), key=lambda d: d[1]) if main == "average" else None,
        "printed": None if printed is None or math.isnan(printed) else printed,
        "warning": warning[:1].upper() + warning[1:],
    }


def _ranking(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows that may be ranked, from the best down: by validation accuracy if there is one."""
    there = tables.comparable(rows)
    validated = [r for r in there if VALIDATION in r.beside]
    if validated:
        return sorted(validated, key=lambda r: -r.beside[VALIDATION].mean)
    return sorted(there, key=lambda r: -r.accuracy[there[0].main].mean)


def _ranks(rows: Sequence[TableRow], looks: figures.Looks) -> list[tuple[str, Spread, str]]:
    """Label, accuracy and color of the rows that may be ranked, from the best down."""
    found = _ranking(rows)[:MOST_RANKS]
    return [(r.label, r.accuracy[r.main], looks[r.label].color) for r in found]


def _gaps(found: GroupAnalysis) -> PageTable | None:
    if not found.gaps:
        return None
    header = ("method", "between domains", "between classes", "ratio", "domain probe, %")
    rows = [
        [label, f"{g.distance:.3f}", f"{g.classes:.3f}", f"{g.ratio:.2f}", f"{g.probe:.1f}"]
        for label, g in found.gaps.items()
    ]
    return PageTable(header, cells(rows), kind="narrow")
