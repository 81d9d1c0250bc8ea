// One chunk of tokens: its decay, the weights of its tokens for each other, and its state.
#pragma once
#include "linear_attention_operand.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// The decay between the tokens of a chunk. With g_i the sum of the log-decays up to token i inclusive,
//   into[i]   = exp(g_i)            from before the chunk to token i
//   out_of[i] = exp(g_last - g_i)   from token i to behind the chunk
// Sums are kept as high + low, so that a difference of two large ones is not rounded at their size.
template <class T>
struct Decay {
  bool on;
  A<T>*high, *low, *into, *out_of;
  A<T> total;  // exp(g_last)

  void take(Arena& arena, const Problem<T>& problem) {
    on = problem.p.decay.data != nullptr;
    total = A<T>(1);
    if (!on) return;
    high = arena.take<A<T>>(problem.chunk);
    low = arena.take<A<T>>(problem.chunk);
    into = arena.take<A<T>>(problem.chunk);
    out_of = arena.take<A<T>>(problem.chunk);
  }
  const A<T>* scale_into() const { return on ? into : nullptr; }
  const A<T>* scale_out() const { return on ? out_of : nullptr; }

  // Tokens [begin, begin + count) of head h. A padded token does not decay.
  void read(const Problem<T>& problem, int64_t b, int64_t h, int64_t begin, int64_t count) {
    if (!on) return;
    double sum = 0, rest = 0;  // of a compensated sum: a reset costs the tokens behind it no precision
    const int64_t rows = round_up(count, kUnit<T>);
    for (int64_t i = 0; i < rows; ++i) {
      if (i < count) {
        const double term = log_decay(problem, b, h, begin + i), next = sum + term, part = next - sum;
        rest += (sum - (next - part)) + (term - part);
        sum = next;
      }
      high[i] = A<T>(sum);
      low[i] = A<T>(rest + (sum - double(high[i])));
    }
    for (int64_t i = 0; i < rows; i += N<T>) {
      store(into + i, exp(load(high + i)));
      store(out_of + i, exp((high[rows - 1] - load(high + i)) + (low[rows - 1] - load(low + i))));
    }
    total = into[rows - 1];
  }
  static double log_decay(const Problem<T>& problem, int64_t b, int64_t h, int64_t token) {
    const View &view = problem.p.decay, &padding = problem.p.key_padding;
    if (padding.data && !static_cast<const uint8_t*>(padding.data)[offset(padding, b, token)]) return 0;
    const int64_t x = offset(view, b, h, token);
    double decay = 0;
    with_dtype_of_decay<T>(
        view.dtype, [&]<class S>(S) { decay = double(to_float(static_cast<const S*>(view.data)[x])); });
    // What is a reset, exp(-1000) = 0, stays finite: the difference of two sums is never inf - inf.
    return decay < -1000 ? -1000 : decay;
  }
  // exp(g_i - g_j) or exp(g_j - g_i) for the columns j = c, c + 1, ... of row i; 0 where `valid` is not.
  template <Part kPart, class M>
  FASTATTN_INLINE V<T> between(int64_t i, int64_t c, bool masked, M valid) const {
    V<T> difference = (high[i] - load(high + c)) + (low[i] - load(low + c));
    if (kPart == Part::upper) difference = -difference;
    if (masked) difference = valid ? difference : V<T>{} - A<T>(2000);  // before exp: it may be large
    return exp(difference);
  }
};

// Products of the tokens of a chunk, [rows, rows]: lower, row i has tokens j <= i; upper, row j has i >= j.
template <class T>
struct Weights {
  int64_t room;
  A<T>* data;
  E<T>* left;
  void take(Arena& arena, const Problem<T>& problem) {
    room = problem.chunk;
    const int64_t size = room * round_up(room, kPanel<T>);
    data = arena.take<A<T>>(size);
    if constexpr (kPairs<T>)
      left = arena.take<E<T>>(size);
    else
      left = data;
  }
};

template <class T>
using Term = typename Format<T>::Term;

template <class T>
inline void multiply_weights(Part part, const Matrix<T>& x, const Matrix<T>& y, int64_t rows,
                             const Weights<T>& weights, Upcoming* upcoming = nullptr) {
  const Term<T> term{x.left, x.rows, y.right_t, y.columns, x.columns};
  Format<T>::multiply(rows, rows, &term, 1, part, A<T>(0), weights.data, weights.room, upcoming);
}

// Adds a bias (by row, or by column), decays, clears what is hidden by causality, rounds to operands, and
// sums the rows into `sums`, a vector each.
template <class T, Part kPart>
inline void finish_weights(const Weights<T>& weights, int64_t rows, const Decay<T>& decay,
                           const A<T>* row_bias, const A<T>* column_bias, V<T>* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t begin = kPart == Part::lower ? 0 : round_down(r, kUnit<T>);
    const int64_t end = kPart == Part::lower ? round_up(r + 1, kUnit<T>) : rows;
    V<T> sum{};
    for (int64_t c = begin; c < end; c += N<T>) {
      A<T>* p = at<T>(weights.data, weights.room, r, c);
      const auto column = lane_index<T>() + Int<A<T>>(c);
      const auto valid = kPart == Part::lower ? column <= Int<A<T>>(r) : column >= Int<A<T>>(r);
      const bool masked = kPart == Part::lower ? c + N<T> - 1 > r : c < r;
      V<T> x = load(p);
      if (row_bias) x += row_bias[r];
      if (column_bias) x += load(column_bias + c);
      if (decay.on) x *= decay.template between<kPart>(r, c, masked, valid);
      if (masked) x = valid ? x : V<T>{};
      x = operand_precision<T>(x);
      sum += x;
      if (kPairs<T> || masked || decay.on || row_bias || column_bias) store(p, x);
    }
    if (sums) sums[r] = sum;
  }
#if defined(__AMX_BF16__)
  if constexpr (kPairs<T>)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = kPart == Part::lower ? 0 : round_down(r, kUnit<T>);
      const int64_t end = kPart == Part::lower ? round_up(r + 1, kUnit<T>) : rows;
      for (int64_t c = begin; c < end; c += 32) {
        const int64_t x = c * weights.room + r * 32;
        store(reinterpret_cast<uint32_t*>(weights.left + x), pack_row_at<false>(weights.data + x));
      }
    }
#endif
}

// kv [X, Z] of tokens x and z, and behind it the sum of rows of one of them.
template <class T>
struct State {
  StateShape<T> shape;
  Matrix<T> kv;
  A<T>* z;
  bool zero;  // nothing has been added yet

  void take(Arena& arena, const StateShape<T>& of, int forms) {
    shape = of;
    kv = take_matrix<T>(arena, of.rows, of.columns, forms, false, true, of.z_columns);
    z = kv.natural + of.size() - of.z_columns;
  }
  void clear() {
    std::memset(kv.natural, 0, size_t(shape.size()) * sizeof(A<T>));
    zero = true;
  }
  // The padding of an operand is 0, that of a product need not be: 0 * inf is NaN, and the next product would
  // add it to everything.
  void clear_padding() {
    const V<T> nothing{};
    for (int64_t c = 0; c < shape.columns; c += N<T>)
      for (int64_t r = shape.used_rows; r < shape.rows; ++r) store(at<T>(kv.natural, kv.rows, r, c), nothing);
    const int64_t first = round_down(shape.used_columns, N<T>);
    for (int64_t c = first; c < shape.columns; c += N<T>)
      for (int64_t r = 0; r < shape.used_rows; ++r) {
        A<T>* x = at<T>(kv.natural, kv.rows, r, c);
        store(x, lane_index<T>() < Int<A<T>>(shape.used_columns - c) ? load(x) : nothing);
      }
  }
};

// Terms of x S, with S or S^T in the form that `right` and `low` are.
template <class T>
inline int state_terms(const Matrix<T>& x, const E<T>* right, const E<T>* low, int64_t right_rows,
                       const A<T>* row_scale, Term<T>* terms) {
  int count = 0;
  terms[count++] = {x.left, x.rows, right, right_rows, x.columns};
  if (kPairs<T>) terms[count++] = {x.left, x.rows, low, right_rows, x.columns};
  terms[count - 1].row_scale = row_scale;
  return count;
}
template <class T>
inline void update_state(State<T>& state, const Matrix<T>& y, const Matrix<T>& z, int64_t rows, A<T> carry,
                         Upcoming* upcoming = nullptr) {
  const Term<T> term{y.left_t, y.columns, z.right, z.rows, rows};
  if (state.zero) carry = A<T>(0);
  state.zero = false;
  Format<T>::multiply(y.columns, z.columns, &term, 1, Part::all, carry, state.kv.natural, state.kv.rows,
                      upcoming);
  state.clear_padding();
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
