# Everything a newcomer needs: `make demo` and `make test` set up their own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
TOOLS := .venv-tools

.PHONY: help demo test test-gpu test-lowest soak lint docs site sbom audit clean

help:            ## list these targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(CORE): pyproject.toml constraints.txt
	@echo "Installing petal into $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $(CORE)

$(STAMP): $(CORE)
	@echo "Installing what the tests need: a few minutes, once"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(CORE)    ## PETAL and its baselines on corrupted digits: no downloads, a few minutes
	$(BIN)/petal demo

lint: $(STAMP)   ## style, types and layers
	$(BIN)/ruff check src tests tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint       ## all checks and tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

test-gpu: $(STAMP) ## the tests that need a CUDA device; the core's dependencies and pytest are enough for them
	$(BIN)/pytest -m gpu

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --constraint constraints-lowest.txt --editable . pytest pytest-xdist hypothesis scipy \
	    kornia opencv-python-headless triton
	@touch $@

# without the extras, and without the tests that need them
WITHOUT := tests/serve tests/sweep tests/deploy tests/cli/test_serve.py src/petal/serve src/petal/sweep

test-lowest: $(LOWEST)/.installed ## the core's tests with the lowest versions that pyproject.toml admits
	OMP_NUM_THREADS=1 $(LOWEST)/bin/pytest -n 3 --dist worksteal $(addprefix --ignore=,$(WITHOUT))

soak: $(STAMP)   ## the long tests: kills at random times, memory over many steps
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m soak

docs: $(STAMP)   ## the reference pages, from docstrings and cards
	$(BIN)/python tools/make_api.py
	$(BIN)/python tools/make_methods.py

site: $(STAMP)   ## the documentation as pages, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(TOOLS)/.installed: constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --constraint constraints.txt cyclonedx-bom pip-audit
	@touch $@

sbom: $(STAMP) $(TOOLS)/.installed ## a bill of materials of the environment, sbom.json (CycloneDX)
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-format JSON --output-file sbom.json

audit: $(STAMP) $(TOOLS)/.installed ## the environment against the known vulnerabilities; needs the network
	$(TOOLS)/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

clean:           ## remove what the targets above made
	rm -rf $(VENV) $(LOWEST) $(TOOLS) sbom.json site .pytest_cache .mypy_cache .ruff_cache .hypothesis
