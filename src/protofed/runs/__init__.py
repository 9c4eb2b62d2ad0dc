"""A run and its folder: records, checkpoints, artifacts, result."""
