"""A federation: local training, the server, rounds, run folders."""
