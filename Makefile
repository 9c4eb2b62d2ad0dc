# Every target runs in .venv, a virtual environment with pinned dependencies.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test slow drill fuzz check docs site wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/installed  ## compare FedAvg, FedProto and FPL on the built-in task: a table and curves
	$(BIN)/protofed compare --task glyphs --methods fedavg,fedproto,fpl --out runs/glyphs

test: .venv/installed-dev  ## run the tests that take seconds
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not drill"

slow: .venv/installed-dev  ## run the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

drill: .venv/installed-dev  ## break a real deployment over loopback (15 minutes or more)
	$(BIN)/python -m pytest -q -m drill

fuzz: .venv/installed-dev  ## fuzz inputs, damage runs and kill them (minutes; FUZZ=--long: hours)
	$(BIN)/python -m tests.fuzz $(FUZZ)

check: .venv/installed-dev  ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-dev  ## regenerate the pages that are made from the source
	$(BIN)/python docs/generate.py

site: .venv/installed-dev  ## build the documentation as a site into build/site
	$(BIN)/python -m sphinx -q -W -b html docs build/site

wheel: .venv/installed-dev  ## build the source distribution, and the wheel from it, into dist/
	rm -rf dist
	$(BIN)/python -m build

clean:  ## delete the environment and what tools leave behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofed needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing protofed and its pinned dependencies into .venv (once, a minute or two)"
	$(PIP) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev,docs,flower,cluster,onnx,dicom,privacy]'
	@touch $@
