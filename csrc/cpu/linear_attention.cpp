// Linear attention on the CPU: forward, backward and the step of one token, for every instruction set and
// dtype.
//
// A chunk of tokens meets itself in products of its rows, and everything before it through a state, carried
// from chunk to chunk. All matrices lie in panels (panels.h), so that one copy in scratch is an operand of
// several products. Long sequences of few heads are cut into segments, whose states are found first.
//
// The parts, each built on those above it:
//   linear_attention_problem.h     types, sizes, segments of sequences, rows of tensors
//   linear_attention_operand.h     feature maps, and the forms of a matrix that products take
//   linear_attention_chunk.h       decay, weights and state of a chunk
//   linear_attention_segments.h    states of calls and of segments
//   linear_attention_forward.h     the walk over chunks, forward
//   linear_attention_gradients.h   what both walks of the backward share
//   linear_attention_query_grad.h  gradients of queries
//   linear_attention_key_grad.h    gradients of keys, values and decay
//   linear_attention_backward.h    backward
//   linear_attention_step.h        one token
#include "linear_attention.h"

#include "linear_attention_backward.h"
#include "linear_attention_step.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Where bf16 has products of its own any other dtype is a weaker variant's.
constexpr bool has_products(DType dtype) { return !kPairs<bf16> || dtype == DType::bf16; }
// f(T{}) for tensors of such a dtype
template <class F>
void with_products(DType dtype, F&& f) {
  if constexpr (kPairs<bf16>)
    f(bf16{});  // nothing else comes here: has_products
  else if (dtype == DType::f64)
    f(double{});
  else
    f(float{});
}

double operations(const LinearAttentionParams& p) {
  const double tokens = double(p.B * p.H) * double(max(p.L, p.S));
  return tokens * (4.0 * double(p.D * p.Dv) + 64.0 * double(p.D + p.Dv));
}

void forward_of_dtype(const LinearAttentionParams& p, const Parallel& parallel) {
  with_products(p.query.dtype, [&]<class T>(T) { forward<T>(p, parallel.worth(operations(p))); });
}
void backward_of_dtype(const LinearAttentionGradParams& p, const Parallel& parallel) {
  with_products(p.query.dtype, [&]<class T>(T) { backward<T>(p, parallel.worth(2.5 * operations(p))); });
}
void step_of_dtype(const LinearAttentionStepParams& p, const Parallel& parallel) {
  // Reading and writing an element of the state takes as long as some ten operations.
  const double work = 10.0 * double(p.B * p.H) * double(p.D * p.Dv);
  with_products(p.query.dtype, [&]<class T>(T) { step<A<T>>(p, parallel.worth(work)); });
}

}  // namespace

extern const LinearAttentionKernels linear_attention_kernels;
const LinearAttentionKernels linear_attention_kernels = {has_products, forward_of_dtype, backward_of_dtype,
                                                         step_of_dtype};

}  // namespace fastattn::FASTATTN_ISA
