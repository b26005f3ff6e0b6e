# `make demo` and `make test` do all the set-up themselves. PYTHON: 3.11 or newer. TORCH: what pip installs as torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(VENV)/.ready  ## make the virtual environment and install everything

# torch first and alone: a later package must not bring another build of it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@

demo: setup  ## train a tiny model with GPPO on arithmetic: two processes, about two minutes
	$(BIN)/gppo launch launchers/recipes/demo.yaml run=$(RUN)
	$(BIN)/python -m checkpoints_tools.ask $(RUN)/hf '7+2+9='

test: setup  ## the fast tests: what a newcomer runs
	$(PYTEST) tests/unit tests/contract tests/numeric

test-distributed: setup  ## several processes: every layout, whole runs, faults
	$(PYTEST) tests/distributed tests/e2e

check: setup  ## lint, format, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: setup  ## seed faults in the numerics, one at a time; each must turn the fast tests red
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-distributed check mutants clean
