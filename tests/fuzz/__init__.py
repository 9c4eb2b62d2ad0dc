"""The fuzzing job: ``make fuzz``, ``python -m tests.fuzz --help``."""
