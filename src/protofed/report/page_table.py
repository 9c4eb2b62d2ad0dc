"""Tables as the page shows them: sortable, with small print below a number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from protofed.report.palette import Look
from protofed.studies.folder import TaskTable
from protofed.studies.tables import (
    BASELINE,
    NOT_RUN,
    TableRow,
    column_title,
    cost_grid,
    grid,
)


@dataclass(frozen=True)
class PageCell:
    """A text with smaller text below it, and a swatch of the method's look before it."""

    text: str
    mark: str = ""
    small: str = ""
    look: Look | None = None

    @property
    def number(self) -> str | None:
        """The number that the text starts with, to sort by."""
        found = re.match(r"\s*([+-]?\d[\d,]*\.?\d*)", self.text)
        return found[1].replace(",", "") if found else None


@dataclass(frozen=True)
class PageTable:
    """Header and rows; ``left`` are the columns of text, which are aligned to the left."""

    header: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    left: Sequence[int] = (0,)
    kind: str = ""
    """A CSS class."""
    main: int | None = None
    """The column that stays in view when a narrow screen scrolls, like the first."""


def cells(rows: Iterable[Iterable[str]]) -> list[list[PageCell]]:
    return [[PageCell(text) for text in row] for row in rows]


def result_table(
    rows: Sequence[TableRow],
    looks: Mapping[str, Look],
    columns: Sequence[str] = (),
    baseline: str = BASELINE,
) -> PageTable:
    """Accuracy per domain and average, with the difference to the baseline.

    What the paper prints is below each number, so that a row stays whole when the table is sorted.
    """
    header, lines = grid(rows, columns, baseline)
    made: list[list[PageCell]] = []
    labels = iter(row.label for row in rows if row.accuracy or row.state)
    for line in lines:
        if not line.paper:
            first, *others = (_with_interval_below(cell.text, cell.mark) for cell in line.cells)
            made.append([replace(first, look=looks.get(next(labels))), *others])
            continue
        if line.label:
            made.append([PageCell(line.label, small=NOT_RUN), *[PageCell("")] * (len(header) - 1)])
        below = ["paper", *(cell.text for cell in line.cells[1:])]
        for i, name in enumerate(header):
            if name.startswith("Δ") and below[i]:
                below[i] = f"paper {below[i]}"
        made[-1] = [
            replace(cell, small=" · ".join(filter(None, (cell.small, more))))
            for cell, more in zip(made[-1], below, strict=True)
        ]
    there = [row for row in rows if row.accuracy]
    main = column_title(there[0].main, there[0].unseen) if there else ""
    return PageTable(
        header, made, kind="result", main=header.index(main) if main in header else None
    )


def cost_table(
    rows: Sequence[TableRow], looks: Mapping[str, Look], baseline: str = BASELINE
) -> PageTable:
    """Traffic and time of each row, and what the target accuracy takes of both."""
    header, lines = cost_grid(rows, baseline)
    labels = (row.label for row in rows if row.accuracy)
    made = [
        [PageCell(label, look=looks.get(label)), *(PageCell(cell.text) for cell in line.cells[1:])]
        for label, line in zip(labels, lines, strict=True)
    ]
    return PageTable(header, made, kind="narrow")


def effect_table(table: TaskTable) -> PageTable:
    header, lines = table.effect_grid()
    made = [[_with_interval_below(cell.text, cell.mark) for cell in line.cells] for line in lines]
    return PageTable(header, made, kind="narrow")


def _with_interval_below(text: str, mark: str) -> PageCell:
    """``+2.3 ± 0.2 (±0.7, noise)`` in two lines: in one, the table would be too wide."""
    whole = re.fullmatch(r"([+-].*) \((±.*)\)", text)
    return PageCell(whole[1], mark, whole[2]) if whole else PageCell(text, mark)
