# `make demo` and `make test` need Python 3.11 or newer with its headers and venv, and a C++ compiler;
# everything else comes into .venv, at the versions in .constraints.txt.

PYTHON ?= python3
QUESTION ?= What is lambda?

BIN := .venv/bin
TOOLS := .venv/.tools
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .constraints.txt

.PHONY: help demo test stress lint types bench clean

help:  ## Say what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(READY)  ## Fine-tune a small model with all its state on disk, and let it answer
	$(BIN)/python scripts/make_demo.py demo
	$(BIN)/ratel finetune configs/demo.yaml
	$(BIN)/python scripts/complete.py "$(QUESTION)" demo/base demo/output

test: $(READY)  ## Run all tests, those of the GPU on a simulated one if torch has no CUDA
	RATEL_SIMULATED_GPU=1 $(BIN)/python -m pytest tests/gpu tests/simulated_gpu
	$(BIN)/python -m pytest

stress: $(READY)  ## Kill a training run a thousand times, at any moment, and compare what it leaves (half an hour)
	RATEL_STRESS_KILLS=1000 $(BIN)/python -m pytest tests/stress -s

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Check types
	$(BIN)/mypy

bench: $(READY)  ## Measure queue, kernel, optimizer and whole steps against their ceilings (hours); keep the results
	$(BIN)/python -m scripts.bench.all

clean:  ## Remove everything that these targets made
	rm -rf .venv build demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: its version is fixed before anything else can ask for another.
$(TOOLS): .constraints.txt
	$(PYTHON) -m venv .venv && $(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(READY): $(TOOLS) pyproject.toml $(shell find kernels -type f)
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@
