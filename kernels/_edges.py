"""What the kernels of graphs share: how edges are laid out over programs, long rows divided, features read.

A program takes a tile of ROWS x EDGES x channels: ROWS pairs of a row and a head, neighbouring heads of a row
side by side in memory, and EDGES edges of each at a time. Nobody but the program sums up a row, in the order
of its edges, so that results repeat bit by bit.

A row of more edges than STEP is divided at the positions that STEP divides. Those cuts are the same for every
call and device and are found in the kernels: the host never reads a degree, and a CUDA graph can hold the
launches. Each cut has one program and one place for its partial result, and a further kernel joins the parts
of each row in their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fastattn.kernels._common import architecture, check, device, launch
from torch import Tensor

__all__ = [
    "Edges", "Tile", "as_rows", "edges_and_heads", "edges_of", "feature_tile", "is_first_cut", "join_sums",
    "next_edges", "node_and_number", "pairs_of", "parts_of", "row_at", "tile_of", "wide_dtype",
]  # fmt: skip


class Tile(NamedTuple):
    ROWS: int
    EDGES: int
    CHANNELS: int
    warps: int = 1
    stages: int = 1


# By architecture: the bytes that a warp loads with 128 bits per lane, and the edges of a row after which it
# is divided. One warp per program, because rows differ in length and warps of a program wait for each other.
# Not measured on a GPU yet.
# - what is wider than one such load is another program's: its indices are 2 % of what it gathers.
# - 512 edges are four at a time 128 steps, about 0.1 ms; the partial results are then fewer bytes than the
#   indices of the edges, up to 512 channels.
# - the interpreter's time goes by operations, its tests are about edges of tiles and divided rows.
LAYOUTS = {
    "cuda:80": (512, 512), "cuda:90": (512, 512), "cuda:100": (512, 512), "xpu": (512, 512),
    "hip": (1024, 512), "interpreter": (256, 64),
}  # fmt: skip


def tile_of(where: torch.device, dtype: torch.dtype, channels: int, loads: int) -> Tile:
    """The tile of features with so many channels; each lane has ``loads`` loads of them under way at a time.

    Narrow features leave lanes for more rows, and then for more edges of each: neighbouring rows wait for the
    longest among them, a row for its last edges.
    """
    if architecture(where) == "interpreter":
        return Tile(64, 16, min(triton.next_power_of_2(max(channels, 1)), 64))
    widest = LAYOUTS[architecture(where)][0] // dtype.itemsize
    block = min(triton.next_power_of_2(max(channels, 1)), widest)
    pairs = widest // block * loads
    edges = loads
    while pairs // edges > 8 and edges < 16:
        edges *= 2
    return Tile(pairs // edges, edges, block)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(tensor: Tensor) -> Tensor:
    """With the channels, its last dimension, side by side; a copy where they are not."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


class Edges:
    """Edges grouped by row, checked, and the arguments of kernels that walk over them."""

    def __init__(
        self, rowptr: Tensor, col: Tensor, perm: Tensor | None, names=("rowptr", "col", "perm")
    ) -> None:
        (pointers,) = check(names[0], rowptr, (None,), torch.int64)
        if pointers == 0:
            raise RuntimeError(f"{names[0]} must have one entry more than there are rows, got none")
        (self.count,) = check(names[1], col, (None,), torch.int32, torch.int64)
        if perm is not None:
            check(names[2], perm, (self.count,), col.dtype)
            perm = perm.contiguous()
        self.rows, self.device = pointers - 1, rowptr.device
        self.step = LAYOUTS[architecture(self.device)][1]
        # Cuts inside the array of edges: rows without edges have none.
        self.cuts = max(self.count - 1, 0) // self.step
        self.arguments = {
            "rowptr": rowptr.contiguous(), "col": col.contiguous(), "perm": perm, "N": self.rows,
            "E": self.count, "STEP": self.step, "search": self.rows.bit_length(),
        }  # fmt: skip

    def launch(self, kernel, tile: Tile, programs: int, **arguments) -> None:
        """Of all arguments the kernel gets those that it has."""
        given = {**self.arguments, **tile._asdict(), **arguments}
        launch(kernel, programs, tile, **{n: given[n] for n in kernel.arg_names})

    def launch_rows(
        self, kernel, tile: Tile, H: int, others: int, parts: dict[str, Tensor], **arguments
    ) -> None:
        """``kernel`` for every row and head, and ``others`` (tiles of channels, batches) of each; then again
        for the cuts of long rows, with ``parts`` for their partial results."""
        nothing = dict.fromkeys(parts)
        programs = -(-self.rows * H // tile.ROWS) * others
        self.launch(kernel, tile, programs, items=self.rows, H=H, **nothing, **arguments)
        if self.cuts:
            programs = -(-self.cuts * H // tile.ROWS) * others
            self.launch(kernel, tile, programs, items=self.cuts, H=H, **parts, **arguments)

    def launch_edges(self, kernel, H: int, **arguments) -> None:
        """``kernel`` for every edge and head, its tiles of edges x heads."""
        heads = min(triton.next_power_of_2(max(H, 1)), 32)
        tile = Tile(1, 256 // heads, heads)
        programs = -(-self.count // tile.EDGES) * -(-H // heads)
        self.launch(kernel, tile, programs, H=H, **arguments)

    def empty_parts(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((self.cuts, *shape), dtype=dtype, device=self.device)


# What depends on a graph's size is never specialised: a new graph must not mean a new compilation.
SIZES = ["N", "E", "items", "search"]


@device
def row_at(rowptr, position, N, search):
    """The row of the edge at each position: the last one that begins there or before."""
    low = position.to(tl.int64) * 0
    high = low + N
    for _ in range(search):
        middle = (low + high) // 2
        before = tl.load(rowptr + middle) <= position
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@device
def is_first_cut(begin, cut, STEP: tl.constexpr):
    return (begin < cut) & (cut - STEP <= begin)


@device
def edges_of(rowptr, item, items, N, E, search, STEP: tl.constexpr, CUT: tl.constexpr):
    """row, begin, end: the edges of each item, and whether it has a result to write.

    Items are rows, all of whose edges they take, or none if they are too many; or, under CUT, the cuts of
    such rows: what follows the cut until the next one, and for the first cut of a row also what precedes it.
    """
    if CUT:
        cut = (item + 1) * STEP
        wanted = (item < items) & (cut < E)
        cut = tl.where(wanted, cut, 0)
        row = row_at(rowptr, cut, N, search)
        begin = tl.load(rowptr + row, mask=wanted, other=0)
        end = tl.load(rowptr + row + 1, mask=wanted, other=0)
        wanted = wanted & (end - begin > STEP) & (begin < cut)
        begin = tl.where(is_first_cut(begin, cut, STEP), begin, cut)
        end = tl.minimum(end, cut + STEP)
    else:
        row = item
        wanted = item < items
        begin = tl.load(rowptr + row, mask=wanted, other=0)
        end = tl.load(rowptr + row + 1, mask=wanted, other=0)
        wanted = wanted & (end - begin <= STEP)
    return row, begin, tl.where(wanted, end, begin), wanted


@device
def parts_of(rowptr, item, items, N, E, search, STEP: tl.constexpr):
    """row, number of parts and whether it has any: of the items, each a cut, those that are a row's first.
    The others of the row follow it, up to the last before the row's last edge."""
    row, begin, _, wanted = edges_of(rowptr, item, items, N, E, search, STEP, True)
    wanted = wanted & (begin < (item + 1) * STEP)
    last = tl.load(rowptr + row + 1, mask=wanted, other=1)
    return row, tl.where(wanted, (last - 1) // STEP - item, 0), wanted


@device
def pairs_of(items, H, ROWS: tl.constexpr):
    """The items and heads of a program, and its number among those that share them: one for each tile of
    channels, and each batch."""
    blocks = tl.cdiv(tl.cast(items, tl.int64) * H, ROWS)
    program = tl.program_id(0).to(tl.int64)
    pair = program % blocks * ROWS + tl.arange(0, ROWS)
    return pair // H, pair % H, program // blocks


@device
def edges_and_heads(rowptr, perm, N, E, search, H, EDGES: tl.constexpr, HEADS: tl.constexpr):
    """A tile of edges and heads: the edges' rows and numbers, the heads, and which of them there are."""
    blocks = tl.cdiv(tl.cast(E, tl.int64), EDGES)
    program = tl.program_id(0).to(tl.int64)
    position = program % blocks * EDGES + tl.arange(0, EDGES)
    h = (program // blocks * HEADS + tl.arange(0, HEADS))[None, :]
    there = position < E
    row = row_at(rowptr, tl.where(there, position, 0), N, search)
    number = position
    if perm is not None:
        number = tl.load(perm + position, mask=there, other=0).to(tl.int64)
    return row[:, None], number[:, None], h, there[:, None] & (h < H)


@device
def next_edges(col, perm, begin, end, start, EDGES: tl.constexpr):
    """EDGES edges of each row, the first ``start`` behind its beginning: positions, which of them there are,
    the other ends, and the caller's numbers."""
    at = begin[:, None] + start + tl.arange(0, EDGES)[None, :]
    there = at < end[:, None]
    node, number = node_and_number(col, perm, at, there)
    return at, there, node, number


@device
def node_and_number(col, perm, at, there):
    """The other end of the edge at each position, and the caller's number of it."""
    node = tl.load(col + at, mask=there, other=0).to(tl.int64)
    if perm is None:
        number = at
    else:
        number = tl.load(perm + at, mask=there, other=0).to(tl.int64)
    return node, number


@device
def feature_tile(base, offset, channel, there, WIDTH: tl.constexpr, like: tl.constexpr):
    """Channels of the rows of features at ``offset``, in the dtype of sums; zeros where none is ``there``."""
    at = base + tl.expand_dims(offset, -1) + channel
    return tl.load(at, mask=tl.expand_dims(there, -1) & (channel < WIDTH), other=0.0).to(like)


@triton.jit(do_not_specialize=SIZES)
def _join_sums(
    parts, rowptr, row_scale, out, out_stride, N, E, items, search, factor: tl.float64, H, B,
    STEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out[b, row, h] = factor * row_scale[row] * the sum of the row's parts, (items, B, H, WIDTH)."""
    item, h, other = pairs_of(items, H, ROWS)
    b, channel = other % B, other // B * CHANNELS + tl.arange(0, CHANNELS)
    row, count, wanted = parts_of(rowptr, item, items, N, E, search, STEP)
    total = tl.zeros([ROWS, CHANNELS], parts.dtype.element_ty)
    for n in range(tl.max(count, 0)):
        at = ((item + n) * B + b) * H + h
        total += feature_tile(parts, at * WIDTH, channel[None, :], n < count, WIDTH, total.dtype)
    total *= tl.full([], factor, total.dtype)
    if row_scale is not None:
        total *= tl.load(row_scale + row, mask=wanted, other=0.0).to(total.dtype)[:, None]
    at = b * out_stride[0] + row * out_stride[1] + h * out_stride[2]
    at = out + at[:, None] + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=wanted[:, None] & (channel < WIDTH)[None, :])


def join_sums(
    edges: Edges, tile: Tile, parts: Tensor, out: Tensor, row_scale: Tensor | None = None, factor: float = 1.0
) -> None:
    """Adds up the parts (cuts, B, H, WIDTH) of long rows into out (B, rows, H, WIDTH)."""
    cuts, B, H, width = parts.shape
    if cuts == 0 or parts.numel() == 0:
        return
    tile = Tile(max(tile.ROWS, 1), 1, tile.CHANNELS)
    programs = -(-cuts * H // tile.ROWS) * B * -(-width // tile.CHANNELS)
    edges.launch(
        _join_sums, tile, programs, parts=parts, row_scale=row_scale, out=out, out_stride=out.stride()[:3],
        items=cuts, factor=factor, H=H, B=B, WIDTH=width,
    )  # fmt: skip
