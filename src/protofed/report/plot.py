"""A plot, and the two ways to draw it: as SVG for a page, as PNG or PDF for a file.

A plot is a row of panels. On a page each panel is an SVG of its own that takes its colors from the
page, and a narrow screen stacks them. In a file they form one figure with its legend.
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
from protofed.report.compact_svg import compact
from protofed.report.palette import STYLES, TONES

INK, FAINT = "#010101", "#020202"
"""Placeholders for the page's colors of text and of thin lines, which ``themed`` replaces.

A file has black and gray instead.
"""

POINTS, FILE_POINTS = 9, 7
"""The size of text on a page and in a file. Panels and all that is in them are measured for a page;
in a file they shrink with the text (``scaled``): a paper includes it as it is."""

_SHARED: dict[str, Any] = {
    "font.size": POINTS,
    "font.family": "DejaVu Sans",
    "axes.titlesize": "medium",
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
    "text.parse_math": False,  # a name with two dollar signs is not a formula
    "legend.frameon": False,
    "legend.handlelength": 3,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "protofed",
    "svg.image_inline": True,
}
_FILE = {**_SHARED, "font.size": FILE_POINTS, "grid.color": "#d5d5d5"}
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


LINE = 1.7
"""The width of a line that stands for a method."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    label: str
    color: str
    shape: str = "solid"
    """A line style of the palette, or a matplotlib marker."""

    @property
    def is_line(self) -> bool:
        return self.shape in STYLES


@dataclass(frozen=True)
class Panel:
    """One set of axes: the function that draws it, and ``alt`` for readers who cannot see it."""

    title: str
    alt: str
    draw: Callable[[Axes], None]
    width: float = 3.7
    height: float = 2.6
    legend: tuple[Key, ...] = ()
    """Entries that hold for this panel only."""


@dataclass(frozen=True)
class Plot:
    """Panels with a legend. Its files are called ``name``."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[Key, ...] = ()
    columns: int = 3
    heading: str = ""
    """Written above the panels in a file; a page has headings of its own."""


def linestyle(style: str) -> Any:
    """A line style of the palette as matplotlib takes it."""
    return (0, STYLES[style]) if STYLES[style] else "-"


def scaled(size: float) -> float:
    """A size of text, lines or marks for a page, as it is where the plot is being drawn."""
    return size * float(matplotlib.rcParams["font.size"]) / POINTS


def ink() -> str:
    """The color of text, on the page or in a file."""
    return str(matplotlib.rcParams["text.color"])


def faint() -> str:
    """The color of thin lines."""
    return str(matplotlib.rcParams["grid.color"])


@contextmanager
def _style(rc: dict[str, Any]) -> Iterator[None]:
    settings: Any = matplotlib.rcParams
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # nothing from the user's own matplotlibrc
        settings.update(rc)
        yield


# ---- on a page ----------------------------------------------------------------------------------


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
    # a style sheet inside would apply to the whole page
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r" xmlns(:\w+)?=\"[^\"]*\"", "", text).replace("xlink:href", "href")
    text = re.sub(r"style=\"([^\"]*)\"", lambda m: f'style="{themed(m[1])}"', text)
    box = re.search(r"viewBox=\"[^\"]+\"", text)
    assert box is not None
    head = f'<svg {box[0]} role="img" aria-label="{html.escape(panel.alt, quote=True)}">'
    text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
    return compact(text, prefix)


_THEME = {
    INK: "currentColor",
    FAINT: "var(--line)",
    # report.html.j2 defines --c0, --c1, ... for light and dark pages
    **{tone.paper.lower(): f"var(--c{i})" for i, tone in enumerate(TONES)},
}


def themed(style: str) -> str:
    """A color or a CSS style, with fixed colors and fonts replaced by the page's variables."""
    for color, variable in _THEME.items():
        style = re.sub(re.escape(color), variable, style, flags=re.I)
    return re.sub(r"'?DejaVu Sans'?(, [^;]*)?", "var(--font)", style)


# ---- in a file ----------------------------------------------------------------------------------

KINDS = ("png", "pdf")
DPI = 300
TEXT_WIDTH = 7.16
"""In inches: no file is wider than the two columns of a paper."""


def save(
    plot: Plot, folder: Path, prefix: str = "", kinds: Sequence[str] = KINDS, dpi: int = DPI
) -> list[Path]:
    """Write the plot into a folder, a file for each kind."""
    paths = []
    for kind, content in render(plot, kinds, dpi).items():
        paths.append(folder / f"{prefix}{plot.name}.{kind}")
        write_atomic(paths[-1], content)
    return paths


def render(plot: Plot, kinds: Sequence[str] = KINDS, dpi: int = DPI) -> dict[str, bytes]:
    """The plot as the content of a file of each kind."""
    columns = min(plot.columns, len(plot.panels))
    rows = math.ceil(len(plot.panels) / columns)
    panel_width = max(p.width for p in plot.panels)
    panel_height = max(p.height for p in plot.panels)
    with _style(_FILE):
        width = min(scaled(panel_width) * columns, TEXT_WIDTH)  # in inches, as all sizes here
        longest = max((len(key.label) for key in plot.legend), default=0)
        entry_width = scaled(max(1.3, 0.75 + 0.075 * longest))
        legend_columns = max(1, min(len(plot.legend), int(width / entry_width)))
        legend_height = 0.2 * math.ceil(len(plot.legend) / legend_columns)
        heading_height = 0.25 * bool(plot.heading)
        height = scaled(panel_height * rows + 0.1 + legend_height + heading_height)
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, plot.panels, strict=False):
            panel.draw(axis)
            axis.set_title(panel.title)
            if panel.legend:  # below its own panel: the colors mean something else in the others
                _panel_legend(axis, panel)
        for axis in axes[len(plot.panels) :]:
            axis.axis("off")
        if plot.legend:
            handles = [_handle(key) for key in plot.legend]
            figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns)
        if plot.heading:
            figure.suptitle(plot.heading, fontsize="medium")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laying out once is enough: it is the slow part
        # no date and no version: the same plot gives the same bytes
        metadata: Any = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
        files = {}
        for kind in kinds:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata[kind])
            files[kind] = buffer.getvalue()
    return files


def _panel_legend(axis: Axes, panel: Panel) -> None:
    columns = max(1, min(len(panel.legend), int(scaled(panel.width) / 0.7)))
    axis.legend(
        handles=[_handle(key) for key in panel.legend], loc="upper center", ncols=columns,
        bbox_to_anchor=(0.5, 0), fontsize=scaled(8), handletextpad=0.1, columnspacing=0.9,
    )  # fmt: skip


def _handle(key: Key) -> Line2D:
    shape: dict[str, Any] = {"marker": key.shape, "linestyle": "", "markersize": scaled(6)}
    if key.is_line:
        shape = {"linestyle": linestyle(key.shape), "linewidth": scaled(LINE)}
    return Line2D([], [], color=ink() if key.color == INK else key.color, label=key.label, **shape)
