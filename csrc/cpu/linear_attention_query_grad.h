// The walk in order: gradients of the queries.
#pragma once
#include "linear_attention_gradients.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// grad phi(q): x, y and z are dO, v and phi(k).
template <class T>
class QueryGrad : public Walk<T, QueryGrad<T>> {
  using Base = Walk<T, QueryGrad<T>>;
  using Base::problem_, Base::y_, Base::z_, Base::weights_, Base::decay_, Base::result_;

 public:
  using Base::kinds, Base::states;

  QueryGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena)
      : Base(problem, arena, problem.state_shape(true), p.normalize || p.grad_z.data),
        p_(p),
        grad_(problem, p, arena, kLeft, problem.chunk) {
    if (p.grad_decay.data) query_ = take_matrix<T>(arena, problem.chunk, problem.d, 0);
  }
  void add_initial(int64_t n, int64_t h, State<T>& state) const {
    if (p_.initial_z.data) add_state(p_, p_.initial_kv, p_.initial_z, n, h, true, state);
  }
  void record(const Flow<T>& flow) { flow_ = flow; }

  const Matrix<T>& counted() const { return z_; }
  void read(int64_t b, int64_t hk, int64_t begin, int64_t count) {
    const int64_t step = problem_.chunk;
    Rows<T> values(p_.value, b, hk, begin, count, p_.Dv, step);
    Rows<T> keys(p_.key, b, hk, begin, count, p_.D, step);
    values.hide(p_.key_padding, b, begin);
    keys.hide(p_.key_padding, b, begin);
    const int64_t rows = fill(FeatureMap::identity, values, y_);
    fill(p_.feature_map, keys, z_);
    form(z_, rows, kRight);
    form(y_, rows, kRightT);
  }
  void emit(const Segment& s, int64_t h, int64_t begin, int64_t count, const State<T>& state, bool ordered) {
    const int64_t rows = grad_.read(s, h, begin, count);
    Term<T> terms[3];
    int all = Base::through_state(grad_.matrix, state, ordered, terms);
    if (flow_.queries) {
      multiply(rows, terms, all);
      add_z(rows, state, ordered);
      follow(s, h, begin, count, state);
    }
    if (ordered) {
      multiply_weights(Part::lower, grad_.matrix, y_, rows, weights_);
      finish_weights<T, Part::lower>(weights_, rows, decay_, p_.normalize ? grad_.dden : nullptr, nullptr,
                                     nullptr);
      terms[all++] = {weights_.left, weights_.room, z_.right, z_.rows, rows, Part::lower};
    }
    multiply(rows, terms, all);
    add_z(rows, state, ordered);
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D, problem_.chunk);
    queries.hide_blind(s, begin);
    write_grad(p_.feature_map, p_.grad_query, queries, result_, problem_.chunk, s.b, h, begin);
  }

 private:
  void multiply(int64_t rows, const Term<T>* terms, int count) {
    Format<T>::multiply(rows, problem_.d, terms, count, Part::all, A<T>(0), result_, problem_.chunk);
  }
  void add_z(int64_t rows, const State<T>& state, bool ordered) {
    if (p_.normalize && !state.zero)
      add_outer<T>(result_, problem_.chunk, rows, problem_.d, ordered ? decay_.scale_into() : nullptr,
                   grad_.dden, state.z);
  }
  void follow(const Segment& s, int64_t h, int64_t begin, int64_t count, const State<T>& state) {
    const int64_t kind = kinds > 1 ? h % problem_.group : 0, tokens = s.end - s.begin;
    const int64_t at_token = begin - s.begin, size = states[0].shape.size();
    std::memcpy(flow_.states + (at_token / problem_.chunk * kinds + kind) * size, state.kv.natural,
                size_t(size) * sizeof(A<T>));
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D, problem_.chunk);
    queries.hide_blind(s, begin);
    fill(p_.feature_map, queries, query_);
    for (int64_t r = 0; r < count; ++r)
      flow_.queries[kind * tokens + at_token + r] =
          dot_rows<T>(query_.natural, result_, problem_.chunk, r, problem_.d);
  }

  const LinearAttentionGradParams& p_;
  OutputGrad<T> grad_;
  Matrix<T> query_;
  Flow<T> flow_{};
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
