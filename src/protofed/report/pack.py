"""A study as it is kept in a repository: a few small files, without models and images.

    study.toml        its definition
    runs.jsonl.gz     a line for each run: config, facts, summary, rounds, and for the first seed of
                      each row that had its model, what a report shows of it
    table.md          its tables
    curves*.png ...   its figures; with kind = "tsne" also those of models and prototypes

Tables and the report are made again from it: ``protofed study table``, ``protofed report``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protofed.config import shown_task
from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.report import figures, plot, stored_analysis
from protofed.report.collect import Progress, collect
from protofed.report.group_analysis import analyze, analyzed_run
from protofed.report.study_figures import write_figures
from protofed.runs.pool import PACKED, write_packed
from protofed.studies.definition import Study
from protofed.studies.folder import StudyFolder, to_text
from protofed.studies.tables import DIVERGED

DPI = 160
"""The figures' resolution, for a screen; ``protofed report`` makes them for a paper."""


@dataclass(frozen=True)
class Packed:
    """What was packed: the number of runs, and bytes in all."""

    runs: int
    size: int


def pack(
    source: Path, to: Path, images: int = 500, progress: Progress = lambda text: None
) -> Packed:
    """Pack a study; ``images``: see ``protofed report``.

    Its models are analyzed here, for the last time. A packed study in the same place is replaced.
    """
    folder = StudyFolder.open(source)
    if to.resolve() == source.resolve():
        raise ProtofedError("a study cannot be packed into itself", "choose another --to")
    if to.is_dir() and any(to.iterdir()) and not (to / PACKED).is_file():
        raise ProtofedError(f"'{to}' is not empty and holds no packed study", "choose another --to")
    stored = {run.hash: run for run in folder.runs.values() if run is not None}
    if not stored:
        raise ProtofedError(f"'{source}' has no finished run to pack", "protofed study run NAME")
    rows = [(table.task, row) for table in folder.tables() for row in table.rows]
    diverged: dict[str, list[str]] = {}
    for task, row in rows:
        if row.state == DIVERGED:
            diverged.setdefault(task, []).append(row.label)
    analyses = _analyses(source, images, progress)
    lines = []
    for run in stored.values():
        progress(f"packing {run.name}")
        lines.append(run.line(analyses.get(run.hash)))
    # no earlier packing is removed before everything has been read: it may be the only copy
    write_packed(to / PACKED, lines)
    for path in to.glob("*.png"):
        path.unlink()
    write_atomic(to / "study.toml", _anywhere(folder.study, diverged).toml())
    packed = StudyFolder.open(to)
    tables = packed.tables()
    write_atomic(to / "table.md", to_text(packed.study, tables, "markdown"))
    write_figures(packed, tables, kinds=("png",), dpi=DPI)
    if packed.study.kind == "tsne":
        _draw_analyses(to, images, progress)
    return Packed(len(lines), sum(path.stat().st_size for path in to.iterdir()))


def _analyses(source: Path, images: int, progress: Progress) -> dict[str, dict[str, object]]:
    """What a report shows of models: for each row the first seed that has its model."""
    found = {}
    for group in collect([source]).groups:
        analysis = analyze(group, images, progress)
        for label, runs in group.methods.items():
            if plain := stored_analysis.to_plain(analysis, label):
                found[str(analyzed_run(runs).summary["hash"])] = plain
    return found


def _draw_analyses(to: Path, images: int, progress: Progress) -> None:
    """The t-SNE and the clusters of a packed study whose figure they are."""
    groups = collect([to]).groups
    for group in groups:
        prefix = f"{figures.slug(group.title)}-" if len(groups) > 1 else ""
        found = analyze(group, images, progress)
        drawn = [
            figures.embedding(label, embedding, found.classes)
            for label, own in found.embeddings.items()
            for embedding in own
        ]
        drawn += [
            figures.clusters(label, rounds, found.distances[label])
            for label, rounds in found.clusters.items()
        ]
        for each in drawn:
            plot.save(each, to, prefix=prefix, kinds=("png",), dpi=DPI)


def _anywhere(study: Study, diverged: Mapping[str, list[str]]) -> Study:
    """The study without the folders its images and runs were in: they cannot change a number.

    Runs that diverged are not packed; the study says which lines have some.
    """
    raw = {k: v for k, v in study.raw.items() if k not in ("pool", "diverged")}
    if diverged:
        raw["diverged"] = diverged
    if "settings" in raw:
        raw["settings"] = _without_data(raw["settings"])
    shown = _shown_tasks(study)
    if "override" in raw:
        settings = _without_data(study.override.get("settings", {}))
        override = {**study.override, "settings": settings}
        if "on" in override:
            override["on"] = shown[override["on"]]
        raw["override"] = {k: v for k, v in override.items() if v}
    if "tasks" in raw:
        raw["tasks"] = {
            name: {**task, "task": shown[task["task"]]} if "task" in task else task
            for name, task in raw["tasks"].items()
        }
    if "images" in raw:
        raw["images"] = {shown[t]: own for t, own in raw["images"].items() if t in shown}
    if "methods" in raw:
        raw["methods"] = {
            name: {
                **file,
                "defaults": {shown[t]: own for t, own in file["defaults"].items() if t in shown},
            }
            for name, file in raw["methods"].items()
        }
    return replace(study, raw=raw)


def _shown_tasks(study: Study) -> dict[str, str]:
    """By task, what a packed study calls it; two folders of one name stay two tasks."""
    named = [(name, task.task) for name, task in study.tasks.items()]
    named += [("on", study.override["on"])] if "on" in study.override else []
    found: dict[str, str] = {}
    for name, task in named:
        if task not in found:
            shown = shown_task(task)
            taken = shown in found.values()
            found[task] = shown.replace(":", f":{name}/", 1) if taken else shown
    return found


def _without_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "data"}
