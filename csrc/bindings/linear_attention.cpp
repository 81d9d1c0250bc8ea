// Linear attention: the registered CPU ops over the kernels of csrc/cpu/linear_attention.h. The schemas are
// defined in fastattn/ops/_linear_attention_autograd.py.
#include "linear_attention.h"

#include <tuple>
#include <vector>

#include "sequences.h"

namespace fastattn {
namespace {

DType accumulator(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

FeatureMap feature_map_of(const std::string& name) {
  constexpr const char* names[] = {"elu", "relu", "exp", "identity"};
  for (int i = 0; i < 4; ++i)
    if (name == names[i]) return static_cast<FeatureMap>(i);
  STD_TORCH_CHECK(false, "feature_map must be elu, relu, exp or identity, got ", name);
}

void check_heads(int64_t H, int64_t Hkv, const Array& query, const Array& key) {
  STD_TORCH_CHECK(Hkv ? H % Hkv == 0 : H == 0, "query heads must be a multiple of key heads, got query ",
                  query.shape(), " and key ", key.shape());
}

// What forward and backward share, checked; `bounds` holds the values of cu_seqlens for the kernel.
void fill(LinearAttentionParams& p, std::vector<int64_t>& bounds, const Tensor& query_tensor,
          const Tensor& key_tensor, const Tensor& value_tensor, const MaybeTensor& decay,
          const MaybeTensor& key_padding_mask, const MaybeTensor& cu_seqlens, const MaybeTensor& initial_kv,
          const MaybeTensor& initial_z, const std::string& feature_map, bool causal, bool normalize,
          double eps, double scale) {
  const Array query("query", query_tensor), key("key", key_tensor), value("value", value_tensor);
  query.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  STD_TORCH_CHECK(query.dim == 4, "query must have 4 dimensions (B, H, L, D), got ", query.shape());
  STD_TORCH_CHECK(key.dim == 4, "key must have 4 dimensions (B, Hkv, S, D), got ", key.shape());
  STD_TORCH_CHECK(value.dim == 4, "value must have 4 dimensions (B, Hkv, S, Dv), got ", value.shape());
  p.B = query.size[0], p.H = query.size[1], p.L = query.size[2], p.D = query.size[3];
  p.Hkv = key.size[1], p.S = key.size[2], p.Dv = value.size[3];
  key.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, p.S, p.D});
  value.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, p.S, p.Dv});
  check_heads(p.H, p.Hkv, query, key);
  STD_TORCH_CHECK(!causal || p.L == p.S, "causal needs as many queries as keys, got query ", query.shape(),
                  " and key ", key.shape());
  p.query = query.view();
  p.key = key.view();
  p.value = value.view();
  p.N = p.B;

  const DType wide = accumulator(query.dtype);
  if (decay) {
    STD_TORCH_CHECK(causal, "decay needs causal");
    const Array array("decay", *decay);
    array.check_dtype({query.dtype, wide});
    if (array.dim == 1) {
      array.check_shape({p.H});
      p.decay = {array.data, array.dtype, {0, array.stride[0], 0, 0}};
    } else {
      p.decay = array.check_shape({p.B, p.H, p.L}).view();
    }
  }
  if (key_padding_mask) {
    const Array padding("key_padding_mask", *key_padding_mask);
    p.key_padding = padding.check_dtype({DType::boolean}).check_shape({p.B, p.S}).view();
  }
  if (cu_seqlens) {
    STD_TORCH_CHECK(p.B == 1 && p.L == p.S,
                    "cu_seqlens needs a batch of 1 and as many queries as keys, got query ", query.shape(),
                    " and key ", key.shape());
    bounds = read_bounds("cu_seqlens", *cu_seqlens, p.L);
    p.N = int64_t(bounds.size()) - 1;
    p.cu_seqlens = bounds.data();
  }
  STD_TORCH_CHECK(bool(initial_kv) == bool(initial_z), "initial_kv and initial_z go together");
  if (initial_kv) {
    p.initial_kv =
        Array("initial_kv", *initial_kv).check_dtype({wide}).check_shape({p.N, p.H, p.D, p.Dv}).view();
    p.initial_z = Array("initial_z", *initial_z).check_dtype({wide}).check_shape({p.N, p.H, p.D}).view();
  }
  p.feature_map = feature_map_of(feature_map);
  p.causal = causal;
  p.normalize = normalize;
  p.eps = eps;
  p.scale = scale;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& decay,
    const MaybeTensor& key_padding_mask, const MaybeTensor& cu_seqlens, const MaybeTensor& initial_kv,
    const MaybeTensor& initial_z, std::string feature_map, bool causal, bool normalize, double eps,
    double scale, bool return_state) {
  LinearAttentionParams p{};
  std::vector<int64_t> bounds;
  fill(p, bounds, query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z, feature_map,
       causal, normalize, eps, scale);
  const DType wide = accumulator(p.query.dtype);
  // (B, L, H, Dv) in memory: joining the heads afterwards is then a view.
  const int64_t row = std::max<int64_t>(p.Dv, 1), token = std::max<int64_t>(p.H, 1) * row;
  const int64_t stride[] = {std::max<int64_t>(p.L, 1) * token, row, token, 1};
  Tensor out = allocate(p.query.dtype, {p.B, p.H, p.L, p.Dv}, stride);
  Tensor den = normalize ? allocate_contiguous(wide, {p.B, p.H, p.L}) : allocate_contiguous(wide, {0});
  Tensor kv =
      return_state ? allocate_contiguous(wide, {p.N, p.H, p.D, p.Dv}) : allocate_contiguous(wide, {0});
  Tensor z = return_state ? allocate_contiguous(wide, {p.N, p.H, p.D}) : allocate_contiguous(wide, {0});
  p.out = output_view(out);
  if (normalize) p.den = output_view(den);
  if (return_state) {
    p.final_kv = output_view(kv);
    p.final_z = output_view(z);
  }
  linear_attention_kernels(p.query.dtype).forward(p, torch_parallel());
  return {out, den, kv, z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_attention_backward(
    const MaybeTensor& grad_out, const MaybeTensor& grad_kv, const MaybeTensor& grad_z, const Tensor& query,
    const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& den, const MaybeTensor& decay,
    const MaybeTensor& key_padding_mask, const MaybeTensor& cu_seqlens, const MaybeTensor& initial_kv,
    const MaybeTensor& initial_z, std::string feature_map, bool causal, bool normalize, double eps,
    double scale, bool decay_grad, bool state_grad) {
  LinearAttentionGradParams p{};
  std::vector<int64_t> bounds;
  fill(p, bounds, query, key, value, decay, key_padding_mask, cu_seqlens, initial_kv, initial_z, feature_map,
       causal, normalize, eps, scale);
  const DType dtype = p.query.dtype, wide = accumulator(dtype);
  static constexpr double zero = 0;  // read with strides of 0 by whatever has no incoming gradient
  p.grad_out = {const_cast<double*>(&zero), dtype, {0, 0, 0, 0}};
  if (grad_out)
    p.grad_out = Array("grad_out", *grad_out).check_dtype({dtype}).check_shape({p.B, p.H, p.L, p.Dv}).view();
  if (grad_kv)
    p.grad_kv = Array("grad_kv", *grad_kv).check_dtype({wide}).check_shape({p.N, p.H, p.D, p.Dv}).view();
  if (grad_z) p.grad_z = Array("grad_z", *grad_z).check_dtype({wide}).check_shape({p.N, p.H, p.D}).view();
  const Tensor held_out = p.Dv <= 1 || out.stride(3) == 1 ? out : torch::stable::contiguous(out);
  const Tensor held_den = den.is_contiguous() ? den : torch::stable::contiguous(den);
  if (normalize) {
    Array("out", held_out).check_dtype({dtype}).check_shape({p.B, p.H, p.L, p.Dv});
    Array("den", held_den).check_dtype({wide}).check_shape({p.B, p.H, p.L});
    p.out = output_view(held_out);
    p.den = output_view(held_den);
  }
  STD_TORCH_CHECK(!decay_grad || decay, "decay_grad needs decay");
  STD_TORCH_CHECK(!state_grad || initial_kv, "state_grad needs initial_kv");

  Tensor grad_query = allocate_like(query);
  Tensor grad_key = allocate_like(key);
  Tensor grad_value = allocate_like(value);
  p.grad_query = output_view(grad_query);
  p.grad_key = output_view(grad_key);
  p.grad_value = output_view(grad_value);
  Tensor grad_decay = decay_grad ? allocate_contiguous(p.decay.dtype, decay->sizes().data(), decay->dim())
                                 : allocate_contiguous(wide, {0});
  if (decay_grad) {
    p.grad_decay = output_view(grad_decay);
    p.decay_per_head = decay->dim() == 1;
    if (p.decay_per_head) p.grad_decay = {p.grad_decay.data, p.decay.dtype, {0, 1, 0, 0}};
  }
  Tensor grad_initial_kv =
      state_grad ? allocate_contiguous(wide, {p.N, p.H, p.D, p.Dv}) : allocate_contiguous(wide, {0});
  Tensor grad_initial_z =
      state_grad ? allocate_contiguous(wide, {p.N, p.H, p.D}) : allocate_contiguous(wide, {0});
  if (state_grad) {
    p.grad_initial_kv = output_view(grad_initial_kv);
    p.grad_initial_z = output_view(grad_initial_z);
  }
  if (p.H == 0)  // the kernel then has nothing to walk along
    for (Tensor* grad : {&grad_key, &grad_value}) torch::stable::zero_(*grad);
  linear_attention_kernels(p.query.dtype).backward(p, torch_parallel());
  return {grad_query, grad_key, grad_value, grad_decay, grad_initial_kv, grad_initial_z};
}

// out (B, H, Dv) of one token; the new state goes to new_kv and new_z, which may be kv and z.
Tensor step(const Tensor& query_tensor, const Tensor& key_tensor, const Tensor& value_tensor,
            const Tensor& kv_tensor, const Tensor& z_tensor, const MaybeTensor& decay,
            const std::string& feature_map, bool normalize, double eps, double scale, const Tensor* new_kv,
            const Tensor* new_z) {
  LinearAttentionStepParams p{};
  const Array query("query", query_tensor), key("key", key_tensor), value("value", value_tensor);
  query.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  STD_TORCH_CHECK(query.dim == 3, "query must have 3 dimensions (B, H, D), got ", query.shape());
  STD_TORCH_CHECK(key.dim == 3, "key must have 3 dimensions (B, Hkv, D), got ", key.shape());
  STD_TORCH_CHECK(value.dim == 3, "value must have 3 dimensions (B, Hkv, Dv), got ", value.shape());
  p.B = query.size[0], p.H = query.size[1], p.D = query.size[2], p.Hkv = key.size[1], p.Dv = value.size[2];
  key.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, p.D});
  value.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, p.Dv});
  check_heads(p.H, p.Hkv, query, key);
  const DType wide = accumulator(query.dtype);
  p.query = query.view();
  p.key = key.view();
  p.value = value.view();
  p.kv = Array("kv", kv_tensor).check_dtype({wide}).check_shape({p.B, p.H, p.D, p.Dv}).view();
  p.z = Array("z", z_tensor).check_dtype({wide}).check_shape({p.B, p.H, p.D}).view();
  if (decay) {
    const Array array("decay", *decay);
    array.check_dtype({query.dtype, wide});
    if (array.dim == 1) {
      array.check_shape({p.H});
      p.decay = {array.data, array.dtype, {0, array.stride[0], 0, 0}};
    } else {
      p.decay = array.check_shape({p.B, p.H}).view();
    }
  }
  p.feature_map = feature_map_of(feature_map);
  p.normalize = normalize;
  p.eps = eps;
  p.scale = scale;
  Tensor out = allocate_contiguous(query.dtype, {p.B, p.H, p.Dv});
  p.out = output_view(out);
  p.new_kv = new_kv ? output_view(*new_kv) : p.kv;
  p.new_z = new_z ? output_view(*new_z) : p.z;
  linear_attention_kernels(p.query.dtype).step(p, torch_parallel());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_attention_step(const Tensor& query, const Tensor& key,
                                                         const Tensor& value, const Tensor& kv,
                                                         const Tensor& z, const MaybeTensor& decay,
                                                         std::string feature_map, bool normalize, double eps,
                                                         double scale) {
  const Array old_kv("kv", kv), old_z("z", z);
  STD_TORCH_CHECK(old_kv.dim == 4, "kv must have 4 dimensions (B, H, D, Dv), got ", old_kv.shape());
  STD_TORCH_CHECK(old_z.dim == 3, "z must have 3 dimensions (B, H, D), got ", old_z.shape());
  Tensor new_kv = allocate_contiguous(old_kv.dtype, old_kv.size, 4);
  Tensor new_z = allocate_contiguous(old_z.dtype, old_z.size, 3);
  Tensor out = step(query, key, value, kv, z, decay, feature_map, normalize, eps, scale, &new_kv, &new_z);
  return {out, new_kv, new_z};
}

Tensor linear_attention_step_(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& kv,
                              const Tensor& z, const MaybeTensor& decay, std::string feature_map,
                              bool normalize, double eps, double scale) {
  return step(query, key, value, kv, z, decay, feature_map, normalize, eps, scale, nullptr, nullptr);
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("linear_attention_forward", TORCH_BOX(&fastattn::linear_attention_forward));
  m.impl("linear_attention_backward", TORCH_BOX(&fastattn::linear_attention_backward));
  m.impl("linear_attention_step", TORCH_BOX(&fastattn::linear_attention_step));
  m.impl("linear_attention_step_", TORCH_BOX(&fastattn::linear_attention_step_));
}
