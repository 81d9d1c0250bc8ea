"""What the Triton kernels share: how they are launched, tiles and products, logarithms, dropout.

Every kernel runs on a GPU, and in Triton's interpreter on CPU tensors if ``TRITON_INTERPRET=1`` is set before
Triton is imported; ``python -m fastattn.kernels`` compiles it without a GPU.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "INTERPRETED", "LN2", "LOG2E", "Config", "Launch", "architecture", "block_of", "check", "describe",
    "device", "dropout_keep", "dropout_threshold", "dropout_words", "launch", "load_rows", "mask_numbers",
    "needs_wide_offsets", "operand", "precision", "product", "record_launches", "seed_word", "store_rows",
    "to_log2", "to_natural",
]  # fmt: skip

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    import numpy

    if isinstance(tl.sum, JITFunction):
        raise ImportError("TRITON_INTERPRET=1 must be set before Triton is imported: it changes Triton, too")


class Config(NamedTuple):
    """What a launch table chooses. The tile has queries x keys in softmax attention, and in linear attention
    tokens x columns of the state; ``warps`` share it, with ``stages`` of its loads under way."""

    rows: int
    columns: int
    warps: int
    stages: int


class Launch(NamedTuple):
    """A kernel, its tile with warps and stages, and everything it is called with."""

    kernel: JITFunction
    config: NamedTuple
    arguments: dict[str, object]


# A function that kernels call. The interpreter would set itself up anew at each call of one that is compiled,
# which takes longer than everything else; inside a kernel the plain function does the same.
device = (lambda function: function) if INTERPRETED else triton.jit

_launches: list[Launch] | None = None


@contextmanager
def record_launches(target_driver) -> Iterator[list[Launch]]:
    """Inside, ``launch`` only notes what the driver's target would get; tensors may be without memory."""
    global _launches
    architecture.cache_clear()
    driver.set_active(target_driver)
    _launches = []
    try:
        yield _launches
    finally:
        _launches = None
        architecture.cache_clear()


@functools.cache
def architecture(device: torch.device) -> str:
    """The key of launch tables: "cuda:90" are NVIDIA's devices from sm_90 on, to the next key."""
    if INTERPRETED:
        return "interpreter"
    target = driver.active.get_current_target()
    if target.backend != "cuda":
        return target.backend
    return next((f"cuda:{n}" for n in (100, 90) if target.arch >= n), "cuda:80")


def launch(kernel, programs: int, config: Config, **arguments) -> None:
    """Runs a kernel on the current device and stream; reads nothing back, so that CUDA graphs can hold it."""
    if programs >= 2**31:
        raise NotImplementedError(f"the call needs {programs} programs, one launch has fewer than 2**31")
    # Triton fuses multiplications and additions by default, which will change.
    arguments |= {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if _launches is not None:
        _launches.append(Launch(kernel, config, arguments))
    elif INTERPRETED:
        with numpy.errstate(all="ignore"):  # infinities and NaN are ordinary numbers here
            kernel[(programs,)](**arguments)
    elif programs > 0:
        kernel[(programs,)](**arguments)


def block_of(size: int) -> int:
    """The width of the tile that holds ``size`` channels: a power of two that matrix instructions take."""
    return max(16, triton.next_power_of_2(size))


def check(
    name: str, tensor: Tensor | None, shape: Sequence[int | None] | None, *dtypes: torch.dtype
) -> torch.Size:
    """The shape of a tensor that kernels may read: None is any size. The ops trust nobody with memory."""
    if tensor is None:
        raise RuntimeError(f"{name} is missing")
    found = tensor.shape
    if shape is not None and (
        len(found) != len(shape) or any(n is not None and n != m for n, m in zip(shape, found, strict=True))
    ):
        raise RuntimeError(
            f"{name} must be {tuple('any' if n is None else n for n in shape)}, got {tuple(found)}"
        )
    if dtypes and tensor.dtype not in dtypes:
        raise RuntimeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    return found


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How products are formed from float32: exactly, unless torch may use TF32 for its own."""
    # Not allow_tf32, which raises once this setting, or what it inherits from, was used.
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and architecture(device) != "hip" and allowed else "ieee"


def needs_wide_offsets(*tensors: Tensor | None) -> bool:
    """Whether offsets within a tile, of at most 512 rows or channels, may not fit into 32 bits.

    Tiles are of the last two dimensions. Offsets of tiles, heads and batches always have 64.
    """
    return any(s * 1024 >= 2**31 for t in tensors if t is not None for s in t.stride()[-2:])


def mask_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as kernels read it. Triton 3.6 ends the process at a product of float64 numbers that
    anything narrower than 32 bits has selected."""
    return mask.to(torch.int32) if dtype == torch.float64 else mask.view(torch.uint8)


# The largest element that is read through tensor descriptors. These take the addresses out of the registers:
# the forward of attention with 128 channels needs 178 of them instead of 248 on sm_90. Larger elements have
# not been tried.
DESCRIPTORS = {"cuda:90": 2, "cuda:100": 2, "interpreter": 8}


def describe(tensor: Tensor, rows: int, width: int) -> TensorDescriptor | None:
    """A descriptor for ``load_rows``, where one should be used and can hold the tensor."""
    size, stride = tensor.itemsize, tensor.stride()
    if (
        size > DESCRIPTORS.get(architecture(tensor.device), 0)
        or stride[3] != 1
        or any(s <= 0 or s * size % 16 != 0 for s in stride[:3])
        or tensor.numel() == 0
        or tensor.data_ptr() % 16 != 0
    ):
        return None
    return TensorDescriptor(tensor, list(tensor.shape), list(stride), [1, 1, rows, width])


def dropout_threshold(dropout_p: float) -> int:
    """Words below it drop a weight; shifted by 2^31, so that it is a signed number of 32 bits."""
    return min(2**32 - 1, round(dropout_p * 2**32)) - 2**31


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@device
def operand(x, like, UPCAST: tl.constexpr):
    """x as it enters a product with ``like``: of its dtype. The interpreter cannot compute with bfloat16."""
    if UPCAST:
        return x.to(tl.float32)
    else:
        return x.to(like.dtype)


@device
def product(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """total + a @ b, summed in total's dtype."""
    a = operand(a, b, UPCAST)
    b = operand(b, b, UPCAST)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@device
def _rows_at(base, stride, b, h, first, rows, columns):
    base += b * stride[0] + h * stride[1] + tl.cast(first, tl.int64) * stride[2]
    # One base and offsets of 32 bits take fewer registers than a tile of pointers.
    return base + (rows[:, None] * stride[2] + columns[None, :] * stride[3])


@device
def load_rows(
    base, stride, b, h, first, rows, columns, shown, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Rows ``first + rows`` of the matrix (b, h), WIDTH columns in a tile of BLOCK; under CHECK zeros where a
    row is not ``shown``. b and h have 64 bits. Without ``stride`` base is a tensor descriptor, and the memory
    unit finds the addresses and reads zeros behind the ends."""
    if stride is None:
        at = [b.to(tl.int32), h.to(tl.int32), tl.cast(first, tl.int32), 0]
        tile = base.load(at).reshape(rows.shape[0], BLOCK)
        if CHECK:
            tile = tl.where(shown[:, None], tile, 0.0)
    else:
        at = _rows_at(base, stride, b, h, first, rows, columns)
        if CHECK:
            if WIDTH == BLOCK:
                tile = tl.load(at, mask=shown[:, None], other=0.0)
            else:
                tile = tl.load(at, mask=shown[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            if WIDTH == BLOCK:
                tile = tl.load(at)
            else:
                tile = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return tile


@device
def store_rows(base, stride, b, h, first, rows, columns, shown, WIDTH: tl.constexpr, tile):
    at = _rows_at(base, stride, b, h, first, rows, columns)
    tl.store(at, tile.to(base.dtype.element_ty), mask=shown[:, None] & (columns < WIDTH)[None, :])


@device
def to_log2(natural):
    """natural * log2(e); what is finite stays so."""
    LARGEST: tl.constexpr = 2.0**1023 if natural.dtype == tl.float64 else 2.0**127
    scaled = natural * LOG2E
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    return tl.where(tl.abs(natural) < float("inf"), scaled, natural)


@device
def to_natural(level, total):
    """(level + log2(total)) / log2(e); levels that ``to_log2`` cut off become the largest numbers."""
    LARGEST: tl.constexpr = 2.0**1023 if level.dtype == tl.float64 else 2.0**127
    MOST: tl.constexpr = 1.7976931348623157e308 if level.dtype == tl.float64 else 3.4028234663852886e38
    lse = (level + tl.log2(total)) * LN2
    lse = tl.where((level >= LARGEST) & (level < float("inf")), MOST, lse)
    return tl.where((level <= -LARGEST) & (level > -float("inf")), -MOST, lse)


@device
def seed_word(seed):
    return tl.load(seed).to(tl.uint64, bitcast=True)


@device
def dropout_words(seed, row):
    """Two words of 32 bits for each row, whose numbers count from 1: a step of splitmix64."""
    z = seed + row.to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@device
def dropout_keep(first, second, column, threshold):
    """Whether the weight of a row, by its two words, and a column survives: a mix as murmur's."""
    x = column.to(tl.uint32) * 0x9E3779B9 + first
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ second
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold
