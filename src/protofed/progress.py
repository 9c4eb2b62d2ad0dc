"""What a person sees while something runs: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from protofed.federation.records import Record, Records
from protofed.federation.run import Federation, Observer, Result


def accuracies(record: Mapping[str, object]) -> str:
    """``scan 84.0  print 41.5 ... average 44.5``."""
    per_domain = record["accuracy"]
    assert isinstance(per_domain, Mapping)
    shown = {**per_domain, "average": record["average"]}
    return "  ".join(f"{d} {a:.1f}" for d, a in shown.items())


def duration(seconds: float) -> str:
    """``8 s``, ``3:20 min``, ``2:05 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"


class RunProgress(Observer):
    """Round, clients of the round, accuracy per domain, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal

    def start(self, federation: Federation, records: Records) -> None:
        """Say what runs, and show the bar."""
        config = federation.config
        self.rounds, self.first = config.rounds, len(records)
        self.began = time.perf_counter()
        clients = ", ".join(f"{d} {n}" for d, n in config.clients.items() if n)
        resumed = f", resumed after round {len(records)}" if records else ""
        self.console.print(
            f"[bold]{federation.method.name}[/bold] on [bold]{config.task}[/bold], seed "
            f"{config.seed}: {len(federation.sites)} clients ({clients}), {config.rounds} rounds "
            f"of {config.epochs} epochs, {config.model}, {config.device}{resumed}"
        )
        self.bar = Progress(
            TextColumn("round {task.fields[round]}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self.task = self.bar.add_task(
            "", total=config.rounds, completed=self.first, round=self.first, state="", left=""
        )
        self.shown = accuracies(records[-1]) if records else ""
        self.bar.start()

    def client(self, round: int, done: int, total: int) -> None:
        """Move the bar by a client."""
        self.bar.update(
            self.task,
            completed=round + done / (total + 1),
            round=round + 1,
            state=f"client {done}/{total}  {self.shown}",
        )

    def round(self, record: Record) -> None:
        """Show the accuracies; a line of text where there is no terminal."""
        done = record["round"] + 1
        spent = time.perf_counter() - self.began
        left = spent / (done - self.first) * (self.rounds - done)
        self.shown = accuracies(record)
        self.bar.update(self.task, completed=done, left=f"{duration(left)} left", state=self.shown)
        if not self.live:
            self.console.print(
                f"round {done}/{self.rounds}  {self.shown}  {duration(left)} left",
                highlight=False,
                soft_wrap=True,
            )
        if done == self.rounds:
            self.bar.stop()

    def end(self, result: Result) -> None:
        """Take the bar away."""
        self.bar.stop()
