"""The structure that aggregation and graph attention work on: who sends to whom, sorted and checked once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes

from fastattn.ops._common import is_plain, is_watched, library

__all__ = ["Compressed", "Graph", "as_graph", "transposed"]

_INDEX_DTYPES = (torch.int64, torch.int32)
_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# SymInt, so that one compilation serves every number of nodes.
library.define(
    "graph_csr(Tensor row, Tensor col, SymInt num_rows, SymInt num_cols) "
    "-> (Tensor rowptr, Tensor col, Tensor perm)"
)
library.define("is_ascending(Tensor index) -> bool")
library.define("graph_ends(Tensor rowptr, Tensor col, Tensor? perm) -> (Tensor row, Tensor col)")
library.define("graph_checked_csr(Tensor rowptr, Tensor col, SymInt num_cols) -> (Tensor rowptr, Tensor col)")


_checked_csr = torch.ops.fastattn.graph_checked_csr.default
_graph_csr = torch.ops.fastattn.graph_csr.default
_graph_ends = torch.ops.fastattn.graph_ends.default
_is_ascending = torch.ops.fastattn.is_ascending.default


class Compressed(NamedTuple):
    """Edges grouped by one of their ends.

    The edges of row n stand at positions ``ptr[n]`` to ``ptr[n + 1]``; ``index`` holds their other ends, of
    which there are ``num_cols``, and ``perm`` the numbers that the caller knows them by, ascending within a
    row. ``perm`` is None where the caller's order is this one.
    """

    ptr: Tensor
    index: Tensor
    perm: Tensor | None
    num_cols: int


def index_dtype(num_edges: int, num_rows: int, num_cols: int) -> torch.dtype:
    """int32 where every node and edge number fits: half of the memory that is read beside the features."""
    # Each by itself: their maximum would make compiled code depend on which one is larger.
    fit = num_edges < 2**31 and num_rows < 2**31 and num_cols < 2**31
    return torch.int32 if fit else torch.int64


def check_range(name: str, index: Tensor, size: int, what: str) -> None:
    if index.numel() == 0:
        return
    low, high = (int(n) for n in torch.aminmax(index))
    if low < 0:
        raise ValueError(f"{name} holds {low}: {what} are numbered from 0")
    if high >= size:
        raise ValueError(f"{name} holds {high}, but there are only {size} {what}")


def _sorted_on_any_device(
    row: Tensor, col: Tensor, num_rows: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``fastattn::graph_csr`` in plain PyTorch; the native library replaces it on the CPU."""
    check_range("row", row, num_rows, "rows")
    check_range("col", col, num_cols, "columns")
    dtype = index_dtype(row.numel(), num_rows, num_cols)
    perm = torch.argsort(row, stable=True)
    rowptr = row.new_zeros(num_rows + 1, dtype=torch.int64)
    rowptr[1:] = torch.bincount(row, minlength=num_rows).cumsum(0)
    return rowptr, col[perm].to(dtype), perm.to(dtype)


def _checked_on_any_device(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    """Copies of both that nobody else can change, once they are known to describe a matrix.

    In plain PyTorch; the native library replaces it on the CPU.
    """
    first, last, E = int(rowptr[0]), int(rowptr[-1]), col.numel()
    if first != 0 or last != E:
        raise ValueError(f"rowptr must go from 0 to {E}, where col ends, got {first} to {last}")
    falls = (rowptr[1:] < rowptr[:-1]).nonzero()
    if falls.numel():
        n = int(falls[0])
        raise ValueError(
            f"rowptr must not decrease, got rowptr[{n + 1}] = {int(rowptr[n + 1])} after {int(rowptr[n])}"
        )
    check_range("col", col, num_cols, "source nodes")
    dtype = index_dtype(E, rowptr.numel() - 1, num_cols)
    return rowptr.to(torch.int64, copy=True), col.to(dtype, copy=True)


def _ends_on_any_device(ptr: Tensor, index: Tensor, perm: Tensor | None) -> tuple[Tensor, Tensor]:
    """``fastattn::graph_ends`` in plain PyTorch; the native library replaces it on the CPU."""
    E = index.shape[0]
    rows = torch.arange(ptr.shape[0] - 1, dtype=index.dtype, device=ptr.device)
    row = torch.repeat_interleave(rows, ptr.diff(), output_size=E)
    if perm is None:
        return row, index.clone()
    perm = perm.long()
    return tuple(torch.empty_like(index).scatter_(0, perm, end) for end in (row, index))


library.impl("graph_ends", _ends_on_any_device, "CompositeExplicitAutograd")
library.impl("is_ascending", lambda index: bool((index[1:] >= index[:-1]).all()), "CompositeExplicitAutograd")
library.impl("graph_csr", _sorted_on_any_device, "CompositeExplicitAutograd")
library.impl("graph_checked_csr", _checked_on_any_device, "CompositeExplicitAutograd")


@torch.library.register_fake("fastattn::graph_csr", lib=library)
def _(row, col, num_rows, num_cols):
    E = row.shape[0]
    dtype = index_dtype(E, num_rows, num_cols)
    return row.new_empty(num_rows + 1, dtype=torch.int64), *(row.new_empty(E, dtype=dtype) for _ in range(2))


@torch.library.register_fake("fastattn::graph_ends", lib=library)
def _(rowptr, col, perm):
    return col.new_empty(col.shape), col.new_empty(col.shape)


@torch.library.register_fake("fastattn::graph_checked_csr", lib=library)
def _(rowptr, col, num_cols):
    dtype = index_dtype(col.shape[0], rowptr.shape[0], num_cols)
    return torch.empty_like(rowptr, dtype=torch.int64), torch.empty_like(col, dtype=dtype)


def _plain(kept_with: Compressed | None = None) -> AbstractContextManager:
    """What is built here outlives the call: it must belong to no transform and to no inference mode.

    What is ``kept_with`` edges that are real tensors must be real, too: tracers do not see it being made, and
    take it for a constant, as they do the edges.
    """
    traced = (
        kept_with is not None
        and not is_dynamo_compiling()
        and _len_torch_dispatch_stack() > 0
        and all(t is None or type(t) is Tensor for t in kept_with[:3])
    )
    transformed = not is_compiling() and _are_functorch_transforms_active()
    inferring = not is_compiling() and torch.is_inference_mode_enabled()
    if not (traced or transformed or inferring):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    if traced:
        stack.enter_context(_disable_current_modes())
    if transformed:
        stack.enter_context(torch._C._DisableFuncTorch())
    return stack


# One row pointer more than there are nodes is still a number of bytes that fits into int64.
_LARGEST_SIZE = 2**60 - 2


def compress(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Compressed:
    """Groups edges by ``row``, stably, so that the edges of a row keep the caller's order."""
    rowptr, sorted_col, perm = _graph_csr(row, col, num_rows, num_cols)
    # A tracer cannot decide by values, and loses nothing but a little speed; meta tensors have none.
    if not is_compiling() and not is_watched() and not row.is_meta and _is_ascending(row):
        perm = None
    return Compressed(rowptr, sorted_col, perm, num_cols)


def edge_ends(edges: Compressed) -> tuple[Tensor, Tensor]:
    """For each edge, in the caller's order: its row, and what ``index`` says of it."""
    return _graph_ends(*edges[:3])


def transposed(edges: Compressed) -> Compressed:
    """The same edges, with the same numbers, grouped by their other end."""
    row, col = edge_ends(edges)
    num_cols = edges.ptr.shape[0] - 1
    ptr, *rest, _ = compress(col, row, edges.num_cols, num_cols)
    return Compressed(ptr, *(t if t is None else t.to(edges.index.dtype) for t in rest), num_cols)


class Graph:
    """The structure of a graph: CSR by target, CSC by source, and which edge of the caller stands where.

    Built once and used many times, it saves every operator the sorting and checking of the edges. It holds
    structure only; weights and features are arguments of the operators, in the caller's edge order. Parallel
    edges stay separate, self-loops are edges like others, isolated nodes are allowed anywhere, and a
    bipartite graph has different numbers of sources and targets.

    Args:
        edge_index: (2, E) int64 or int32, any strides: row 0 the sources, row 1 the targets, in any order.
            Also a ``torch_geometric.EdgeIndex``, whose sizes and caches are used.
        num_nodes: number of nodes, for sources and targets alike; by default the largest number in
            ``edge_index`` plus one.
        size: ``(num_src, num_dst)`` of a bipartite graph, instead of ``num_nodes``; None for one to infer.

    Attributes:
        num_src, num_dst, num_edges: sizes.
        rowptr: (num_dst + 1,) int64; the edges into target n are at positions rowptr[n] to rowptr[n + 1].
        col: (E,) the source of the edge at each position: int32 where all numbers fit, else int64.
        perm: (E,) the caller's number of that edge, or None where the edges came in this order. The edges of
            a row keep the caller's order.
        colptr, row, perm_t: the same grouped by source; built when first read, and kept.

    Raises:
        ValueError: a node number that is negative or too large; the message names it.
        RuntimeError: a wrong shape or dtype. TypeError: something else in place of a tensor.

    Example:
        >>> graph = fastattn.Graph(torch.tensor([[0, 1, 1], [1, 2, 2]]), num_nodes=4)
        >>> fastattn.aggregate(torch.eye(4), graph)[2]
        tensor([0., 2., 0., 0.])
    """

    num_src: int
    num_dst: int
    num_edges: int
    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    # In compiled code the caller's edges: what is made of them alone then does without sorting.
    _given: Tensor | None = None

    def __init__(
        self,
        edge_index: Tensor,
        num_nodes: int | None = None,
        *,
        size: tuple[int | None, int | None] | None = None,
    ) -> None:
        num_src, num_dst = _check_sizes(num_nodes, size)
        _check_edge_index(edge_index)
        with _plain():
            if is_pyg_edge_index(edge_index):
                from fastattn._graph_formats import of_edge_index

                self._set(*of_edge_index(edge_index, num_src, num_dst))
            else:
                self._set(*of_edges(*edge_index.unbind(), num_src, num_dst))
                if is_compiling():
                    self._given = edge_index

    def _set(self, num_src: int, num_dst: int, csr: Compressed, csc: Compressed | None = None) -> None:
        self.num_src, self.num_dst, self.num_edges = num_src, num_dst, csr.index.shape[0]
        self.rowptr, self.col, self.perm, _ = csr
        self._csr = csr
        self._csc = csc
        self._vectors: dict[tuple[str, torch.dtype], Tensor] = {}
        # Calls of aggregate() that were found to need no check of this graph again.
        self._forms: dict[object, object] = {}
        # What others make of this graph and want again at their next call, such as its self-loops.
        self._derived: dict[object, object] = {}

    @staticmethod
    def _of_edges(src: Tensor, dst: Tensor, num_src: int | None, num_dst: int | None, names: Ends) -> Graph:
        with _plain():
            return _make(*of_edges(src, dst, num_src, num_dst, names))

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, *, num_src: int | None = None) -> Graph:
        """From compressed rows, which are the targets: ``aggregate(x, graph)`` is ``A @ x``.

        Edges are numbered by their position in ``col``. Both tensors are checked and copied.

        Args:
            rowptr: (num_dst + 1,) int64 or int32, from 0 to E, not decreasing.
            col: (E,) int64 or int32, the source of each edge, in any order within a row.
            num_src: number of source nodes, by default that of targets.

        Example:
            >>> fastattn.Graph.from_csr(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]))
            Graph(num_src=2, num_dst=2, num_edges=3)
        """
        _check_index("rowptr", rowptr, 1)
        _check_index("col", col, 1)
        if rowptr.shape[0] == 0:
            raise RuntimeError("rowptr must have one entry more than there are rows, got none")
        if rowptr.device != col.device:
            raise RuntimeError(f"rowptr is on {rowptr.device}, col on {col.device}")
        num_dst = rowptr.shape[0] - 1
        num_src = num_dst if num_src is None else _check_size("num_src", num_src)
        with _plain():
            checked = _checked_csr(rowptr, col, num_src)
            return _make(num_src, num_dst, Compressed(*checked, None, num_src))

    @classmethod
    def from_sparse(cls, matrix) -> Graph:
        """From the places that a sparse matrix stores. Rows are targets: ``aggregate(x)`` is ``A @ x``.

        Takes ``torch.sparse`` matrices in CSR, CSC and COO layout, ``scipy.sparse`` ones in the same formats,
        ``torch_sparse.SparseTensor``, ``torch_geometric.EdgeIndex`` (which reads like an ``edge_index``: its
        row 1 holds the targets) and DGL graphs of one edge type. Nothing is coalesced: duplicate places of a
        COO matrix are parallel edges, stored zeros are edges. Edges are numbered as the matrix orders its
        values, so that these are the ``edge_weight`` of the matrix product.

        Example:
            >>> A = torch.eye(3).to_sparse_csr()
            >>> y = fastattn.aggregate(x, fastattn.Graph.from_sparse(A), edge_weight=A.values())
        """
        from fastattn._graph_formats import of_matrix

        with _plain():
            return _make(*of_matrix(matrix))

    def __getstate__(self) -> dict[str, object]:
        # What loads it may put it on another device.
        return self.__dict__ | {"_forms": {}}

    @property
    def device(self) -> torch.device:
        return self.rowptr.device

    @property
    def is_plain(self) -> bool:
        """Whether all of it are dense CPU tensors and nothing more, as ops._common has it."""
        return all(t is None or (type(t) is Tensor and is_plain(t)) for t in self._csr[:3])

    @property
    def csr(self) -> Compressed:
        """By target: (rowptr, col, perm, num_src)."""
        return self._csr

    @property
    def csc(self) -> Compressed:
        """By source: (colptr, row, perm_t, num_dst)."""
        if self._csc is None:
            with _plain(self.csr):
                self._csc = transposed(self.csr)
        return self._csc

    @property
    def colptr(self) -> Tensor:
        return self.csc.ptr

    @property
    def row(self) -> Tensor:
        return self.csc.index

    @property
    def perm_t(self) -> Tensor | None:
        return self.csc.perm

    def edge_index(self) -> Tensor:
        """(2, E) int64: sources and targets in the caller's order, as a new tensor."""
        if self._given is not None:
            return self._given.to(torch.int64, copy=True)
        dst, src = edge_ends(self.csr)
        return torch.stack([src, dst]).long()

    def reverse(self) -> Graph:
        """Every edge turned round, keeping its number; shares the tensors of this graph."""
        return _make(self.num_dst, self.num_src, self.csc, self.csr)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """This graph on another device, with what it has built so far; itself if it is there already."""
        if torch.empty(0, device=device).device == self.device:
            return self

        def move(edges: Compressed | None) -> Compressed | None:
            if edges is None:
                return None
            tensors = (t if t is None else t.to(device, non_blocking=non_blocking) for t in edges[:3])
            return Compressed(*tensors, edges.num_cols)

        with _plain():
            return _make(self.num_src, self.num_dst, move(self.csr), move(self._csc))

    def in_degrees(self) -> Tensor:
        """(num_dst,) int64: how many edges enter each target."""
        return self.rowptr.diff()

    def out_degrees(self) -> Tensor:
        """(num_src,) int64: how many edges leave each source."""
        if self._csc is not None:
            return self._csc.ptr.diff()
        ones = torch.ones((), dtype=torch.int64, device=self.device).expand(self.num_edges)
        return torch.zeros(self.num_src, dtype=torch.int64, device=self.device).index_add_(0, self.col, ones)

    def _vector(self, name: str, dtype: torch.dtype) -> Tensor:
        """A function of the degrees that is 0 where the degree is: kept, as it is asked for at every call.

        ``name`` is "in" for one over the in-degree, "in_root" and "out_root" for one over the square root.
        """
        key = (name, dtype)
        found = self._vectors.get(key)
        if found is None:
            with _plain(self.csr):
                counts = self.out_degrees() if name == "out_root" else self.in_degrees()
                factor = counts.to(dtype)
                factor = factor.reciprocal_() if name == "in" else factor.rsqrt_()
                found = self._vectors[key] = factor.masked_fill_(counts == 0, 0.0)
        return found

    def __repr__(self) -> str:
        notes = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"Graph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}{notes})"


def _make(num_src: int, num_dst: int, csr: Compressed, csc: Compressed | None = None) -> Graph:
    graph = object.__new__(Graph)
    graph._set(num_src, num_dst, csr, csc)
    return graph


class Ends(NamedTuple):
    """What error messages call the two ends of edges, and the nodes there."""

    source: str = "edge_index[0] (sources)"
    target: str = "edge_index[1] (targets)"
    sources: str = "source nodes"
    targets: str = "target nodes"


_EDGE_INDEX = Ends()


def of_edges(src: Tensor, dst: Tensor, num_src: int | None, num_dst: int | None, names: Ends = _EDGE_INDEX):
    """The parts of a graph from its edges: both sizes, and the edges by target. None sizes are inferred."""
    num_src, num_dst = of_sizes(src, dst, num_src, num_dst)
    try:
        csr = compress(dst, src, num_dst, num_src)
    except (RuntimeError, ValueError):
        # Where it is a number out of range or too large, say so in the caller's words.
        check_ends(src, dst, num_src, num_dst, names)
        _check_size(f"the largest of {names.source} plus one", num_src)
        _check_size(f"the largest of {names.target} plus one", num_dst)
        raise
    return num_src, num_dst, csr


def check_ends(src: Tensor, dst: Tensor, num_src: int, num_dst: int, names: Ends = _EDGE_INDEX) -> None:
    check_range(names.source, src, num_src, names.sources)
    check_range(names.target, dst, num_dst, names.targets)


def of_sizes(src: Tensor, dst: Tensor, num_src: int | None, num_dst: int | None) -> tuple[int, int]:
    """Infers the sizes that are None from the largest number; both from either end where both are None."""
    if src.is_meta and (num_src is None or num_dst is None):
        raise RuntimeError("the numbers of nodes cannot be read from a meta tensor: give num_nodes or size")

    def size(index: Tensor) -> int:
        largest = int(index.max()) + 1 if index.shape[0] else 0
        if is_compiling():
            # Compiled code has to know how wide indices are before it knows this number.
            torch._check(largest < 2**31)
        return max(largest, 0)

    if num_src is None and num_dst is None:
        num_src = num_dst = max(size(src), size(dst))
    return size(src) if num_src is None else num_src, size(dst) if num_dst is None else num_dst


def is_pyg_edge_index(edge_index) -> bool:
    # A tensor that is nothing more takes long to look for what it does not have.
    return (
        isinstance(edge_index, Tensor)
        and edge_index.__class__ is not Tensor
        and all(hasattr(edge_index, n) for n in ("sparse_size", "get_csc", "as_tensor"))
    )


def _check_index(name: str, index, dims: int) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(index).__name__}")
    if index.is_nested or index.layout != torch.strided:
        what = "a nested one" if index.is_nested else f"layout {index.layout}"
        raise RuntimeError(f"{name} must be a dense tensor, got {what}")
    if index.dtype not in _INDEX_DTYPES:
        raise RuntimeError(f"{name} must be int64 or int32, got {index.dtype}")
    if index.dim() != dims:
        raise RuntimeError(f"{name} must have {dims} dimension{'s' * (dims > 1)}, got {tuple(index.shape)}")


def _check_edge_index(edge_index) -> None:
    if isinstance(edge_index, Tensor) and edge_index.layout in _SPARSE_LAYOUTS:
        raise RuntimeError(
            f"edge_index must be a dense (2, E) tensor, got layout {edge_index.layout}: use Graph.from_sparse"
        )
    _check_index("edge_index", edge_index, 2)
    if edge_index.shape[0] != 2:
        raise RuntimeError(
            f"edge_index must be (2, E), sources and targets, got {tuple(edge_index.shape)}"
            + (": transpose it" if edge_index.shape[1] == 2 else "")
        )


def _check_size(name: str, size) -> int:
    if isinstance(size, bool) or not (isinstance(size, (int, torch.SymInt)) or hasattr(size, "__index__")):
        raise TypeError(f"{name} must be an integer, got {size!r}")
    if not isinstance(size, (int, torch.SymInt)):
        try:
            size = size.__index__()
        except TypeError:  # a tensor that holds no integer, or several
            raise TypeError(f"{name} must be an integer, got {size!r}") from None
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")
    if size > _LARGEST_SIZE:
        raise ValueError(f"{name} must be at most {_LARGEST_SIZE}, got {size}")
    return size


def _check_sizes(num_nodes, size) -> tuple[int | None, int | None]:
    if size is None:
        num_nodes = None if num_nodes is None else _check_size("num_nodes", num_nodes)
        return num_nodes, num_nodes
    if num_nodes is not None:
        raise ValueError(f"give num_nodes or size, not both: got num_nodes={num_nodes} and size={size}")
    if not isinstance(size, Sequence) or len(size) != 2:
        raise TypeError(f"size must be a pair (num_src, num_dst), got {size!r}")
    num_src, num_dst = (
        None if n is None else _check_size(f"size[{position}]", n) for position, n in enumerate(size)
    )
    return num_src, num_dst


def as_graph(graph, num_src: int, num_dst: int | None = None, *, name: str = "x") -> Graph:
    """What an operator was given as its graph: a :class:`Graph`, or anything that one can be made of.

    An ``edge_index`` takes its sizes from the features: ``num_src`` rows, and ``num_dst`` or as many targets.
    Everything else brings sizes, which have to be these. ``name`` is what the error message calls the
    features of the sources.
    """
    if isinstance(graph, Tensor) and graph.layout == torch.strided:
        known = tuple(graph.sparse_size()) if is_pyg_edge_index(graph) else (None, None)
        num_dst = num_src if num_dst is None and known[1] is None else num_dst
        size = (num_src if known[0] is None else known[0], num_dst if known[1] is None else known[1])
        graph = Graph(graph, size=size)
    elif not isinstance(graph, Graph):
        from fastattn._graph_formats import of_matrix

        with _plain():
            graph = _make(*of_matrix(graph, "graph"))
    if graph.num_src != num_src:
        raise RuntimeError(f"{name} has {num_src} rows, the graph {graph.num_src} source nodes")
    if num_dst is not None and graph.num_dst != num_dst:
        raise RuntimeError(f"there are features of {num_dst} targets, the graph has {graph.num_dst}")
    return graph
