# make setup       the environment in .venv (TORCH=auto|cpu|cu126|cu128|cu130)
# make quickstart  set-up, then train a small model on this machine
# make test        set-up, lint, types, contract, fast tests
# make test-all    the same and the slow tests
# make test-cluster  installs Slurm, Open MPI, PostgreSQL and Chromium (Debian, root), then tests on them
# make test-gpu    the tests that need an NVIDIA GPU, and layouts over NCCL on 2 and 4 ranks that share it
# make test-faults  thousands of damaged files, killed commands and fuzzed inputs (docs/reliability.md)
# make lint        check style, types, imports and documentation; make format  reformat
# make wheel       dist/: the source distribution and the wheel
# make wheelhouse  wheelhouse/: all wheels for an install without a network (TORCH=..., EXTRAS=all)
# make bench       the measurements that need no GPU and no data from elsewhere
SHELL := /bin/bash
TORCH ?= auto
EXTRAS ?=
PYTHON ?= python3
BIN := .venv/bin
# Where it is set, every process of the tests compiles the package anew: four seconds of CPU each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart lint format test test-all test-cluster test-gpu test-faults wheel wheelhouse bench clean

# The script itself looks for a Python from 3.11 to 3.14; one before 3.7 cannot even read it.
setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 7) and "error: this Python is too old: make setup PYTHON=python3.12, or build an image, see containers/")'
	@$(PYTHON) tools/setup.py --torch $(TORCH)

quickstart: setup
	@$(BIN)/steelyard quickstart

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_docs.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Two processes, each with whole files (tests/conftest.py): what a file sets up once is not set up twice.
PYTEST := $(BIN)/pytest -n 2

test: lint
	$(PYTEST) -m "not slow and not cluster"

test-all: lint
	$(PYTEST) -m "not cluster"

# Its own cache, since CI runs it beside test-all; CLUSTER_TESTS=--last-failed runs only what failed.
test-cluster: setup
	tools/cluster_packages
	$(BIN)/pytest -m cluster -o cache_dir=.pytest_cache/cluster $(CLUSTER_TESTS)

# GPU_TESTS="--minutes 9" for a slice; the same command continues behind what is done.
test-gpu: setup
	$(BIN)/python tools/gpu_tests.py $(GPU_TESTS)

# Goes on behind what faults.json has; remove the file to begin again.
test-faults: setup
	$(BIN)/python -m tests.faults --out faults.json

wheel: setup
	$(BIN)/python tools/build_wheel.py dist

wheelhouse: setup
	$(BIN)/python tools/wheelhouse.py wheelhouse --torch $(TORCH) --extras "$(EXTRAS)"

bench: setup
	$(BIN)/python benchmarks/index_maps.py

clean:
	rm -rf .venv build dist wheelhouse *.egg-info
