"""What every test gets: seeds, poisoned memory, and ways to run code in a fresh interpreter."""

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from unittest.mock import MagicMock

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when torch is imported: spinning threads starve others

import numpy as np
import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter. Read when fastattn and Triton are imported.
if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import hypothesis  # noqa: F401
except ImportError:  # a GPU's machine may have nothing but torch and pytest: its tests are skipped there

    def skipped(*args, **kwargs):
        return pytest.mark.skip(reason="hypothesis is not installed")

    sys.modules["hypothesis"] = stand_in = module_from_spec(ModuleSpec("hypothesis", None))
    stand_in.given, stand_in.settings = skipped, skipped
    stand_in.HealthCheck, stand_in.strategies = MagicMock(), MagicMock()

from fastattn import _native

ROOT = Path(__file__).resolve().parent.parent
# What this machine can run, each a value for FASTATTN_CPU_ISA; nothing without the native kernels.
ISAS = [name for name, supported in _native.isas().items() if supported]


# What a Triton kernel says to tensors on the CPU, and what says that it cannot be interpreted.
NEEDS_INTERPRETER = ("on the CPU Triton only has an interpreter", "Triton's interpreter cannot run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Where Triton compiles for a GPU, tests that hand it tensors on the CPU are skipped."""
    try:
        return (yield)
    except Exception as error:
        if torch.accelerator.is_available() and any(text in str(error) for text in NEEDS_INTERPRETER):
            pytest.skip("calls the Triton kernels on the CPU: only for their interpreter")
        raise


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def perturbed_malloc() -> Iterator[None]:
    """Fresh memory holds 0x7f bytes: some 3e38 in float32 and bfloat16, NaN in float16. This reaches what C++
    allocates, which torch's own switch for uninitialised memory does not; freed memory is overwritten too."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    M_PERTURB = -6
    if mallopt is not None:
        mallopt(M_PERTURB, 0x80)
    yield
    if mallopt is not None:
        mallopt(M_PERTURB, 0)


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess]:
    """run_python("-c", code, FASTATTN_CPU_ISA="avx2") runs a new interpreter that imports this checkout."""

    def run(*arguments, check=True, cwd=ROOT, python=sys.executable, path=ROOT, **environment):
        environment = os.environ | {"PYTHONPATH": str(path)} | environment
        done = subprocess.run(
            [python, *map(str, arguments)], env=environment, cwd=cwd, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(params=ISAS)
def isa(request) -> str:
    """Every instruction set of this machine in turn; pass it on as FASTATTN_CPU_ISA, which is read once."""
    return request.param


@pytest.fixture(params=[name for name in ISAS if name != _native.isa()])
def other_isa(request) -> str:
    """Those of them that all the other tests do not run under anyhow."""
    return request.param
