"""What watches a run: progress, TensorBoard, profiles."""
