"""Lanes: clients on a GPU, several at a time."""
