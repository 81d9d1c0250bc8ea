// Linear attention backward, in two walks over the chunks. With num_i = phi(q_i)^T S_i, out_i = num_i /
// (den_i + eps), and dO_i, dden_i the gradients of num_i and den_i:
//   in order    grad phi(q_i) = sum_{j <= i} (dO_i.v_j + dden_i) phi(k_j)           carried by S^T and z
//   in reverse  grad phi(k_j) = sum_{i >= j} (dO_i.v_j + dden_i) phi(q_i)           carried by dS^T and dz
//               grad v_j      = sum_{i >= j} (phi(q_i).phi(k_j)) dO_i               carried by dS
// Every line is linear attention of its own, with decay between i and j where there is any. Nothing is kept
// per chunk, except the states of the first walk where decay has a gradient.
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

  OutputGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena, int forms)
      : p_(p), forms_(forms) {
    matrix = take_matrix<T>(arena, problem.chunk, problem.dv, forms);
    factor = arena.take<A<T>>(problem.chunk);
    dden = arena.take<A<T>>(problem.chunk);
  }
  int64_t read(const Segment& s, int64_t h, int64_t begin, int64_t count) {
    const int64_t rows = round_up(count, kUnit<T>);
    for (int64_t r = 0; r < rows; ++r) factor[r] = dden[r] = 0;
    Rows<T> grads(p_.grad_out, s.b, h, begin, count, p_.Dv);
    for (int64_t r = max(s.seen_from - begin, 0); r < count; ++r) {
      factor[r] = A<T>(p_.scale);
      if (!p_.normalize) continue;
      const A<T> den = static_cast<const A<T>*>(p_.den.data)[offset(p_.den, s.b, h, begin + r)];
      factor[r] = is_empty(p_, den) ? A<T>(0) : row_factor(p_, den);
      if (is_empty(p_, den)) continue;
      const T* out = static_cast<const T*>(p_.out.data) + offset(p_.out, s.b, h, begin + r);
      V<T> sum{};
      for (int64_t c = 0; c < p_.Dv; c += N<T>)
        sum += load_row<A<T>>(out + c, 1, p_.Dv - c) *
               load_row<A<T>>(grads.data + r * grads.row + c * grads.column, grads.column, p_.Dv - c);
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
};

// Rows of `result` as the gradient of a tensor that was mapped; zero where `shown` hides them.
template <class T, FeatureMap kMap>
inline void write_grad(const View& grad, const View& input, const A<T>* result, int64_t room, int64_t b,
                       int64_t h, int64_t begin, int64_t count, int64_t columns, const Rows<T>& shown) {
  for (int64_t r = 0; r < count; ++r) {
    T* to = static_cast<T*>(grad.data) + offset(grad, b, h, begin + r);
    const T* x = static_cast<const T*>(input.data) + offset(input, b, h, begin + r);
    const bool zero = !shown.is_shown(r);
    for (int64_t c = 0; c < columns; c += N<T>) {
      V<T> g{};
      if (!zero) {
        g = load(at<T>(const_cast<A<T>*>(result), room, r, c));
        if constexpr (kMap != FeatureMap::identity)
          g *= feature_slope<T, kMap>(load_row<A<T>>(x + c * input.stride[3], input.stride[3], columns - c));
      }
      store_row<A<T>>(to + c * grad.stride[3], grad.stride[3], columns - c, g);
    }
  }
}

// m [rows, columns] += scale[r] vector[c], times weight[r] where given.
template <class T>
inline void add_outer(A<T>* m, int64_t room, int64_t rows, int64_t columns, const A<T>* scale,
                      const A<T>* weight, const A<T>* vector) {
  for (int64_t r = 0; r < rows; ++r) {
    if (scale && scale[r] == A<T>(0)) continue;
    const A<T> factor = (scale ? scale[r] : A<T>(1)) * (weight ? weight[r] : A<T>(1));
    for (int64_t c = 0; c < columns; c += N<T>) {
      A<T>* p = at<T>(m, room, r, c);
      store(p, load(p) + factor * load(vector + c));
    }
  }
}

// Row r of a, times row r of b, summed.
template <class T>
inline A<T> dot_rows(A<T>* a, A<T>* b, int64_t room, int64_t r, int64_t columns) {
  V<T> sum{};
  for (int64_t c = 0; c < columns; c += N<T>) sum += load(at<T>(a, room, r, c)) * load(at<T>(b, room, r, c));
  return reduce_add<A<T>>(sum);
}

// What the gradient of decay takes from the walk in order: the states before every chunk, and for every token
// the part of grad phi(q).phi(q) that came through the state.
template <class T>
struct Flow {
  A<T>* states;   // [chunks of the segment, kinds, size]
  A<T>* queries;  // [kinds, tokens of the segment]
};

// grad phi(q): x, y and z are dO, v and phi(k).
template <class T>
class QueryGrad : public Walk<T, QueryGrad<T>> {
  using Base = Walk<T, QueryGrad<T>>;
  using Base::problem_, Base::y_, Base::z_, Base::weights_, Base::decay_, Base::result_;

 public:
  using Base::kinds, Base::states;

  QueryGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena)
      : Base(problem, arena, problem.dv, problem.d, p.normalize || p.grad_z.data),
        p_(p),
        grad_(problem, p, arena, kLeft) {
    if (p.grad_decay.data) query_ = take_matrix<T>(arena, problem.chunk, problem.d, 0);
  }
  void add_initial(int64_t n, int64_t h, State<T>& state) const {
    if (p_.initial_z.data) add_state(p_, p_.initial_kv, p_.initial_z, n, h, true, state);
  }
  void record(const Flow<T>& flow) { flow_ = flow; }

  const Matrix<T>& counted() const { return z_; }
  void read(int64_t b, int64_t hk, int64_t begin, int64_t count) {
    Rows<T> values(p_.value, b, hk, begin, count, p_.Dv), keys(p_.key, b, hk, begin, count, p_.D);
    values.hide(p_.key_padding, b, begin);
    keys.hide(p_.key_padding, b, begin);
    const int64_t rows = fill<T, FeatureMap::identity>(values, y_);
    with_map(p_.feature_map, [&]<FeatureMap kMap>() { fill<T, kMap>(keys, z_); });
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
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D);
    queries.hide_blind(s, begin);
    with_map(p_.feature_map, [&]<FeatureMap kMap>() {
      write_grad<T, kMap>(p_.grad_query, p_.query, result_, problem_.chunk, s.b, h, begin, count, p_.D,
                          queries);
    });
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
    const int64_t at_token = begin - s.begin, size = states[0].size;
    std::memcpy(flow_.states + (at_token / problem_.chunk * kinds + kind) * size, state.kv.natural,
                size_t(size) * sizeof(A<T>));
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D);
    queries.hide_blind(s, begin);
    with_map(p_.feature_map, [&]<FeatureMap kMap>() { fill<T, kMap>(queries, query_); });
    for (int64_t r = 0; r < count; ++r)
      flow_.queries[kind * tokens + at_token + r] =
          dot_rows<T>(query_.natural, result_, problem_.chunk, r, problem_.d);
  }

  const LinearAttentionGradParams& p_;
  OutputGrad<T> grad_;
  Matrix<T> query_;
  Flow<T> flow_{};
};

// grad phi(k) and grad v, in reverse.
template <class T>
class KeyGrad {
 public:
  int64_t kinds;
  State<T>* states;

  KeyGrad(const Problem<T>& problem, const LinearAttentionGradParams& p, Arena& arena)
      : problem_(problem), p_(p), grad_(problem, p, arena, kRight | kRightT) {
    const int64_t chunk = problem.chunk;
    decay_.take(arena, problem);
    key_ = take_matrix<T>(arena, chunk, problem.d, kLeft);
    value_ = take_matrix<T>(arena, chunk, problem.dv, kLeft);
    query_ = take_matrix<T>(arena, chunk, problem.d, kRight | kRightT | kLeftT, decay_.on);
    weights_.take(arena, problem);
    grad_key_ = arena.take<A<T>>(chunk * round_up(problem.d, kPanel<T>));
    grad_value_ = arena.take<A<T>>(chunk * round_up(problem.dv, kPanel<T>));
    scale_ = arena.take<A<T>>(chunk);
    kinds = kinds_of(problem, p);
    states = arena.take<State<T>>(kinds);
    for (int64_t k = 0; k < kinds; ++k)
      states[k].take(arena, problem.d, problem.dv, problem.d, kRight | kRightT);
    has_z_ = p.normalize || p.grad_z.data;
    if (!p.grad_decay.data) return;
    grad_weights_.take(arena, problem);
    through_state_ = arena.take<A<T>>(chunk * round_up(problem.d, kPanel<T>));
    turned_ = arena.take<A<T>>(problem.dv * round_up(problem.d, kPanel<T>));
    column_ = arena.take<A<T>>(chunk);
    keys_flow_ = arena.take<A<T>>(chunk);
    inner_flow_ = arena.take<A<T>>(chunk);
  }
  static int64_t kinds_of(const Problem<T>& problem, const LinearAttentionParams& p) {
    return p.decay.data || p.initial_z.data ? problem.group : 1;
  }
  void clear() {
    for (int64_t k = 0; k < kinds; ++k) states[k].clear();
  }
  // The gradient of the final state.
  void add_final(int64_t n, int64_t hk, int64_t kind, State<T>& state) const {
    if (!p_.grad_kv.data && !p_.grad_z.data) return;
    for (int64_t g = 0; g < problem_.group; ++g)
      if (kinds == 1 || g == kind)
        add_state(p_, p_.grad_kv, p_.grad_z, n, hk * problem_.group + g, false, state);
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
      Rows<T> values(p_.value, s.b, hk, begin, count, p_.Dv), keys(p_.key, s.b, hk, begin, count, p_.D);
      values.hide(p_.key_padding, s.b, begin);
      keys.hide(p_.key_padding, s.b, begin);
      const int64_t rows = fill<T, FeatureMap::identity>(values, value_);
      with_map(p_.feature_map, [&]<FeatureMap kMap>() { fill<T, kMap>(keys, key_); });
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
      with_map(p_.feature_map, [&]<FeatureMap kMap>() {
        write_grad<T, kMap>(p_.grad_key, p_.key, grad_key_, problem_.chunk, s.b, hk, begin, count, p_.D,
                            keys);
      });
      write_grad<T, FeatureMap::identity>(p_.grad_value, p_.value, grad_value_, problem_.chunk, s.b, hk,
                                          begin, count, p_.Dv, values);
    }
  }

 private:
  int64_t last_chunk(const Segment& s) const {
    return s.begin + (s.end - s.begin - 1 + problem_.chunk) / problem_.chunk * problem_.chunk -
           problem_.chunk;
  }
  int64_t read_queries(const Segment& s, int64_t h, int64_t begin, int64_t count) {
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D);
    queries.hide_blind(s, begin);
    with_map(p_.feature_map, [&]<FeatureMap kMap>() { fill<T, kMap>(queries, query_); });
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
    const int64_t size = problem_.state_size(problem_.dv, problem_.d);
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
    const View& view = p_.grad_decay;
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
      const int64_t x = offset(view, s.b, h, begin + t);
      if (view.dtype == p_.query.dtype)
        store_row<A<T>>(static_cast<T*>(view.data) + x, 1, 1, broadcast(A<T>(grad)));
      else
        static_cast<A<T>*>(view.data)[x] = A<T>(grad);
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

template <class T>
inline void backward(const LinearAttentionGradParams& p, const Parallel& parallel) {
  if (p.H == 0) return;
  const Problem<T> problem(p);
  const int64_t heads = p.Hkv;
  const std::vector<Segment> keys = problem.segments(p.S, parallel.threads);
  const std::vector<Segment> queries = p.causal ? keys : problem.segments(p.L, parallel.threads);
  const bool whole = int64_t(keys.size()) == p.N && int64_t(queries.size()) == p.N;
  const int64_t kinds = QueryGrad<T>::kinds_of(problem), grad_kinds = KeyGrad<T>::kinds_of(problem, p);
  const int64_t key_items = int64_t(keys.size()) * heads, query_items = int64_t(queries.size()) * heads;
  const Buffer<double> decay_sums(p.grad_decay.data && p.decay_per_head ? key_items * grad_kinds : 0);

  // States between segments, where there are any.
  const std::vector<Segment> none;
  const SegmentStates<T> before(whole ? none : keys, heads, kinds, problem.dv, problem.d, problem.d);
  const SegmentStates<T> behind(whole ? none : queries, heads, grad_kinds, problem.d, problem.dv, problem.d);
  if (!whole) {
    for_each_item<T>(parallel, key_items + query_items, [&](int64_t task, Arena& arena) {
      const bool of_keys = task < key_items;
      const int64_t item = of_keys ? task : task - key_items, s = item / heads, hk = item % heads;
      A<T>* decays = arena.take<A<T>>(problem.group);
      if (of_keys) {
        if (p.causal && keys[s].last) return;
        QueryGrad<T> walk(problem, p, arena);
        walk.clear();
        walk.walk(keys[s], hk, false, true, decays);
        for (int64_t k = 0; k < kinds; ++k) before.put(s, hk, k, walk.states[k], decays[k]);
      } else {
        if (p.causal && queries[s].first) return;
        KeyGrad<T> walk(problem, p, arena);
        walk.clear();
        walk.absorb(queries[s], hk, decays);
        for (int64_t k = 0; k < grad_kinds; ++k) behind.put(s, hk, k, walk.states[k], decays[k]);
      }
    });
    before.carry(parallel, p.causal, false, [&](int64_t n, int64_t hk, int64_t kind, State<T>& state) {
      if (p.initial_z.data)
        add_state(p, p.initial_kv, p.initial_z, n, hk * problem.group + kind, true, state);
    });
    behind.carry(parallel, p.causal, true, [&](int64_t n, int64_t hk, int64_t kind, State<T>& state) {
      for (int64_t g = 0; g < problem.group; ++g)
        if (grad_kinds == 1 || g == kind)
          add_state(p, p.grad_kv, p.grad_z, n, hk * problem.group + g, false, state);
    });
  }

  auto grad_queries = [&](int64_t s, int64_t hk, Arena& arena, const Flow<T>* flow) {
    const Segment& segment = queries[s];
    QueryGrad<T> walk(problem, p, arena);
    if (whole) {
      walk.clear();
      for (int64_t k = 0; k < kinds; ++k) walk.add_initial(segment.n, hk * problem.group + k, walk.states[k]);
      if (!p.causal) walk.walk(keys[s], hk, false, true, nullptr);
    } else {
      for (int64_t k = 0; k < kinds; ++k)
        before.get(p.causal ? s : before.first_of(segment.n), hk, k, walk.states[k]);
    }
    if (flow) walk.record(*flow);
    if (p.causal)
      walk.walk(segment, hk, true, false, nullptr);
    else
      walk.look_up(segment, hk);
  };
  auto grad_keys = [&](int64_t s, int64_t hk, Arena& arena, const Flow<T>* flow) {
    const Segment& segment = keys[s];
    KeyGrad<T> walk(problem, p, arena);
    if (whole) {
      walk.clear();
      for (int64_t k = 0; k < grad_kinds; ++k) walk.add_final(segment.n, hk, k, walk.states[k]);
      A<T>* decays = arena.take<A<T>>(problem.group);
      if (!p.causal) walk.absorb(queries[s], hk, decays);
    } else {
      for (int64_t k = 0; k < grad_kinds; ++k)
        behind.get(p.causal ? s : behind.last_of(segment.n), hk, k, walk.states[k]);
    }
    double* sums = decay_sums.data() ? decay_sums.data() + (s * heads + hk) * grad_kinds : nullptr;
    for (int64_t k = 0; k < grad_kinds && sums; ++k) sums[k] = 0;
    walk.walk(segment, hk, p.causal, segment.first && p.grad_initial_z.data, flow, sums);
    if (segment.first) walk.finish(segment.n, hk);
  };

  if (p.grad_decay.data) {  // one after the other: the second reads what the first has recorded
    for_each_item<T>(parallel, key_items, [&](int64_t task, Arena& arena) {
      const int64_t s = task / heads, hk = task % heads, tokens = keys[s].end - keys[s].begin;
      const int64_t chunks = (tokens + problem.chunk - 1) / problem.chunk;
      const Buffer<A<T>> states(chunks * kinds * problem.state_size(problem.dv, problem.d));
      const Buffer<A<T>> flows(kinds * tokens);
      const Flow<T> flow{states.data(), flows.data()};
      grad_queries(s, hk, arena, &flow);
      grad_keys(s, hk, arena, &flow);
    });
  } else {  // the longer tasks first
    for_each_item<T>(parallel, key_items + query_items, [&](int64_t task, Arena& arena) {
      if (task < key_items)
        grad_keys(task / heads, task % heads, arena, nullptr);
      else
        grad_queries((task - key_items) / heads, (task - key_items) % heads, arena, nullptr);
    });
  }
  if (p.grad_decay.data && p.decay_per_head)  // also where there are no sequences
    for (int64_t h = 0; h < p.H; ++h) {
      double sum = 0;
      for (size_t s = 0; s < keys.size(); ++s)
        sum += decay_sums.data()[(int64_t(s) * heads + h / problem.group) * grad_kinds + h % problem.group];
      const int64_t x = offset(p.grad_decay, 0, h);
      if (p.grad_decay.dtype == p.query.dtype)
        store_row<A<T>>(static_cast<T*>(p.grad_decay.data) + x, 1, 1, broadcast(A<T>(sum)));
      else
        static_cast<A<T>*>(p.grad_decay.data)[x] = A<T>(sum);
    }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
