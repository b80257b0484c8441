# Everything runs from .venv; `make` alone explains the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Kernels and integrations import optional packages, so their examples run in their own tests.
DOCTEST_SKIP := --ignore=src/lln/kernels --ignore=src/lln/integrations
OLDEST := .oldest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-gpu bench fit check clean

help:  ## show this list
	@echo "lln: Linear Log-Normal attention. First time here? Try 'make demo'."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Nothing to prepare: each target installs what it needs into $(VENV) on first use."
	@echo "Another interpreter: make PYTHON=python3.12 setup (Python 3.10 or newer)."

setup: $(VENV)/.stamp-dev  ## install the package and the developer tools into .venv
demo: $(VENV)/.stamp-run  ## see the library at work, on CPU
	$(BIN)/lln demo

test: setup  ## run the CPU tests and the examples in the docstrings
	$(BIN)/python -m pytest -n 2 -m "not gpu and not slow" --ignore=tests/kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m "not gpu" tests/kernels
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/kernels/test_chips.py
	$(BIN)/python -m pytest --doctest-modules $(DOCTEST_SKIP) src/lln

# Absolute, because some tests start Python in another folder.
test-oldest: $(OLDEST)/.stamp  ## run the Hugging Face tests with the oldest supported transformers
	LLN_TEST_OLDEST=1 PYTHONPATH="$(CURDIR)/$(OLDEST):$(CURDIR)/src" $(BIN)/python -m pytest -n 2 \
		-m "not gpu and not slow" tests/integrations tests/studies/inspection \
		tests/instruments/test_capture_transformers.py

test-gpu:  ## run the GPU tests with the python at hand, which brings its own torch
	PYTHONPATH=src $(PYTHON) -m pytest tests/kernels tests/instruments/test_gpu.py \
		tests/studies/bench/test_roberta.py

bench: setup  ## time attention on this machine, table and figure (CPU: three minutes)
	$(BIN)/lln bench --figure

fit: setup  ## refit the constants that ship with the package
	$(BIN)/lln fit

# Not --quiet, which also drops the warnings that --strict counts.
# The variable silences an advertisement for another program.
.PHONY: docs
docs: setup  ## build the site of the documentation in build/site, and fail on a dead link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: setup  ## lint, formatting, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

clean:  ## remove .venv, .oldest, caches and build output
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("lln needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# The stamps depend on what they install from, so a second run does nothing.
$(VENV)/.stamp-run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[instruments]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,docs,hf,instruments,onnx,oracles,triton]' tensorboard
	@touch $(VENV)/.stamp-run $@

# Emptied first: pip leaves in a target folder whatever is there already.
$(OLDEST)/.stamp: requirements-oldest.txt | $(VENV)/.stamp-dev
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) -r $<
	@touch $@
