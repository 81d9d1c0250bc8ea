// What both walks of the backward share: gradients of the outputs as read, and results as written.
#pragma once
#include "linear_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// <row r of a, row r of b>, while the rows of a that come next are fetched.
template <class S, class T>
__attribute__((noinline)) A<T> row_product_of(const Rows<T>& a, const Rows<T>& b, int64_t r) {
  const S *x = a.template at<S>(r), *y = b.template at<S>(r);
  const int64_t whole = a.column == 1 && b.column == 1 ? round_down(a.columns, N<T>) : 0;
  V<T> sum{};
  for (int64_t c = 0; c < a.columns; c += N<T>) prefetch(x + c * a.column, a.step * a.row);
  for (int64_t c = 0; c < whole; c += N<T>) sum += load_wide(x + c) * load_wide(y + c);
  for (int64_t c = whole; c < a.columns; c += N<T>)
    sum += load_row<A<T>>(x + c * a.column, a.column, a.columns - c) *
           load_row<A<T>>(y + c * b.column, b.column, a.columns - c);
  return reduce_add<A<T>>(sum);
}

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
    const Rows<T> outputs(p_.out, s.b, h, begin, count, p_.Dv, step_);
    for (int64_t r = max(s.seen_from - begin, 0); r < count; ++r) {
      factor[r] = A<T>(p_.scale);
      if (!p_.normalize) continue;
      const A<T> den = static_cast<const A<T>*>(p_.den.data)[offset(p_.den, s.b, h, begin + r)];
      factor[r] = is_empty(p_, den) ? A<T>(0) : row_factor(p_, den);
      if (is_empty(p_, den)) continue;
      with_dtype_beside<T>(p_.out.dtype,
                           [&]<class S>(S) { dden[r] = -row_product_of<S>(outputs, grads, r) * factor[r]; });
    }
    grads.factor = factor;
    fill(FeatureMap::identity, grads, matrix);
    form(matrix, rows, forms_);
    return rows;
  }

 private:
  const LinearAttentionGradParams& p_;
  int forms_;
  int64_t step_;
};

template <class S, FeatureMap kMap, class T>
__attribute__((noinline)) void write_grad_of(const View& grad, const Rows<T>& input, const A<T>* result,
                                             int64_t room, int64_t b, int64_t h, int64_t begin,
                                             const Matrix<T>* features) {
  for (int64_t r = 0; r < input.count; ++r) {
    S* to = static_cast<S*>(grad.data) + offset(grad, b, h, begin + r);
    const S* x = input.template at<S>(r);
    const bool zero = !input.is_shown(r);
    for_row<T>(room, r, input.columns, [&](int64_t c, int64_t at_result) {
      const int64_t left = input.columns - c;
      V<T> g{};
      if (!zero) {
        g = load(result + at_result);
        if (kMap != FeatureMap::identity && features && !kPairs<T>)
          g *= slope_of_feature<T, kMap>(load(features->natural + at_result));
        else if (kMap != FeatureMap::identity)
          g *= feature_slope<T, kMap>(load_row<A<T>>(x + c * input.column, input.column, left));
      }
      prefetch(to + c * grad.stride[3], input.step * grad.stride[2]);
      store_row<A<T>>(to + c * grad.stride[3], grad.stride[3], left, g);
    });
  }
}
// Rows of `result` as the gradient of a tensor that was mapped; zero where rows are hidden. The slope comes
// from the features where they are given unrounded, else from the tensor itself.
template <class T>
inline void write_grad(FeatureMap map, const View& grad, const Rows<T>& input, const A<T>* result,
                       int64_t room, int64_t b, int64_t h, int64_t begin,
                       const Matrix<T>* features = nullptr) {
  with_dtype_beside<T>(grad.dtype, [&]<class S>(S) {
    with_map(map, [&]<FeatureMap kMap>() {
      write_grad_of<S, kMap>(grad, input, result, room, b, h, begin, features);
    });
  });
}
// Element x of the gradient of decay.
template <class T>
inline void put_decay(const View& grad, int64_t x, A<T> value) {
  with_dtype_of_decay<T>(grad.dtype, [&]<class S>(S) {
    store_row<A<T>>(static_cast<S*>(grad.data) + x, 1, 1, broadcast(value));
  });
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
