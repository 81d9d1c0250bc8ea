// Interface between the op binding and the CPU kernel that sorts the edges of a graph by row.
#pragma once
#include <cstdint>

#include "parallel.h"

namespace fastattn {

// The same nodes as one end of every edge; int32_t or int64_t, `stride` elements apart.
struct EdgeEnds {
  const void* data;
  int64_t stride, nodes;
  bool wide;
};

struct GraphCsrParams {
  int64_t edges;
  EdgeEnds row, col;
  bool wide;        // what is written is int64_t
  int64_t* rowptr;  // (row.nodes + 1)
  void* out_col;    // (edges)
  void* out_perm;   // (edges)
};

// The first edge, in the caller's order, with an end outside of [0, nodes); -1 where there is none.
struct GraphCsrResult {
  int64_t bad_row, bad_col;
};

struct GraphKernels {
  // Stable: the edges of a row keep the caller's order.
  GraphCsrResult (*csr)(const GraphCsrParams&, const Parallel&);
};

// The variant for the best instruction set that this machine and FASTATTN_CPU_ISA allow (dispatch.cpp).
const GraphKernels& graph_kernels();

}  // namespace fastattn
