"""The figures of a study, as files in its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.config import EACH
from protofed.report import figures, plot
from protofed.report.palette import looks_of
from protofed.report.plot import Plot
from protofed.studies.definition import Study
from protofed.studies.folder import StudyFolder, TaskTable
from protofed.studies.history import RunHistory


def write_figures(folder: StudyFolder, tables: Sequence[TaskTable], **how: Any) -> list[str]:
    """Draw a study's figures into its folder; returns the names of their files."""
    study = folder.study
    runs = {} if study.sweeps else {t.task: folder.histories(t.task) for t in tables if t.runs}
    return study_figures(study, tables, runs, folder.path, **how)


def study_figures(
    study: Study,
    tables: Sequence[TaskTable],
    runs: Mapping[str, Sequence[RunHistory]],
    folder: Path,
    kinds: Sequence[str] = plot.KINDS,
    dpi: int = plot.DPI,
) -> list[str]:
    """Draw the figures that the study asks for; returns the names of their files.

    ``runs`` has the runs of each task. A sweep is drawn over its parameters, not over rounds.
    """
    names = []
    for table in tables:
        if not table.runs:
            continue
        suffix = "" if len(tables) == 1 else "-" + re.sub(r"[^\w.-]+", "-", table.task)
        for drawn in _plots(study, table, runs.get(table.task, ())):
            named = replace(drawn, name=f"{drawn.name}{suffix}")
            names += [path.name for path in plot.save(named, folder, kinds=kinds, dpi=dpi)]
    return names


def _plots(study: Study, table: TaskTable, runs: Sequence[RunHistory]) -> list[Plot]:
    made = []
    title = figures.study_heading(study, table)
    looks = looks_of([*runs, *(row for row in table.rows if row.method)])
    if runs and not study.sweeps:
        # only runs that left out the same domain, or none, can share a figure
        alike = [run for run in runs if run.unseen == runs[0].unseen]
        left_out = ", each domain left out in turn" if alike[0].unseen == EACH else ""
        seeds = sorted({run.seed for run in alike})
        shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds (band: their range)"
        heading = f"{title}{left_out}, {shown}"
        made.append(figures.curves(alike, looks, heading))
    if study.kind == "bars":
        made.append(replace(figures.bars(table.rows, looks, title), name="bars"))
    sweeps = (figures.sweep(study, i, table) for i in range(len(study.sweeps)))
    return made + [drawn for drawn in sweeps if drawn is not None]
