// Neighbour aggregation: the registered CPU ops over the kernels of csrc/cpu/aggregation.h. The schemas are
// defined in fastattn/ops/_aggregation_autograd.py.
#include "aggregation.h"

#include <cstring>
#include <tuple>

#include "graph_tensor.h"

namespace fastattn {
namespace {

// Features (B, nodes, H, F). Kernels read them in rows; anything else is copied.
struct Features {
  Tensor held;
  Array array;
  Features(const char* name, const Tensor& tensor) : held(in_rows(tensor)), array(name, held) {
    STD_TORCH_CHECK(array.dim == 4, name, " must have 4 dimensions (B, N, H, F), got ", array.shape());
    array.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  }
  static Tensor in_rows(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    return last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor
                                                                          : torch::stable::contiguous(tensor);
  }
};

DType sum_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

void fill_weight(AggregateParams& p, const MaybeTensor& edge_weight) {
  if (!edge_weight) return;
  const Array weight("edge_weight", *edge_weight);
  weight.check_dtype({p.x.dtype, sum_dtype(p.x.dtype)});
  if (weight.dim == 2 && weight.size[1] == 1)
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

// An edge's number for every feature, of the graph's index dtype.
struct Selection {
  Tensor held;
  View view;
  Selection(const MaybeTensor& arg, const GraphView& graph, int64_t B, int64_t nodes, int64_t H, int64_t F) {
    if (!arg) return;
    held = Features::in_rows(*arg);
    STD_TORCH_CHECK(is_wide("arg", held) == graph.wide, "arg must have the dtype of col");
    const int64_t expected[] = {B, nodes, H, F};
    const int64_t *size = held.sizes().data(), *stride = held.strides().data();
    STD_TORCH_CHECK(held.dim() == 4 && std::equal(expected, expected + 4, size),
                    "arg must have shape (B, N, H, F) of its nodes");
    view.data = held.data_ptr();
    for (int i = 0; i < 4; ++i) view.stride[i] = size[i] == 1 ? 0 : stride[i];
  }
};

// (B, N, H, F) of the dtype of x; kernels rely on it being contiguous.
Tensor allocate_output(const AggregateParams& p) {
  const int64_t bytes = p.x.dtype == DType::f64 ? 8 : p.x.dtype == DType::f32 ? 4 : 2;
  return in_huge_pages(allocate_contiguous(p.x.dtype, {p.B, p.graph.rows, p.H, p.F}), bytes);
}
View contiguous_view(const Tensor& tensor, DType dtype) { return {tensor.data_ptr(), dtype, {0, 0, 0, 0}}; }

void fill_features(AggregateParams& p, const GraphArrays& graph, const Features& x, int64_t num_cols) {
  p.graph = graph.view;
  p.B = x.array.size[0], p.M = x.array.size[1], p.H = x.array.size[2], p.F = x.array.size[3];
  p.x = x.array.view();
  check_nodes("x", p.M, num_cols);
}

Tensor aggregate_sum(const Tensor& x_, const Tensor& rowptr, const Tensor& col, const MaybeTensor& perm,
                     int64_t num_cols, const MaybeTensor& edge_weight, const MaybeTensor& row_scale_,
                     const MaybeTensor& col_scale_, const MaybeTensor& arg_, bool arg_of_rows) {
  const GraphArrays graph(rowptr, col, perm);
  const Features x("x", x_);
  AggregateSumParams p{};
  fill_features(p, graph, x, num_cols);
  fill_weight(p, edge_weight);
  const Scale row_scale("row_scale", row_scale_, sum_dtype(p.x.dtype), p.graph.rows);
  const Scale col_scale("col_scale", col_scale_, sum_dtype(p.x.dtype), p.M);
  const Selection arg(arg_, p.graph, p.B, arg_of_rows ? p.graph.rows : p.M, p.H, p.F);
  p.row_scale = row_scale.data;
  p.col_scale = col_scale.data;
  p.arg = arg.view;
  p.arg_of_rows = arg_of_rows;
  Tensor out = allocate_output(p);
  p.out = contiguous_view(out, p.x.dtype);
  if (out.numel() > 0) aggregation_kernels().sum(p, torch_parallel());
  return out;
}

std::tuple<Tensor, Tensor> aggregate_max(const Tensor& x_, const Tensor& rowptr, const Tensor& col,
                                         const MaybeTensor& perm, int64_t num_cols,
                                         const MaybeTensor& edge_weight, bool minimum) {
  const GraphArrays graph(rowptr, col, perm);
  const Features x("x", x_);
  AggregateMaxParams p{};
  fill_features(p, graph, x, num_cols);
  fill_weight(p, edge_weight);
  p.minimum = minimum;
  Tensor out = allocate_output(p);
  Tensor arg = in_huge_pages(allocate_index(p.graph.wide, out.sizes().data(), 4), p.graph.wide ? 8 : 4);
  p.out = contiguous_view(out, p.x.dtype);
  p.arg = arg.data_ptr();
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
  p.B = b.array.size[0], p.M = b.array.size[1], p.H = b.array.size[2], p.F = b.array.size[3];
  const DType dtype = b.array.dtype;
  a.array.check_dtype({dtype}).check_shape({p.B, p.graph.rows, p.H, p.F});
  check_nodes("b", p.M, num_cols);
  p.a = a.array.view();
  p.b = b.array.view();
  const Scale row_scale("row_scale", row_scale_, sum_dtype(dtype), p.graph.rows);
  const Scale col_scale("col_scale", col_scale_, sum_dtype(dtype), p.M);
  const Selection arg(arg_, p.graph, p.B, arg_of_rows ? p.graph.rows : p.M, p.H, p.F);
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
