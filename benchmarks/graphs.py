"""The graphs of the benchmarks: a synthetic one with power-law degrees, and real ones from a folder.

`power-law-NxE` is a synthetic one of N nodes and E edges.
A real graph is a file NAME.npz with `src` and `dst`, the ends of its edges, and `num_nodes`; the folder is
given by `--graphs FOLDER`. Without it, cases on real graphs are listed as absent.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .runner import time_calls

SYNTHETIC = "power-law"
REAL = ("email-Enron", "cond-mat-2005", "pgp-strong-2009")
NAMES = (SYNTHETIC, *REAL)
NODES, EDGES = 100_000, 2_000_000
# Degrees d with frequency d^-2.5, as many real networks have: hubs of some ten thousand edges.
RANK_EXPONENT = 1 / (2.5 - 1)

# A peer that takes this many times the fastest one's time in a first trial is no contestant: only the fastest
# counts, and some peers would take minutes.
HOPELESS = 2.5

folder: Path | None = None


@dataclass(frozen=True)
class Edges:
    """Sorted by target, then source, so that CSR order is the caller's order for everybody."""

    src: torch.Tensor
    dst: torch.Tensor
    num_nodes: int

    @property
    def edge_index(self) -> torch.Tensor:
        return torch.stack([self.src, self.dst])

    @property
    def count(self) -> int:
        return self.src.shape[0]

    @functools.cached_property
    def rowptr(self) -> torch.Tensor:
        counts = torch.bincount(self.dst, minlength=self.num_nodes)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def csr(self, values: torch.Tensor) -> torch.Tensor:
        size = (self.num_nodes, self.num_nodes)
        return torch.sparse_csr_tensor(self.rowptr, self.src, values, size, check_invariants=False)


def power_law(nodes: int = NODES, edges: int = EDGES) -> Edges:
    """Both ends of every edge are drawn with a probability that falls as a power of a node's rank."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, nodes + 1, dtype=torch.float64) ** -RANK_EXPONENT
    names = torch.randperm(nodes, generator=generator)
    src, dst = (names[torch.multinomial(weights, edges, True, generator=generator)] for _ in range(2))
    return _sorted(src, dst, nodes)


def _sorted(src: torch.Tensor, dst: torch.Tensor, nodes: int) -> Edges:
    order = torch.argsort(dst * nodes + src)
    return Edges(src[order], dst[order], nodes)


def is_there(name: str) -> bool:
    return name.startswith(SYNTHETIC) or (folder is not None and (folder / f"{name}.npz").exists())


@functools.lru_cache(maxsize=1)
def load(name: str) -> Edges:
    if name == SYNTHETIC:
        return power_law()
    if name.startswith(SYNTHETIC):
        return power_law(*map(int, name.rpartition("-")[2].split("x")))
    if not is_there(name):
        raise FileNotFoundError(f"no graph {name}: --graphs FOLDER names the folder with {name}.npz")
    import numpy as np

    with np.load(folder / f"{name}.npz") as file:
        src, dst = (torch.from_numpy(file[end]).long() for end in ("src", "dst"))
        return _sorted(src, dst, int(file["num_nodes"]))


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def hopeful(calls: Mapping[str, Callable[[], object]], peers: tuple[str, ...]) -> dict[str, Callable]:
    """The calls without the peers that are far behind the fastest one."""
    seconds = {}
    for name in peers:
        seconds[name] = time_calls(calls[name], 1)
        # The first call also warms up, which makes nobody four times slower that takes a tenth of a second.
        if seconds[name] < 0.1 or seconds[name] < 4 * HOPELESS * min(seconds.values()):
            seconds[name] = time_calls(calls[name], 1)
    fastest = min(seconds.values(), default=0.0)
    return {name: call for name, call in calls.items() if seconds.get(name, 0.0) <= HOPELESS * fastest}
