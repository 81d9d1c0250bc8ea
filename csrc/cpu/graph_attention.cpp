// Attention on the edges of a graph on the CPU: forward and backward, for every instruction set and dtype.
//
// A target reads the rows of its sources, wherever they lie: the kernels are bound by these gathers and make
// as few of them as possible. Forward: scores of a block of edges, softmax, weighted sum, while the block's
// rows are in the first cache; nothing of an edge outlives its block. Backward: one pass by source recomputes
// and sums everything at that end and leaves one number per edge and head for the pass by target.
//
// The parts, each built on those above it:
//   edge_split.h                rows and parts of rows as tasks of equal work
//   graph_attention_lanes.h     scores of a block of edges as vectors, dropout
//   graph_attention_rows.h      rows of features as vectors, products and weighted sums of them
//   graph_attention_scores.h    the three forms of the score
//   graph_attention_forward.h   forward
//   graph_attention_backward.h  backward
#include "graph_attention.h"

#include "graph_attention_backward.h"
#include "graph_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// A gathered channel costs as much as some operations, an edge and a row as some more.
double operations(const GraphAttentionParams& p) {
  return double(p.by_target.edges) * (8 * double(p.H * (p.D + p.C)) + 40 * double(p.H) + 100) +
         double(p.N_dst) * double(2 * p.H * p.C + 100);
}

void forward_of_type(const GraphAttentionParams& p, const Parallel& parallel) {
  const Parallel some = parallel.worth(operations(p));
  p.dtype == DType::f64 ? forward<double>(p, some) : forward<float>(p, some);
}
void backward_of_type(const GraphAttentionGradParams& p, const Parallel& parallel) {
  const Parallel some = parallel.worth(2.5 * operations(p));
  p.dtype == DType::f64 ? backward<double>(p, some) : backward<float>(p, some);
}
void edge_softmax_backward_of_type(const EdgeSoftmaxGradParams& p, const Parallel& parallel) {
  const Parallel some = parallel.worth(double(p.by_target.edges) * double(40 * p.H + 50));
  p.dtype == DType::f64 ? edge_softmax_backward<double>(p, some) : edge_softmax_backward<float>(p, some);
}

}  // namespace

extern const GraphAttentionKernels graph_attention_kernels;
const GraphAttentionKernels graph_attention_kernels = {forward_of_type, backward_of_type,
                                                       edge_softmax_backward_of_type};

}  // namespace fastattn::FASTATTN_ISA
