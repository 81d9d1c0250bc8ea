// Neighbour aggregation: the registered CPU ops over the kernels of csrc/cpu/aggregation.h. The schemas are
// defined in fastattn/ops/_aggregation_autograd.py.
#include "aggregation.h"

#include <cstring>
#include <tuple>

#include "graph_tensor.h"

namespace fastattn {
namespace {

// What kernels take is (B, nodes, H, F). B and H may be missing: (nodes, F), (B, nodes, F), or beside weights
// of several heads (nodes, H, F). So a small call in eager mode does without views around it.
struct Layout {
  int64_t dim;
  std::array<int, 4> place;  // of the tensor's dimensions among the four

  Layout(int64_t dim, bool heads) : dim(dim), place{0, 1, 2, 3} {
    if (dim == 2) place = {1, 3};
    if (dim == 3) place = heads ? std::array<int, 4>{1, 2, 3} : std::array<int, 4>{0, 1, 3};
  }
};

Tensor in_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor
                                                                        : torch::stable::contiguous(tensor);
}

// Kernels read features in rows; anything else is copied.
struct Features {
  Tensor held;
  Array array;
  Layout layout;
  std::array<int64_t, 4> size{1, 1, 1, 1};
  View view;

  Features(const char* name, const Tensor& tensor, bool heads = false)
      : held(in_rows(tensor)), array(name, held), layout(array.dim, heads) {
    STD_TORCH_CHECK(array.dim >= 2 && array.dim <= 4, name, " must have 4 dimensions (B, N, H, F), got ",
                    array.shape());
    array.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
    view = array.view(layout.place);
    for (int64_t i = 0; i < array.dim; ++i) size[layout.place[i]] = array.size[i];
  }
};

DType sum_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

void fill_weight(AggregateParams& p, const Layout& layout, const MaybeTensor& edge_weight) {
  if (!edge_weight) return;
  const Array weight("edge_weight", *edge_weight);
  weight.check_dtype({p.x.dtype, sum_dtype(p.x.dtype)});
  if (weight.dim == 1 && layout.dim < 4)
    weight.check_shape({p.graph.edges});
  else if (weight.dim == 2 && weight.size[1] == 1)
    weight.check_shape({p.graph.edges, 1});
  else
    weight.check_shape({p.graph.edges, p.H});
  p.edge_weight = weight.view();
}

// One number per node. Kernels read it as contiguous.
struct Scale {
  Tensor held;
  const void* data = nullptr;
  Scale(const char* name, const MaybeTensor& tensor, DType dtype, int64_t nodes) {
    if (!tensor) return;
    held = as_contiguous(*tensor);
    data = Array(name, held).check_dtype({dtype}).check_shape({nodes}).data;
  }
};

// An edge's number for every feature, of the graph's index dtype and with the dimensions that features have.
struct Selection {
  Tensor held;
  View view;
  Selection(const MaybeTensor& arg, const GraphView& graph, const Layout& layout,
            std::array<int64_t, 4> expected) {
    if (!arg) return;
    held = in_rows(*arg);
    STD_TORCH_CHECK(is_wide("arg", held) == graph.wide, "arg must have the dtype of col");
    bool fits = held.dim() == layout.dim;
    view.data = data_of("arg", held);
    for (int64_t i = 0; fits && i < layout.dim; ++i) {
      const int place = layout.place[i];
      fits = held.size(i) == expected[place];
      view.stride[place] = held.size(i) == 1 ? 0 : held.stride(i);
    }
    STD_TORCH_CHECK(fits, "arg must have shape (B, N, H, F) of its nodes");
  }
};

// The size of the result, in the dimensions of x.
std::array<int64_t, 4> size_of_rows(const AggregateParams& p, const Layout& layout) {
  const std::array<int64_t, 4> all{p.B, p.graph.rows, p.H, p.F};
  std::array<int64_t, 4> size{};
  for (int64_t i = 0; i < layout.dim; ++i) size[i] = all[layout.place[i]];
  return size;
}

// Of the dtype of x; kernels rely on it being contiguous.
Tensor allocate_output(const AggregateParams& p, const Layout& layout) {
  return allocate_contiguous(p.x.dtype, size_of_rows(p, layout).data(), layout.dim);
}
View contiguous_view(const Tensor& tensor, DType dtype) { return {tensor.data_ptr(), dtype, {0, 0, 0, 0}}; }

void fill_features(AggregateParams& p, const GraphArrays& graph, const Features& x, int64_t num_cols) {
  p.graph = graph.view;
  p.B = x.size[0], p.M = x.size[1], p.H = x.size[2], p.F = x.size[3];
  p.x = x.view;
  check_nodes("x", p.M, num_cols);
}

Tensor aggregate_sum(const Tensor& x_, const Tensor& rowptr, const Tensor& col, const MaybeTensor& perm,
                     int64_t num_cols, const MaybeTensor& edge_weight, const MaybeTensor& row_scale_,
                     const MaybeTensor& col_scale_, const MaybeTensor& arg_, bool arg_of_rows) {
  const GraphArrays graph(rowptr, col, perm);
  const Features x("x", x_, edge_weight && edge_weight->dim() == 2);
  AggregateSumParams p{};
  fill_features(p, graph, x, num_cols);
  fill_weight(p, x.layout, edge_weight);
  const Scale row_scale("row_scale", row_scale_, sum_dtype(p.x.dtype), p.graph.rows);
  const Scale col_scale("col_scale", col_scale_, sum_dtype(p.x.dtype), p.M);
  const Selection arg(arg_, p.graph, x.layout, {p.B, arg_of_rows ? p.graph.rows : p.M, p.H, p.F});
  p.row_scale = row_scale.data;
  p.col_scale = col_scale.data;
  p.arg = arg.view;
  p.arg_of_rows = arg_of_rows;
  Tensor out = allocate_output(p, x.layout);
  p.out = contiguous_view(out, p.x.dtype);
  if (out.numel() > 0) aggregation_kernels().sum(p, torch_parallel());
  return out;
}

std::tuple<Tensor, Tensor> aggregate_max(const Tensor& x_, const Tensor& rowptr, const Tensor& col,
                                         const MaybeTensor& perm, int64_t num_cols,
                                         const MaybeTensor& edge_weight, bool minimum, bool return_arg) {
  const GraphArrays graph(rowptr, col, perm);
  const Features x("x", x_, edge_weight && edge_weight->dim() == 2);
  AggregateMaxParams p{};
  fill_features(p, graph, x, num_cols);
  fill_weight(p, x.layout, edge_weight);
  p.minimum = minimum;
  Tensor out = allocate_output(p, x.layout);
  const std::array<int64_t, 4> nothing{};
  const int64_t* size = return_arg ? out.sizes().data() : nothing.data();
  Tensor arg = allocate_index(p.graph.wide, size, return_arg ? x.layout.dim : 1);
  p.out = contiguous_view(out, p.x.dtype);
  p.arg = return_arg ? arg.data_ptr() : nullptr;
  if (out.numel() > 0) aggregation_kernels().max(p, torch_parallel());
  return {out, arg};
}

Tensor edge_dot(const Tensor& a_, const Tensor& b_, const Tensor& rowptr, const Tensor& col,
                const MaybeTensor& perm, int64_t num_cols, const MaybeTensor& row_scale_,
                const MaybeTensor& col_scale_, const MaybeTensor& arg_, bool arg_of_rows, bool per_head) {
  const GraphArrays graph(rowptr, col, perm);
  const Features a("a", a_), b("b", b_);
  EdgeDotParams p{};
  p.graph = graph.view;
  p.B = b.size[0], p.M = b.size[1], p.H = b.size[2], p.F = b.size[3];
  const DType dtype = b.array.dtype;
  a.array.check_dtype({dtype}).check_shape({p.B, p.graph.rows, p.H, p.F});
  check_nodes("b", p.M, num_cols);
  p.a = a.view;
  p.b = b.view;
  const Scale row_scale("row_scale", row_scale_, sum_dtype(dtype), p.graph.rows);
  const Scale col_scale("col_scale", col_scale_, sum_dtype(dtype), p.M);
  const Selection arg(arg_, p.graph, b.layout, {p.B, arg_of_rows ? p.graph.rows : p.M, p.H, p.F});
  p.row_scale = row_scale.data;
  p.col_scale = col_scale.data;
  p.arg = arg.view;
  p.arg_of_rows = arg_of_rows;
  p.per_head = per_head;
  Tensor out = allocate_contiguous(sum_dtype(dtype), {p.graph.edges, per_head ? p.H : 1});
  p.out = contiguous_view(out, sum_dtype(dtype));
  if (p.B * p.H * p.F > 0)
    aggregation_kernels().edge_dot(p, torch_parallel());
  else if (out.numel() > 0)
    torch::stable::zero_(out);
  return out;
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("aggregate_sum", TORCH_BOX(&fastattn::aggregate_sum));
  m.impl("aggregate_max", TORCH_BOX(&fastattn::aggregate_max));
  m.impl("edge_dot", TORCH_BOX(&fastattn::edge_dot));
}
