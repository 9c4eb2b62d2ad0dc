# Everything runs in a virtual environment of its own, with pinned dependencies.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test slow drill check clean

run: .venv/installed  ## FedAvg, FedProto and FPL on the embedded task: table and curves
	$(BIN)/protofed compare --task glyphs --methods fedavg,fedproto,fpl --out runs/glyphs

test: .venv/installed-dev  ## all tests that take seconds
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not drill"

slow: .venv/installed-dev  ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

drill: .venv/installed-dev  ## faults of a real deployment over loopback (a quarter of an hour or more)
	$(BIN)/python -m pytest -q -m drill

check: .venv/installed-dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## forget the environment and what tools left behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofed needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing protofed and its pinned dependencies into .venv (once, a minute or two)"
	$(PIP) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev,flower]'
	@touch $@
