"""``protofed tasks``: the tasks and where their images are."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from protofed.cli.output import console


def tasks() -> None:
    """List the tasks: domains, classes, images, and the clients they are split into.

    Images are counted as published; protofed data show TASK counts those that are there.
    """
    from protofed.config import TASK_PROTOCOL
    from protofed.data import TASKS, DataMissing, describe, official_counts, where

    for name in TASKS:
        info = describe(name)
        domains, clients, samples = info.domains or (), info.clients or {}, info.samples or {}
        console.print(
            f"[bold]{name}[/bold]: {len(info.classes or ())} classes, {info.image_size}×"
            f"{info.image_size} pixels, protocol {TASK_PROTOCOL[name]}. {escape(info.about)}"
        )
        table = Table("domain", "training", "test", "clients", "samples each", box=None)
        counts = official_counts(name)
        for domain in domains:
            row = (*counts[domain], clients[domain])
            table.add_row(domain, *map(str, row), f"{samples[domain]:g}")
        console.print(table)
        try:
            if place := where(name):
                console.print(f"[dim]files: {escape(str(place))}[/dim]", highlight=False)
        except DataMissing:
            console.print(f"[dim]not found, protofed data fetch {name}[/dim]", highlight=False)
    console.print("[bold]folder:PATH[/bold]: any tree domain/class/image of your own.")
