"""Checks for anyone's method: ``protofed methods check`` and pytest use the same ones."""

from __future__ import annotations

from protofed.testing.checks import check, run_checks

__all__ = ["check", "run_checks"]
