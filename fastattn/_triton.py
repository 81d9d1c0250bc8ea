"""Registers Triton kernels as the GPU implementation of ops, and says in one line why they cannot run.

Triton and the kernels are loaded by the first call. ``missing`` only reads names, so that it may be called
under ``torch.compile``.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["cannot_interpret", "interpreter", "missing", "register", "replaces_native", "run"]

_missing = None if importlib.util.find_spec("triton") else "Triton is not installed"
_interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_interpreting = False
_modules: dict[str, str] = {}  # by op
DEVICES = ("cuda", "xpu")  # AMD's devices are "cuda", too

if importlib.util.find_spec("fastattn.kernels") is None:
    # A checkout that is not installed has the kernels beside the package.
    folder = Path(__file__).parent.parent / "kernels"
    if (folder / "attention.py").exists():
        spec = importlib.util.spec_from_file_location(
            "fastattn.kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    else:
        _missing = f"its kernels are not in {folder}"


def missing(op: str, device: str) -> str | None:
    """Why the op cannot run on Triton there, or None if it can."""
    if op not in _modules:
        return "this version has no triton kernel of this operator"
    if _missing is not None:
        return _missing
    if device == "cpu":
        return None if _interpreting else "on the CPU Triton only has an interpreter, which is for tests"
    return None if device in DEVICES else f"Triton has no {device} devices"


def cannot_interpret() -> str | None:
    """Why there is no ``interpreter`` in this process, or None if there is."""
    return _missing or (None if _interpreted else "TRITON_INTERPRET=1 was not set when fastattn was imported")


def replaces_native(op: str) -> bool:
    """Whether the interpreter runs the op on the CPU, in the place of the native kernel."""
    return _interpreting and op in _modules


@contextmanager
def interpreter() -> Iterator[None]:
    """Inside, Triton's interpreter runs the ops on CPU tensors, in place of the native kernels: for tests.

    Autograd, transforms and callers of the bare ops meet the Triton kernels as they would on a GPU.
    """
    global _interpreting
    if cannot_interpret():
        raise RuntimeError(f"Triton's interpreter cannot run: {cannot_interpret()}")
    with torch.library._scoped_library("fastattn", "IMPL") as overrides:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*overrid", category=UserWarning)
            for op in _modules:
                overrides.impl(op.partition("::")[2], run(op), "CPU", allow_override=True)
        before, _interpreting = _interpreting, True
        try:
            yield
        finally:
            _interpreting = before


def run(op: str) -> Callable:
    """The kernel of an op, ``fastattn::...``, as a function of the op's arguments."""
    return getattr(importlib.import_module(f"fastattn.kernels.{_modules[op]}"), op.partition("::")[2])


def register(library: torch.library.Library, module: str, *names: str) -> None:
    """fastattn.kernels.<module>.<name> becomes the implementation of each named op on GPUs."""

    for name in names:
        op = f"fastattn::{name}"
        _modules[op] = module

        def kernel(*args, op=op):
            device = next(a.device for a in args if isinstance(a, torch.Tensor))
            with torch.accelerator.device_index(device.index):  # Triton launches on the current device
                return run(op)(*args)

        for device in DEVICES:
            library.impl(name, kernel, device.upper())
