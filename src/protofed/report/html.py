"""Pieces of HTML: tables that sort, legends. Every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from protofed.report import plots
from protofed.report.plots import Key

Cell = tuple[str, str] | tuple[str, str, str]
"""A text, a class, and maybe a smaller text below it."""


def html_table(
    header: Sequence[str],
    lines: Sequence[Sequence[Cell]],
    left: Sequence[int] = (0,),
    kind: str = "",
) -> str:
    """A table that sorts by a click: by the cells' own texts, not by what is below them."""
    head = "".join(
        f'<th scope="col"{" class=left" if i in left else ""}>'
        f'<button type="button">{escape(text)}</button></th>'
        for i, text in enumerate(header)
    )
    body = []
    for line in lines:
        cells = []
        for i, (text, mark, *below) in enumerate(line):
            number = None if i in left else re.match(r"\s*([+-]?\d[\d,]*\.?\d*)", text)
            value = f' data-value="{number[1].replace(",", "")}"' if number else ""
            marks = f"{mark} left" if i in left else mark
            small = "".join(f"<br><small>{escape(more)}</small>" for more in below if more)
            cells.append(f'<td class="{escape(marks.strip())}"{value}>{escape(text)}{small}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="sortable {kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


# ---- legends -----------------------------------------------------------------------------------

_SHAPES = {
    "line": '<line x1="0" y1="6" x2="20" y2="6" stroke-width="2.4"/>',
    "dash": '<line x1="0" y1="6" x2="20" y2="6" stroke-width="2.4" stroke-dasharray="5 3"/>',
    "dot": '<circle cx="6" cy="6" r="4.5"/>',
    "o": '<circle cx="6" cy="6" r="4.5"/>',
    "s": '<rect x="2" y="2" width="8" height="8"/>',
    "^": '<path d="M6 1 11 10H1z"/>',
    "v": '<path d="M6 11 11 2H1z"/>',
    "D": '<path d="M6 1 11 6 6 11 1 6z"/>',
    "*": '<path d="M6 0 7.6 4.3 12 4.5 8.5 7.2 9.7 11.6 6 9.1 2.3 11.6 3.5 7.2 0 4.5 4.4 4.3z"/>',
}


def legend(keys: Sequence[Key]) -> str:
    """The entries of a legend, with their marks."""
    items = []
    for key in keys:
        color = plots.themed(key.color)
        wide = key.shape in ("line", "dash")
        shape = _SHAPES.get(key.shape, _SHAPES["dot"])
        items.append(
            f'<li class="{"stroke" if wide else "dot"}">'
            f'<svg viewBox="0 0 {20 if wide else 12} 12" aria-hidden="true" '
            f'style="{"stroke" if wide else "fill"}: {color}">{shape}</svg>'
            f"{escape(key.label)}</li>"
        )
    return f'<ul class="keys">{"".join(items)}</ul>' if items else ""
