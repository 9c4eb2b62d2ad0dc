"""Plots that are drawn twice: as SVG that takes its colors from the page, and for a paper.

A plot is a row of panels. On the page each panel is an SVG of its own, so that a phone can put
them below each other; for a paper they are one figure with its legend, as PDF and PNG.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from protofed.files import write_atomic
from protofed.report.curves import COLORS
from protofed.report.slim import slim

CLASS_COLORS = (
    "#4e79a7", "#f28e2b", "#e15759", "#2f9e94", "#59a14f",
    "#d4a717", "#b07aa1", "#ff7f93", "#9c755f", "#8a8f98",
)  # fmt: skip
"""For classes: ten that can be told apart on light and on dark paper."""

INK, FAINT = "#010101", "#020202"
"""Stand for the page's own colors of text and of lines; a paper has black and gray."""

_SHARED: dict[str, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.linewidth": 0.6,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "protofed",
    "svg.image_inline": True,
}
_PAPER = {**_SHARED, "grid.color": "#d5d5d5"}
_PAGE = {
    **_SHARED,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": FAINT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    label: str
    color: str
    shape: str = "line"
    """line, dash, dot (a mark), or a matplotlib marker."""


@dataclass(frozen=True)
class Panel:
    """One set of axes: what draws it, and what it shows in words."""

    title: str
    alt: str
    draw: Callable[[Axes], None]
    width: float = 3.7
    height: float = 2.6
    legend: tuple[Key, ...] = ()
    """What only this panel has."""


@dataclass(frozen=True)
class Plot:
    """Panels with a legend. ``name`` is the name of its files."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[Key, ...] = ()
    columns: int = 3


@contextmanager
def _style(rc: dict[str, Any]) -> Iterator[None]:
    settings: Any = matplotlib.rcParams
    with matplotlib.rc_context():  # and nothing of a person's own matplotlibrc
        matplotlib.rcdefaults()
        settings.update(rc)
        settings["text.parse_math"] = False  # a name with $ is a name
        yield


def svg(panel: Panel, prefix: str) -> str:
    """The panel as inline SVG; ``prefix`` makes its ids unique on the page."""
    with _style(_PAGE):
        figure = Figure(figsize=(panel.width, panel.height), layout="constrained")
        panel.draw(figure.subplots())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # a style sheet inside would hold for the whole page
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r" xmlns(:\w+)?=\"[^\"]*\"", "", text).replace("xlink:href", "href")
    text = re.sub(r"style=\"([^\"]*)\"", lambda m: f'style="{themed(m[1])}"', text)
    box = re.search(r"viewBox=\"[^\"]+\"", text)
    assert box is not None
    head = f'<svg {box[0]} role="img" aria-label="{html.escape(panel.alt, quote=True)}">'
    text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
    return slim(text, prefix)


_THEME = {
    INK: "currentColor",
    FAINT: "var(--line)",
    **{color.lower(): f"var(--c{i})" for i, color in enumerate(COLORS)},
}


def themed(style: str) -> str:
    """A style with the page's colors and font in place of those that were drawn with."""
    for color, variable in _THEME.items():
        style = re.sub(re.escape(color), variable, style, flags=re.I)
    return re.sub(r"'?DejaVu Sans'?(, [^;]*)?", "inherit-font", style).replace(
        "inherit-font", "var(--font)"
    )


KINDS = ("png", "pdf")
DPI = 200


def save(
    plot: Plot, folder: Path, prefix: str = "", kinds: Sequence[str] = KINDS, dpi: int = DPI
) -> list[Path]:
    """The plot as PDF and PNG for a paper."""
    columns = min(plot.columns, len(plot.panels))
    rows = math.ceil(len(plot.panels) / columns)
    width, height = (max(getattr(p, side) for p in plot.panels) for side in ("width", "height"))
    paths = []
    with _style(_PAPER):
        figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, plot.panels, strict=False):
            panel.draw(axis)
            axis.set_title(panel.title)
            if panel.legend:  # below its own panel: colors mean something else in the others
                _legend(axis, panel)
        for axis in axes[len(plot.panels) :]:
            axis.axis("off")
        if plot.legend:
            handles = [_handle(key) for key in plot.legend]
            spare = max(1, min(len(handles), int(width * columns / 1.3)))
            figure.legend(handles=handles, loc="outside lower center", ncols=spare)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # once is enough: it is the slow part
        plain: Any = {"pdf": {"CreationDate": None}, "png": {"Software": None}}  # no dates
        for kind in kinds:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=plain[kind])
            paths.append(folder / f"{prefix}{plot.name}.{kind}")
            write_atomic(paths[-1], buffer.getvalue())
    return paths


def ink() -> str:
    """The color of text, on the page or on paper."""
    return str(matplotlib.rcParams["text.color"])


def faint() -> str:
    """The color of fine lines."""
    return str(matplotlib.rcParams["grid.color"])


def _legend(axis: Axes, panel: Panel) -> None:
    columns = max(1, min(len(panel.legend), int(panel.width / 0.8)))
    axis.legend(
        handles=[_handle(key) for key in panel.legend], loc="upper center", ncols=columns,
        bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8, handletextpad=0.1, columnspacing=0.9,
    )  # fmt: skip


def _handle(key: Key) -> Line2D:
    if key.shape in ("line", "dash"):
        return Line2D(
            [], [], color=key.color, ls="-" if key.shape == "line" else "--", label=key.label
        )
    marker = "o" if key.shape == "dot" else key.shape
    color = ink() if key.color == INK else key.color
    return Line2D([], [], color=color, marker=marker, linestyle="", label=key.label)
