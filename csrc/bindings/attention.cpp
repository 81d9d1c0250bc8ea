// Softmax attention: the registered CPU ops over the kernels of csrc/cpu/attention.h. The schemas are defined
// in fastattn/ops/_attention_autograd.py.
#include "attention.h"

#include <limits>
#include <tuple>

#include "sequences.h"

namespace fastattn {
namespace {

struct Options {
  double scale, softcap;
  int64_t window_left, window_right;
  bool lower_right;
  double dropout_p;
};

// Packed sequences: tensors have a batch of 1, and p.B counts sequences.
struct Packed {
  const MaybeTensor &cu_seqlens_q, &cu_seqlens_k;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
};

void check_longest(const char* name, std::optional<int64_t> most, const std::vector<int64_t>& bounds) {
  for (size_t i = 1; most && i < bounds.size(); ++i)
    STD_TORCH_CHECK(bounds[i] - bounds[i - 1] <= *most, name, " is ", *most, ", but sequence ", i - 1,
                    " has ", bounds[i] - bounds[i - 1], " tokens");
}

// What packed sequences are, checked; the result has to live as long as p is used.
std::vector<Sequence> fill_sequences(AttentionParams& p, const Packed& packed) {
  STD_TORCH_CHECK(bool(packed.cu_seqlens_q) == bool(packed.cu_seqlens_k),
                  "cu_seqlens_q and cu_seqlens_k go together");
  if (!packed.cu_seqlens_q) return {};
  STD_TORCH_CHECK(p.B == 1, "cu_seqlens need a batch of 1, got ", p.B);
  const std::vector<int64_t> queries = read_bounds("cu_seqlens_q", *packed.cu_seqlens_q, p.L);
  const std::vector<int64_t> keys = read_bounds("cu_seqlens_k", *packed.cu_seqlens_k, p.S);
  STD_TORCH_CHECK(queries.size() == keys.size(),
                  "cu_seqlens_q and cu_seqlens_k must have as many elements, got ", queries.size(), " and ",
                  keys.size());
  check_longest("max_seqlen_q", packed.max_seqlen_q, queries);
  check_longest("max_seqlen_k", packed.max_seqlen_k, keys);
  std::vector<Sequence> sequences(
      queries.size());  // one more than needed: its memory says that there are any
  for (size_t b = 0; b + 1 < queries.size(); ++b)
    sequences[b] = {queries[b], keys[b], queries[b + 1] - queries[b], keys[b + 1] - keys[b]};
  p.B = int64_t(queries.size()) - 1;
  p.sequences = sequences.data();
  return sequences;
}
int64_t batch(const AttentionParams& p) { return p.sequences ? 1 : p.B; }
// Of a tensor with this batch: all packed sequences lie in the one entry.
View written(const AttentionParams& p, const Tensor& tensor) {
  View view = output_view(tensor);
  if (p.sequences) view.stride[0] = 0;
  return view;
}

// What the three ops share: sizes, query, key, masks and options, all checked.
std::vector<Sequence> fill(AttentionParams& p, const Array& query, const Array& key,
                           const MaybeTensor& attn_mask, const MaybeTensor& key_padding_mask,
                           const MaybeTensor& alibi_slopes, const MaybeTensor& dropout_seed,
                           const Options& options, const Packed& packed) {
  query.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  STD_TORCH_CHECK(query.dim == 4, "query must have 4 dimensions (B, H, L, D), got ", query.shape());
  STD_TORCH_CHECK(key.dim == 4, "key must have 4 dimensions (B, Hkv, S, D), got ", key.shape());
  p.B = query.size[0], p.H = query.size[1], p.L = query.size[2], p.D = query.size[3];
  p.Hkv = key.size[1], p.S = key.size[2], p.Dv = 0;
  key.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, p.S, p.D});
  STD_TORCH_CHECK(p.Hkv ? p.H % p.Hkv == 0 : p.H == 0,
                  "query heads must be a multiple of key heads, got query ", query.shape(), " and key ",
                  key.shape());
  p.query = query.view();
  p.key = key.view();

  std::vector<Sequence> sequences = fill_sequences(p, packed);
  STD_TORCH_CHECK(!p.sequences || !(attn_mask || key_padding_mask),
                  "attn_mask and key_padding_mask have no meaning with cu_seqlens");
  if (attn_mask) {
    const Array mask("attn_mask", *attn_mask);
    p.mask = mask.check_dtype({DType::boolean, query.dtype, DType::f32}).broadcast({p.B, p.H, p.L, p.S});
  }
  if (key_padding_mask) {
    const Array padding("key_padding_mask", *key_padding_mask);
    p.key_padding = padding.check_dtype({DType::boolean}).check_shape({p.B, p.S}).view();
  }
  if (alibi_slopes) {
    Array slopes("alibi_slopes", *alibi_slopes);
    slopes.check_dtype({query.dtype == DType::f64 ? DType::f64 : DType::f32});
    if (slopes.dim == 1) {
      slopes.check_shape({p.H});
      p.alibi = {slopes.data, slopes.dtype, {0, slopes.stride[0], 0, 0}};
    } else {
      p.alibi = slopes.check_shape({p.B, p.H}).view();
    }
  }

  STD_TORCH_CHECK(options.softcap >= 0, "softcap must not be negative, got ", options.softcap);
  STD_TORCH_CHECK(options.window_left >= -1 && options.window_right >= -1,
                  "window_left and window_right must be -1 or more, got ", options.window_left, " and ",
                  options.window_right);
  p.scale = options.scale;
  p.softcap = options.softcap;
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  p.lower_right = options.lower_right;
  p.dropout_p = options.dropout_p;
  p.seed = read_seed(dropout_seed, options.dropout_p);
  return sequences;
}

void fill_value(AttentionParams& p, const Array& value) {
  STD_TORCH_CHECK(value.dim == 4, "value must have 4 dimensions (B, Hkv, S, Dv), got ", value.shape());
  p.Dv = value.size[3];
  p.value = value.check_dtype({p.query.dtype}).check_shape({batch(p), p.Hkv, p.S, p.Dv}).view();
}

void fill_sinks(AttentionParams& p, const MaybeTensor& sinks) {
  if (!sinks) return;
  const Array array("sinks", *sinks);
  p.sinks = array.check_dtype({p.query.dtype, DType::f32}).check_shape({p.H}).view();
}

DType lse_dtype(const AttentionParams& p) { return p.query.dtype == DType::f64 ? DType::f64 : DType::f32; }

// The log-sum-exp as an input. Kernels read it as contiguous.
Tensor fill_lse(AttentionParams& p, const Tensor& lse) {
  Tensor held = lse.is_contiguous() ? lse : torch::stable::contiguous(lse);
  p.lse = Array("lse", held).check_dtype({lse_dtype(p)}).check_shape({batch(p), p.H, p.L}).view();
  return held;
}

// out and lse, which p then is about.
std::tuple<Tensor, Tensor> allocate_outputs(AttentionParams& p) {
  // (B, L, H, Dv) in memory: joining the heads afterwards is then a view.
  const int64_t row = std::max<int64_t>(p.Dv, 1), token = std::max<int64_t>(p.H, 1) * row;
  const int64_t stride[] = {std::max<int64_t>(p.L, 1) * token, row, token, 1};
  Tensor out = allocate(p.query.dtype, {batch(p), p.H, p.L, p.Dv}, stride);
  Tensor lse = allocate_contiguous(lse_dtype(p), {batch(p), p.H, p.L});
  p.out = written(p, out);
  p.lse = written(p, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& attn_mask,
    const MaybeTensor& key_padding_mask, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
    const MaybeTensor& dropout_seed, double scale, double softcap, int64_t window_left, int64_t window_right,
    bool lower_right, double dropout_p, const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
    std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k) {
  AttentionParams p{};
  const std::vector<Sequence> sequences =
      fill(p, {"query", query}, {"key", key}, attn_mask, key_padding_mask, alibi_slopes, dropout_seed,
           {scale, softcap, window_left, window_right, lower_right, dropout_p},
           {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k});
  fill_value(p, {"value", value});
  fill_sinks(p, sinks);

  auto [out, lse] = allocate_outputs(p);
  attention_kernels(p).forward(p, torch_parallel());
  return {out, lse};
}

// Sum over the batch of a kernel's (B, H) partial sums, in the dtype of the (H,) input.
Tensor sum_over_batch(const Tensor& partial, DType dtype) {
  const std::array<int64_t, 1> batch{0};
  return to_dtype(torch::stable::sum(partial, torch::headeronly::IntHeaderOnlyArrayRef(batch.data(), 1)),
                  dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const MaybeTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const MaybeTensor& attn_mask,
    const MaybeTensor& key_padding_mask, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
    const MaybeTensor& dropout_seed, double scale, double softcap, int64_t window_left, int64_t window_right,
    bool lower_right, double dropout_p, bool mask_grad, bool alibi_grad, bool sinks_grad,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, std::optional<int64_t> max_seqlen_q,
    std::optional<int64_t> max_seqlen_k) {
  AttentionGradParams p{};
  const std::vector<Sequence> sequences =
      fill(p, {"query", query}, {"key", key}, attn_mask, key_padding_mask, alibi_slopes, dropout_seed,
           {scale, softcap, window_left, window_right, lower_right, dropout_p},
           {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k});
  fill_value(p, {"value", value});
  fill_sinks(p, sinks);
  const Tensor held_lse = fill_lse(p, lse);
  const Tensor held_out = p.Dv <= 1 || out.stride(3) == 1 ? out : torch::stable::contiguous(out);
  const DType dtype = p.query.dtype;
  Array("out", held_out).check_dtype({dtype}).check_shape({batch(p), p.H, p.L, p.Dv});
  p.out = written(p, held_out);
  p.grad_out =
      Array("grad_out", grad_out).check_dtype({dtype}).check_shape({batch(p), p.H, p.L, p.Dv}).view();
  if (grad_lse)
    p.grad_lse =
        Array("grad_lse", *grad_lse).check_dtype({lse_dtype(p)}).check_shape({batch(p), p.H, p.L}).view();
  STD_TORCH_CHECK(!mask_grad || (attn_mask && p.mask.dtype != DType::boolean),
                  "mask_grad needs a floating point attn_mask");
  STD_TORCH_CHECK(!alibi_grad || alibi_slopes, "alibi_grad needs alibi_slopes");
  STD_TORCH_CHECK(!sinks_grad || sinks, "sinks_grad needs sinks");

  Tensor grad_query = allocate_like(query);
  Tensor grad_key = allocate_like(key);
  Tensor grad_value = allocate_like(value);
  p.grad_query = written(p, grad_query);
  p.grad_key = written(p, grad_key);
  p.grad_value = written(p, grad_value);

  Tensor grad_mask = mask_grad
                         ? allocate_contiguous(p.mask.dtype, attn_mask->sizes().data(), attn_mask->dim())
                         : allocate_contiguous(dtype, {0});
  if (mask_grad) {
    p.grad_mask = Array("grad_mask", grad_mask).broadcast({p.B, p.H, p.L, p.S});
    touch_huge_pages(p.grad_mask.data,
                     uint64_t(grad_mask.numel()) * aoti_torch_dtype_element_size(code_of(p.mask.dtype)));
  }
  const auto per_head = [&](bool wanted) {
    return wanted ? allocate_contiguous(lse_dtype(p), {p.B, p.H}) : allocate_contiguous(dtype, {0});
  };
  Tensor grad_alibi = per_head(alibi_grad);
  Tensor grad_sinks = per_head(sinks_grad);
  if (alibi_grad) p.grad_alibi = output_view(grad_alibi);
  if (sinks_grad) p.grad_sinks = output_view(grad_sinks);

  attention_kernels(p).backward(p, torch_parallel());
  if (alibi_grad && alibi_slopes->dim() == 1) grad_alibi = sum_over_batch(grad_alibi, p.alibi.dtype);
  if (sinks_grad) grad_sinks = sum_over_batch(grad_sinks, p.sinks.dtype);
  return {grad_query, grad_key, grad_value, grad_mask, grad_alibi, grad_sinks};
}

// The same of the weights, (B, H, L, S), or their mean over heads (B, L, S).
Tensor allocate_weights(AttentionWeightsParams& p, bool average_heads) {
  p.average = average_heads;
  Tensor weights = average_heads ? allocate_contiguous(p.query.dtype, {p.B, p.L, p.S})
                                 : allocate_contiguous(p.query.dtype, {p.B, p.H, p.L, p.S});
  p.weights = output_view(weights);
  if (average_heads && p.H == 0) torch::stable::fill_(weights, std::numeric_limits<double>::quiet_NaN());
  if (average_heads)
    p.weights.stride[3] = 1, p.weights.stride[2] = p.weights.stride[1], p.weights.stride[1] = 0;
  return weights;
}

Tensor attention_weights(const Tensor& query, const Tensor& key, const Tensor& lse,
                         const MaybeTensor& attn_mask, const MaybeTensor& key_padding_mask,
                         const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                         const MaybeTensor& dropout_seed, double scale, double softcap, int64_t window_left,
                         int64_t window_right, bool lower_right, double dropout_p, bool average_heads) {
  AttentionWeightsParams p{};
  fill(p, {"query", query}, {"key", key}, attn_mask, key_padding_mask, alibi_slopes, dropout_seed,
       {scale, softcap, window_left, window_right, lower_right, dropout_p}, {{}, {}, {}, {}});
  fill_sinks(p, sinks);
  const Tensor held_lse = fill_lse(p, lse);
  Tensor weights = allocate_weights(p, average_heads);
  attention_kernels(p).weights(p, torch_parallel());
  return weights;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward_with_weights(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& attn_mask,
    const MaybeTensor& key_padding_mask, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
    const MaybeTensor& dropout_seed, double scale, double softcap, int64_t window_left, int64_t window_right,
    bool lower_right, double dropout_p, bool average_heads) {
  AttentionWeightsParams p{};
  fill(p, {"query", query}, {"key", key}, attn_mask, key_padding_mask, alibi_slopes, dropout_seed,
       {scale, softcap, window_left, window_right, lower_right, dropout_p}, {{}, {}, {}, {}});
  fill_value(p, {"value", value});
  fill_sinks(p, sinks);
  auto [out, lse] = allocate_outputs(p);
  Tensor weights = allocate_weights(p, average_heads);
  attention_kernels(p).forward_with_weights(p, torch_parallel());
  return {out, lse, weights};
}

int64_t attention_causality(const Tensor& mask) {
  const Array array("mask", mask);
  STD_TORCH_CHECK(array.dim >= 2 && array.dim <= 4, "mask must have 2 to 4 dimensions, got ", array.shape());
  AttentionMask m{1, 1, array.size[array.dim - 2], array.size[array.dim - 1], {}};
  if (array.dim > 2) m.H = array.size[array.dim - 3];
  if (array.dim > 3) m.B = array.size[0];
  m.mask = array.broadcast({m.B, m.H, m.L, m.S});
  AttentionParams any{};
  any.query.dtype = DType::f64;  // masks are the same for all
  return attention_kernels(any).causality(m);
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&fastattn::attention_forward));
  m.impl("attention_backward", TORCH_BOX(&fastattn::attention_backward));
  m.impl("attention_weights", TORCH_BOX(&fastattn::attention_weights));
  m.impl("attention_forward_with_weights", TORCH_BOX(&fastattn::attention_forward_with_weights));
  m.impl("attention_causality", TORCH_BOX(&fastattn::attention_causality));
}
