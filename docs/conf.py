"""The documentation site: ``make site`` builds it into build/site; warnings are errors."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from protofed.version import __version__

DOCS = Path(__file__).parent

project = "Protofed"
author = "Protofed contributors"
copyright = author
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Protofed {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True

OUTSIDE = re.compile(r"(?<!!)(\[[^\]]*\])\((\.\./(?:\.\./)?[^)#\s]+)(#[^)\s]*)?\)")
"""A link to a file of the repository that is not a page of the site."""


def link_to_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Links that work in the repository also work on the site: as downloads, or as plain text."""
    page = DOCS / f"{name}.md"

    def linked(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        file = (page.parent / target).resolve()
        if DOCS in file.parents or not file.exists():
            return match[0]
        return f"{text}(path:{target})" if file.is_file() else f"{text[1:-1]} (in the repository)"

    source[0] = OUTSIDE.sub(linked, source[0])
    if name == "index" and (DOCS / "styles.md").is_file():  # generated, once it is measured
        source[0] = source[0].replace("\nresults\n", "\nresults\nstyles\n")


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_to_files)
