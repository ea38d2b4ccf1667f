# One virtual environment, .venv, with the pinned set of constraints.txt; nothing else on the machine is touched.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: help compare test lint campaign oldest clean
.DEFAULT_GOAL := help

help:
	@echo 'make compare    compare the layer in NumPy, JAX and PyTorch with Hugging Face (ARGS="--help" for its options)'
	@echo 'make test       the test suite (ARGS="-k name" to choose)'
	@echo 'make lint       ruff and mypy'
	@echo 'make campaign   10,000 damaged files, 200 killed runs, a thousand correct runs before every gate (hours)'
	@echo 'make oldest     the tests of the reference with the first transformers that has Qwen3'
	@echo 'make clean      remove the virtual environment and all caches'

compare: .venv/installed
	@$(BIN)/python -m harness.compare $(ARGS)

test: .venv/installed-dev
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: .venv/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

campaign: .venv/installed-dev
	@$(BIN)/python tests/fuzz.py
	@$(BIN)/python tests/kills.py
	@$(BIN)/python tests/campaign.py $(ARGS)

# The adapter around Hugging Face's layer must run on both ends of the range that pyproject.toml allows.
oldest:
	@$(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@.venv-oldest/bin/python -m pip install --quiet transformers==4.51.0 numpy safetensors ml_dtypes jaxtyping beartype psutil pytest
	@.venv-oldest/bin/python -m pytest -o addopts= -q tests/test_reference.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# PyTorch comes first and by its exact version, so that a machine that has its CPU build uses that one.
.venv/installed: pyproject.toml constraints.txt
	@echo 'Installing the pinned packages into .venv (once; a minute or two) ...'
	@$(PYTHON) -m venv .venv
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo 'Installing the test tools into .venv ...'
	@$(PIP) -e '.[dev]'
	@touch $@
