"""Kernels compiled for GPUs that are not there, what came out, and a record of it.

A configuration is a kernel with its tile, warps and stages, for a target and a dtype. Its fingerprint says
what is compiled: an entry of the record that has the same tells what compiling it again would.
"""

import ast
import functools
import hashlib
import inspect
import multiprocessing
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fastattn.kernels._cases import COMMON, Case, call
from fastattn.kernels._common import Launch, record_launches
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = [
    "HEADER", "TARGETS", "Configuration", "Offline", "compile_all", "configurations", "fingerprint",
    "line_of", "read_record",
]  # fmt: skip


class Target(NamedTuple):
    """What limits a kernel: shared memory of a program and of an SM, and an SM's threads and registers."""

    gpu: GPUTarget
    matrix: tuple[str, ...]  # its matrix instructions, the best first
    shared: int
    shared_of_sm: int
    threads_of_sm: int
    registers_of_sm: int


# CUDA C++ Programming Guide, "Compute Capabilities"; AMD CDNA 3 ISA: a compute unit has 4
# SIMDs with 512 vector registers for each of 64 lanes, and 64 KB of LDS.
TARGETS = {
    "cuda:80": Target(GPUTarget("cuda", 80, 32), ("mma.sync",), 163 << 10, 164 << 10, 2048, 65536),
    "cuda:90": Target(GPUTarget("cuda", 90, 32), ("wgmma", "mma.sync"), 227 << 10, 228 << 10, 2048, 65536),
    "cuda:100": Target(
        GPUTarget("cuda", 100, 32), ("tcgen05.mma", "mma.sync"), 227 << 10, 228 << 10, 2048, 65536
    ),
    "hip:gfx942": Target(GPUTarget("hip", "gfx942", 64), ("v_mfma",), 64 << 10, 64 << 10, 2048, 4 * 64 * 512),
}


class Offline:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, target: str):
        self.target = TARGETS[target].gpu

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class Configuration(NamedTuple):
    target: str
    case: Case  # that launches it
    launch: Launch


def configurations(targets: Iterable[str], cases: Iterable[Case]) -> dict[str, Configuration]:
    """The distinct ones that the cases launch, by fingerprint."""
    found, tiles = {}, set()
    for target in targets:
        for case in cases:
            with record_launches(Offline(target)) as launches:
                call(case)
            for launch in launches:
                tile = (target, case.dtype, _name(launch), launch.config)
                if case in COMMON or tile not in tiles:
                    tiles.add(tile)
                    each = Configuration(target, case, launch)
                    found.setdefault(fingerprint(each), each)
    return found


def _name(launch: Launch) -> str:
    """The kernel's, and which of its forms this is."""
    forms = [launch.arguments[name] for name in ("ROLE", "SCORE") if name in launch.arguments]
    return " ".join([launch.kernel.fn.__name__.strip("_").removesuffix("_kernel"), *forms])


def _tree(node) -> object:
    """A syntax tree as tuples, the same in every version of Python."""
    if isinstance(node, list):
        return [_tree(n) for n in node]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _tree(getattr(node, name, None))) for name in node._fields)
    return type(node).__name__, *(field for field in fields if field[1] not in (None, []))


@functools.cache
def code_of(function) -> str:
    """The code of a function, without comments and docstrings, and of whatever of fastattn it uses."""
    found, left = {}, [function]
    while left:
        function = left.pop()
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if ast.get_docstring(tree.body[0]) is not None:
            del tree.body[0].body[0]
        found[function.__module__, function.__qualname__] = _tree(tree)
        for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            value = function.__globals__.get(name)
            if isinstance(value, JITFunction):
                if value.fn.__module__.startswith("fastattn") and (
                    (value.fn.__module__, value.fn.__qualname__) not in found
                ):
                    left.append(value.fn)
            elif isinstance(value, (bool, int, float, str, list, tuple, tl.constexpr)):
                found[function.__module__, name] = repr(value)
    return repr(sorted(found.items()))


def _argument(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}, {value.dim()}"
    if hasattr(value, "block_shape"):
        return f"descriptor of {_argument(value.base)}, {value.block_shape}"
    return str(value)


def fingerprint(configuration: Configuration) -> str:
    """Of everything that is compiled, but for the version of Triton."""
    target, _, launch = configuration
    arguments = {name: _argument(value) for name, value in launch.arguments.items()}
    text = repr((target, code_of(launch.kernel.fn), sorted(arguments.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Found(NamedTuple):
    """What a compiler made of a configuration."""

    registers: int
    spilled: int
    shared: int
    matrix: str
    wide_loads: str
    programs: int
    triton: str


HEADER = (
    "target", "case", "kernel", "tile, warps, stages", "registers", "spilled bytes", "shared bytes", "matrix",
    "128-bit loads", "programs per SM", "triton", "fingerprint",
)  # fmt: skip


def line_of(configuration: Configuration, found: Iterable[object]) -> str:
    """A line of the record."""
    target, case, launch = configuration
    tile = f"{' x '.join(map(str, launch.config[:-2]))}, {launch.config.warps}, {launch.config.stages}"
    return "\t".join(map(str, (target, case, _name(launch), tile, *found, fingerprint(configuration))))


def read_record(path: Path) -> dict[str, list[str]]:
    """What was found, by fingerprint; nothing, if the record has other columns than now."""
    header, *lines = path.read_text().splitlines() if path.exists() else [""]
    if header != "\t".join(HEADER):
        return {}
    first = len(HEADER) - len(Found._fields) - 1
    return {cells[-1]: cells[first:-1] for cells in (line.split("\t") for line in lines)}


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


def _compile(configuration: Configuration) -> Found:
    name, case, launch = configuration
    target, config = TARGETS[name], launch.config
    driver.set_active(Offline(name))
    launch.kernel.device_caches.clear()  # by device, of which all targets are the same one
    try:
        compiled = launch.kernel.warmup(grid=(1,), **launch.arguments)
    except Exception as error:  # those of compilers cannot be handed from process to process
        raise RuntimeError(f"{_name(launch)} of {case} does not compile for {name}: {error}") from None
    if target.gpu.backend == "cuda":
        text = compiled.asm["ptx"]
        registers, spills = _nvidia_resources(compiled.asm["cubin"])
        wide = r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg"
    else:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count: +(\d+)", text)[1])
        spills = 4 * int(re.search(r"\.vgpr_spill_count: +(\d+)", text)[1])
        wide = r"(global|buffer)_load_dwordx4"
    threads, shared = config.warps * target.gpu.warp_size, compiled.metadata.shared
    programs = min(
        target.threads_of_sm // threads, target.registers_of_sm // (max(registers, 1) * threads),
        target.shared_of_sm // shared if shared else 2048,
    )  # fmt: skip
    return Found(
        registers, spills, shared, next((m for m in target.matrix if m in text), "none"),
        "yes" if re.search(wide, text) else "no", programs, triton.__version__,
    )  # fmt: skip


_work: list[Configuration] = []


def _compile_number(n: int) -> Found:
    return _compile(_work[n])


def compile_all(chosen: Iterable[Configuration], jobs: int) -> Iterator[tuple[Configuration, Found]]:
    _work[:] = chosen  # the processes inherit it: kernels and tensors without memory cannot be sent to them
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from zip(_work, pool.map(_compile_number, range(len(_work))), strict=True)
