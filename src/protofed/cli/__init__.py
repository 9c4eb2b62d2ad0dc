"""The command line; ``protofed`` calls ``main``."""

from __future__ import annotations

from protofed.cli.app import main

__all__ = ["main"]
