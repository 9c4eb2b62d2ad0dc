"""``protofed tasks``: the tasks and where their images are."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from protofed.cli.output import console
from protofed.config import TASK_PROTOCOL
from protofed.data import TASKS, DataMissing, describe, load_task
from protofed.data.locate import locate
from protofed.data.sources import PUBLISHED


def tasks() -> None:
    """List the tasks: domains, classes, images, and the clients they are split into.

    Image counts are the published ones; protofed data show TASK counts the images on disk.
    """
    for name in TASKS:
        info, published = describe(name), PUBLISHED.get(name)
        assert info.domains and info.classes and info.clients and info.samples
        console.print(
            f"[bold]{name}[/bold]: {len(info.classes)} classes, {info.image_size}×"
            f"{info.image_size} pixels, protocol {TASK_PROTOCOL[name]}. {escape(info.about)}"
        )
        if published is not None:
            counts = dict(published.counts)
        else:
            made = load_task(name).domains
            counts = {d: (len(images.train), len(images.test)) for d, images in made.items()}
        table = Table("domain", "training", "test", "clients", "samples each", box=None)
        for domain in info.domains:
            row = (*counts[domain], info.clients[domain])
            samples = info.samples[domain]  # a count, or a fraction of the training images
            each = str(samples) if isinstance(samples, int) else f"{samples:.0%}"
            table.add_row(domain, *map(str, row), each)
        console.print(table)
        if published is not None:
            try:
                where = f"files: {locate(published)[0]}"
            except DataMissing:
                where = f"files: none yet; {published.fetch_hint}"
            console.print(f"[dim]{escape(where)}[/dim]", highlight=False, soft_wrap=True)
    console.print("[bold]folder:PATH[/bold]: your own images, in a tree domain/class/image.")
