// Interface between the op bindings and the per-ISA CPU kernels of neighbour aggregation.
// Raw pointers, sizes and element strides only: nothing here knows torch.
#pragma once
#include <cstdint>

#include "edge_split.h"
#include "parallel.h"
#include "view.h"

namespace fastattn {

// T is the dtype of the features, A what they are summed in: f64 for f64, f32 for all others. N nodes stand
// at the rows of the graph, M at the other ends of its edges.
struct AggregateParams {
  GraphView graph;
  int64_t B, H, M, F;
  View x;            // (B, M, H, F) of T; stride[3] == 1
  View edge_weight;  // (E, H) of T or A, in the caller's order; stride[1] == 0 where heads share it; null = 1
};

// out[b, n, h, f] = row_scale[n] sum_e edge_weight[e, h] col_scale[m] x[b, m, h, f] over the edges e = (n, m)
// of row n; with `arg`, over those with arg[b, n or m, h, f] == e. An empty sum is 0.
struct AggregateSumParams : AggregateParams {
  const void *row_scale, *col_scale;  // (N), (M) of A; null = 1
  View arg;                           // (B, N or M, H, F) index; stride[3] == 1; null = all edges
  bool arg_of_rows;                   // arg belongs to n, not to m
  View out;                           // (B, N, H, F) of T, contiguous
};

// out = the largest edge_weight[e, h] x[b, m, h, f], or the smallest, or 0 where there is none; arg = its
// edge, or -1. The first edge wins a tie, the first NaN wins over everything.
struct AggregateMaxParams : AggregateParams {
  bool minimum;
  View out;   // (B, N, H, F) of T, contiguous
  void* arg;  // likewise, index; null = not wanted
};

// out[e, h] = row_scale[n] col_scale[m] sum_b,f a[b, n, h, f] b[b, m, h, f], with `arg` over those f where
// arg[b, n or m, h, f] == e; summed over h as well unless per_head.
struct EdgeDotParams {
  GraphView graph;
  int64_t B, H, M, F;
  View a, b;  // (B, N, H, F), (B, M, H, F) of T; stride[3] == 1
  const void *row_scale, *col_scale;
  View arg;
  bool arg_of_rows, per_head;
  View out;  // (E, H) or (E, 1) of A, contiguous, in the caller's order
};

struct AggregationKernels {
  void (*sum)(const AggregateSumParams&, const Parallel&);
  void (*max)(const AggregateMaxParams&, const Parallel&);
  void (*edge_dot)(const EdgeDotParams&, const Parallel&);
};

// The variant for the best instruction set that this machine and FASTATTN_CPU_ISA allow (dispatch.cpp).
const AggregationKernels& aggregation_kernels();

}  // namespace fastattn
