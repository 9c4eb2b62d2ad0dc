"""A federation: one client's round, the server, and the simulation of all of it in one process."""
