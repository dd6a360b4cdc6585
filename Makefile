# Everything a developer runs. Needs python3 (3.11 or later) with pip; the rest goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt
CODE := $(wildcard src tests examples benchmarks)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check format format-check lint types site clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## fit a small model into less memory and print the proof
	@$(BIN)/python examples/first_light.py

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist worksteal

check: format-check lint types site test ## all that .ci/run holds: format, lint, types, site, tests

format: $(STAMP) ## rewrite the code in the one format, and fix what lint can fix
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

format-check: $(STAMP) ## fail where the format differs
	@$(BIN)/ruff format --check $(CODE)

lint: $(STAMP) ## fail on what ruff finds
	@$(BIN)/ruff check $(CODE)

types: $(STAMP) ## fail on what mypy --strict finds in src
	@$(BIN)/mypy

site: $(STAMP) ## build the documentation into build/site; fail on a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean: ## remove caches, build output and .venv
	@rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

# torch first, at its pin alone: the resolver then never weighs another build of it.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "setting up $(VENV) (once; a few minutes)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e ".[dev]"
	@touch $@
