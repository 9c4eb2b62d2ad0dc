"""Engines: where and how the clients of a round are trained."""
