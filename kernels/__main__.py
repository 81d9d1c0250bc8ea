"""``python -m fastattn.kernels``: compiles the kernels for GPUs that are not there, and says what came out.

Every configuration that a launch table can choose, for every target, with what the compiler found: registers,
spills, shared memory, the matrix instruction, and how many programs an SM holds.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from fastattn.kernels import (
    _attention_kernels,
    _edges,
    _graph_attention_kernels,
    aggregation,
    attention,
    graph_attention,
    kv_cache,
    linear_attention,
)
from fastattn.kernels._common import INTERPRETED, compile_only
from triton.backends.compiler import GPUTarget


class Target(NamedTuple):
    """What limits a kernel: registers of a lane and of an SM, shared memory of a program and of an SM."""

    gpu: GPUTarget
    matrix: tuple[str, ...]  # its matrix instructions, the best first
    shared: int
    shared_of_sm: int
    threads_of_sm: int
    registers: int
    registers_of_sm: int


# CUDA C++ Programming Guide, "Compute Capabilities"; AMD CDNA 3 ISA: a compute unit has 4
# SIMDs with 512 vector registers for each of 64 lanes, and 64 KB of LDS.
TARGETS = {
    "cuda:80": Target(GPUTarget("cuda", 80, 32), ("mma.sync",), 163 << 10, 164 << 10, 2048, 255, 65536),
    "cuda:90": Target(
        GPUTarget("cuda", 90, 32), ("wgmma", "mma.sync"), 227 << 10, 228 << 10, 2048, 255, 65536
    ),
    "cuda:100": Target(
        GPUTarget("cuda", 100, 32), ("tcgen05.mma", "mma.sync"), 227 << 10, 228 << 10, 2048, 255, 65536
    ),
    "hip:gfx942": Target(
        GPUTarget("hip", "gfx942", 64), ("v_mfma",), 64 << 10, 64 << 10, 2048, 512, 4 * 64 * 512
    ),
}


class Offline:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class Case(NamedTuple):
    """One call, forward and backward, by dtype, channels of a head and options."""

    dtype: torch.dtype
    D: int
    options: str = "causal"
    family: str = "attention"

    def __str__(self) -> str:
        return f"{self.family}, {str(self.dtype).removeprefix('torch.')} {self.D} {self.options}"


class Row(NamedTuple):
    target: str
    case: str
    kernel: str
    config: str
    registers: int
    spills: int
    shared: int
    matrix: str
    wide_loads: bool
    programs: int


HEADER = (
    "target", "case", "kernel", "tile, warps, stages", "registers", "spilled bytes", "shared bytes", "matrix",
    "128-bit loads", "programs per SM",
)  # fmt: skip

HALF = (torch.bfloat16, torch.float16)
# What the tests compile.
MAIN = [
    Case(torch.float16, 64, "plain"),
    Case(torch.bfloat16, 128, "causal"),
    Case(torch.float64, 64, "boolean mask"),
    Case(torch.float16, 128, "pages", "attention over a cache"),
    Case(torch.float32, 128, "weighted, divided rows", "aggregation"),
    Case(torch.bfloat16, 64, "gatv2", "graph attention"),
    Case(torch.float32, 256, "dot, divided rows", "graph attention"),
    Case(torch.bfloat16, 64, "causal", "linear attention"),
]
# What docs/triton.md shows.
DOCUMENTED = [
    *(Case(torch.bfloat16, D) for D in (64, 128, 256)),
    *(Case(torch.float16, D) for D in (64, 128)),
    Case(torch.float32, 64),
    *(Case(torch.bfloat16, 128, options) for options in ("plain", "window", "boolean mask", "packed")),
    Case(torch.bfloat16, 128, "pages", "attention over a cache"),
    *(Case(torch.bfloat16, D, "causal", "linear attention") for D in (64, 128)),
    Case(torch.float16, 64, "causal", "linear attention"),
]
EVERYTHING = (
    MAIN
    + [
        Case(dtype, D, "causal")
        for dtype in (*HALF, torch.float32, torch.float64)
        for D in (16, 64, 80, 128, 256, 512)
    ]
    + [Case(torch.bfloat16, 128, "plain"), Case(torch.float32, 64, "plain")]
    + [
        Case(torch.bfloat16, D, options)
        for D in (64, 128)
        for options in ("everything", "window", "boolean mask", "packed")
    ]
    + [Case(torch.float32, 64, "everything"), Case(torch.float64, 64, "everything")]
    + [
        Case(dtype, D, options, "attention over a cache")
        for dtype in (*HALF, torch.float32)
        for D in (64, 128, 256, 512)
        for options in ("contiguous", "pages", "small pages", "everything")
    ]
    + [
        Case(dtype, F, f"{options}, divided rows", family)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for F in (1, 8, 32, 128, 256)
        for family, given in (
            ("aggregation", ("plain", "weighted", "everything")),
            ("graph attention", ("additive", "dot", "gatv2", "dot with everything")),
        )
        for options in given
    ]
    + [
        Case(dtype, D, options, "linear attention")
        for dtype in (*HALF, torch.float32, torch.float64)
        for D in (16, 64, 128, 256, 512)
        for options in ("causal", "everything", "not causal", "packed")
        if options == "causal" or (D in (64, 128) and dtype != torch.float64)
    ]
    + [Case(torch.float64, 64, "everything", "linear attention")]
)


def compile_attention(case: Case) -> None:
    """The forward, the backward and the weights of a call of attention, on tensors without memory."""
    dtype, wide = case.dtype, torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, Hkv, L, S = 2, 8, 2, 1000, 2000
    query, out = empty(B, L, H, case.D).transpose(1, 2), empty(B, L, H, case.D).transpose(1, 2)
    key, value = (empty(B, S, Hkv, case.D).transpose(1, 2) for _ in range(2))
    mask = padding = alibi = sinks = seed = None
    left, right, softcap, dropout_p = -1, -1 if case.options in ("plain", "boolean mask") else 0, 0.0, 0.0
    if case.options in ("window", "everything"):
        left = 256
    if case.options == "boolean mask":
        mask = empty(B, 1, L, S, dtype=torch.bool)
    if case.options == "everything":
        mask, padding = empty(B, H, L, S), empty(B, S, dtype=torch.bool)
        alibi, sinks, seed = empty(H, dtype=wide), empty(H), empty(1, dtype=torch.int64)
        softcap, dropout_p = 30.0, 0.1
    packed = ()
    if case.options == "packed":
        query, out, key, value = query[:1], out[:1], key[:1], value[:1]
        B, alibi, packed = 1, empty(9, H, dtype=wide), (empty(10, dtype=torch.int32),) * 2
    biases, options = (mask, padding, alibi), (case.D**-0.5, softcap, left, right, True, dropout_p)
    lse, everything = empty(B, H, L, dtype=wide), case.options == "everything"
    grads = everything, everything or bool(packed), everything
    attention.attention_forward(query, key, value, *biases, sinks, seed, *options, *packed)
    attention.attention_backward(
        out, None, query, key, value, out, lse, *biases, sinks, seed, *options, *grads, *packed
    )
    if case.options not in ("plain", "packed"):
        attention.attention_weights(query, key, lse, *biases, sinks, seed, *options, True)


def compile_kv_cache(case: Case) -> None:
    """Decoding, which divides the keys, and a prompt that is its own part."""
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, Hkv, capacity = 4, 32, 8, 8192
    alibi = sinks = table = None
    left, softcap = -1, 0.0
    pages = {"pages": 256, "small pages": 16}.get(case.options.partition(",")[0])
    if "everything" in case.options:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        alibi, sinks, left, softcap, pages = empty(H, dtype=wide), empty(H), 256, 30.0, 16
    if pages is None:
        cache = empty(B, Hkv, capacity, case.D)
    else:
        cache = empty(B * capacity // pages, Hkv, pages, case.D)
        table = empty(B, capacity // pages, dtype=torch.int32)
    for L in (1, 128):
        new = empty(B, Hkv, L, case.D)
        kv_cache.attention_with_kv_cache(
            empty(B, H, L, case.D), cache, cache, new, new, empty(B, dtype=torch.int32), table, alibi, sinks,
            case.D**-0.5, softcap, left, 0, 0,
        )  # fmt: skip


def _edges_of(case: Case) -> tuple[int, int, tuple, tuple]:
    """Numbers of nodes and edges, and the edges by either end; few enough that no row is divided, or not."""
    N, E = 1000, 50000 if "divided" in case.options else 500
    index = lambda size, dtype=torch.int32: torch.empty(size, dtype=dtype, device="meta")  # noqa: E731
    by_target, by_source = ((index(N + 1, torch.int64), index(E), index(E)) for _ in range(2))
    return N, E, (*by_target, N), by_source


def compile_aggregation(case: Case) -> None:
    """Sums, extremes and products of edges, with what their derivatives need."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    N, E, edges, _ = _edges_of(case)
    H = 1 if case.options.startswith("plain") else 8
    x, weight, scale, args = empty(1, N, H, case.D), None, None, (None,)
    if H > 1:
        weight = empty(E, H)
    if case.options.startswith("everything"):
        scale, args = empty(N, dtype=wide), (None, empty(1, N, H, case.D, dtype=torch.int32))
    for arg in args:
        for of_rows in (False, True)[: 1 if arg is None else 2]:
            aggregation.aggregate_sum(x, *edges, weight, scale, scale, arg, of_rows)
            aggregation.edge_dot(x, x, *edges, scale, scale, arg, of_rows, H > 1)
    for minimum in (False, True):
        aggregation.aggregate_max(x, *edges, weight, minimum, return_arg=not minimum)


def compile_graph_attention(case: Case) -> None:
    """Forward and backward of a form of the score, and the softmax alone."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    N, E, by_target, by_source = _edges_of(case)
    H, score = 8, case.options.partition(",")[0].partition(" ")[0]
    value, out, per_edge = empty(N, H, case.D), empty(N, H, case.D), empty(E, H)
    query = key = alpha = term = edge = att = seed = grad_attention = None
    if score == "additive":
        alpha, term = empty(N, H, dtype=wide), empty(E, H, dtype=wide)
    else:
        query = empty(N, H, case.D)
    if score == "dot":
        key = empty(N, H, case.D)
    if score == "gatv2":
        edge, att = empty(E, H, case.D), empty(H, case.D)
    full = "everything" in case.options
    if full:
        term, seed, grad_attention = empty(E, H), empty(1, dtype=torch.int64), per_edge
    tensors = (score, query, key, value, alpha, alpha, term, edge, att)
    options = (seed, 1.0, 0.2, 0.1 if full else 0.0)
    _, stats, _ = graph_attention.graph_attention_forward(*tensors, *by_target, *options, full)
    graph_attention.graph_attention_backward(
        out,
        grad_attention,
        out,
        stats,
        per_edge,
        *tensors,
        *by_target,
        *by_source,
        *options,
        edge is not None,
    )
    if full:
        graph_attention.edge_softmax_backward(per_edge, per_edge, per_edge, *by_target[:3])


def compile_linear_attention(case: Case) -> None:
    """Forward, backward and step of a call of linear attention, in one segment or in several, and the forward
    of a few tokens."""
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    empty = lambda *shape, dtype=case.dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    B, H, L, D = 64 if case.options == "causal" else 1, 8, 4096, case.D
    query, key, value, out = (empty(B, L, H, D).transpose(1, 2) for _ in range(4))
    den, decay, padding, bounds, kv, z = empty(B, H, L, dtype=wide), None, None, None, None, None
    full = case.options == "everything"
    if full:
        decay, kv, z = empty(B, H, L, dtype=wide), empty(B, H, D, D, dtype=wide), empty(B, H, D, dtype=wide)
        padding = empty(B, L, dtype=torch.bool)
    if case.options == "packed":
        bounds = empty(10, dtype=torch.int32)
    tensors = (decay, padding, bounds, kv, z)
    options = ("elu", case.options != "not causal", True, 1e-6, 1.0)
    linear_attention.linear_attention_forward(query, key, value, *tensors, *options, full)
    linear_attention.linear_attention_backward(
        out, kv, z, query, key, value, out, den, *tensors, *options, full, full
    )
    if options[1]:
        first = slice(linear_attention.SHORT)
        few = [None if t is None else t[:, :, first] for t in (query, key, value, decay)]
        state = empty(B, H, D, D, dtype=wide), empty(B, H, D, dtype=wide)
        if bounds is not None:
            state = empty(9, H, D, D, dtype=wide), empty(9, H, D, dtype=wide)
        few_shown = None if padding is None else padding[:, first]
        linear_attention.linear_attention_forward(*few, few_shown, bounds, *state, *options, True)
    if full:
        one = (query[:, :, 0], key[:, :, 0], value[:, :, 0], kv, z, decay[:, :, 0], "elu", *options[2:])
        linear_attention.linear_attention_step(*one)
        linear_attention.linear_attention_step_(*one)


FAMILIES = {
    "attention": compile_attention,
    "attention over a cache": compile_kv_cache,
    "aggregation": compile_aggregation,
    "graph attention": compile_graph_attention,
    "linear attention": compile_linear_attention,
}


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, which is where spilled registers go: these kernels have no arrays."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def _describe(name: str, case: Case, kernel: str, config, compiled) -> Row:
    target, asm = TARGETS[name], compiled.asm
    if target.gpu.backend == "cuda":
        text = asm["ptx"]
        registers, spills = _nvidia_resources(asm["cubin"])
        wide = bool(
            re.search(
                r"(ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg\S* .*, 0x10|cp\.async\.cg)",
                text,
            )
        )
    else:
        text = asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count: +(\d+)", text)[1])
        spills = 4 * int(re.search(r"\.vgpr_spill_count: +(\d+)", text)[1])
        wide = bool(re.search(r"(global|buffer)_load_dwordx4", text))
    matrix = next((m for m in target.matrix if m in text), "none")
    threads = config.warps * target.gpu.warp_size
    shared = compiled.metadata.shared
    programs = min(
        target.threads_of_sm // threads, target.registers_of_sm // (max(registers, 1) * threads),
        target.shared_of_sm // shared if shared else 2048,
    )  # fmt: skip
    tile = f"{' x '.join(map(str, config[:-2]))}, {config.warps}, {config.stages}"
    kernel = kernel.strip("_").removesuffix("_kernel")
    return Row(name, str(case), kernel, tile, registers, spills, shared, matrix, wide, programs)


def compile_case(name: str, case: Case) -> list[Row]:
    """All kernels of a call, compiled for a target."""
    modules = (
        _edges, _attention_kernels, _graph_attention_kernels, aggregation, kv_cache, linear_attention,
    )  # fmt: skip
    for module in modules:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):
                kernel.device_caches.clear()
    with compile_only(Offline(TARGETS[name].gpu)) as compiled:
        try:
            FAMILIES[case.family](case)
        except triton.CompilationError as error:  # which cannot be handed from process to process
            raise RuntimeError(f"{case} does not compile for {name}: {error}") from None
    return [_describe(name, case, *each) for each in compiled]


def compile_all(targets: list[str], cases: list[Case], jobs: int) -> Iterator[Row]:
    work = [(target, case) for target in targets for case in cases]
    with ProcessPoolExecutor(jobs) as pool:
        for rows in pool.map(compile_case, *zip(*work, strict=True)):
            yield from rows


def _line(cells) -> str:
    return f"| {' | '.join(('no', 'yes')[x] if isinstance(x, bool) else str(x) for x in cells)} |"


def _replace_table(path: Path, table: list[str]) -> None:
    """The table with this heading becomes another one."""
    lines = path.read_text().splitlines()
    first = lines.index(table[0])
    after = next((n for n in range(first, len(lines)) if not lines[n].startswith("|")), len(lines))
    path.write_text("\n".join([*lines[:first], *table, *lines[after:]]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.kernels", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    parser.add_argument("--main", action="store_true", help="only the configurations that tests compile")
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="replaces the table in docs/triton.md by its cases"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, default 2")
    options = parser.parse_args()
    if INTERPRETED:
        print(
            "python -m fastattn.kernels: TRITON_INTERPRET must not be set, nothing is compiled then",
            file=sys.stderr,
        )
        return 1
    chosen = MAIN if options.main else DOCUMENTED if options.update else EVERYTHING
    cases = [c for c in chosen if c.family in (options.family or FAMILIES)]
    table = [_line(HEADER), "|" + "---|" * len(HEADER)]
    print(*table, sep="\n")
    for row in compile_all(options.target or [*TARGETS], cases, options.jobs):
        table.append(_line(row))
        print(table[-1], flush=True)
    if options.update:
        _replace_table(options.update, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
