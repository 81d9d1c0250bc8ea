// Attention on graphs: the registered CPU ops over the kernels of csrc/cpu/graph_attention.h. The schemas are
// defined in fastattn/ops/_graph_attention_autograd.py.
#include "graph_attention.h"

#include <tuple>
#include <vector>

#include "graph_tensor.h"

namespace fastattn {
namespace {

// Arguments as kernels read them, and the copies that some of them needed.
class Holder {
 public:
  // (rows, H, channels) of `dtype` whose rows are contiguous.
  FeatureRows features(const char* name, const Tensor& tensor, DType dtype, int64_t rows, int64_t H,
                       int64_t channels) {
    Tensor held = tensor;
    Array array(name, held);
    array.check_dtype({dtype}).check_shape({rows, H, channels});
    if ((channels > 1 && array.stride[2] != 1) || (H > 1 && array.stride[1] != channels)) {
      held = torch::stable::contiguous(tensor);
      array = Array(name, held);
    }
    held_.push_back(held);
    return {array.data, rows > 1 ? array.stride[0] : 0};
  }
  // (rows, H) of `dtype` or of the dtype of sums, as the latter, contiguous; null where it is absent.
  const void* table(const char* name, const MaybeTensor& tensor, DType dtype, int64_t rows, int64_t H) {
    if (!tensor) return nullptr;
    const DType wide = wide_of(dtype);
    Array(name, *tensor).check_dtype({dtype, wide}).check_shape({rows, H});
    held_.push_back(as_contiguous(to_dtype(*tensor, wide)));
    const void* data = held_.back().data_ptr();
    // An empty table is there, although it has no memory.
    static const double nothing = 0;
    return data ? data : &nothing;
  }
  static DType wide_of(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

 private:
  std::vector<Tensor> held_;
};

// What both ops take, in the order of their schemas.
struct Arguments {
  const std::string& score;
  const MaybeTensor &query, &key;
  const Tensor& value;
  const MaybeTensor &alpha_src, &alpha_dst, &score_term, &edge, &att, &dropout_seed;
  double scale, negative_slope, dropout_p;
};

void require(bool given, const char* name, const std::string& score) {
  STD_TORCH_CHECK(given, name, " is missing: the score \"", score, "\" needs it");
}

void fill(GraphAttentionParams& p, const Arguments& a, const GraphView& by_target, int64_t num_src,
          Holder& holder) {
  const Array value("value", a.value);
  value.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  STD_TORCH_CHECK(value.dim == 3, "value must have 3 dimensions (N_src, H, C), got ", value.shape());
  p.dtype = value.dtype;
  p.N_src = value.size[0], p.H = value.size[1], p.C = value.size[2], p.D = 0;
  check_nodes("value", p.N_src, num_src);
  p.by_target = by_target;
  p.N_dst = by_target.rows;
  p.value = holder.features("value", a.value, p.dtype, p.N_src, p.H, p.C);
  p.score_term = holder.table("score_term", a.score_term, p.dtype, by_target.edges, p.H);
  if (a.score == "additive") {
    p.score = GraphScore::additive;
    p.alpha_src = holder.table("alpha_src", a.alpha_src, p.dtype, p.N_src, p.H);
    p.alpha_dst = holder.table("alpha_dst", a.alpha_dst, p.dtype, p.N_dst, p.H);
  } else {
    require(a.query.has_value(), "query", a.score);
    const Array query("query", *a.query);
    STD_TORCH_CHECK(query.dim == 3, "query must have 3 dimensions (N_dst, H, D), got ", query.shape());
    p.D = query.size[2];
    p.query = holder.features("query", *a.query, p.dtype, p.N_dst, p.H, p.D);
    if (a.score == "dot") {
      p.score = GraphScore::dot;
      require(a.key.has_value(), "key", a.score);
      p.key = holder.features("key", *a.key, p.dtype, p.N_src, p.H, p.D);
    } else {
      STD_TORCH_CHECK(a.score == "gatv2", "score must be additive, dot or gatv2, got ", a.score);
      STD_TORCH_CHECK(!a.score_term, "score_term does not go with the score \"gatv2\"");
      p.score = GraphScore::gatv2;
      require(a.att.has_value(), "att", a.score);
      STD_TORCH_CHECK(p.D == p.C, "query must have the ", p.C, " channels of value, got ", query.shape());
      p.key = p.value;
      p.att = holder.table("att", a.att, p.dtype, p.H, p.D);
      if (a.edge) p.edge = holder.features("edge", *a.edge, p.dtype, by_target.edges, p.H, p.D);
    }
  }
  p.scale = a.scale;
  p.negative_slope = a.negative_slope;
  p.dropout_p = a.dropout_p;
  p.seed = read_seed(a.dropout_seed, a.dropout_p);
}

std::tuple<Tensor, Tensor, Tensor> graph_attention_forward(
    std::string score, const MaybeTensor& query, const MaybeTensor& key, const Tensor& value,
    const MaybeTensor& alpha_src, const MaybeTensor& alpha_dst, const MaybeTensor& score_term,
    const MaybeTensor& edge, const MaybeTensor& att, const Tensor& rowptr, const Tensor& col,
    const MaybeTensor& perm, int64_t num_src, const MaybeTensor& dropout_seed, double scale,
    double negative_slope, double dropout_p, bool return_attention) {
  const GraphArrays graph(rowptr, col, perm);
  GraphAttentionParams p{};
  Holder holder;
  fill(p,
       {score, query, key, value, alpha_src, alpha_dst, score_term, edge, att, dropout_seed, scale,
        negative_slope, dropout_p},
       graph.view, num_src, holder);
  const DType wide = Holder::wide_of(p.dtype);
  Tensor out = allocate_contiguous(p.dtype, {p.N_dst, p.H, p.C});
  Tensor stats = allocate_contiguous(wide, {p.N_dst, 2, p.H});
  Tensor attention = return_attention ? allocate_contiguous(wide, {p.by_target.edges, p.H})
                                      : allocate_contiguous(p.dtype, {0});
  p.out = out.data_ptr();
  p.stats = stats.data_ptr();
  p.attention = return_attention ? attention.data_ptr() : nullptr;
  if (p.H > 0) graph_attention_kernels().forward(p, torch_parallel());
  return {out, stats, to_dtype(attention, p.dtype)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> graph_attention_backward(
    const Tensor& grad_out, const MaybeTensor& grad_attention, const Tensor& out, const Tensor& stats,
    const Tensor& attention, std::string score, const MaybeTensor& query, const MaybeTensor& key,
    const Tensor& value, const MaybeTensor& alpha_src, const MaybeTensor& alpha_dst,
    const MaybeTensor& score_term, const MaybeTensor& edge, const MaybeTensor& att, const Tensor& rowptr,
    const Tensor& col, const MaybeTensor& perm, int64_t num_src, const Tensor& colptr, const Tensor& row,
    const MaybeTensor& perm_t, const MaybeTensor& dropout_seed, double scale, double negative_slope,
    double dropout_p, bool edge_grad) {
  const GraphArrays graph(rowptr, col, perm), transpose(colptr, row, perm_t);
  GraphAttentionGradParams p{};
  Holder holder;
  fill(p,
       {score, query, key, value, alpha_src, alpha_dst, score_term, edge, att, dropout_seed, scale,
        negative_slope, dropout_p},
       graph.view, num_src, holder);
  p.by_source = transpose.view;
  STD_TORCH_CHECK(p.by_source.rows == p.N_src && p.by_source.edges == p.by_target.edges,
                  "colptr and row must be those of the transpose, with ", p.N_src, " rows and ",
                  p.by_target.edges, " edges; got ", p.by_source.rows, " and ", p.by_source.edges);
  const int64_t E = p.by_target.edges;
  const DType wide = Holder::wide_of(p.dtype);
  p.grad_out = holder.features("grad_out", grad_out, p.dtype, p.N_dst, p.H, p.C);
  const Tensor held_out = as_contiguous(out), held_stats = as_contiguous(stats);
  p.out = Array("out", held_out).check_dtype({p.dtype}).check_shape({p.N_dst, p.H, p.C}).data;
  p.stats = Array("stats", held_stats).check_dtype({wide}).check_shape({p.N_dst, 2, p.H}).data;
  if (grad_attention) {
    p.grad_attention = holder.table("grad_attention", grad_attention, p.dtype, E, p.H);
    p.attention = const_cast<void*>(holder.table("attention", attention, p.dtype, E, p.H));
  }

  const auto absent = [&] { return allocate_contiguous(p.dtype, {0}); };
  const auto table = [&](bool there, int64_t rows) {
    return there ? allocate_contiguous(wide, {rows, p.H}) : absent();
  };
  const auto features = [&](bool there, int64_t rows, int64_t channels) {
    return there ? allocate_contiguous(p.dtype, {rows, p.H, channels}) : absent();
  };
  const bool additive = p.score == GraphScore::additive, dot = p.score == GraphScore::dot;
  Tensor grad_query = features(!additive, p.N_dst, p.D);
  Tensor grad_key = features(dot, p.N_src, p.D);
  Tensor grad_value = features(true, p.N_src, p.C);
  Tensor grad_alpha_src = table(p.alpha_src, p.N_src), grad_alpha_dst = table(p.alpha_dst, p.N_dst);
  Tensor grad_score = table(true, E);
  Tensor grad_edge = features(edge_grad && edge, E, p.D);
  Tensor grad_att = p.att ? allocate_contiguous(wide, {p.H, p.D}) : absent();
  p.grad_query = grad_query.data_ptr();
  p.grad_key = dot ? grad_key.data_ptr() : nullptr;
  p.grad_value = grad_value.data_ptr();
  p.grad_alpha_src = p.alpha_src ? grad_alpha_src.data_ptr() : nullptr;
  p.grad_alpha_dst = p.alpha_dst ? grad_alpha_dst.data_ptr() : nullptr;
  p.grad_score = grad_score.data_ptr();
  p.grad_edge = edge_grad && edge ? grad_edge.data_ptr() : nullptr;
  p.grad_att = grad_att.data_ptr();
  if (p.H > 0) graph_attention_kernels().backward(p, torch_parallel());
  const auto like = [](const Tensor& grad, const MaybeTensor& input) {
    return input ? to_dtype(grad, Array("input", *input).dtype) : grad;
  };
  return {grad_query,
          grad_key,
          grad_value,
          like(grad_alpha_src, alpha_src),
          like(grad_alpha_dst, alpha_dst),
          score_term ? like(grad_score, score_term) : absent(),
          grad_edge,
          like(grad_att, att)};
}

Tensor edge_softmax_backward(const Tensor& grad, const Tensor& score, const Tensor& attention,
                             const Tensor& rowptr, const Tensor& col, const MaybeTensor& perm) {
  const GraphArrays graph(rowptr, col, perm);
  const Array array("score", score);
  array.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  STD_TORCH_CHECK(array.dim == 2, "score must have 2 dimensions (E, H), got ", array.shape());
  const int64_t E = graph.view.edges, H = array.size[1];
  Holder holder;
  EdgeSoftmaxGradParams p{};
  p.dtype = array.dtype;
  p.H = H;
  p.by_target = graph.view;
  p.score = holder.table("score", score, p.dtype, E, H);
  p.grad = holder.table("grad", grad, p.dtype, E, H);
  p.attention = holder.table("attention", attention, p.dtype, E, H);
  Tensor grad_score = allocate_contiguous(Holder::wide_of(p.dtype), {E, H});
  p.grad_score = grad_score.data_ptr();
  if (H > 0) graph_attention_kernels().edge_softmax_backward(p, torch_parallel());
  return to_dtype(grad_score, p.dtype);
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("graph_attention_forward", TORCH_BOX(&fastattn::graph_attention_forward));
  m.impl("graph_attention_backward", TORCH_BOX(&fastattn::graph_attention_backward));
  m.impl("edge_softmax_backward", TORCH_BOX(&fastattn::edge_softmax_backward));
}
