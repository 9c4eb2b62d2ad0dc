"""The figures of a study, as files in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from protofed.config import EACH
from protofed.report import figures, plot
from protofed.report.palette import looks_of
from protofed.report.plot import Plot
from protofed.report.tuning import tuning
from protofed.studies.definition import DIFFERENCES, TUNE, Line, Study
from protofed.studies.folder import StudyFolder, TaskTable
from protofed.studies.history import RunHistory


def write_figures(
    folder: StudyFolder,
    tables: Sequence[TaskTable],
    kinds: Sequence[str] = plot.KINDS,
    dpi: int = plot.DPI,
) -> list[str]:
    """Draw the figures that a study asks for into its folder; returns the names of their files.

    A sweep is drawn over its parameters, not over rounds.
    """
    names: list[str] = []

    def save(drawn: Plot) -> None:
        saved = plot.save(drawn, folder.path, kinds=kinds, dpi=dpi)
        names.extend(path.name for path in saved)

    if folder.study.kind == DIFFERENCES:
        if any(figures.gains(table) for table in tables):
            save(figures.differences(tables, folder.study.title))
        return names
    for table in tables:
        if not table.runs:
            continue
        runs = [] if folder.study.sweeps else folder.histories(table.task)
        one = len({run.task for run in folder.runs}) == 1
        suffix = "" if one else f"-{table.task}"
        for drawn in _plots(folder.study, table, runs, folder.choices(table.task)):
            save(replace(drawn, name=figures.file_name(f"{drawn.name}{suffix}")))
    return names


def _plots(
    study: Study, table: TaskTable, runs: Sequence[RunHistory], choices: Sequence[Line]
) -> list[Plot]:
    made = []
    title = figures.study_heading(study, table)
    if study.kind == TUNE:
        swept = any(line.sweep is not None for line in choices)
        return [tuning(study, table.rows, choices, title)] if swept else []
    looks = looks_of([*runs, *(row for row in table.rows if row.method)])
    if runs:
        # only runs that left out the same domain, or none, can share a figure
        alike = [run for run in runs if run.unseen == runs[0].unseen]
        left_out = ", each domain left out in turn" if alike[0].unseen == EACH else ""
        seeds = sorted({run.seed for run in alike})
        counts = sorted(Counter(run.label for run in alike).values())
        few = f"{counts[0]} to " if counts[0] < counts[-1] else ""
        shown = f"{few}{counts[-1]} seeds (band: their range)"
        if len(seeds) == 1:
            shown = f"seed {seeds[0]}"
        made.append(figures.curves(alike, looks, f"{title}{left_out}, {shown}"))
    if study.kind == "bars":
        made.append(replace(figures.bars(table.rows, looks, title), name="bars"))
    return made + figures.sweeps(study, table)
