# Every target sets up what it needs: see scripts/setup.sh. No activated environment is required.
# All paths are relative, because make splits absolute ones at the spaces they may hold.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install java format check test torture bench bench-remote demo notebooks hdfs clean

# The environment in .venv is complete; what another one left in these variables would leak into it.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV

PYTHON_RUN := .venv/bin/python
SPARK_RUN := JAVA_HOME="$$(cat .venv/java_home)" $(PYTHON_RUN)

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

install: ## Create .venv and install the pinned packages
	@bash scripts/setup.sh packages

java: install
	@bash scripts/setup.sh java

format: install ## Format the code and apply the safe lint fixes
	$(PYTHON_RUN) -m ruff check --fix-only .
	$(PYTHON_RUN) -m ruff format .

check: install ## Lint, check the format and check the types
	$(PYTHON_RUN) -m ruff check .
	$(PYTHON_RUN) -m ruff format --check .
	$(PYTHON_RUN) -m mypy

test: check java ## Check, then run the whole test suite except torture
	$(SPARK_RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

torture: java ## Run the tests that kill processes and break storage
	$(SPARK_RUN) -m pytest -m torture

bench: java ## Run the benchmarks
	$(SPARK_RUN) -m benchmarks

bench-remote: java ## Run the benchmarks that need a real HDFS
	$(SPARK_RUN) -m benchmarks remote

demo: java ## Run the main job on local disk and show what happened
	$(SPARK_RUN) scripts/demo.py

notebooks: java ## Run all notebooks and render them to docs/notebooks
	$(SPARK_RUN) -m notebooks.runner --output docs/notebooks

hdfs: java ## Run a small HDFS until Ctrl-C, to try the log on
	$(SPARK_RUN) -m servers

clean: ## Remove .venv, caches and build output
	rm -rf .venv .venv.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
