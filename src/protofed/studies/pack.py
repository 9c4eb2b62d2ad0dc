"""A study as it is kept in a repository: small, without models and images, with its report.

    study.toml, index-*.json    as in the study's own folder
    <run>/                      config.toml, summary.json, clients.json, rounds.jsonl.gz, and of
                                each row's first seed that had its model analysis.json.gz: what the
                                report shows of it
    table.md .csv .tex          the tables
    report.html, figures/*.png  the report and its figures

All of it can be made again from the copy: ``protofed study table``, ``protofed report``.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from protofed.errors import ProtofedError
from protofed.files import write_atomic
from protofed.runs.finished import read_finished, read_settings, read_summary
from protofed.runs.records import line
from protofed.studies import plan
from protofed.studies.definition import Study
from protofed.studies.folder import (
    finished,
    make_tables,
    open_study,
    read_index,
    write_study,
    write_tables,
)

DPI = 100
"""Of the figures: for a screen; ``protofed report`` makes them for a paper."""


@dataclass(frozen=True)
class Packed:
    """What was packed: runs, and bytes in all and of the report."""

    runs: int
    size: int
    report: int


def pack(
    folder: Path, to: Path, images: int = 500, tell: Callable[[str], None] = lambda text: None
) -> Packed:
    """Copy a study to keep it; ``images``: see ``protofed report``.

    Models are looked into here, for the last time. A folder that was packed before is replaced.
    """
    from protofed.report.collect import collect  # matplotlib is slow to import
    from protofed.report.group_analysis import store_analyses
    from protofed.report.page import write_report

    study, index = open_study(folder), read_index(folder)
    if to.resolve() == folder.resolve():
        raise ProtofedError("a study cannot be packed into itself", "choose another --to")
    runs: dict[str, Path] = {}
    for cell in plan.cells(study):
        if (run := finished(index.get(cell.key, ()))) is not None:
            runs[cell.key] = run
    if not runs:
        raise ProtofedError(f"'{folder}' has no finished run to pack", "protofed study run NAME")
    packed = {}
    for run in dict.fromkeys(runs.values()):
        tell(f"packing {run.name}")
        packed[run.name] = _packed_run(run)
    _clear(to)  # not before all could be read: what is there may be the only copy
    for name, files in packed.items():
        for file, content in files.items():
            write_atomic(to / name / file, content)
    write_study(_anywhere(study), to, {key: to / run.name for key, run in runs.items()})
    store_analyses(folder, to, images, tell)
    kept = open_study(to)
    write_tables(kept, to, make_tables(kept, to))
    page = to / "report.html"
    write_report(collect([to]), page, to / "figures", progress=tell, kinds=("png",), dpi=DPI)
    size = sum(file.stat().st_size for file in to.rglob("*") if file.is_file())
    return Packed(len(set(runs.values())), size, page.stat().st_size)


def _clear(to: Path) -> None:
    """Remove what was packed there before, and nothing else."""
    if to.is_dir() and any(to.iterdir()) and not (to / "study.toml").is_file():
        raise ProtofedError(f"'{to}' is not empty and holds no study", "choose another --to")
    if any(to.glob("*/model.safetensors")) or any(to.glob("*.claim*")):
        raise ProtofedError(f"'{to}' holds a study with its models", "choose another --to")
    for path in to.glob("*/config.toml"):
        shutil.rmtree(path.parent)
    shutil.rmtree(to / "figures", ignore_errors=True)
    for pattern in ("index-*.json", "table.*", "report.html"):
        for path in to.glob(pattern):
            path.unlink()


def _packed_run(run: Path) -> dict[str, str | bytes]:
    """The files that are kept of a run."""
    files: dict[str, str | bytes] = {}
    for name in ("config.toml", "summary.json", "clients.json"):
        if (run / name).is_file():
            text = (run / name).read_text("utf-8")
            if name == "config.toml":  # where the images lay on the machine that ran it
                text = "".join(s for s in text.splitlines(True) if not s.startswith("data = "))
            files[name] = text
    read_summary(run), read_settings(run)  # errors, if they are damaged
    text = "".join(map(line, read_finished(run)))
    files["rounds.jsonl.gz"] = gzip.compress(text.encode(), mtime=0)  # the same bytes every time
    return files


def _anywhere(study: Study) -> Study:
    """The study without the folder its images lay in: that cannot change a number."""
    given = study.override.get("settings", {})
    if "data" not in given:
        return study
    override = {**study.override, "settings": {k: v for k, v in given.items() if k != "data"}}
    return replace(study, raw={**study.raw, "override": override})
