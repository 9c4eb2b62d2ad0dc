"""Checks for any method: ``protofed methods check`` and pytest use the same ones."""

from __future__ import annotations

from protofed.testing.checks import CHECKS, CheckResult, check, run_checks

__all__ = ["CHECKS", "CheckResult", "check", "run_checks"]
