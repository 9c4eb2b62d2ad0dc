"""A run in a few lines of text, with sparklines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.markup import escape

from protofed.errors import ProtofedError
from protofed.models.mixed import model_names
from protofed.observers.progress import duration
from protofed.runs.folder import RunFolder
from protofed.runs.records import LAST, SELECTION, beside, last_mean, shown
from protofed.runs.result import no_folder

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48


def sparkline(values: Sequence[float], low: float, high: float, width: int = WIDTH) -> str:
    """Values as blocks of eight heights between ``low`` and ``high``; long ones are thinned."""
    if len(values) > width:  # means of as many neighbors as needed
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    scale = (high - low) or 1.0
    steps = len(BLOCKS) - 1
    return "".join(
        BLOCKS[min(steps, max(0, round((v - low) / scale * steps)))] if v == v else " "
        for v in values
    )


def lines(folder: Path) -> list[str]:
    run = RunFolder(folder)
    if not run.exists:
        if not folder.is_dir():
            raise no_folder(folder)
        if (folder / "study.toml").is_file():
            raise ProtofedError(f"'{folder}' is a study's folder", f"protofed study table {folder}")
        raise ProtofedError(f"'{folder}' is not a run's folder")
    config, records = run.settings(), run.records()
    summary = run.summary() if run.is_finished() else {}
    found = {**config, **run.facts(), **summary}
    options = ", ".join(f"{k}={v}" for k, v in config.get("options", {}).items())
    text = [
        f"[bold]{escape(config['method'])}[/bold] on [bold]{escape(config['task'])}[/bold], seed "
        f"{config['seed']}, protocol {config['protocol']}, "
        f"{' and '.join(model_names(config['model']))}"
        + (f"  [dim]{escape(options)}[/dim]" if options else "")
    ]
    done, asked = len(records), config["rounds"]
    state = " (stopped early)" if done < asked else ""
    if not summary:
        resume = f"protofed run --config {folder / 'config.toml'} --out {folder} --resume"
        state = f" [yellow](not finished: {escape(resume)})[/yellow]"
    if not records:
        return [*text, f"none of the {asked} rounds is complete"]
    up, down = (sum(r.get(k, 0) for r in records) / 1e6 for k in ("bytes_up", "bytes_down"))
    seconds = sum(sum(r.get("seconds", {}).values()) for r in records)
    text.append(
        f"{done} of {asked} rounds{state}, {duration(seconds)}, {up:.1f} MB up, {down:.1f} MB "
        f"down, {found.get('precision')} on {found.get('device')}"
    )
    unseen = config.get("leave_out")
    last = shown(last_mean(records), unseen)
    rounds = [shown({**r["accuracy"], "average": r["average"]}, unseen) for r in records]
    columns = {name: [r[name] for r in rounds] for name in last}
    for name in beside(records[-1]):
        columns[name] = [beside(r)[name] for r in records]
        last[name] = fmean(columns[name][-LAST:])
    main = "average" if "average" in columns else next(iter(columns))
    # a deployment's domain is NaN in rounds in which no site measured it
    every = [v for column in columns.values() for v in column if not math.isnan(v)]
    low, high = min(every, default=0.0), max(every, default=0.0)
    width = max(map(len, columns))
    text.append("")
    for name, column in columns.items():
        style = "bold" if name == main else "default"
        text.append(
            f"  [{style}]{escape(name):<{width}}[/]  {sparkline(column, low, high)}  "
            f"[{style}]{last[name]:5.1f}[/]  [dim]{column[0]:.1f} → {column[-1]:.1f}[/dim]"
        )
    losses = [sum(r["loss"].values()) for r in records if "loss" in r]
    if losses:
        curve = sparkline(losses, min(losses), max(losses))
        text.append(
            f"  {'loss':<{width}}  {curve}         [dim]{losses[0]:.3g} → {losses[-1]:.3g}[/dim]"
        )
    scale = f"blocks from {low:.0f} to {high:.0f}; numbers: {SELECTION}"
    text.append(f"\n[dim]% correct, {scale}[/dim]")
    if summary:
        per: dict[str, list[int]] = {}
        for client in summary.get("clients", []):
            per.setdefault(client["domain"], []).append(client["samples"])
        held = ", ".join(f"{d} {len(n)} × {sum(n) / len(n):.0f}" for d, n in per.items())
        engine = escape(summary.get("engine", "?"))
        text.append(f"[dim]clients × samples: {escape(held)}; engine {engine}[/dim]")
    return text
