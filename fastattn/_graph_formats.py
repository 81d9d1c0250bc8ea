"""Reads the structure of other libraries' sparse matrices and graphs; imports none of them."""

import torch
from torch import Tensor

from fastattn.graph import (
    Compressed,
    Ends,
    check_ends,
    check_range,
    index_dtype,
    is_pyg_edge_index,
    of_edges,
    of_sizes,
    transposed,
)

__all__ = ["of_edge_index", "of_matrix"]

Parts = tuple[int, int, Compressed, Compressed | None]
_ENDS = Ends("the column indices", "the row indices")
_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


def of_matrix(matrix, name: str = "matrix") -> Parts:
    """num_src, num_dst, the edges by target and, where it costs nothing, by source."""
    if is_pyg_edge_index(matrix):
        return of_edge_index(matrix, None, None)
    if isinstance(matrix, Tensor):
        return _of_torch(matrix)
    if hasattr(matrix, "storage") and hasattr(matrix, "sparse_sizes"):
        return _of_sparse_tensor(matrix)
    if hasattr(matrix, "canonical_etypes") and hasattr(matrix, "edges"):
        return _of_dgl(matrix)
    if hasattr(matrix, "format") and hasattr(matrix, "tocsr"):
        return _of_scipy(matrix)
    also = "a Graph, an edge_index, " if name == "graph" else ""
    raise TypeError(
        f"{name} must be {also}a sparse matrix of torch, scipy or torch_sparse, or a DGL graph, got "
        f"{type(matrix).__name__}"
    )


def _of_compressed(ptr: Tensor, index: Tensor, num_rows: int, num_index: int) -> Compressed:
    if ptr.shape[0] != num_rows + 1:
        raise ValueError(f"the row pointers must have {num_rows + 1} entries, got {ptr.shape[0]}")
    return Compressed(*torch.ops.fastattn.graph_checked_csr(ptr, index, num_index), None, num_index)


def _of_torch(matrix: Tensor) -> Parts:
    if matrix.layout not in _LAYOUTS:
        raise RuntimeError(
            f"a sparse matrix must have CSR, CSC or COO layout, got {matrix.layout}"
            + (": an edge_index goes to Graph(edge_index)" if matrix.layout == torch.strided else "")
        )
    # Values may be vectors, as weights of several heads are: they are dimensions of their own.
    coo = matrix.layout == torch.sparse_coo
    if (matrix.sparse_dim() if coo else matrix.dim() - matrix.dense_dim()) != 2:
        raise RuntimeError(f"a sparse matrix must have two sparse dimensions, got {tuple(matrix.shape)}")
    num_dst, num_src = matrix.shape[:2]
    if matrix.layout == torch.sparse_csr:
        csr = _of_compressed(matrix.crow_indices(), matrix.col_indices(), num_dst, num_src)
        return num_src, num_dst, csr, None
    if matrix.layout == torch.sparse_csc:
        csc = _of_compressed(matrix.ccol_indices(), matrix.row_indices(), num_src, num_dst)
        return num_src, num_dst, transposed(csc), csc
    # Not indices(), which wants the matrix coalesced: duplicates are edges of their own.
    row, col = matrix._indices()
    return *of_edges(col, row, num_src, num_dst, _ENDS), None


def _of_scipy(matrix) -> Parts:
    if len(matrix.shape) != 2:
        raise RuntimeError(f"a sparse matrix must have two dimensions, got {tuple(matrix.shape)}")
    num_dst, num_src = (int(n) for n in matrix.shape)
    if matrix.format in ("csr", "csc"):
        ptr = _of_numpy(matrix.indptr)
        # scipy allows room to spare behind the last entry.
        index = _of_numpy(matrix.indices)[: int(ptr[-1])]
        if matrix.format == "csr":
            return num_src, num_dst, _of_compressed(ptr, index, num_dst, num_src), None
        csc = _of_compressed(ptr, index, num_src, num_dst)
        return num_src, num_dst, transposed(csc), csc
    if matrix.format == "coo":
        row, col = _of_numpy(matrix.row), _of_numpy(matrix.col)
        return *of_edges(col, row, num_src, num_dst, _ENDS), None
    raise RuntimeError(
        f"a scipy matrix must be in csr, csc or coo format, where its values have an order, got "
        f"{matrix.format}: convert it with .tocsr()"
    )


def _of_numpy(array) -> Tensor:
    # A read-only array cannot be shared; what is made of it here is copied anyway.
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def _of_sparse_tensor(matrix) -> Parts:
    num_dst, num_src = (int(n) for n in matrix.sparse_sizes())
    rowptr, col, _ = matrix.csr()
    csr = _of_compressed(rowptr, col, num_dst, num_src)
    storage, csc = matrix.storage, None
    if storage._colptr is not None and storage._csr2csc is not None:
        row = storage.row()[storage._csr2csc]
        csc = _adopt((storage._colptr, row, storage._csr2csc), num_src, num_dst)
    return num_src, num_dst, csr, csc


def _of_dgl(graph) -> Parts:
    if len(graph.canonical_etypes) != 1:
        raise RuntimeError(f"a DGL graph must have one edge type, got {graph.canonical_etypes}")
    src, dst = graph.edges(form="uv", order="eid")
    return *of_edges(src, dst, int(graph.num_src_nodes()), int(graph.num_dst_nodes())), None


def of_edge_index(edge_index, num_src: int | None, num_dst: int | None) -> Parts:
    """PyG's EdgeIndex: sizes where it knows them, and what it has sorted already."""
    known_src, known_dst = edge_index.sparse_size()
    sizes = []
    for name, given, known in (("source", num_src, known_src), ("target", num_dst, known_dst)):
        if given is not None and known is not None and given != known:
            raise ValueError(f"edge_index is for {known} {name} nodes, the graph shall have {given}")
        sizes.append(known if given is None else given)
    src, dst = edge_index.as_tensor()
    num_src, num_dst, csr, csc = *of_sizes(src, dst, *sizes), None, None
    order = edge_index.sort_order
    ptr, other = edge_index._indptr, edge_index._T_indptr
    perm, (T_src, T_dst) = edge_index._T_perm, edge_index._T_index
    if order == "col":
        csr = None if ptr is None else _adopt((ptr, src, None), num_dst, num_src)
        if other is not None and perm is not None and T_dst is not None:
            csc = _adopt((other, T_dst, perm), num_src, num_dst)
    elif order == "row":
        csc = None if ptr is None else _adopt((ptr, dst, None), num_src, num_dst)
        if other is not None and perm is not None and T_src is not None:
            csr = _adopt((other, T_src, perm), num_dst, num_src)
    if csr is None:
        return *of_edges(src, dst, num_src, num_dst), csc
    check_ends(src, dst, num_src, num_dst)
    return num_src, num_dst, csr, csc


def _adopt(edges, num_rows: int, num_index: int) -> Compressed | None:
    """Edges that another library has sorted, or None if they are not what this one needs.

    Its sort need not be stable: then the edges of a row are not in the caller's order, and ties of a maximum
    would be decided by another edge.
    """
    ptr, index, perm = edges
    if ptr.shape[0] != num_rows + 1:
        return None
    ptr, index = torch.ops.fastattn.graph_checked_csr(ptr, index, num_index)
    if perm is None:
        return Compressed(ptr, index, None, num_index)
    check_range("the permutation of edge_index", perm, index.shape[0], "edges")
    rises = torch.ones(perm.shape[0], dtype=torch.bool, device=perm.device)
    rises[1:] = perm[1:] > perm[:-1]
    starts = ptr[:-1][ptr[:-1] < ptr[1:]]
    rises[starts] = True
    if not bool(rises.all()):
        return None
    perm = perm.to(index_dtype(perm.shape[0], num_rows, num_index), copy=True)
    return Compressed(ptr, index, perm, num_index)
