# Each target sets up what it needs, in a virtual environment of its own; the second run is quick.
#
#   make demo, make test, make lint      see `make help`
#   PYTHON=/path/to/python               the Python to build the environment with (3.11 to 3.13; found if not given)
#   VENV=.venv                           where the environment goes
#   CONSTRAINTS=.ci/constraints-3.11.txt a pip constraints file that pins versions
#   WORKERS=2                            how many processes run the tests (one a CPU, at most 4)
#   PYTEST_ARGS="tests/test_engine.py"   what `make test` passes to pytest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

PYTHON ?=
VENV ?= .venv
CONSTRAINTS ?=
WORKERS ?= logical
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

help: ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/.installed ## answer a handful of prompts with the default model, then show what paging saved
	@$(BIN)/python scripts/demo.py

test: $(VENV)/.installed-dev ## run the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## check format, lint, types and import rules
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

clean: ## remove the environments and everything that was built
	rm -rf .venv* .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(scripts/find_python.sh 3.11 3.12 3.13) || exit 1; \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)"; \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	    || { echo "error: jpaged needs Python 3.11 to 3.13; name one with make PYTHON=..." >&2; exit 1; }; \
	rm -rf "$(VENV)"; "$$python" -m venv "$(VENV)"

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing jpaged into $(VENV) (a minute or two the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing jpaged and its development tools into $(VENV) (two minutes or so the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@
