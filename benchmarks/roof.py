"""The machine's roofs, measured in the same run and on the same threads as the cases.

"fp32" and "bf16" are register-only multiply-add loops of the native library (csrc/cpu/roof.cpp), "bf16_tile"
the same for matrix tiles where the processor has them. A processor that cannot multiply bf16 widens it: its
roof is that of fp32. "fp32_tile" is what "bf16_tile" leaves of fp32 products of three parts each, a sixth.
"matmul" is a 1024^3 fp32 torch.matmul: processors lower their clock where operands come from memory, by a
sixth on some, so that no product of vectors reaches the roof of registers. Without the native library it
stands in for that.
"copy" is a copy between two buffers larger than the private caches, read + write; "read" is a sum over one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from fastattn import _native

from .runner import time_calls

KINDS = ("fp32", "fp32_tile", "bf16", "bf16_tile", "matmul", "copy", "read")
TILES_OF_FP32 = 6  # products of parts, see docs/attention.md
COPY_BYTES = 128 << 20
MATMUL_SIZE = 1024
# One call has to be long beside the start of the threads, which takes milliseconds where cores are shared.
CALL_SECONDS = 20e-3


@dataclass(frozen=True)
class Roof:
    kind: str
    source: str
    work: float  # operations, or bytes for "copy" and "read", of one call
    call: Callable[[], object]

    @property
    def unit(self) -> str:
        return "GB/s" if self.kind in ("copy", "read") else "GFLOP/s"


def _register_loop(kind: str, loop: str) -> Roof | None:
    """None where the library or the instruction is missing: the op then says that it did no operations."""
    if _native.missing() is not None:
        return None
    op = torch.ops.fastattn.roof.default
    iterations = 1000
    if op(loop, iterations) == 0:
        return None
    threads = torch.get_num_threads()
    # The work per thread is found on one: with several, waiting for the others to start would count as work.
    torch.set_num_threads(1)
    try:
        while min(time_calls(partial(op, loop, iterations), 1) for _ in range(3)) < CALL_SECONDS:
            iterations *= 2
    finally:
        torch.set_num_threads(threads)
    source = "register multiply-add loop" + ("" if loop == kind else f" of {loop}")
    return Roof(kind, source, op(loop, iterations), lambda: op(loop, iterations))


def _matmul(kind: str) -> Roof:
    # In fp32 for every kind: torch multiplies bf16 a hundred times slower on some processors.
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE) for _ in range(2))
    return Roof(kind, f"torch.matmul {MATMUL_SIZE} fp32", 2 * MATMUL_SIZE**3, lambda: a @ b)


def _copy() -> Roof:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source).fill_(0)
    return Roof("copy", f"copy of {COPY_BYTES >> 20} MiB", 2 * COPY_BYTES, lambda: target.copy_(source))


def _read() -> Roof:
    source = torch.ones(COPY_BYTES // 4)
    return Roof("read", f"sum over {COPY_BYTES >> 20} MiB", COPY_BYTES, source.sum)


def _find(kind: str) -> Roof | None:
    if kind == "copy":
        return _copy()
    if kind == "read":
        return _read()
    if kind == "matmul":
        return _matmul(kind)
    if kind == "bf16_tile":
        return _register_loop(kind, kind)
    if kind == "fp32_tile":
        tile = _register_loop(kind, "bf16_tile")
        return tile and replace(tile, work=tile.work / TILES_OF_FP32)
    return _register_loop(kind, kind) or _register_loop(kind, "fp32") or _matmul(kind)


def roofs(kinds: tuple[str, ...] = KINDS) -> dict[str, Roof]:
    """The roofs that this machine has."""
    return {kind: roof for kind in kinds if (roof := _find(kind)) is not None}
