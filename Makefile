# Every target does its own set-up in .venv and can be the first command on a fresh machine.
# Nothing here needs root or a package manager; tests that want nginx skip where there is none.

VENV ?= .venv
# One version for everybody. On Linux without a GPU the small CPU build is enough:
#   make test PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
# Two processes, a file in one of them; conftest.py puts the long files first. A process that dies ends the run: with
# another in its place, pytest-xdist 3.8 waited for ever.
PYTEST_FLAGS ?= -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Seconds for each of the readers.
FUZZ_SECONDS ?= 8
FUZZ_FLAGS ?= --seconds $(FUZZ_SECONDS)
# The newest of these that is at least 3.11 makes the environment; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)

# Hundreds of tests start a Python; each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
BENCHMARKS := importtime planning first resume http https s3 gs az small large store busy memory link faults faults-peers verify service filters decode loader workers size images \
	images-file shards cache signing listing exact interleave index distributed.map distributed.index distributed.plan

.PHONY: help test test-fast test-process fuzz demo lint types format generate docs dist bench clean
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# Rooms whose tests need neither torch nor a cloud's client; `make test T=tests/tar` installs a few small packages.
CORE_ROOMS := tests/tar% tests/test_urls% tests/test_rewrite% tests/test_redact% tests/test_errors% tests/test_handlers%
test: $(VENV)/.$(if $(and $(T),$(filter $(CORE_ROOMS),$(T))),core,test)-ready ## All tests, or those of a room: make test T=tests/tar
	$(BIN)/python -m pytest $(if $(T),-q $(T),$(PYTEST_FLAGS))

# Not the files that look into the thread, or put doubles into its process.
test-process: $(VENV)/.test-ready ## The tests of reading, with the engine in another process
	WDS_ENGINE=process $(BIN)/python -m pytest -q tests/reading tests/faults tests/shardcache tests/test_dataset.py tests/test_loader.py \
	  tests/transfer $(foreach name,engine pump retry hedging traffic,--ignore=tests/transfer/test_$(name).py)

test-fast: $(VENV)/.test-ready ## The tests that start neither a server nor a process
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

fuzz: $(VENV)/.fuzz-ready ## Look for inputs that a reader answers wrongly (two minutes; FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz $(FUZZ_FLAGS)

demo: $(VENV)/.demo-ready ## Train a small model from shards streamed over HTTP
	$(BIN)/wds-async demo

lint: $(VENV)/.lint-ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: $(VENV)/.types-ready ## What an editor sees of the public names: pyright (which needs node) and mypy
	$(BIN)/pyright --pythonpath $(BIN)/python tests/typing
	$(BIN)/mypy tests/typing

format: $(VENV)/.lint-ready ## Let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.lint-ready ## Write the fluent methods and the page of variables anew
	$(BIN)/python .ci/generate.py

docs: $(VENV)/.docs-ready ## The documentation as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(VENV)/.release-ready ## The wheel and the source archive, built twice, compared and checked
	$(BIN)/python .ci/dist.py

bench: $(VENV)/.bench-ready ## All benchmarks, side by side with the peers (an hour or two; link needs root)
	$(BIN)/python -m benchmarks --install all $(addprefix --run ,$(BENCHMARKS))
	$(BIN)/python -m benchmarks.report

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "wds_async needs Python 3.11 or newer; name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv module? On Debian: apt-get install python3-venv"; exit 1; }

# torch comes first and by its exact version, so that no later package can choose another.
$(VENV)/.torch-ready: | $(BIN)/python
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.core-ready: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[test-core]"
	@touch $@

$(VENV)/.%-ready: pyproject.toml $(VENV)/.torch-ready
	$(PIP) "$(TORCH)" -e ".[$*]"
	@touch $@

$(VENV)/.docs-ready $(VENV)/.release-ready $(VENV)/.types-ready: $(VENV)/.%-ready: pyproject.toml | $(BIN)/python
	$(PIP) -e ".[$*]"
	@touch $@

$(VENV)/.lint-ready: pyproject.toml $(VENV)/.torch-ready
	$(PIP) "$(TORCH)" -e ".[test,lint]"
	@touch $@
