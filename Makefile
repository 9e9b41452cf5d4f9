# make setup       the environment in .venv (TORCH=auto|cpu|cu126|cu128|cu130)
# make quickstart  setup, then train a small model on this machine
# make test        setup, lint, types, import contracts, fast tests
# make test-all    the same and the slow tests
# make test-cluster  installs Slurm, Open MPI, PostgreSQL and Chromium (Debian, root), then tests on them
# make test-gpu    tests that need an NVIDIA GPU, and layouts over NCCL with 2 and 4 ranks on one GPU
# make test-faults  thousands of damaged files, killed commands and fuzzed inputs (docs/reliability.md)
# make lint        check style, types, imports and documentation; make format  reformat
# make wheel       dist/: the source distribution and the wheel
# make wheelhouse  wheelhouse/: all wheels for an offline install (TORCH=..., EXTRAS=all)
# make bench       the benchmarks that need no GPU and no downloads
SHELL := /bin/bash
TORCH ?= auto
EXTRAS ?=
PYTHON ?= python3
BIN := .venv/bin
# If it is set, every test process compiles the package again, which takes four seconds of CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart lint format test test-all test-cluster test-gpu test-faults wheel wheelhouse bench clean

# The script searches for a Python from 3.11 to 3.14. A Python before 3.7 cannot parse it.
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

# Two processes, each with whole files (tests/conftest.py), so that the fixtures of a file are set up once.
PYTEST := $(BIN)/pytest -n 2

test: lint
	$(PYTEST) -m "not slow and not cluster"

# TESTS=--last-failed runs only what failed.
test-all: lint
	$(PYTEST) -m "not cluster" $(TESTS)

# Its own cache, since CI runs it beside test-all; CLUSTER_TESTS=--last-failed runs only what failed.
test-cluster: setup
	tools/cluster_packages
	$(BIN)/pytest -m cluster -o cache_dir=.pytest_cache/cluster $(CLUSTER_TESTS)

# GPU_TESTS="--minutes 9" runs a part; the same command continues with the remaining cases.
test-gpu: setup
	$(BIN)/python tools/gpu_tests.py $(GPU_TESTS)

# Continues after the results in faults.json; remove the file to start again.
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
