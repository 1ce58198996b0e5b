# Each target sets up what it needs on first use and does nothing twice.
# One virtual environment, .venv, is installed from constraints.txt (versions known to work together).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
# Two test processes with one thread each.
PYTEST_FLAGS ?= -q -n 2

.PHONY: help demo test lint types check bench schema clean
help:
	@echo "make demo   quantize a real network and show accuracy before and after"
	@echo "make test   run all tests"
	@echo "make lint   ruff and the import rules        make types  mypy"
	@echo "make bench  the measurements of benchmarks/   make schema rebuild the descriptor set from *.proto"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

bench: $(BENCH_STAMP)
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

schema: $(STAMP)
	$(BIN)/python scripts/build_schema.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
