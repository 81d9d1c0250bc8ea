// Linear attention forward: chunks of tokens in order, each reading the state of those before it.
#pragma once
#include "linear_attention_segments.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// What the rows of phi(q) S are multiplied with: 1 / (den + eps).
template <class A, class Params>
inline A row_factor(const Params& p, A den) {
  return p.normalize ? A(1) / (den + A(p.eps)) : A(p.scale);
}
// Whether there is no such number: the row is zero then. An infinite den has one, 0, and hides nothing: what
// it divides may be infinite too.
template <class A, class Params>
inline bool is_empty(const Params& p, A den) {
  return p.normalize && (den == A(0) || __builtin_isinf(row_factor(p, den)));
}

// One thread's walk over the tokens of one key/value head: sum_{j <= i} (x_i.y_j) z_j, chunk by chunk. The
// query heads of its group have a state each (`kinds` of them), or one together where neither decay nor an
// initial state tells them apart. `Derived` says what x, y and z are:
//   read(b, hk, begin, count)  reads y and z
//   emit(segment, h, begin, count, state, ordered)  reads x, writes results
//   counted()                  the matrix whose rows are summed beside the state
template <class T, class Derived>
class Walk {
 public:
  int64_t kinds;
  State<T>* states;  // of one of the heads that are walked in turn

  void turn_to(int64_t head) { states = all_states_ + head * kinds; }
  void clear() {
    for (int64_t k = 0; k < kinds; ++k) states[k].clear();
  }
  // What the tokens of a segment add to the states (but its last chunk, unless `absorb_last`), and their
  // results. `decays` [kinds], if given, becomes the decay over all of them.
  void walk(const Segment& s, int64_t hk, bool emit, bool absorb_last, A<T>* decays) {
    auto& self = static_cast<Derived&>(*this);
    for (int64_t k = 0; k < kinds && decays; ++k) decays[k] = A<T>(1);
    for (int64_t begin = s.begin; begin < s.end; begin += problem_.chunk) {
      const int64_t count = min(problem_.chunk, s.end - begin);
      const bool absorb = absorb_last || begin + count < s.end;
      const int64_t rows = round_up(count, kUnit<T>);
      self.read(s.b, hk, begin, count);
      for (int64_t g = 0; g < problem_.group; ++g) {
        const int64_t h = hk * problem_.group + g;
        State<T>& state = states[kinds > 1 ? g : 0];
        const bool last = kinds > 1 || g == problem_.group - 1;
        if (!emit && !last) continue;
        decay_.read(problem_, s.b, h, begin, count);
        if (emit) {
          if (kPairs<T> && (kinds > 1 || g == 0) && !state.zero) form(state.kv, state.kv.rows, kRight);
          self.emit(s, h, begin, count, state, true);
        }
        if (!last || !absorb) continue;
        form_left_t(y_, rows, decay_.scale_out());
        const A<T> carry = state.zero ? A<T>(0) : decay_.total;
        if (keep_z_) add_rows(self.counted(), rows, decay_.scale_out(), carry, state.z);
        update_state(state, y_, z_, rows, carry, upcoming_);
        if (decays) decays[kinds > 1 ? g : 0] *= decay_.total;
      }
    }
  }
  // Results of a segment whose rows all see the same state.
  void look_up(const Segment& s, int64_t hk) {
    auto& self = static_cast<Derived&>(*this);
    if (kPairs<T>)
      for (int64_t k = 0; k < kinds; ++k) form(states[k].kv, states[k].kv.rows, kRight);
    for (int64_t begin = s.begin; begin < s.end; begin += problem_.chunk)
      for (int64_t g = 0; g < problem_.group; ++g)
        self.emit(s, hk * problem_.group + g, begin, min(problem_.chunk, s.end - begin),
                  states[kinds > 1 ? g : 0], false);
  }

 protected:
  // x and y [chunk, state.rows], z [chunk, state.columns]
  Walk(const Problem<T>& problem, Arena& arena, const StateShape<T>& state, bool keep_z, int64_t heads = 1)
      : problem_(problem), p_(problem.p), keep_z_(keep_z) {
    decay_.take(arena, problem);
    y_ = take_matrix<T>(arena, problem.chunk, state.rows, kRightT | kLeftT, decay_.on);
    z_ = take_matrix<T>(arena, problem.chunk, state.columns, kRight);
    weights_.take(arena, problem);
    result_ = arena.take<A<T>>(problem.chunk * round_up(state.columns, kPanel<T>));
    kinds = problem.kinds();
    all_states_ = arena.take<State<T>>(heads * kinds);
    for (int64_t k = 0; k < heads * kinds; ++k) all_states_[k].take(arena, state, kRight);
    turn_to(0);
    const bool enough = kinds == problem.group && problem.d * problem.dv >= 64 * 64;
    upcoming_ = p_.causal && !problem.alone && enough && !kPairs<T> ? &next_ : nullptr;
  }
  // Terms of x S.
  int through_state(const Matrix<T>& x, const State<T>& state, bool ordered, Term<T>* terms) const {
    if (state.zero) return 0;
    return state_terms(x, state.kv.right, state.kv.right_low, state.kv.rows,
                       ordered ? decay_.scale_into() : nullptr, terms);
  }

  const Problem<T>& problem_;
  const LinearAttentionParams& p_;
  Matrix<T> y_, z_;
  Weights<T> weights_;
  Decay<T> decay_;
  A<T>* result_;
  bool keep_z_;
  State<T>* all_states_;
  // Brings the next chunk where products are enough to hide that: a large state for every query head. Else
  // its rows are fetched while those of this one are read.
  Upcoming next_;
  Upcoming* upcoming_;
};

// out: x, y and z are phi(q), phi(k) and v.
template <class T>
class Forward : public Walk<T, Forward<T>> {
  using Base = Walk<T, Forward<T>>;
  using Base::problem_, Base::p_, Base::y_, Base::z_, Base::weights_, Base::decay_, Base::result_;
  using Base::upcoming_;

 public:
  using Base::kinds, Base::states;

  Forward(const Problem<T>& problem, Arena& arena, int64_t heads = 1)
      : Base(problem, arena, problem.state_shape(false), problem.p.normalize || problem.p.final_z.data,
             heads) {
    query_ = take_matrix<T>(arena, problem.chunk, problem.d, kLeft);
    sums_ = arena.take<V<T>>(problem.chunk);
    den_ = arena.take<A<T>>(problem.chunk);
  }
  void finish(int64_t n, int64_t hk) const {
    if (!p_.final_z.data) return;
    for (int64_t g = 0; g < problem_.group; ++g)
      write_state(p_, states[kinds > 1 ? g : 0], p_.final_kv, p_.final_z, n, hk * problem_.group + g);
  }

  const Matrix<T>& counted() const { return y_; }
  void read(int64_t b, int64_t hk, int64_t begin, int64_t count) {
    const int64_t step = problem_.chunk;
    Rows<T> values(p_.value, b, hk, begin, count, p_.Dv, step);
    Rows<T> keys(p_.key, b, hk, begin, count, p_.D, step);
    values.hide(p_.key_padding, b, begin).bring_next(upcoming_);
    keys.hide(p_.key_padding, b, begin).bring_next(upcoming_);
    const int64_t rows = fill(FeatureMap::identity, values, z_);
    fill(p_.feature_map, keys, y_);
    form(z_, rows, kRight);
    form(y_, rows, kRightT);
  }
  void emit(const Segment& s, int64_t h, int64_t begin, int64_t count, const State<T>& state, bool ordered) {
    Rows<T> queries(p_.query, s.b, h, begin, count, p_.D, problem_.chunk);
    queries.hide_blind(s, begin).bring_next(upcoming_);
    const int64_t rows = fill(p_.feature_map, queries, query_);
    form(query_, rows, kLeft);
    Term<T> terms[3];
    int all = Base::through_state(query_, state, ordered, terms);
    if (ordered) {
      multiply_weights(Part::lower, query_, y_, rows, weights_, upcoming_);
      finish_weights<T, Part::lower>(weights_, rows, decay_, nullptr, nullptr,
                                     p_.normalize ? sums_ : nullptr);
      terms[all++] = {weights_.left, weights_.room, z_.right, z_.rows, rows, Part::lower};
    }
    Format<T>::multiply(rows, problem_.dv, terms, all, Part::all, A<T>(0), result_, problem_.chunk,
                        upcoming_);
    if (p_.normalize) denominators(s.b, h, begin, count, state, ordered);
    with_dtype_beside<T>(p_.out.dtype, [&]<class S>(S) { write_rows_of<S>(s.b, h, begin, count); });
  }

 private:
  // den = sum of weights + phi(q).z
  void denominators(int64_t b, int64_t h, int64_t begin, int64_t count, const State<T>& state, bool ordered) {
    for (int64_t first = 0; first < count; first += N<T>) {
      V<T> rows[N<T>] = {};
      if (!state.zero)
        for_row<T>(query_.rows, first, problem_.d, [&](int64_t c, int64_t x) {
          const V<T> z = load(state.z + c);
#pragma GCC unroll 16
          for (int i = 0; i < N<T>; ++i) rows[i] += load(query_.natural + x + i * kPanel<T>) * z;
        });
      for (int i = 0; i < N<T> && ordered; ++i) {
        if (decay_.on) rows[i] = scaled<A<T>>(rows[i], decay_.into[first + i]);
        rows[i] += sums_[first + i];
      }
      store(den_ + first, reduce_rows<A<T>>(rows));
    }
    std::memcpy(static_cast<A<T>*>(p_.den.data) + offset(p_.den, b, h, begin), den_,
                size_t(count) * sizeof(A<T>));
  }
  template <class S>
  __attribute__((noinline)) void write_rows_of(int64_t b, int64_t h, int64_t begin, int64_t count) {
    if (upcoming_) {
      const S* next = static_cast<const S*>(p_.out.data) + offset(p_.out, b, h, begin + problem_.chunk);
      upcoming_->add(next, p_.out.stride[2] * int64_t(sizeof(S)), count, p_.Dv * int64_t(sizeof(S)));
    }
    for (int64_t r = 0; r < count; ++r) {
      const V<T> factor = broadcast(p_.normalize ? row_factor(p_, den_[r]) : A<T>(p_.scale));
      const bool empty = p_.normalize && is_empty(p_, den_[r]);
      S* out = static_cast<S*>(p_.out.data) + offset(p_.out, b, h, begin + r);
      for_row<T>(problem_.chunk, r, p_.Dv, [&](int64_t c, int64_t x) {
        store_row<A<T>>(out + c, 1, p_.Dv - c, empty ? V<T>{} : load(result_ + x) * factor);
      });
    }
  }

  Matrix<T> query_;
  V<T>* sums_;
  A<T>* den_;
};

// f(task, arena) with what a thread needs for it.
template <class T, class F>
inline void for_each_item(const Parallel& parallel, int64_t tasks, F&& f) {
  for_each_task(parallel, tasks, [&](int64_t task, int) {
    typename Format<T>::Configuration configuration;
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    f(task, arena);
  });
}

template <class T>
inline void forward(const LinearAttentionParams& p, const Parallel& parallel) {
  if (p.H == 0 || p.N == 0) return;
  const Problem<T> problem(p);
  const Segments segments = problem.segments(parallel.threads);
  const std::vector<Segment>&keys = segments.keys, &queries = segments.queries;
  const int64_t heads = p.Hkv, kinds = problem.kinds();
  // States between segments, where there are any.
  const SegmentStates<T> states(keys, heads, kinds, problem.state_shape(false));
  auto add_initial = [&](int64_t n, int64_t hk, int64_t kind, State<T>& state) {
    if (p.initial_z.data) add_state(p, p.initial_kv, p.initial_z, n, hk * problem.group + kind, false, state);
  };
  if (!states.empty()) {
    for_each_item<T>(parallel, int64_t(keys.size()) * heads, [&](int64_t task, Arena& arena) {
      const int64_t s = task / heads, hk = task % heads;
      if (keys[s].alone || (p.causal && keys[s].last)) return;
      Forward<T> walk(problem, arena);
      A<T>* decays = arena.take<A<T>>(kinds);
      walk.clear();
      walk.walk(keys[s], hk, false, true, decays);
      for (int64_t k = 0; k < kinds; ++k) states.put(s, hk, k, walk.states[k], decays[k]);
    });
    states.carry(parallel, p.causal, false, add_initial);
  }
  auto start = [&](Forward<T>& walk, int64_t s, int64_t hk) {
    const Segment& segment = queries[s];
    if (segment.alone) {
      walk.clear();
      for (int64_t k = 0; k < kinds; ++k) add_initial(segment.n, hk, k, walk.states[k]);
      if (!p.causal) walk.walk(keys[s], hk, false, true, nullptr);
    } else {
      for (int64_t k = 0; k < kinds; ++k)
        states.get(p.causal ? s : states.first_of(segment.n), hk, k, walk.states[k]);
    }
  };
  const int64_t together = problem.heads_together(int64_t(queries.size()), parallel.threads);
  for_each_item<T>(parallel, int64_t(queries.size()) * heads / together, [&](int64_t task, Arena& arena) {
    const int64_t s = task * together / heads, first = task * together % heads;
    const Segment& segment = queries[s];
    Forward<T> walk(problem, arena, together);
    auto each_head = [&](auto&& f) {
      for (int64_t i = 0; i < together; ++i) {
        walk.turn_to(i);
        f(first + i);
      }
    };
    each_head([&](int64_t hk) { start(walk, s, hk); });
    for (Segment span = segment; span.begin < segment.end; span.begin = span.end) {
      if (together > 1) span.end = min(span.begin + problem.kSpan, segment.end);
      const bool absorb_last = span.end < segment.end || (segment.last && p.final_z.data);
      each_head([&](int64_t hk) {
        if (p.causal)
          walk.walk(span, hk, true, absorb_last, nullptr);
        else
          walk.look_up(span, hk);
      });
    }
    if (segment.last) each_head([&](int64_t hk) { walk.finish(segment.n, hk); });
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
