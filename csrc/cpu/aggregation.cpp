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

void sum_of_dtype(const AggregateSumParams& p, const Parallel& parallel) {
  p.x.dtype == DType::f64 ? sum<double>(p, parallel) : sum<float>(p, parallel);
}
void max_of_dtype(const AggregateMaxParams& p, const Parallel& parallel) {
  p.x.dtype == DType::f64 ? max_over_edges<double>(p, parallel) : max_over_edges<float>(p, parallel);
}
void dot_of_dtype(const EdgeDotParams& p, const Parallel& parallel) {
  p.a.dtype == DType::f64 ? edge_dot<double>(p, parallel) : edge_dot<float>(p, parallel);
}

}  // namespace

extern const AggregationKernels aggregation_kernels;
const AggregationKernels aggregation_kernels{sum_of_dtype, max_of_dtype, dot_of_dtype};

}  // namespace fastattn::FASTATTN_ISA
