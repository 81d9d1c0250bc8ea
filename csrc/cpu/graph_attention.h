// Interface between the op bindings and the per-ISA CPU kernels of attention on graphs.
// Raw pointers, sizes and element strides only: nothing here knows torch.
#pragma once
#include <cstdint>

#include "edge_split.h"
#include "parallel.h"
#include "view.h"

namespace fastattn {

// What an edge from source m to target n scores, per head:
enum class GraphScore : int32_t {
  additive,  // leaky_relu(alpha_src[m] + alpha_dst[n] + score_term[e])
  dot,       // scale * <query[n], key[m]> + score_term[e]
  gatv2,     // <att, leaky_relu(key[m] + query[n] + edge[e])>
};

// (nodes or edges, H, channels): rows are `stride` elements apart, each of them contiguous.
struct FeatureRows {
  void* data = nullptr;
  int64_t stride = 0;
};

// T is `dtype`; A is f32, or f64 beside f64. Everything of A is contiguous; null where it is absent.
struct GraphAttentionParams {
  GraphScore score;
  DType dtype;
  int64_t N_src, N_dst, H, D, C;  // D channels of query and key, C of value
  GraphView by_target;
  FeatureRows query;       // T (N_dst, H, D)
  FeatureRows key, value;  // T (N_src, H, D), (N_src, H, C)
  FeatureRows edge;        // T (E, H, D), the caller's order
  const void* att;         // A (H, D)
  const void* alpha_src;   // A (N_src, H)
  const void* alpha_dst;   // A (N_dst, H)
  const void* score_term;  // A (E, H), the caller's order; -inf hides the edge
  double scale, negative_slope, dropout_p;
  uint64_t seed;
  void* out;    // T (N_dst, H, C), contiguous
  void* stats;  // A (N_dst, 2, H): the largest score of a row and 1 / sum(exp(score - largest)); 0, 0 of an
                // empty row. Together they are the log-sum-exp, without its rounding.
  void* attention;  // A (E, H), the caller's order, after dropout; null = not wanted
};

struct GraphAttentionGradParams : GraphAttentionParams {
  GraphView by_source;         // the transpose
  FeatureRows grad_out;        // T (N_dst, H, C)
  const void* grad_attention;  // A (E, H), beside `attention` as the forward gave it; null = zero
  void* grad_query;            // T (N_dst, H, D), like the following contiguous
  void* grad_key;              // T (N_src, H, D); null where key is value: then grad_value is the sum of both
  void* grad_value;            // T (N_src, H, C)
  void* grad_edge;             // T (E, H, D); null = not wanted
  void* grad_att;              // A (H, D)
  void* grad_alpha_src;        // A (N_src, H); null = not wanted
  void* grad_alpha_dst;        // A (N_dst, H); null = not wanted
  void* grad_score;            // A (E, H): the gradient of score_term; also scratch, so never null
};

// grad_score = attention * (grad - sum over the row of attention * grad), 0 where the score is -inf; all
// A (E, H), the caller's order.
struct EdgeSoftmaxGradParams {
  DType dtype;
  int64_t H;
  GraphView by_target;
  const void *score, *grad, *attention;
  void* grad_score;
};

struct GraphAttentionKernels {
  void (*forward)(const GraphAttentionParams&, const Parallel&);
  void (*backward)(const GraphAttentionGradParams&, const Parallel&);
  void (*edge_softmax_backward)(const EdgeSoftmaxGradParams&, const Parallel&);
};

// The variant for the best instruction set that this machine and FASTATTN_CPU_ISA allow (dispatch.cpp).
const GraphAttentionKernels& graph_attention_kernels();

}  // namespace fastattn
