// Graphs between torch and the plain structs of csrc/cpu.
#pragma once
#include "edge_split.h"
#include "tensor.h"

namespace fastattn {

// Whether an index tensor is int64 (true) or int32; anything else is refused.
inline bool is_wide(const char* name, const Tensor& tensor) {
  const int32_t code = dtype_code(tensor);
  const bool wide = code == aoti_torch_dtype_int64();
  STD_TORCH_CHECK(wide || code == aoti_torch_dtype_int32(), name, " must be int32 or int64");
  return wide;
}

inline Tensor allocate_index(bool wide, const int64_t* size, int64_t dim) {
  int64_t stride[4];
  for (int64_t i = dim - 1, next = 1; i >= 0; --i) {
    stride[i] = next;
    next *= std::max<int64_t>(size[i], 1);
  }
  return allocate_strided(dim, size, stride, wide ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32());
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// rowptr (N + 1), col (E) and perm (E) of a graph, which is trusted to be one: only what is quickly seen is
// checked. Keeps what its view points to.
struct GraphArrays {
  Tensor rowptr, col;
  MaybeTensor perm;
  GraphView view;

  GraphArrays(const Tensor& rowptr_, const Tensor& col_, const MaybeTensor& perm_)
      : rowptr(as_contiguous(rowptr_)), col(as_contiguous(col_)) {
    STD_TORCH_CHECK(dtype_code(rowptr) == aoti_torch_dtype_int64(), "rowptr must be int64");
    STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.numel() >= 1,
                    "rowptr must have shape (N + 1,), got a tensor of ", rowptr.dim(), " dimensions and ",
                    rowptr.numel(), " elements");
    STD_TORCH_CHECK(col.dim() == 1, "col must have 1 dimension, got ", col.dim());
    view.rows = rowptr.numel() - 1;
    view.edges = col.numel();
    view.wide = is_wide("col", col);
    view.rowptr = static_cast<const int64_t*>(data_of("rowptr", rowptr));
    view.col = data_of("col", col);
    view.perm = nullptr;
    STD_TORCH_CHECK(view.rowptr[0] == 0 && view.rowptr[view.rows] == view.edges,
                    "rowptr must go from 0 to the number of edges, ", view.edges, ", got ", view.rowptr[0],
                    " to ", view.rowptr[view.rows]);
    if (!perm_) return;
    perm = as_contiguous(*perm_);
    STD_TORCH_CHECK(is_wide("perm", *perm) == view.wide, "perm must have the dtype of col");
    STD_TORCH_CHECK(perm->dim() == 1 && perm->numel() == view.edges, "perm must have shape (", view.edges,
                    ",), got a tensor of ", perm->dim(), " dimensions and ", perm->numel(), " elements");
    view.perm = data_of("perm", *perm);
  }
};

// Kernels read the nodes that `col` names without looking: `nodes`, those there are, must be what it was
// checked against. A call that was traced may get other features than it was traced with.
inline void check_nodes(const char* name, int64_t nodes, int64_t num_cols) {
  STD_TORCH_CHECK(nodes == num_cols, name, " must have the ", num_cols,
                  " nodes that the edges come from, got ", nodes);
}

}  // namespace fastattn
