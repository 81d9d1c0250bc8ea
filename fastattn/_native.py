"""Loads the compiled libraries and says in one line why one is missing.

Loading the CPU library registers the CPU implementation of the operators; it takes about a millisecond and
starts no thread. Both libraries are loaded when this module is imported, so that afterwards the functions
only read a name and may be called under ``torch.compile``.
"""

import warnings
from pathlib import Path

import torch

__all__ = ["build_info", "has_kernel", "isa", "isas", "missing"]


def _load() -> str | None:
    folder = Path(__file__).parent
    library = folder / "_cpu.so"
    if not library.exists():
        record = folder / "_native_missing.txt"  # setup.py leaves the reason there
        return record.read_text().strip() if record.exists() else "the CPU library has not been built"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name} does not load: {' '.join(str(error).split())}"
    return None


_missing = _load()
_kernels = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if _missing is None else ())
_invalid_isa = None
_isa = None

try:
    from fastattn import _introspection
except ImportError:  # the kernels need no Python API and run without it
    _introspection = None
else:
    try:
        _isa = _introspection.isa()
    except ValueError as error:
        _invalid_isa = str(error)

if _missing is not None:
    warnings.warn(
        f"no native CPU kernels, operators run on the reference: {_missing}", RuntimeWarning, stacklevel=2
    )


def missing() -> str | None:
    """Why the native CPU kernels cannot be used here, in one line, or None if they can.

    Raises:
        ValueError: the environment variable ``FASTATTN_CPU_ISA`` names no instruction set.
    """
    if _invalid_isa is not None:
        raise ValueError(_invalid_isa)
    return _missing


def has_kernel(op: str) -> bool:
    """Whether the native library implements the registered op of this name, ``fastattn::...``."""
    return op in _kernels


def isa() -> str | None:
    """The instruction set whose CPU kernels run here; None if that is not known.

    It is the strongest one that was compiled and that this machine supports, capped by the environment
    variable ``FASTATTN_CPU_ISA`` as it was when the package was imported.

    Raises:
        ValueError: ``FASTATTN_CPU_ISA`` names no instruction set.
    """
    return _isa if missing() is None else None


def isas() -> dict[str, bool]:
    """Every compiled instruction set, weakest first, and whether this machine supports it."""
    return _introspection.isas() if _introspection is not None else {}


def build_info() -> dict[str, str]:
    """How the native kernels were built: compiler, flags, torch headers, the oldest torch they run under."""
    return _introspection.build_info() if _introspection is not None else {}
