"""A table's header and lines for a terminal, as Markdown, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protofed.studies.tables import AVERAGE, SPREAD, WORST, TableCell, TableLine, TableRow


def to_terminal(header: Sequence[str], lines: Sequence[TableLine], console: Console) -> list[Table]:
    """The best bold, the second underlined, the paper's lines dim.

    A table wider than the terminal is split between columns into several.
    """
    parts: list[list[int]] = [[]]
    for column in range(1, len(header)):
        longer = _terminal(header, lines, [*parts[-1], column])
        if parts[-1] and natural_width(longer) > console.width:
            parts.append([column])
        else:
            parts[-1].append(column)
    return [_terminal(header, lines, columns) for columns in parts]


def natural_width(table: Table) -> int:
    """The width of a table in characters if nothing is cut."""
    return Console(width=10_000).measure(table).maximum


def _terminal(header: Sequence[str], lines: Sequence[TableLine], columns: Sequence[int]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(escape(header[0]), overflow="fold")
    for i in columns:
        table.add_column(escape(header[i]), justify="right", no_wrap=True)
    styles = {"best": "bold", "second": "underline"}
    for line in lines:
        first, *cells = (line.cells[i] for i in (0, *columns))
        if line.paper and not any(c.text for c in cells):
            continue
        texts = [
            f"[{styles[c.mark]}]{escape(c.text)}[/]" if c.mark else escape(c.text) for c in cells
        ]
        name = "  " * line.paper + escape(first.text)
        table.add_row(name, *texts, style="dim" if line.paper else None)
    return table


def to_markdown(header: Sequence[str], lines: Sequence[TableLine], caption: str = "") -> str:
    def plain(text: str) -> str:
        return text.replace("|", "\\|")

    def cell(c: TableCell) -> str:
        text = plain(c.text)
        return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(c.mark, text)

    texts = [[*map(plain, header)], ["---", *["---:"] * (len(header) - 1)]]
    texts += [[cell(c) for c in line.cells] for line in lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in texts) + "\n"
    return text + (f"\n{caption}\n" if caption else "")


def to_html(header: Sequence[str], lines: Sequence[TableLine], caption: str = "") -> str:
    """A plain table, as a notebook shows it."""

    def cell(c: TableCell) -> str:
        text = html.escape(c.text)
        return {"best": f"<b>{text}</b>", "second": f"<u>{text}</u>"}.get(c.mark, text)

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    rows = ("".join(f"<td>{cell(c)}</td>" for c in line.cells) for line in lines)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    below = f"<p><small>{html.escape(caption)}</small></p>" if caption else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"


def to_latex(
    header: Sequence[str], lines: Sequence[TableLine], caption: str = "", note: str = ""
) -> str:
    r"""A ``table*`` for a paper, as wide as the page; needs ``\usepackage{booktabs}``.

    The ``note`` is below the table in small print: a caption should stay short.
    """

    def cell(c: TableCell) -> str:
        text = latex_escape(c.text)
        return {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}"}.get(c.mark, text)

    body = [
        r"\quad " * line.paper + " & ".join(cell(c) for c in line.cells) + r" \\" for line in lines
    ]
    below = [
        r"\par\vspace{2pt}",
        rf"\begin{{minipage}}{{\textwidth}}\scriptsize {latex_escape(note)}\end{{minipage}}",
    ]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table*}",
            r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{latex_escape(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(map(latex_escape, header)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(below if note else ()),
            r"\end{table*}",
            "",
        ]
    )


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "×": r"$\times$", "Δ": r"$\Delta$", "−": r"$-$", "—": "---", "–": "--",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\varepsilon$",
    "η": r"$\eta$", "θ": r"$\theta$", "κ": r"$\kappa$", "λ": r"$\lambda$", "μ": r"$\mu$",
    "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$", "φ": r"$\varphi$", "ω": r"$\omega$",
    "²": r"\textsuperscript{2}",
    "<": r"\textless{}", ">": r"\textgreater{}", "≥": r"$\geq$", "≤": r"$\leq$", "→": r"$\to$",
    "≈": r"$\approx$", "…": r"\ldots{}",
    # at the start of a line they would be an argument of the \\ before it
    "[": "{[}", "*": "{*}",
}  # fmt: skip


def latex_escape(text: str) -> str:
    """Text with LaTeX's special characters escaped; a hyphen before a number is a minus."""
    text = re.sub(r"(?<![^\s(])-(?=\d)", "−", text)
    return "".join(_LATEX.get(c, c) for c in text)


CSV_HEADER = (
    "task", "method", "column", "mean", "std", "seeds", "wanted", "difference", "low", "high",
    "paper", "paper_std", "ours_minus_paper", "megabytes", "seconds", "target", "rounds_to_target",
    "megabytes_to_target", "state", "values",
)  # fmt: skip


def to_csv(tables: Mapping[str, Sequence[TableRow]], columns: Mapping[str, Sequence[str]]) -> str:
    """A line for each task, row and column; empty where a number is missing.

    ``difference`` is to the baseline, paired by seed; ``low`` and ``high`` are its 95 % interval.
    What the target takes is a mean over the seeds that reach it. ``values`` has one for each seed.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_HEADER, restval="", lineterminator="\n")
    writer.writeheader()
    for task, row in ((task, row) for task, rows in tables.items() for row in rows):
        derived = [c for c in (WORST, SPREAD) if c in row.derived]
        for column in (*columns[task], *derived, *row.beside):
            own, delta, paper = row.at(column), row.differences.get(column), row.paper.get(column)
            numbers = {"paper": paper, "megabytes": row.megabytes, "seconds": row.seconds}
            numbers["target"] = row.target
            if row.reached is not None:
                rounds, megabytes = row.reached
                numbers |= {"rounds_to_target": rounds.mean, "megabytes_to_target": megabytes.mean}
            if own:
                numbers |= {"mean": own.mean, "std": own.std}
            if own and paper is not None:
                numbers["ours_minus_paper"] = own.mean - paper
            if delta:
                numbers["difference"] = delta.mean
            if delta and delta.half is not None:
                numbers |= {"low": delta.mean - delta.half, "high": delta.mean + delta.half}
            if column == AVERAGE:
                numbers["paper_std"] = row.paper_std
            texts = {"task": task, "method": row.label, "column": column, "state": row.state}
            texts["values"] = " ".join(f"{v:.4f}" for v in own.values) if own else ""
            counts = {"seeds": own.seeds if own else 0, "wanted": row.wanted}
            given = {k: f"{v:.4f}" for k, v in numbers.items() if v is not None}
            writer.writerow({**texts, **counts, **given})
    return buffer.getvalue()
