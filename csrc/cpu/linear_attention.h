// Interface between the op bindings and the per-ISA CPU kernels of linear attention.
#pragma once
#include <cstdint>

#include "parallel.h"
#include "view.h"

namespace fastattn {

enum class FeatureMap : int32_t { elu, relu, exp, identity };  // elu is elu(x) + 1

// A is the accumulator type: f32, f64 for f64 inputs. A tensor without elements has no memory either: of a kv
// and its z, ask z whether they are there. kv is empty with Dv = 0, and z is not.
struct LinearAttentionParams {
  int64_t B, H, Hkv, L, S, D, Dv;  // H is a multiple of Hkv: query head h reads key/value head h / (H / Hkv)
  int64_t N;                       // sequences: B, or those that cu_seqlens cuts the tokens of one batch into
  View query;                      // (B, H, L, D)
  View key;                        // (B, Hkv, S, D)
  View value;                      // (B, Hkv, S, Dv)
  View decay;                      // (B, H, L), of the query's dtype or A; only if causal
  View key_padding;                // (B, S) boolean, true = attend
  const int64_t* cu_seqlens;       // N + 1 token positions, or null
  View initial_kv, initial_z;      // (N, H, D, Dv), (N, H, D) of A; both or neither
  FeatureMap feature_map;
  bool causal, normalize;
  double eps, scale;
  View out;                // (B, H, L, Dv); stride[3] == 1
  View den;                // (B, H, L) contiguous A: phi(q).z; null unless normalize
  View final_kv, final_z;  // (N, H, D, Dv), (N, H, D) contiguous A; null = not wanted
};

struct LinearAttentionGradParams : LinearAttentionParams {
  View grad_out;                          // (B, H, L, Dv), any strides; null = zero
  View grad_kv, grad_z;                   // (N, H, D, Dv), (N, H, D) of A, any strides; null = zero
  View grad_query, grad_key, grad_value;  // shapes of query, key, value; any strides without overlap
  View grad_decay;                        // (B, H, L), of the dtype of decay; null = not wanted
  bool decay_per_head;                    // decay is (H,): grad_decay is the sum, at (0, h, 0)
  View grad_initial_kv, grad_initial_z;   // (N, H, D, Dv), (N, H, D) contiguous A; null = not wanted
};

// One token per sequence: L = S = 1, N = B. The new state may be the old one.
struct LinearAttentionStepParams {
  int64_t B, H, Hkv, D, Dv;
  View query, key, value;  // (B, H, D), (B, Hkv, D), (B, Hkv, Dv)
  View kv, z;              // (B, H, D, Dv), (B, H, D) of A
  View decay;              // (B, H), of the query's dtype or A; null = none
  FeatureMap feature_map;
  bool normalize;
  double eps, scale;
  View out;            // (B, H, Dv) contiguous
  View new_kv, new_z;  // as kv and z
};

struct LinearAttentionKernels {
  bool (*suits)(DType);  // any other dtype is a weaker variant's
  void (*forward)(const LinearAttentionParams&, const Parallel&);
  void (*backward)(const LinearAttentionGradParams&, const Parallel&);
  void (*step)(const LinearAttentionStepParams&, const Parallel&);
};

// The variant of a query's dtype for the best instruction set that this machine and FASTATTN_CPU_ISA allow
// (dispatch.cpp).
const LinearAttentionKernels& linear_attention_kernels(DType dtype);

}  // namespace fastattn
