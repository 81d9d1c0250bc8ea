// Softmax attention on the CPU: forward, backward and attention weights, for every instruction set and dtype.
//
// One layout carries all of it: the lanes of a vector are query rows. A tile of kTile query rows is packed
// once, transposed, into a panel; then
//   scores^T [keys, rows]  = K [keys, D]   . Q^T panel   keys are read in place, one scalar at a time
//   out^T    [Dv, rows]   += V^T [Dv, keys] . P^T        values likewise; P^T is the score buffer itself
// so that neither keys nor values are repacked in fp32, and the softmax (running maximum, sum, rescaling,
// bands, masks, dropout) is vertical arithmetic without a single horizontal reduction. The backward's five
// products have the same two forms. In the bf16 pair format values (and keys, for grad_query) are transposed
// once per key block and shared by the tiles of a task.
//
// The parts, each built on those above it:
//   attention_problem.h    types and options, which key a query sees, tiles of query rows, dropout
//   attention_tasks.h      sequences as problems, and their tasks
//   attention_pack.h       panels of query rows, blocks of keys and values
//   attention_scores.h     scores of a tile and a key block, with bias and masks
//   attention_softmax.h    weights, running sums, the finished tile; log-sum-exp back to weights
//   attention_decode_tiles.h  products of few query rows on matrix tiles
//   attention_decode.h     forward of few query rows
//   attention_few_keys.h   forward of many query rows and few keys
//   attention_forward.h    forward of all others
//   attention_gradients.h  dS of a tile and a key block, and its products
//   attention_decode_grad.h  backward of few query rows
//   attention_few_keys_grad.h  backward of many query rows and few keys
//   attention_mask_grad.h  gradient of a mask
//   attention_backward.h   backward of all others
//   attention_weights.h    the weights themselves, alone or with the output
//   attention_causality.h  whether a mask is a causal one
#include "attention.h"

#include "attention_backward.h"
#include "attention_causality.h"
#include "attention_forward.h"
#include "attention_weights.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Of the forward, without what masks save. Reading an element takes as long as some twenty operations, which
// is what few queries or few keys wait for.
double operations(const AttentionParams& p) {
  double scores = double(p.B * p.L) * double(p.S);
  double keys = double(p.B) * double(p.S), queries = double(p.B) * double(p.L);
  if (p.sequences) {
    scores = keys = queries = 0;
    for (int64_t b = 0; b < p.B; ++b) {
      scores += double(p.sequences[b].L) * double(p.sequences[b].S);
      keys += double(p.sequences[b].S);
      queries += double(p.sequences[b].L);
    }
  }
  const double elements = double(p.Hkv) * keys + double(p.H) * queries;
  return (2.0 * double(p.H) * scores + 20.0 * elements) * double(p.D + p.Dv);
}

void forward_of_dtype(const AttentionParams& p, const Parallel& parallel) {
  with_products(p.query.dtype, [&]<class T>(T) { forward<T>(p, parallel.worth(operations(p))); });
}
void backward_of_dtype(const AttentionGradParams& p, const Parallel& parallel) {
  with_products(p.query.dtype, [&]<class T>(T) { backward<T>(p, parallel.worth(2.5 * operations(p))); });
}
void weights_of_dtype(const AttentionWeightsParams& p, const Parallel& parallel) {
  with_products(p.query.dtype, [&]<class T>(T) { weights<T>(p, parallel.worth(operations(p))); });
}
void forward_with_weights_of_dtype(const AttentionWeightsParams& p, const Parallel& parallel) {
  with_products(p.query.dtype,
                [&]<class T>(T) { forward_with_weights<T>(p, parallel.worth(operations(p))); });
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {suits,
                                            forward_of_dtype,
                                            backward_of_dtype,
                                            weights_of_dtype,
                                            forward_with_weights_of_dtype,
                                            kPairs<bf16> ? nullptr : causality};

}  // namespace fastattn::FASTATTN_ISA
