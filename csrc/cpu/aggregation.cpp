// Neighbour aggregation on the CPU: sums and maxima over neighbours and dot products along edges, for every
// instruction set and dtype. Work is cut by edges (edge_split.h); each sum belongs to one chunk, so that no
// result is added to by two threads, and rows that are cut are joined in the order of their chunks.
//
//   aggregation_rows.h  tiles of features, nodes and edges as the kernels read them
//   aggregation_sum.h   sums
//   aggregation_max.h   maxima, minima and their edges
//   aggregation_dot.h   dot products
#include "aggregation.h"

#include "aggregation_dot.h"
#include "aggregation_max.h"
#include "aggregation_sum.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class F>
void with_types(const View& features, const GraphView& graph, F&& f) {
  with_dtype(features.dtype, [&]<class T>(T t) { with_index(graph.wide, [&]<class I>(I i) { f(t, i); }); });
}

void sum_of_types(const AggregateSumParams& p, const Parallel& parallel) {
  with_types(p.x, p.graph, [&]<class T, class I>(T, I) { sum<T, I>(p, parallel); });
}
void max_of_types(const AggregateMaxParams& p, const Parallel& parallel) {
  with_types(p.x, p.graph, [&]<class T, class I>(T, I) {
    p.arg ? max_over_edges<T, I, true>(p, parallel) : max_over_edges<T, I, false>(p, parallel);
  });
}
void dot_of_types(const EdgeDotParams& p, const Parallel& parallel) {
  with_types(p.a, p.graph, [&]<class T, class I>(T, I) { edge_dot<T, I>(p, parallel); });
}

}  // namespace

extern const AggregationKernels aggregation_kernels;
const AggregationKernels aggregation_kernels{sum_of_types, max_of_types, dot_of_types};

}  // namespace fastattn::FASTATTN_ISA
