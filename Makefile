# Everyday commands. Each one sets up what it needs: a bare machine with Python 3.11 or newer is enough.
#
#   make install  the command p2pdiloco, in .venv/bin
#   make demo     one tracker and three nodes train a model on this machine (ends by itself)
#   make test     every everyday test
#   make help     the rest
#
# Variables: PYTHON (interpreter to build .venv from), TORCH_SPEC (which torch to install; empty takes the
# newest), DEMO_ARGS (flags for `p2pdiloco demo`), JOBS (parallel test processes). pip's own settings,
# PIP_CONSTRAINT among them, are honoured.

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
DEMO_ARGS ?=

# Without an NVIDIA driver a CUDA build of torch is 3 to 5 GB of nothing. An exact version takes the small CPU
# build wherever the index in use offers one; a range never does.
HAS_NVIDIA := $(shell { nvidia-smi -L >/dev/null 2>&1 || test -e /proc/driver/nvidia/version; } && echo yes)
ifeq ($(HAS_NVIDIA),yes)
TORCH_SPEC ?=
else
TORCH_SPEC ?= torch==2.13.0
endif

PYTEST := $(BIN)/python -m pytest
PURE := not e2e and not timed and not long and not extras
REAL := e2e and not timed and not long and not extras
ALONE := timed and not long

.PHONY: help install demo test test-long test-extras lint rules unit sim e2e format bench simulate-long clean
.DEFAULT_GOAL := help

help:
	@echo "make install        installs p2pdiloco into .venv, and nothing else"
	@echo "make demo           one tracker and three nodes train a model on this machine"
	@echo "make test           every everyday test (lint, types, rules, unit, contracts, simulation, end to end)"
	@echo "make lint           ruff and mypy only"
	@echo "make unit           rules, unit and contract tests only"
	@echo "make sim            simulated swarms only"
	@echo "make e2e            tests with real processes only"
	@echo "make test-long      tests with real processes that take minutes each"
	@echo "make test-extras    installs datasets and wandb, and runs the tests that need them"
	@echo "make format         let ruff format and mend the code"
	@echo "make bench          codec and outer-step speed on this machine (about a minute)"
	@echo "make simulate-long  20,000 simulated swarms (hours)"
	@echo "make clean          remove .venv and caches"

install: $(VENV)/.node-installed
	@echo "[set-up] done. In each terminal: . $(BIN)/activate"

demo: $(VENV)/.node-installed
	$(BIN)/p2pdiloco demo $(DEMO_ARGS)

test: $(VENV)/.dev-installed
	@echo "==> 1/5 lint and types"
	@$(MAKE) --no-print-directory lint
	@echo "==> 2/5 rules, unit and contract tests ($(JOBS) processes)"
	$(PYTEST) -q -n $(JOBS) -m "$(PURE)" tests/rules tests/unit tests/contracts
	@echo "==> 3/5 simulated swarms ($(JOBS) processes)"
	$(PYTEST) -q -n $(JOBS) -m "$(PURE)" tests/sim
	@echo "==> 4/5 commands as people give them ($(JOBS) processes)"
	$(PYTEST) -q -n $(JOBS) --dist loadfile -m "$(REAL)" tests/e2e
	@echo "==> 5/5 whole swarms of real processes under faults, one at a time"
	$(PYTEST) -m "$(ALONE)" tests/e2e

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.dev-installed
	$(PYTEST) -q -n $(JOBS) -m "$(PURE)" tests/rules tests/unit tests/contracts

sim: $(VENV)/.dev-installed
	$(PYTEST) -q -n $(JOBS) -m "$(PURE)" tests/sim

e2e: $(VENV)/.dev-installed
	$(PYTEST) -q -n $(JOBS) --dist loadfile -m "$(REAL)" tests/e2e
	$(PYTEST) -m "$(ALONE)" tests/e2e

test-long: $(VENV)/.dev-installed
	$(PYTEST) -v -m "long" tests

test-extras: $(VENV)/.dev-installed
	$(BIN)/python -m pip install --no-input --disable-pip-version-check -e '.[hub,wandb]'
	$(PYTEST) -v -m "extras" tests

format: $(VENV)/.dev-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev-installed
	$(BIN)/python tests/bench/bench_codec.py
	$(BIN)/python tests/bench/bench_outer_step.py

simulate-long: $(VENV)/.dev-installed
	$(BIN)/p2pdiloco simulate --seeds 1..20000

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python)

# Set-up. The stamps are newer than pyproject.toml when the environment matches it.

$(BIN)/python:
	@echo "[set-up] looking for Python 3.11 or newer"
	@set -eu; \
	for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found="$$python"; \
	    if "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	      echo "[set-up] $$("$$python" --version) ($$(command -v "$$python")) makes $(VENV)"; \
	      exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	  fi; \
	done; \
	if [ -n "$${found:-}" ]; then \
	  echo "[set-up] $$found is new enough but lacks the venv module. On Debian and Ubuntu: apt install python3-venv" >&2; \
	else \
	  echo "[set-up] none of these is Python 3.11 or newer: $(PYTHONS) (python3 is $$(python3 --version 2>&1 || true))." >&2; \
	  echo "[set-up] Install one, or name it: make PYTHON=/path/to/python3.12 <target>" >&2; \
	fi; \
	exit 1

$(VENV)/.node-installed: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "[set-up] installing p2pdiloco[node] $(if $(TORCH_SPEC),with $(TORCH_SPEC),with the newest torch) (a few minutes the first time)"
	$(BIN)/python -m pip install --no-input --disable-pip-version-check -e '.[node]' $(if $(TORCH_SPEC),'$(TORCH_SPEC)')
	@touch $@

$(VENV)/.dev-installed: pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "[set-up] installing p2pdiloco[node,dev] $(if $(TORCH_SPEC),with $(TORCH_SPEC),with the newest torch) (a few minutes the first time)"
	$(BIN)/python -m pip install --no-input --disable-pip-version-check -e '.[node,dev]' $(if $(TORCH_SPEC),'$(TORCH_SPEC)')
	@touch $@ $(VENV)/.node-installed
