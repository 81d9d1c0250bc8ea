// What both walks of the backward share: gradients of the outputs as read, and results as written.
#pragma once
#include "linear_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// What both walks read of queries: dO and dden of a chunk.
template <class T>
class OutputGrad {
 public:
  Matrix<T> matrix;
  A<T>*factor, *dden;

  // Of a walk whose next chunk is `step` tokens from this one.
  OutputGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena, int forms,
             int64_t step)
      : p_(p), forms_(forms), step_(step) {
    matrix = take_matrix<T>(arena, problem.chunk, problem.dv, forms);
    factor = arena.take<A<T>>(problem.chunk);
    dden = arena.take<A<T>>(problem.chunk);
  }
  int64_t read(const Segment& s, int64_t h, int64_t begin, int64_t count) {
    const int64_t rows = round_up(count, kUnit<T>);
    for (int64_t r = 0; r < rows; ++r) factor[r] = dden[r] = 0;
    Rows<T> grads(p_.grad_out, s.b, h, begin, count, p_.Dv, step_);
    const int64_t ahead = step_ * p_.out.stride[2];
    for (int64_t r = max(s.seen_from - begin, 0); r < count; ++r) {
      factor[r] = A<T>(p_.scale);
      if (!p_.normalize) continue;
      const A<T> den = static_cast<const A<T>*>(p_.den.data)[offset(p_.den, s.b, h, begin + r)];
      factor[r] = is_empty(p_, den) ? A<T>(0) : row_factor(p_, den);
      if (is_empty(p_, den)) continue;
      const T* out = static_cast<const T*>(p_.out.data) + offset(p_.out, s.b, h, begin + r);
      const T* grad = grads.data + r * grads.row;
      const int64_t whole = grads.column == 1 ? round_down(p_.Dv, N<T>) : 0;
      V<T> sum{};
      for (int64_t c = 0; c < p_.Dv; c += N<T>) prefetch(out + c, ahead);
      for (int64_t c = 0; c < whole; c += N<T>) sum += load_wide(out + c) * load_wide(grad + c);
      for (int64_t c = whole; c < p_.Dv; c += N<T>)
        sum += load_row<A<T>>(out + c, 1, p_.Dv - c) *
               load_row<A<T>>(grad + c * grads.column, grads.column, p_.Dv - c);
      dden[r] = -reduce_add<A<T>>(sum) * factor[r];
    }
    grads.factor = factor;
    fill<T, FeatureMap::identity>(grads, matrix);
    form(matrix, rows, forms_);
    return rows;
  }

 private:
  const LinearAttentionGradParams& p_;
  int forms_;
  int64_t step_;
};

// Rows of `result` as the gradient of a tensor that was mapped; zero where `shown` hides them. The slope
// comes from the features where they are given unrounded, else from the tensor itself.
template <class T, FeatureMap kMap>
inline void write_grad(const View& grad, const View& input, const A<T>* result, int64_t room, int64_t b,
                       int64_t h, int64_t begin, int64_t count, int64_t columns, const Rows<T>& shown,
                       const Matrix<T>* features = nullptr) {
  for (int64_t r = 0; r < count; ++r) {
    T* to = static_cast<T*>(grad.data) + offset(grad, b, h, begin + r);
    const T* x = static_cast<const T*>(input.data) + offset(input, b, h, begin + r);
    const bool zero = !shown.is_shown(r);
    for_row<T>(room, r, columns, [&](int64_t c, int64_t at_result) {
      V<T> g{};
      if (!zero) {
        g = load(result + at_result);
        if (kMap != FeatureMap::identity && features && !kPairs<T>)
          g *= slope_of_feature<T, kMap>(load(features->natural + at_result));
        else if (kMap != FeatureMap::identity)
          g *= feature_slope<T, kMap>(load_row<A<T>>(x + c * input.stride[3], input.stride[3], columns - c));
      }
      prefetch(to + c * grad.stride[3], shown.step * grad.stride[2]);
      store_row<A<T>>(to + c * grad.stride[3], grad.stride[3], columns - c, g);
    });
  }
}

// m [rows, columns] += scale[r] vector[c], times weight[r] where given.
template <class T>
inline void add_outer(A<T>* m, int64_t room, int64_t rows, int64_t columns, const A<T>* scale,
                      const A<T>* weight, const A<T>* vector) {
  for (int64_t r = 0; r < rows; ++r) {
    if (scale && scale[r] == A<T>(0)) continue;
    const V<T> factor = broadcast((scale ? scale[r] : A<T>(1)) * (weight ? weight[r] : A<T>(1)));
    for_row<T>(room, r, columns,
               [&](int64_t c, int64_t x) { store(m + x, load(m + x) + factor * load(vector + c)); });
  }
}

// Row r of a, times row r of b, summed.
template <class T>
inline A<T> dot_rows(A<T>* a, A<T>* b, int64_t room, int64_t r, int64_t columns) {
  V<T> sum{};
  for_row<T>(room, r, columns, [&](int64_t, int64_t x) { sum += load(a + x) * load(b + x); });
  return reduce_add<A<T>>(sum);
}

// What the gradient of decay takes from the walk in order: the states before every chunk, and for every token
// the part of grad phi(q).phi(q) that came through the state.
template <class T>
struct Flow {
  A<T>* states;   // [chunks of the segment, kinds, size]
  A<T>* queries;  // [kinds, tokens of the segment]
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
