# The front door. Targets set up .venv by themselves: `make test`, `make demo`, `make bench`, `make lint`, `make format`;
# `make gpu` runs with the PYTHON at hand, as it is.
#
# TORCH is the torch requirement of .venv. The default is pinned, so that a run can be repeated and so that pip takes
# a CPU-only wheel of this version where it has been given one; plain `torch` is the newest release, on Linux a CUDA
# build of several GB: `make test TORCH=torch`.
TORCH ?= torch==2.13.0
PYTHON ?= python3
# Test processes. Most of the time goes to single-threaded Python, so that two of them take hardly more than half.
JOBS ?= 2
# Pinned: another version formats differently.
LINTERS := ruff==0.17.5 clang-format==23.1.3
# Threads that wait spin by default, which costs tests a lot when cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

BIN := .venv/bin
SOURCES := setup.py pyproject.toml $(wildcard csrc/*/*)

.PHONY: demo test bench gpu lint format clean

test: .venv/installed
	$(BIN)/python -m pytest tests -n $(JOBS) --dist worksteal

demo: .venv/installed
	$(BIN)/python examples/train_language_model.py
	$(BIN)/python examples/generate_digits.py
	$(BIN)/python examples/classify_digits.py

bench: .venv/installed
	$(BIN)/python -m benchmarks attention --quick

# What a GPU is needed for, in stages; the next call goes on where this one ends. Nothing is installed.
gpu:
	$(PYTHON) -m tests.gpu

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*/*.cpp csrc/*/*.h)

format: .venv/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard csrc/*/*.cpp csrc/*/*.h)

# One stamp per torch requirement: another TORCH= reinstalls, the same one does not.
.venv/torch-$(subst /,_,$(TORCH)): | .venv/bin/python
	rm -f .venv/torch-* .venv/installed
	$(BIN)/python -m pip install "$(TORCH)"
	touch "$@"

.venv/installed: .venv/torch-$(subst /,_,$(TORCH)) $(SOURCES)
	$(BIN)/python -m pip install -e ".[test]"
	touch $@

.venv/lint: Makefile | .venv/bin/python
	$(BIN)/python -m pip install $(LINTERS)
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build fastattn/*.so fastattn/_native_missing.txt *.egg-info demo_output
