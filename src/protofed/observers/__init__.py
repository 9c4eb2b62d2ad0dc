"""What watches a run: progress, TensorBoard, profiles."""

from __future__ import annotations

from protofed.observers import profile, progress, tensorboard

__all__ = ["profile", "progress", "tensorboard"]
