// The walk in reverse: gradients of the keys, the values and the decay.
#pragma once
#include "linear_attention_gradients.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// grad phi(k) and grad v, in reverse.
template <class T>
class KeyGrad {
 public:
  int64_t kinds;
  State<T>* states;

  KeyGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena)
      : problem_(problem), p_(p), grad_(problem, p, arena, kRight | kRightT, -problem.chunk) {
    const int64_t chunk = problem.chunk;
    decay_.take(arena, problem);
    key_ = take_matrix<T>(arena, chunk, problem.d, kLeft);
    value_ = take_matrix<T>(arena, chunk, problem.dv, kLeft);
    query_ = take_matrix<T>(arena, chunk, problem.d, kRight | kRightT | kLeftT, decay_.on);
    weights_.take(arena, problem);
    grad_key_ = arena.take<A<T>>(chunk * round_up(problem.d, kPanel<T>));
    grad_value_ = arena.take<A<T>>(chunk * round_up(problem.dv, kPanel<T>));
    scale_ = arena.take<A<T>>(chunk);
    kinds = problem.kinds();
    states = arena.take<State<T>>(kinds);
    for (int64_t k = 0; k < kinds; ++k) states[k].take(arena, problem.state_shape(false), kRight | kRightT);
    has_z_ = p.normalize || p.grad_z.data;
    if (!p.grad_decay.data) return;
    grad_weights_.take(arena, problem);
    through_state_ = arena.take<A<T>>(chunk * round_up(problem.d, kPanel<T>));
    turned_ = arena.take<A<T>>(problem.dv * round_up(problem.d, kPanel<T>));
    column_ = arena.take<A<T>>(chunk);
    keys_flow_ = arena.take<A<T>>(chunk);
    inner_flow_ = arena.take<A<T>>(chunk);
  }
  void clear() {
    for (int64_t k = 0; k < kinds; ++k) states[k].clear();
  }
  // The gradient of the final state.
  static void add_final(const Problem<T>& problem, const LinearAttentionGradParams& p, int64_t n, int64_t hk,
                        int64_t kind, State<T>& state) {
    if (!p.grad_kv.data && !p.grad_z.data) return;
    for (int64_t g = 0; g < problem.group; ++g)
      if (problem.kinds() == 1 || g == kind)
        add_state(p, p.grad_kv, p.grad_z, n, hk * problem.group + g, false, state);
  }
  void finish(int64_t n, int64_t hk) const {
    if (!p_.grad_initial_z.data) return;
    for (int64_t g = 0; g < problem_.group; ++g)
      write_state(p_, states[kinds > 1 ? g : 0], p_.grad_initial_kv, p_.grad_initial_z, n,
                  hk * problem_.group + g);
  }

  // What the queries of a segment add to the states.
  void absorb(const Segment& s, int64_t hk, A<T>* decays) {
    for (int64_t k = 0; k < kinds; ++k) decays[k] = A<T>(1);
    for (int64_t begin = last_chunk(s); begin >= s.begin; begin -= problem_.chunk)
      for (int64_t g = 0; g < problem_.group; ++g) {
        const int64_t h = hk * problem_.group + g, count = min(problem_.chunk, s.end - begin);
        decay_.read(problem_, s.b, h, begin, count);
        const int64_t rows = read_queries(s, h, begin, count);
        add_queries(rows, states[kinds > 1 ? g : 0]);
        decays[kinds > 1 ? g : 0] *= decay_.total;
      }
  }
  // Gradients of the keys and values of a segment; in order (causal) its queries are absorbed on the way,
  // those of the first chunk only if wanted. `flow` and `decay_sums` [kinds] if decay has a gradient.
  void walk(const Segment& s, int64_t hk, bool ordered, bool absorb_first, const Flow<T>* flow,
            double* decay_sums) {
    for (int64_t begin = last_chunk(s); begin >= s.begin; begin -= problem_.chunk) {
      const int64_t count = min(problem_.chunk, s.end - begin);
      const int64_t step = -problem_.chunk;
      Rows<T> values(p_.value, s.b, hk, begin, count, p_.Dv, step);
      Rows<T> keys(p_.key, s.b, hk, begin, count, p_.D, step);
      values.hide(p_.key_padding, s.b, begin);
      keys.hide(p_.key_padding, s.b, begin);
      const int64_t rows = fill(FeatureMap::identity, values, value_);
      fill(p_.feature_map, keys, key_);
      form(value_, rows, kLeft);
      form(key_, rows, kLeft);
      for (int64_t g = 0; g < problem_.group; ++g) {
        const int64_t h = hk * problem_.group + g;
        State<T>& state = states[kinds > 1 ? g : 0];
        if (ordered) {
          decay_.read(problem_, s.b, h, begin, count);
          read_queries(s, h, begin, count);
        }
        const bool with_state = (kinds > 1 || g == 0) && !state.zero;
        grads_of(rows, state, with_state, ordered, g > 0, flow != nullptr);
        if (flow) grad_decay(s, h, begin, count, state, *flow, decay_sums);
        if (ordered && (absorb_first || begin > s.begin)) add_queries(rows, state);
      }
      write_grad(p_.feature_map, p_.grad_key, keys, grad_key_, problem_.chunk, s.b, hk, begin, &key_);
      write_grad(FeatureMap::identity, p_.grad_value, values, grad_value_, problem_.chunk, s.b, hk, begin);
    }
  }

 private:
  int64_t last_chunk(const Segment& s) const {
    return s.begin + (s.end - s.begin - 1 + problem_.chunk) / problem_.chunk * problem_.chunk -
           problem_.chunk;
  }
  int64_t read_queries(const Segment& s, int64_t h, int64_t begin, int64_t count) {
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D, -problem_.chunk);
    queries.hide_blind(s, begin);
    fill(p_.feature_map, queries, query_);
    const int64_t rows = grad_.read(s, h, begin, count);
    form(query_, rows, kRight | kRightT);
    return rows;
  }
  void add_queries(int64_t rows, State<T>& state) {
    form_left_t(query_, rows, decay_.scale_into());
    const A<T> carry = state.zero ? A<T>(0) : decay_.total;
    if (p_.normalize) {
      for (int64_t r = 0; r < rows; ++r) scale_[r] = grad_.dden[r] * (decay_.on ? decay_.into[r] : A<T>(1));
      add_rows(query_, rows, scale_, carry, state.z);
    } else if (has_z_ && decay_.on) {
      for (int64_t c = 0; c < problem_.d; ++c) state.z[c] *= carry;
    }
    update_state(state, query_, grad_.matrix, rows, carry);
  }
  void grads_of(int64_t rows, const State<T>& state, bool with_state, bool ordered, bool more, bool follow) {
    const int64_t chunk = problem_.chunk;
    const Matrix<T>& s = state.kv;
    const A<T>* out_of = ordered ? decay_.scale_out() : nullptr;
    if (with_state) form(s, s.rows, kPairs<T> ? kRight | kRightT : kRightT);
    Term<T> terms[3];

    int all = with_state ? state_terms(key_, s.right, s.right_low, s.rows, out_of, terms) : 0;
    if (ordered) {
      multiply_weights(Part::upper, key_, query_, rows, weights_);
      finish_weights<T, Part::upper>(weights_, rows, decay_, nullptr, nullptr, nullptr);
      terms[all++] = {weights_.left, weights_.room, grad_.matrix.right, grad_.matrix.rows, rows, Part::upper};
    }
    Format<T>::multiply(rows, problem_.dv, terms, all, Part::all, A<T>(more), grad_value_, chunk);

    all = with_state ? state_terms(value_, s.right_t, s.right_t_low, s.columns, out_of, terms) : 0;
    if (follow) {
      Format<T>::multiply(rows, problem_.d, terms, all, Part::all, A<T>(0), through_state_, chunk);
      if (with_state && has_z_)
        add_outer<T>(through_state_, chunk, rows, problem_.d, out_of, nullptr, state.z);
      for (int64_t r = 0; r < rows; ++r)
        keys_flow_[r] = dot_rows<T>(key_.natural, through_state_, chunk, r, problem_.d);
    }
    if (ordered) {
      const Weights<T>& weights = follow ? grad_weights_ : weights_;
      multiply_weights(Part::upper, value_, grad_.matrix, rows, weights);
      if (follow) pair_flow(rows);
      finish_weights<T, Part::upper>(weights, rows, decay_, nullptr, p_.normalize ? grad_.dden : nullptr,
                                     nullptr);
      terms[all++] = {weights.left, weights.room, query_.right, query_.rows, rows, Part::upper};
    }
    Format<T>::multiply(rows, problem_.d, terms, all, Part::all, A<T>(more), grad_key_, chunk);
    if (with_state && has_z_) add_outer<T>(grad_key_, chunk, rows, problem_.d, out_of, nullptr, state.z);
  }

  // inner_flow[t] = sum over i >= t > j of the weight of i for j times its gradient: both lie in the chunk.
  void pair_flow(int64_t rows) {
    for (int64_t c = 0; c < rows; ++c) column_[c] = 0;  // sum over j < t
    for (int64_t t = 0; t < rows; ++t) {
      V<T> sum{};
      for (int64_t c = round_down(t, N<T>); c < rows; c += N<T>) {
        V<T> x = load(column_ + c);
        const auto later = lane_index<T>() + Int<A<T>>(c) >= Int<A<T>>(t);
        sum += later ? x : V<T>{};
        V<T> w = load(at<T>(grad_weights_.data, grad_weights_.room, t, c));
        if (p_.normalize) w += load(grad_.dden + c);
        w *= load(at<T>(weights_.data, weights_.room, t, c));
        store(column_ + c, later ? x + w : x);
      }
      inner_flow_[t] = reduce_add<A<T>>(sum);
    }
  }
  // d / d decay_t: everything that flows from a token before t to one from t on. Both may be in the chunk, or
  // the second behind it (keys_flow), or the first before it (flow.queries), or neither of them.
  void grad_decay(const Segment& s, int64_t h, int64_t begin, int64_t count, const State<T>& state,
                  const Flow<T>& flow, double* sums) {
    const int64_t kind = kinds > 1 ? h % problem_.group : 0, first = begin - s.begin;
    const int64_t size = problem_.state_shape(true).size();
    const A<T>* before = flow.states + (first / problem_.chunk * kinds + kind) * size;
    const A<T>* queries = flow.queries + kind * (s.end - s.begin) + first;
    double across = 0;
    if (!state.zero && decay_.total != A<T>(0)) {
      const Matrix<T>& m = state.kv;
      transpose_panels(m.natural, m.rows, m.rows, m.columns, turned_, m.columns);
      V<T> sum{};
      for (int64_t r = 0; r < m.columns; ++r)
        for (int64_t c = 0; c < m.rows; c += N<T>)
          sum +=
              load(at<T>(turned_, m.columns, r, c)) * load(at<T>(const_cast<A<T>*>(before), m.columns, r, c));
      if (has_z_) {
        const A<T>* z = before + m.columns * round_up(m.rows, kPanel<T>);
        for (int64_t c = 0; c < m.rows; c += N<T>) sum += load(z + c) * load(state.z + c);
      }
      across = double(reduce_add<A<T>>(sum)) * double(decay_.total);
    }
    double later = 0, earlier = 0;
    for (int64_t t = 0; t < count; ++t) later += queries[t];
    for (int64_t t = 0; t < count; ++t) {
      const double log_decay = Decay<T>::log_decay(problem_, s.b, h, begin + t);
      const View& padding = p_.key_padding;
      const bool hidden =
          padding.data && !static_cast<const uint8_t*>(padding.data)[offset(padding, s.b, begin + t)];
      double grad = across + double(inner_flow_[t]) + later + earlier;
      if (hidden || log_decay <= -1000) grad = 0;
      later -= queries[t];
      earlier += keys_flow_[t];
      if (p_.decay_per_head) {
        sums[kind] += grad;
        continue;
      }
      put_decay<T>(p_.grad_decay, offset(p_.grad_decay, s.b, h, begin + t), A<T>(grad));
    }
  }

  const Problem<T>& problem_;
  const LinearAttentionGradParams& p_;
  OutputGrad<T> grad_;
  Matrix<T> key_, value_, query_;
  Weights<T> weights_, grad_weights_;
  Decay<T> decay_;
  A<T>*grad_key_, *grad_value_, *scale_;
  A<T>*through_state_, *turned_, *column_, *keys_flow_, *inner_flow_;
  bool has_z_;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
