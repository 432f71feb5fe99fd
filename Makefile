# `make demo` answers a prompt from the embedded model, `make test` runs the tests. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
NATIVE := $(wildcard expertserve/ops/ggml/*.c expertserve/ops/ggml/*.h expertserve/experts/*.c expertserve/bench/*.c)

.PHONY: help setup demo test test-slow test-gpu lint type bench docs check clean demo-model

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 14

# The stamp makes setup run again when what is installed or compiled has changed.
$(VENV)/.installed: pyproject.toml $(wildcard setup.py) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

setup: $(VENV)/.installed ## make .venv with the package and the tools of development

demo: setup ## answer a prompt from the embedded model
	$(BIN)/expertserve run demo --prompt "Why is the sky blue?" --temperature 0 --max-tokens 64 --stats-every 0

test: setup ## run the tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(JOBS) --dist worksteal

test-slow: setup ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-gpu: setup ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

lint: setup ## check formatting and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: setup ## check types
	$(BIN)/mypy

bench: setup ## measure MODEL (a synthetic one) over budgets and beside llama.cpp, into docs/BENCHMARKS.md
	$(BIN)/python -m tools.bench_docs $(MODEL)

docs: setup ## write the generated parts of docs/
	$(BIN)/python tools/gen_docs.py

check: lint type ## everything that a change must pass
	$(BIN)/python tools/gen_docs.py --check
	$(MAKE) test

demo-model: setup ## train the embedded model anew (over an hour)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tools/train_demo/requirements.txt
	$(BIN)/python -m tools.train_demo --work build/demo
	cp build/demo/demo.gguf expertserve/data/demo.gguf

clean: ## remove what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find expertserve -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
