// Interface between the op bindings and the per-ISA CPU kernels of softmax attention.
#pragma once
#include <cstdint>

#include "parallel.h"
#include "view.h"

namespace fastattn {

// Rows [query, query + L) of queries and [key, key + S) of keys of a batch.
struct Sequence {
  int64_t query, key, L, S;
  // Where keys and values do not lie in one piece: key j is row j % page_size of the batch pages[j /
  // page_size].
  const int64_t* pages = nullptr;
};

struct AttentionParams {
  int64_t B, H, Hkv, L, S, D, Dv;  // H is a multiple of Hkv: query head h reads key/value head h / (H / Hkv)
  // One for each b, which attends within it; null: all L rows and S keys. Batches then may be one and the
  // same memory (stride[0] == 0: packed sequences), and there are no mask and no key_padding.
  const Sequence* sequences;
  const int64_t* pages;  // of the only sequence; as there
  int64_t page_size;
  int64_t num_splits;  // tasks that the keys of a head are dealt to, at most; 0 = any. Changes no result
  View query;          // (B, H, L, D)
  View key;            // (B, Hkv, S, D)
  View value;          // (B, Hkv, S, Dv)
  View mask;           // (B, H, L, S), broadcast dimensions have stride 0; boolean (true = attend) or
                       // additive of the query's dtype or f32; -inf hides
  View key_padding;    // (B, S) boolean, true = attend
  View alibi;          // (B, H) f32 slopes; f64 beside f64 queries
  View sinks;          // (H,) of the query's dtype or f32
  double scale;
  double softcap;        // 0 = off
  int64_t window_left;   // keys visible left of the diagonal, -1 = unlimited
  int64_t window_right;  // the same right of it; 0 = causal
  bool lower_right;      // the diagonal of query i is key i + S - L, otherwise i
  double dropout_p;
  uint64_t seed;
  View out;  // (B, H, L, Dv); stride[3] == 1
  View lse;  // (B, H, L), the elements of a contiguous tensor: they number the rows for dropout; f32, f64 for
             // f64 inputs
};

struct AttentionGradParams : AttentionParams {
  View grad_out;                          // (B, H, L, Dv), any strides
  View grad_lse;                          // (B, H, L), any strides; null = zero
  View grad_query, grad_key, grad_value;  // shapes of query, key, value; any strides without overlap
  View grad_mask;   // the mask's own shape seen through stride 0; null = not wanted. dtype: the mask's
  View grad_alibi;  // (B, H) contiguous f32 / f64; null = not wanted
  View grad_sinks;  // (B, H) contiguous f32 / f64 partial sums (the caller sums over B); null = not wanted
};

// weights (B, H, L, S), or their mean over heads (B, L, S) when `average`: exp(score - lse), after dropout.
struct AttentionWeightsParams : AttentionParams {
  View weights;  // stride[1] == 0 when `average`; stride[3] == 1; the query's dtype
  bool average;
};

// A mask by itself, in the sense of nn.MultiheadAttention: true, or -inf, hides.
struct AttentionMask {
  int64_t B, H, L, S;
  View mask;
};

struct AttentionKernels {
  bool (*suits)(const AttentionParams&);  // any other call is a weaker variant's
  void (*forward)(const AttentionParams&, const Parallel&);
  void (*backward)(const AttentionGradParams&, const Parallel&);
  void (*weights)(const AttentionWeightsParams&, const Parallel&);  // from lse
  void (*forward_with_weights)(const AttentionWeightsParams&, const Parallel&);
  // 0: a key right of the diagonal is visible somewhere; 1: none is; 2: none is, and all other elements are
  // 0. Null where `suits` is not always true.
  int (*causality)(const AttentionMask&);
};

// The variant that suits a call, for the best instruction set that this machine and FASTATTN_CPU_ISA allow
// (dispatch.cpp).
const AttentionKernels& attention_kernels(const AttentionParams&);

}  // namespace fastattn
