"""Tables as text for Markdown and LaTeX."""

from __future__ import annotations

from protofed.studies.render import latex_escape, to_latex, to_markdown
from protofed.studies.tables import TableCell, TableLine


def test_escaping() -> None:
    assert latex_escape("-8.7 (-0.3) a-1 2-3") == "$-$8.7 ($-$0.3) a-1 2-3"
    assert latex_escape("a_b & 5 % ± τ {x}") == r"a\_b \& 5 \% $\pm$ $\tau$ \{x\}"
    assert to_markdown(["a|b"], [TableLine((TableCell("c|d"),))]).count("\\|") == 2
    # the end of a line, \\, takes a star or a bracket on the next line for its own
    assert latex_escape("*a [b] ε") == r"{*}a {[}b] $\varepsilon$"
    assert r"x\_1" in to_latex(["m"], [TableLine((TableCell("x_1", "best"),))], "50 % of_it")
