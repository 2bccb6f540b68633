# Everything here needs only Python >= 3.11; `make` works from any folder with `make -C`.
PYTHON ?= python3
STRATEGY ?= isoloco
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo simulate test lint bench clean

demo: $(READY)  ## Train a small Llama with IsoLoCo on 8 virtual clients: make demo [STRATEGY=diloco]
	$(BIN)/python -m simulations.demo --strategy $(STRATEGY)

simulate: $(READY)  ## DiLoCo and IsoLoCo on 4 and 16 workers beside data-parallel training, and a report
	$(BIN)/python -m simulations run quick --anew
	$(BIN)/python -m simulations report quick --anew

test: lint  ## Lint, then all tests but those that need a GPU or many minutes
	@command -v chromium > /dev/null || echo 'No chromium here: the report is not looked at in a browser'
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow$$(command -v chromium > /dev/null || echo ' and not browser')"

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## Speed and memory against named peers; writes benchmarks/results/
	$(BIN)/python -m benchmarks.merging
	$(BIN)/python -m benchmarks.aggregation
	$(BIN)/python -m benchmarks.pretraining

clean:  ## Remove the environment and what the tools leave behind; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, PYTHON=... names one")'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing what is needed into $(VENV) (once; a few minutes) ...'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[simulation,pretraining,metrics,fast,dev]'
	touch $@
