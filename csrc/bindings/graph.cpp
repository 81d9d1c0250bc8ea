// Graphs: the registered CPU ops, whose schemas are defined in fastattn/graph.py, and the balance of the work
// split. Sorting is in csrc/cpu/graph.h.
#include "graph.h"

#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "graph_tensor.h"

namespace fastattn {
namespace {

EdgeEnds ends_of(const char* name, const Tensor& tensor, int64_t nodes) {
  STD_TORCH_CHECK(tensor.dim() == 1, name, " must have 1 dimension, got ", tensor.dim());
  return {data_of(name, tensor), tensor.stride(0), nodes, is_wide(name, tensor)};
}

// A ValueError in Python.
[[noreturn]] void refuse(const char* name, const char* nodes, const EdgeEnds& ends, int64_t edge) {
  const int64_t node = ends.wide ? static_cast<const int64_t*>(ends.data)[edge * ends.stride]
                                 : static_cast<const int32_t*>(ends.data)[edge * ends.stride];
  const std::string text = std::string(name) + " holds " + std::to_string(node);
  throw std::invalid_argument(node < 0 ? text + ": " + nodes + " are numbered from 0"
                                       : text + ", but there are only " + std::to_string(ends.nodes) + " " +
                                             nodes);
}

std::tuple<Tensor, Tensor, Tensor> graph_csr(const Tensor& row, const Tensor& col, int64_t num_rows,
                                             int64_t num_cols) {
  STD_TORCH_CHECK(num_rows >= 0 && num_cols >= 0, "num_rows and num_cols must not be negative, got ",
                  num_rows, " and ", num_cols);
  GraphCsrParams p{row.numel(), ends_of("row", row, num_rows), ends_of("col", col, num_cols)};
  STD_TORCH_CHECK(col.numel() == p.edges && p.row.wide == p.col.wide,
                  "row and col must have the same dtype and length, got lengths ", p.edges, " and ",
                  col.numel());
  const int64_t most = std::max({p.edges, num_rows, num_cols}), length = num_rows + 1;
  p.wide = most > std::numeric_limits<int32_t>::max();
  Tensor rowptr = allocate_index(true, &length, 1);
  Tensor out_col = allocate_index(p.wide, &p.edges, 1), out_perm = allocate_index(p.wide, &p.edges, 1);
  p.rowptr = static_cast<int64_t*>(rowptr.data_ptr());
  p.out_col = out_col.data_ptr();
  p.out_perm = out_perm.data_ptr();
  const GraphCsrResult result = graph_kernels().csr(p, torch_parallel());
  if (result.bad_row >= 0) refuse("row", "rows", p.row, result.bad_row);
  if (result.bad_col >= 0) refuse("col", "columns", p.col, result.bad_col);
  return {rowptr, out_col, out_perm};
}

// Copies `count` numbers, which may become wider or narrower, and says which are the smallest and the
// largest.
template <class From, class To>
std::pair<int64_t, int64_t> copy_numbers(const From* from, int64_t count, To* to) {
  From least = std::numeric_limits<From>::max(), most = std::numeric_limits<From>::min();
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, from[i]);
    most = std::max(most, from[i]);
    to[i] = To(from[i]);
  }
  return {least, most};
}
Tensor copy_index(const char* name, const Tensor& tensor, bool wide, std::pair<int64_t, int64_t>& bounds) {
  const Tensor held = as_contiguous(tensor);
  const int64_t count = held.numel();
  Tensor result = allocate_index(wide, &count, 1);
  const auto copy = [&]<class From>(const From* from) {
    return wide ? copy_numbers(from, count, static_cast<int64_t*>(result.data_ptr()))
                : copy_numbers(from, count, static_cast<int32_t*>(result.data_ptr()));
  };
  const void* data = data_of(name, held);
  bounds =
      is_wide(name, held) ? copy(static_cast<const int64_t*>(data)) : copy(static_cast<const int32_t*>(data));
  return result;
}

std::tuple<Tensor, Tensor> graph_checked_csr(const Tensor& rowptr, const Tensor& col, int64_t num_cols) {
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.numel() >= 1 && col.dim() == 1,
                  "rowptr must have shape (N + 1,) and col (E,)");
  const int64_t E = col.numel(), rows = rowptr.numel() - 1;
  std::pair<int64_t, int64_t> bounds;
  Tensor out_rowptr = copy_index("rowptr", rowptr, true, bounds);
  const int64_t* at = static_cast<const int64_t*>(out_rowptr.data_ptr());
  if (at[0] != 0 || at[rows] != E)
    throw std::invalid_argument("rowptr must go from 0 to " + std::to_string(E) + ", where col ends, got " +
                                std::to_string(at[0]) + " to " + std::to_string(at[rows]));
  for (int64_t n = 0; n < rows; ++n)
    if (at[n + 1] < at[n])
      throw std::invalid_argument("rowptr must not decrease, got rowptr[" + std::to_string(n + 1) +
                                  "] = " + std::to_string(at[n + 1]) + " after " + std::to_string(at[n]));
  const bool wide = std::max({E, rows, num_cols}) > std::numeric_limits<int32_t>::max();
  Tensor out_col = copy_index("col", col, wide, bounds);
  if (E > 0 && (bounds.first < 0 || bounds.second >= num_cols)) {
    const int64_t bad = bounds.first < 0 ? bounds.first : bounds.second;
    refuse("col", "source nodes", {&bad, 1, num_cols, true}, 0);
  }
  return {out_rowptr, out_col};
}

// Whether edges with these ends are sorted by them.
template <class I>
bool ascends(const EdgeEnds& ends, int64_t edges) {
  const I* at = static_cast<const I*>(ends.data);
  bool result = true;
  for (int64_t e = 1; e < edges && result; ++e) result = at[(e - 1) * ends.stride] <= at[e * ends.stride];
  return result;
}
bool is_ascending(const Tensor& index) {
  const EdgeEnds ends = ends_of("index", index, 0);
  return ends.wide ? ascends<int64_t>(ends, index.numel()) : ascends<int32_t>(ends, index.numel());
}

// For each edge, in the caller's order, its row and its other end.
template <class I>
bool fill_ends(const GraphView& graph, I* row, I* col) {
  const I *from = static_cast<const I*>(graph.col), *perm = static_cast<const I*>(graph.perm);
  for (int64_t n = 0, end = 0; n < graph.rows; ++n) {
    const int64_t begin = end;
    end = graph.rowptr[n + 1];
    if (end < begin || end > graph.edges) return false;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = perm ? int64_t(perm[i]) : i;
      if (uint64_t(e) >= uint64_t(graph.edges)) return false;
      row[e] = I(n);
      col[e] = from[i];
    }
  }
  return true;
}
std::tuple<Tensor, Tensor> graph_ends(const Tensor& rowptr, const Tensor& col, const MaybeTensor& perm) {
  const GraphArrays graph(rowptr, col, perm);
  const GraphView& view = graph.view;
  Tensor out_row = allocate_index(view.wide, &view.edges, 1),
         out_col = allocate_index(view.wide, &view.edges, 1);
  void *row_data = out_row.data_ptr(), *col_data = out_col.data_ptr();
  const bool filled = view.wide
                          ? fill_ends(view, static_cast<int64_t*>(row_data), static_cast<int64_t*>(col_data))
                          : fill_ends(view, static_cast<int32_t*>(row_data), static_cast<int32_t*>(col_data));
  STD_TORCH_CHECK(filled, "rowptr must not decrease, and perm must hold the numbers of edges");
  return {out_row, out_col};
}

// Edges that each of `threads` equally fast workers gets: they take chunk after chunk, whoever is done first
// takes the next one.
Tensor edges_per_worker(const Tensor& rowptr, int64_t threads) {
  STD_TORCH_CHECK(threads >= 1, "threads must be at least 1, got ", threads);
  STD_TORCH_CHECK(dtype_code(rowptr) == aoti_torch_dtype_int64() && rowptr.dim() == 1 && rowptr.numel() >= 1,
                  "rowptr must be int64 of shape (N + 1,)");
  const Tensor held = as_contiguous(rowptr);
  const EdgeSplit split = split_edges(static_cast<const int64_t*>(data_of("rowptr", held)), held.numel() - 1);
  Tensor result = allocate_index(true, &threads, 1);
  int64_t* edges = static_cast<int64_t*>(result.data_ptr());
  std::fill(edges, edges + threads, 0);
  std::vector<int64_t> work(threads);
  for (int64_t k = 0; k < split.chunks; ++k) {
    const EdgeCut from = edge_cut(split, k), to = edge_cut(split, k + 1);
    const int64_t worker = std::min_element(work.begin(), work.end()) - work.begin();
    edges[worker] += to.edge - from.edge;
    work[worker] += to.edge - from.edge + to.row - from.row;
  }
  return result;
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn, m) {
  m.def("edges_per_worker(Tensor rowptr, int threads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("graph_csr", TORCH_BOX(&fastattn::graph_csr));
  m.impl("is_ascending", TORCH_BOX(&fastattn::is_ascending));
  m.impl("graph_ends", TORCH_BOX(&fastattn::graph_ends));
  m.impl("graph_checked_csr", TORCH_BOX(&fastattn::graph_checked_csr));
  m.impl("edges_per_worker", TORCH_BOX(&fastattn::edges_per_worker));
}
