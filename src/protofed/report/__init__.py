"""Figures and the HTML report, drawn from what ``runs`` and ``studies`` hand over."""
