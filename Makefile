# `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
DEVICE ?= auto
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install install-dev train test test-packaging check protos clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# The interpreter is looked for here because deploy/install.py, which looks for everything else, needs one.
INSTALL = @command -v $(PYTHON) >/dev/null || { echo "install: no $(PYTHON) here: apt-get install python3 python3-venv" >&2; exit 2; }; \
	$(PYTHON) deploy/install.py --device $(DEVICE)

install: ## everything to run tandem, in .venv (PYTHON=... picks the interpreter, DEVICE=cpu or cuda what for)
	$(INSTALL)

install-dev: ## the same, and what checks and tests need
	$(INSTALL) --dev

train: install ## train the small model through the whole stack (ARGS="--run.seed 2" overrides settings)
	@$(BIN)/tandem train deploy/runs/tiny.toml $(ARGS)

test: install-dev ## run the tests (ARGS="-k push" picks some)
	@$(BIN)/python -m pytest $(ARGS)

test-packaging: install-dev ## install the large extras in fresh environments and start what they promise (ARGS="cpu" picks)
	@$(BIN)/python -m tests.packaging.large_extras $(ARGS)

check: install-dev ## run every linter, and compare the generated code
	@echo "ruff" && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "mypy (the first time takes a minute)" && $(BIN)/mypy
	@echo "import-linter" && $(BIN)/lint-imports --no-logo
	@echo "buf" && $(BIN)/buf lint && $(BIN)/buf format --diff --exit-code
	@echo "generated code" && $(BIN)/python -m protos.generate --check

protos: install-dev ## generate the code of the .proto files
	@$(BIN)/buf format --write
	@$(BIN)/python -m protos.generate

clean: ## remove .venv and the caches (not runs/)
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
