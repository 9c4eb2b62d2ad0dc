"""Using a trained model: predictions, metrics, exports."""

from __future__ import annotations

from protofed.inference.model import TrainedModel, load_model

__all__ = ["TrainedModel", "load_model"]
