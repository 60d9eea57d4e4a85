# Everything a newcomer needs: `make demo` and `make test` set up their own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-gpu soak lint docs clean

help:            ## list these targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)   ## PETAL and its baselines on corrupted digits: no downloads, a few minutes
	$(BIN)/petal demo

lint: $(STAMP)   ## style, types and layers
	$(BIN)/ruff check src tests tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint       ## all checks and tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

test-gpu: $(STAMP) ## the tests that need a CUDA device; the core's dependencies and pytest are enough for them
	$(BIN)/pytest -m gpu

soak: $(STAMP)   ## the long tests: kills at random times, memory over many steps
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m soak

docs: $(STAMP)   ## the reference pages, from docstrings and cards
	$(BIN)/python tools/make_api.py
	$(BIN)/python tools/make_methods.py

clean:           ## remove what the targets above made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
