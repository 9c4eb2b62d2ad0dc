"""The lanes engine: clients on a GPU, several at a time."""
