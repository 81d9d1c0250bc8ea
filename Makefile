# The front door. Targets set up their environments by themselves: `make test`, `make test-newest`,
# `make test-triton`, `make demo`, `make bench`, `make lint`, `make format`; `make gpu` runs with the PYTHON at hand,
# as it is.
#
# TORCH is the torch requirement of .venv. The default is pinned, so that a run can be repeated and so that pip takes
# a CPU-only wheel of this version where it has been given one; plain `torch` is the newest release, on Linux a CUDA
# build of several GB: `make test TORCH=torch`.
TORCH ?= torch==2.13.0
# The torch that `pip install torch` brings, which the binary that was built with TORCH has to serve as well. Pinned,
# too: a newer one is a change to this line, made when its tests pass.
NEWEST ?= torch==2.14.1
# The oldest Triton that the kernels have to compile under: that of torch 2.11.
OLDEST_TRITON ?= triton==3.6.0
PYTHON ?= python3
# Test processes. Most of the time goes to single-threaded Python, so that two of them take hardly more than half.
JOBS ?= 2
# Pinned: another version formats differently.
LINTERS := ruff==0.17.5 clang-format==23.1.3
# Threads that wait spin by default, which costs tests a lot when cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

# What depends on torch's Python side, which changes from release to release: compile, export, autograd, torch.func,
# overrides, nested tensors, modules, and the library that loads. Arithmetic is the kernels' own.
NEWEST_TESTS := $(patsubst %,tests/test_%.py,attention_torch varlen_attention_torch linear_attention_torch \
  aggregation_torch accelerate replace_attention multihead_attention_torch nested_tensors kv_cache_object graph_conv) \
  $(addprefix tests/test_package.py::test_,one_binary_for_every_torch environment_caps_the_instruction_set \
  works_without_the_native_library_and_says_why_in_one_line calls_from_several_threads_at_once \
  registered_ops_refuse_what_does_not_fit layouts_of_outputs)

BIN := .venv/bin
NEWEST_BIN := .venv-newest/bin
SOURCES := setup.py pyproject.toml $(wildcard csrc/*/*)

.PHONY: demo test test-newest test-triton bench gpu lint format clean

test: .venv/installed
	$(BIN)/python -m pytest tests -n $(JOBS) --dist worksteal

# The first line is the wheel, as a user has it; the tests load the checkout, whose library is the same.
test-newest: .venv-newest/installed
	cd .venv-newest && bin/python -m fastattn
	$(NEWEST_BIN)/python -m pytest $(NEWEST_TESTS) -n $(JOBS) --dist worksteal

# A GPU's machine brings the Triton of its torch, whose compiler takes less than the newest.
test-triton: .venv/$(OLDEST_TRITON)
	PYTHONPATH=$< $(BIN)/python -m fastattn.kernels --main --target cuda:90

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

# A wheel of what .venv has built: nothing is compiled again. The second install replaces one of the same version.
.venv-newest/installed: .venv/installed .venv-newest/torch-$(subst /,_,$(NEWEST))
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(NEWEST_BIN)/python -m pip install "$(NEWEST)" "$$(echo build/wheel/*.whl)[test]"
	$(NEWEST_BIN)/python -m pip install --no-deps --force-reinstall build/wheel/*.whl
	touch $@

.venv/$(OLDEST_TRITON): .venv/installed
	rm -rf $@
	$(BIN)/python -m pip install --no-deps --target $@ $(OLDEST_TRITON)
	touch $@

.venv-newest/torch-$(subst /,_,$(NEWEST)):
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(NEWEST_BIN)/python -m pip install "$(NEWEST)"
	touch "$@"

.venv/lint: Makefile | .venv/bin/python
	$(BIN)/python -m pip install $(LINTERS)
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .venv-newest build fastattn/*.so fastattn/_native_missing.txt *.egg-info demo_output
