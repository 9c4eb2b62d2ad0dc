"""Compact SVG: nothing that can be seen is lost."""

from __future__ import annotations

import io
import re

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protofed.report.compact_svg import compact
from protofed.report.plot import Panel, svg

PLACES = np.random.default_rng(0).normal(size=(200, 2))


def scatter(axis: Axes) -> None:
    axis.scatter(PLACES[:, 0], PLACES[:, 1], s=7, alpha=0.5, color="#4e79a7", linewidths=0)
    axis.set_xticks([])
    axis.set_yticks([])


def plain(draw: object) -> str:
    """As matplotlib writes it."""
    figure = Figure(figsize=(3, 3), layout="constrained")
    draw(figure.subplots())  # type: ignore[operator]
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue().decode()


def test_points_are_one_path_with_a_marker_at_each_place() -> None:
    text = svg(Panel("t", "two hundred points", scatter, 3, 3), "g")
    (marked,) = re.findall(r'<path d="M([^"]+)" [^>]*marker-mid="url\(#([^)]+)\)"', text)
    places = [tuple(map(float, pair.split())) for pair in marked[0].split("L")]
    assert len(places) == 200 and f'<marker id="{marked[1]}"' in text
    # they lie as the points do: x to the right, y down
    x, y = np.array(places).T
    assert np.corrcoef(x, PLACES[:, 0])[0, 1] > 0.9999
    assert np.corrcoef(y, -PLACES[:, 1])[0, 1] > 0.9999
    assert "fill: #4e79a7; fill-opacity: 0.5" in text
    assert len(text) < len(plain(scatter)) / 5


def test_every_text_and_line_is_still_there() -> None:
    def draw(axis: Axes) -> None:
        axis.plot([1, 2, 3], [5, 4, 6], color="#0072B2")
        axis.set_xlabel('a < b & "c"')
        for i in range(5):
            axis.text(1 + i / 2, 5, f"no. {i}", fontsize=7)

    text = svg(Panel("t", "alt", draw), "g")
    assert "a &lt; b &amp; " in text
    assert all(f">no. {i}<" in text for i in range(5))
    assert text.count("font-size: 7px") == 1  # said once for all five
    assert re.search(r'<path d="M[^"]+L[^"]+L[^"]+" clip-path="url\(#g-\d+\)"', text)


def test_only_ids_that_are_referred_to_remain_with_the_prefix() -> None:
    text = compact(
        '<svg><defs><clipPath id="c"><rect id="r" x="1.23456"/></clipPath></defs><g id="empty"/>'
        '<g id="x"><g clip-path="url(#c)"><path d="M 1.0 2.0  L 3.456789 4 "/></g></g>'
        '<path d="M0 0" style="fill: none"/><text transform="rotate(-0 1 2)">a  b</text></svg>',
        "p",
    )
    assert text == (
        '<svg><defs><clipPath id="p-0"><rect x="1.23" /></clipPath></defs>'
        '<g clip-path="url(#p-0)"><path d="M1 2L3.46 4" /></g><text>a  b</text></svg>'
    )
