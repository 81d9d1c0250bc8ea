// From an operator to its kernels for the chosen instruction set: a header, two lines and a function per
// operator.
#include "aggregation.h"
#include "attention.h"
#include "build_config.h"
#include "graph.h"
#include "graph_attention.h"
#include "isa.h"
#include "linear_attention.h"
#include "roof.h"

// Every compiled variant defines its table in a namespace named after its instruction set.
#define FASTATTN_DECLARE(isa)                                   \
  namespace isa {                                               \
  extern const AggregationKernels aggregation_kernels;          \
  extern const AttentionKernels attention_kernels;              \
  extern const GraphKernels graph_kernels;                      \
  extern const GraphAttentionKernels graph_attention_kernels;   \
  extern const LinearAttentionKernels linear_attention_kernels; \
  extern const RoofKernels roof_kernels;                        \
  }

#define FASTATTN_ADDRESS_AGGREGATION(isa) &isa::aggregation_kernels,
#define FASTATTN_ADDRESS_ATTENTION(isa) &isa::attention_kernels,
#define FASTATTN_ADDRESS_GRAPH(isa) &isa::graph_kernels,
#define FASTATTN_ADDRESS_GRAPH_ATTENTION(isa) &isa::graph_attention_kernels,
#define FASTATTN_ADDRESS_LINEAR_ATTENTION(isa) &isa::linear_attention_kernels,
#define FASTATTN_ADDRESS_ROOF(isa) &isa::roof_kernels,

namespace fastattn {

FASTATTN_ISAS(FASTATTN_DECLARE)

const AggregationKernels& aggregation_kernels() {
  static const AggregationKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_AGGREGATION)};
  return *variants[chosen_isa()];
}

const AttentionKernels& attention_kernels() {
  static const AttentionKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_ATTENTION)};
  return *variants[chosen_isa()];
}

const GraphKernels& graph_kernels() {
  static const GraphKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_GRAPH)};
  return *variants[chosen_isa()];
}

const GraphAttentionKernels& graph_attention_kernels() {
  static const GraphAttentionKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_GRAPH_ATTENTION)};
  return *variants[chosen_isa()];
}

const LinearAttentionKernels& linear_attention_kernels() {
  static const LinearAttentionKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_LINEAR_ATTENTION)};
  return *variants[chosen_isa()];
}

const RoofKernels& roof_kernels() {
  static const RoofKernels* const variants[] = {FASTATTN_ISAS(FASTATTN_ADDRESS_ROOF)};
  return *variants[chosen_isa()];
}

}  // namespace fastattn
