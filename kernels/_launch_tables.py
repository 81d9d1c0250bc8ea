"""Launch tables: the tile of a program, the warps that share it and the loads under way at a time.

By architecture, then by element size in bytes and width of the call in channels: the first entry that holds
both, or else the first of "any", which has the tiles of Ampere, the smallest. No GPU has measured them: they
are the largest of the tiles that were tried which keep everything in registers, as ``python -m
fastattn.kernels`` shows. The graph kernels' tiles follow from the width alone, see _edges.py.

- a warp holds 16 rows of a product's left side, so that 4 warps go with 64 rows and 8 with 128: with fewer
  rows two warps compute the same. On Hopper 4 warps are a warpgroup, the unit of wgmma.
- Ampere and CDNA have less shared memory (163 KB and 64 KB, not 227 KB) for stages, and Ampere also holds
  the right sides of products in registers: narrower blocks.
- float32 forms its products on the ordinary units and holds both operands in registers: small tiles.
- the interpreter's time goes by operations, its tests are about edges of tiles: small but not smallest.
"""

import torch
from fastattn.kernels._common import Config, architecture

__all__ = [
    "DECODE", "FORWARD", "GRAD_KEY_VALUE", "GRAD_QUERY", "PROMPT", "WALK", "WALK_TF32", "Table",
    "choose_config",
]  # fmt: skip


Table = dict[str, dict[tuple[int, int], tuple[int, int, int, int]]]


def choose_config(table: Table, device: torch.device, dtype: torch.dtype, width: int) -> Config:
    entries = (*table.get(architecture(device), {}).items(), *table["any"].items())
    return Config(*next(c for (size, widest), c in entries if size >= dtype.itemsize and widest >= width))


# Softmax attention; the width is the wider of D and Dv as a power of two, and a mask counts as as many again.
FORWARD: Table = {
    "cuda:90": {
        (2, 64): (128, 128, 8, 3), (2, 128): (128, 64, 8, 3), (2, 256): (128, 32, 8, 2),
        (2, 512): (64, 32, 8, 1),
    },
    "cuda:100": {(2, 128): (128, 64, 8, 3), (2, 256): (128, 32, 8, 2), (2, 512): (64, 32, 8, 1)},
    "hip": {
        (2, 64): (64, 64, 4, 1), (2, 128): (32, 64, 4, 1), (2, 256): (32, 32, 4, 1), (2, 512): (32, 16, 4, 1),
        (4, 64): (64, 32, 4, 1), (4, 128): (32, 32, 4, 1),
    },
    "interpreter": {(8, 512): (32, 32, 1, 1)},
    "any": {
        (2, 64): (128, 64, 8, 3), (2, 128): (128, 32, 8, 3), (2, 256): (64, 32, 8, 2),
        (2, 512): (32, 16, 4, 2), (4, 64): (32, 32, 4, 2), (4, 128): (32, 16, 8, 2), (8, 512): (16, 16, 4, 1),
    },
}  # fmt: skip
GRAD_QUERY: Table = {
    "cuda:90": {(2, 128): (128, 64, 8, 2), (2, 256): (64, 32, 4, 1)},
    "cuda:100": {(2, 64): (128, 64, 8, 1), (2, 128): (64, 64, 4, 2), (2, 256): (64, 32, 4, 1)},
    "hip": {
        (2, 64): (64, 64, 4, 1), (2, 128): (32, 64, 4, 1), (2, 256): (16, 32, 4, 1), (2, 512): (16, 16, 4, 1),
        (4, 64): (32, 32, 4, 1),
    },
    "interpreter": {(8, 512): (32, 32, 1, 1)},
    "any": {
        (2, 64): (128, 64, 8, 2), (2, 128): (128, 32, 8, 2), (2, 256): (32, 32, 4, 1),
        (2, 512): (16, 16, 4, 1), (4, 64): (16, 32, 4, 1), (8, 512): (16, 16, 4, 1),
    },
}  # fmt: skip
# Two accumulators of a tile's width, half of all registers at 128 keys and channels: few queries at a time.
GRAD_KEY_VALUE: Table = {
    "cuda:90": {(2, 128): (32, 128, 8, 2), (2, 256): (16, 64, 8, 2)},
    "cuda:100": {(2, 64): (16, 128, 8, 2), (2, 128): (16, 128, 8, 1), (2, 256): (32, 64, 8, 1)},
    "hip": {(2, 64): (64, 64, 4, 1), (2, 128): (32, 64, 4, 1), (2, 256): (16, 32, 4, 1)},
    "interpreter": {(8, 512): (32, 32, 1, 1)},
    "any": {
        (2, 64): (16, 128, 8, 2), (2, 128): (32, 64, 8, 2), (2, 256): (16, 32, 4, 1),
        (2, 512): (16, 16, 4, 1), (4, 64): (32, 32, 4, 1), (8, 512): (16, 16, 4, 1),
    },
}  # fmt: skip

# Attention over a cache. Decoding is bound by reading it: the smallest tile of queries, many loads under way.
DECODE: Table = {
    "hip": {
        (2, 128): (16, 64, 4, 1), (2, 256): (16, 32, 4, 1), (2, 512): (16, 16, 4, 1), (4, 64): (16, 32, 4, 1),
        (4, 128): (16, 16, 4, 1),
    },
    "interpreter": {(8, 512): (16, 32, 1, 1)},
    "any": {
        (2, 64): (16, 128, 4, 3), (2, 128): (16, 64, 4, 3), (2, 256): (16, 32, 4, 3),
        (2, 512): (16, 16, 4, 2), (4, 64): (16, 64, 4, 2), (4, 128): (16, 16, 4, 2), (8, 512): (16, 16, 4, 1),
    },
}  # fmt: skip
# A prompt, or a part of one: as the forward without a cache, with registers left for pages.
PROMPT: Table = {
    "hip": {
        (2, 64): (64, 64, 4, 1), (2, 128): (32, 64, 4, 1), (2, 256): (32, 32, 4, 1), (2, 512): (16, 16, 4, 1),
        (4, 64): (32, 32, 4, 1),
    },
    "interpreter": {(8, 512): (32, 32, 1, 1)},
    "any": {
        (2, 128): (64, 64, 4, 2), (2, 256): (64, 32, 8, 2), (2, 512): (32, 16, 4, 1), (4, 64): (32, 32, 4, 2),
        (4, 128): (32, 16, 8, 1), (8, 512): (16, 16, 4, 1),
    },
}  # fmt: skip

# Linear attention; the width is the height of the state as a power of two, and decay counts as as many again.
# The state takes height x columns registers, and the features of queries and keys tokens x height each. 64
# tokens are a warpgroup's share of Hopper's wgmma; more tokens mean more products within the chunk. On CDNA 8
# warps leave 256 of 512 registers to a lane, and 16 rows of 512 channels of float64 are all of its shared
# memory, which has to hold other operands as well.
WALK: Table = {
    "cuda:80": {(2, 64): (64, 64, 8, 1)},
    "hip": {
        (2, 64): (64, 64, 4, 1), (2, 128): (64, 32, 4, 1), (2, 256): (32, 32, 8, 1), (4, 128): (16, 32, 4, 1),
        (4, 512): (16, 16, 8, 1), (8, 256): (16, 16, 8, 1), (8, 512): (8, 8, 4, 1),
    },
    "interpreter": {(8, 512): (16, 16, 1, 1)},
    "any": {
        (2, 64): (64, 64, 4, 1), (2, 128): (64, 32, 8, 1), (2, 256): (32, 32, 8, 1), (4, 64): (16, 32, 4, 1),
        (8, 512): (16, 16, 8, 1),
    },
}  # fmt: skip
# TF32 keeps its operands in twice the registers and shared memory of bfloat16.
WALK_TF32: Table = {
    "cuda:80": {(4, 64): (64, 32, 8, 1)},
    "interpreter": {(8, 512): (16, 16, 1, 1)},
    "any": {(4, 64): (64, 32, 4, 1), (4, 256): (16, 32, 8, 1), (8, 512): (16, 16, 8, 1)},
}  # fmt: skip
