"""What the user sees while something runs: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from protofed.config import Config, training_options
from protofed.data import Task
from protofed.errors import printable
from protofed.federation.simulation import Federation, Observer
from protofed.runs.records import Record, beside, shown
from protofed.runs.result import Result
from protofed.silence import Silence

BAR, NARROW_BAR, NARROW = 24, 10, 100
"""The width of the bar; a terminal with fewer characters than the last has the narrow one."""


def accuracies(record: Record, unseen: str | None = None, brief: bool = False) -> str:
    """A round in one line: ``scan 84.0  print 41.5 ... average 44.5``.

    An ``unseen`` domain comes first. Other accuracies of the method, if any, come last. With
    ``brief``, there is only what counts: the average, or the unseen domain.
    """
    of_method = shown({**record["accuracy"], "average": record["average"]}, unseen)
    if brief:
        main = "average" if "average" in of_method else next(iter(of_method))
        return f"{main} {of_method[main]:.1f}"
    return "  ".join(f"{name} {a:.1f}" for name, a in {**of_method, **beside(record)}.items())


def print_plain(console: Console, line: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """``8 s``, ``3:20 min``, ``2:05 h``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    unit, size = ("min", 60) if seconds < 3600 else ("h", 3600)
    return f"{int(seconds // size)}:{int(seconds % size // (size // 60)):02d} {unit}"


def protocol_line(config: Config) -> str:
    """``protocol fpl: resnet10, 32×32 pixels, batch 64, epochs 10, rounds 100``, and options.

    What a folder's images have yet to decide is left out.
    """
    size = f"{config.image_size}×{config.image_size} pixels" if config.image_size else ""
    numbers = {n: getattr(config, n) for n in ("batch", "epochs", "rounds")}
    parts = [config.model_in_words, size, *(f"{n} {v}" for n, v in numbers.items() if v)]
    parts += training_options(vars(config))
    return f"protocol {config.protocol}: {', '.join(filter(None, parts))}"


def client_lines(federation: Federation) -> list[str]:
    """A line for each domain with its clients, then the notes on clients (leftover, repair)."""
    table, unseen = federation.table(), federation.config.leave_out
    total = len(federation.task.classes)
    width = max(map(len, federation.task.domains))
    lines = []
    for domain in federation.task.domains:
        own = [row for row in table if row["domain"] == domain]
        if own:
            samples = _range([row["samples"] for row in own])
            classes = _range([row["classes"] for row in own])
            text = f"{len(own)} client{'s' * (len(own) > 1)} × {samples} samples"
            text += f", {classes} of {total} classes"
            if len(federation.config.models) > 1:
                text += ": " + ", ".join(f"{row['client']} {row['model']}" for row in own)
            if domain in federation.validation:
                text += f"; validated on {len(federation.validation[domain])} other images"
        else:
            reason = "left out" if domain == unseen else "no clients"
            text = f"{reason}: only tested on, with {len(federation.tests[domain])} images"
        lines.append(f"  {domain:<{width}}  {text}")
    return lines + [f"  {row['client']} {row['note']}" for row in table if "note" in row]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


class RunProgress(Observer):
    """Round, clients of the round, accuracy per domain, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.previewed = False  # a preview says what memory a run takes

    def prepare(self, config: Config, task: Task) -> None:
        from protofed.observers.preview import preview  # it imports this module

        if task.survey is not None:
            self.previewed = True
            for line in preview(config, task):
                print_plain(self.console, line)

    def start(self, federation: Federation, records: Sequence[Record]) -> None:
        config = federation.config
        self.rounds, self.unseen = config.rounds, config.leave_out
        self.earlier_rounds = len(records)
        self.started = time.perf_counter()
        self.silence = Silence()
        resumed = f", resumed after round {len(records)}" if records else ""
        clients = f"{len(federation.clients)} client{'s' * (len(federation.clients) > 1)}"
        self.console.print(
            f"[bold]{federation.method.name}[/bold] on [bold]{escape(config.task)}[/bold], seed "
            f"{config.seed}: {clients}, "
            f"engine {federation.facts.engine}{resumed}"
        )
        print_plain(self.console, f"  {protocol_line(config)}")
        skipped = [f"  skipped file: {name}" for name in federation.task.skipped]
        memory = [] if self.previewed else [f"  {federation.memory}"]
        for line in [*client_lines(federation), *memory, *skipped]:
            print_plain(self.console, line)
        self.bar = Progress(
            TextColumn("round {task.fields[round]}/{task.total:.0f}"),
            BarColumn(bar_width=NARROW_BAR if self.console.width < NARROW else BAR),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        done = self.earlier_rounds
        self.bar_task = self.bar.add_task(
            "", total=config.rounds, completed=done, round=done, state="", left=""
        )
        self.latest, self.left = records[-1] if records else None, ""
        self.bar.start()

    def client(self, round: int, done: int, total: int) -> None:
        self.bar.update(
            self.bar_task,
            completed=round - 1 + done / (total + 1),
            round=round,
            state=self._state(f"client {done}/{total}"),
        )
        self._under_way(round, f"{done} of {total} clients trained")

    def tested(self, round: int, done: int, total: int) -> None:
        """Show how many models have been tested, if there are several."""
        if total > 1:
            self.bar.update(self.bar_task, state=self._state(f"tested {done}/{total}"))
            self._under_way(round, f"{done} of {total} models tested")

    def round(self, record: Record) -> None:
        done = record["round"]
        spent = time.perf_counter() - self.started
        left = f"{duration(spent / (done - self.earlier_rounds) * (self.rounds - done))} left"
        self.latest, self.left = record, left
        self.bar.update(self.bar_task, completed=done, left=left, state=self._state())
        if not self.live:
            text = f"round {done}/{self.rounds}  {accuracies(record, self.unseen)}  {left}"
            print_plain(self.console, text)
            self.silence.end()
        if done == self.rounds:
            self.bar.stop()

    def _under_way(self, round: int, work: str) -> None:
        """A line now and then in a round that takes long, where there is no bar."""
        if not self.live and self.silence.too_long():
            spent = duration(self.silence.seconds)
            print_plain(self.console, f"round {round}/{self.rounds}  {work}, {spent} so far")

    def _state(self, work: str = "") -> str:
        """What is under way and the latest accuracies, as far as the terminal has room for them.

        Round and time matter more.
        """
        width = self.console.width
        rest = f"round {self.rounds}/{self.rounds}   0:00:00 {self.left}"
        room = width - len(rest) - 1 - (NARROW_BAR if width < NARROW else BAR)
        said = [work]
        if self.latest is not None:
            brief = accuracies(self.latest, self.unseen, brief=True)
            said = [f"{work}  {accuracies(self.latest, self.unseen)}", f"{work}  {brief}", brief]
        return next((text.strip() for text in said if len(text.strip()) <= room), "")

    def end(self, result: Result) -> None:
        self.bar.stop()
        if (done := len(result.rounds)) < self.rounds:
            better = f"no better validation accuracy in {result.config.patience} rounds"
            print_plain(self.console, f"stopped early after round {done}: {better}")

    def stopped(self) -> None:
        self.bar.stop()  # or the terminal's cursor stays hidden
