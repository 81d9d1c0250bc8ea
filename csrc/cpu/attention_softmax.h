// The softmax of a tile as blocks of keys go by, and the way from its log-sum-exp back to weights.
#pragma once
#include "attention_scores.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Of one tile. Weights are 2^(score - reference). The reference is the rounded-up maximum of the first keys,
// an integer so that rescaling is exact. It moves only when a later score exceeds it by more than kHeadroom
// (a weight of 2^16 costs no precision), so that the maximum is found in the same pass that forms the
// weights.
template <class T>
struct State {
  V<T> reference[NV], sum[NV];
  bool started;  // the reference comes from scores
  bool exact;    // references beyond kExact: scores are rounded to log2 units first
  A<T>* out;     // out^T [Dv][kTile]
};
constexpr float kHeadroom = 16;
// What one block adds to a state.
template <class T>
struct Added {
  V<T> sum[NV], top[NV];
  FASTATTN_INLINE void clear() {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[v] = V<T>{}, top[v] = V<T>{} - kInf<T>;
  }
};

template <class Vector>
FASTATTN_INLINE Vector finite_or_zero(Vector m) {
  return m == -__builtin_inff() ? Vector{} : m;
}

// Moves the reference to cover the scores of keys [from, to) and rescales what has been summed.
template <class T>
inline void raise_reference(const Problem<T>& problem, const Tile<T>& tile, const Scores<T>& s, int64_t from,
                            int64_t to, State<T>& state) {
  const A<T>* rows = s.row(from);
  for (int v = 0; v < tile.vectors; ++v) {
    V<T> top = V<T>{} - kInf<T>;
    for (int64_t j = 0; j < to - from; ++j) top = maximum(top, load(rows + j * kTile<T> + v * N<T>));
    V<T> reference = maximum(state.reference[v], ceil(top * s.factor));
    if (state.started && any(reference != state.reference[v])) {
      V<T> alpha = exp2<>(state.reference[v] - finite_or_zero(reference));
      state.sum[v] *= alpha;
      for (int64_t d = 0; d < problem.p.Dv; ++d) {
        A<T>* at = state.out + d * kTile<T> + v * N<T>;
        store(at, load(at) * alpha);
      }
    }
    state.reference[v] = reference;
  }
  state.started = true;
  state.exact = false;
  for (int v = 0; v < NV; ++v) {
    const V<T> reference = finite_or_zero(state.reference[v]);
    state.exact |= any((reference > kExact<T>) | (reference < -kExact<T>));
  }
}

// P^T of keys [from, to) as parts, in units of two keys, (j, j + N) of 2 N, that products can be formed
// beside.
template <class T>
class WeighUnits {
 public:
  FASTATTN_INLINE WeighUnits(const Scores<T>& s, int64_t from, E<T>* weights, const State<T>& state,
                             const Added<T>& added)
      : factor_(s.factor), rows_(s.row(from)), to_(weights + from * kParts<T> * kTile<T>) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      shift_[v] = finite_or_zero(state.reference[v]), sum_[v] = added.sum[v], top_[v] = added.top[v];
  }
  static int64_t units(int64_t from, int64_t to) { return (to - from) / 2; }
  // keep(p, v, j) is what dropout leaves of a weight of vector v and key from + j; `kept`: weights also go
  // over the scores.
  template <class F>
  FASTATTN_INLINE void run(int64_t unit, bool kept, F&& keep) {
    const int64_t j = unit + round_down(unit, N<T>);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      V<T> p[2];
#pragma GCC unroll 2
      for (int u = 0; u < 2; ++u) {
        A<T>* at = rows_ + (j + u * N<T>)*kTile<T> + v * N<T>;
        const V<T> score = load(at);
        top_[v] = maximum(top_[v], score);
        p[u] = exp2<>(score * factor_ - shift_[v]);
        sum_[v] += p[u];
        p[u] = keep(p[u], v, j + u * N<T>);
        if (kept) store(at, p[u]);
      }
      bool finite = true;
      store_parts(to_ + 2 * unit * kParts<T> * kTile<T> + v * 2 * N<T>, 2 * kTile<T>,
                  split(p[0], p[1], finite));
    }
  }
  FASTATTN_INLINE void operator()(int64_t unit) {
    run(unit, false, [](V<T> p, int, int64_t) __attribute__((always_inline)) { return p; });
  }
  FASTATTN_INLINE void end(Added<T>& added) const {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) added.sum[v] = sum_[v], added.top[v] = top_[v];
  }

 private:
  const A<T> factor_;
  A<T>* const rows_;
  E<T>* const to_;
  V<T> shift_[NV], sum_[NV], top_[NV];
};
// P^T of keys [from, to), for kVectors vectors of the tile: into `weights` as pairs, or over the scores.
template <int kVectors, class T>
inline void weigh_vectors(const Problem<T>& problem, const Tile<T>& tile, const Scores<T>& s, int64_t from,
                          int64_t to, E<T>* weights, const State<T>& state, Added<T>& added) {
  constexpr int kDegree = kPairs<T> ? 3 : 6;  // a weight in a pair is rounded to bf16
  V<T> shift[kVectors], sum[kVectors], top[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    shift[v] = finite_or_zero(state.reference[v]), sum[v] = added.sum[v], top[v] = added.top[v];
  const bool dropout = problem.has_dropout();
  const A<T> factor = s.factor;
  A<T>* rows = s.row(from);
  constexpr int kUnroll = kPairs<T> ? 2 : 1;
  for (int64_t j = from; j < to; j += kUnroll) {
    V<T> p[kUnroll][kVectors];
#pragma GCC unroll 2
    for (int u = 0; u < kUnroll; ++u)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        V<T> score = load(rows + (j - from + u) * kTile<T> + v * N<T>);
        top[v] = maximum(top[v], score);
        p[u][v] = exp2<kDegree>(score * factor - shift[v]);
        sum[v] += p[u][v];
      }
    if (dropout)
#pragma GCC unroll 2
      for (int u = 0; u < kUnroll; ++u)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) p[u][v] *= dropout_keep(problem, tile, v, s.block_begin + j + u);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kPairs<T>)
        store_pair(weights + j * kTile<T> + v * 2 * N<T>, p[0][v], p[1][v]);
      else
        store(rows + (j - from) * kTile<T> + v * N<T>, p[0][v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) added.sum[v] = sum[v], added.top[v] = top[v];
}
template <class T>
inline void weigh(const Problem<T>& problem, const Tile<T>& tile, const Scores<T>& s, int64_t from,
                  int64_t to, E<T>* weights, const State<T>& state, Added<T>& added) {
  if constexpr (kParts<T> > 1) {
    WeighUnits<T> units(s, from, weights, state, added);
    const bool dropout = problem.has_dropout();
    for (int64_t unit = 0; unit < units.units(from, to); ++unit)
      units.run(unit, s.kept, [&](V<T> p, int v, int64_t j) {
        return dropout ? p * dropout_keep(problem, tile, v, s.block_begin + from + j) : p;
      });
    units.end(added);
  } else if (!kPairs<T> && tile.vectors == 1) {
    weigh_vectors<1>(problem, tile, s, from, to, weights, state, added);
  } else {
    weigh_vectors<NV>(problem, tile, s, from, to, weights, state, added);
  }
}
// Takes over what a block added; false where a score exceeds the headroom, or is too large for this, and the
// block must be weighed again.
template <class T>
inline bool accept(const Scores<T>& s, State<T>& state, const Added<T>& added) {
  if (state.exact) return false;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v)
    if (any(added.top[v] * s.factor > state.reference[v] + kHeadroom)) return false;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) state.sum[v] += added.sum[v];
  return true;
}
// The whole span of a block whose scores stand, after its reference has been raised.
template <class T>
inline void weigh_again(const Problem<T>& problem, const Tile<T>& tile, Scores<T>& s, E<T>* weights,
                        State<T>& state) {
  s.apply_factor();
  raise_reference(problem, tile, s, s.span.begin, s.span.end, state);
  Added<T> added;
  added.clear();
  weigh(problem, tile, s, s.span.begin, s.span.end, weights, state, added);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) state.sum[v] += added.sum[v];
}

// out^T += V^T P^T, but for parts: see BlockStep.
template <class T>
inline void add_values(const Tile<T>& tile, KeyBlock<T>& block, Span span, const E<T>* weights, int64_t rows,
                       A<T>* out) {
  for_visible(tile, block.begin, span, [&](Span part, auto vectors, int lane) {
    Format<T>::template outputs<vectors>(rows, part.end - part.begin, block.value_t.at(0, part.begin),
                                         block.value_t.ld, weights + part.begin * kTile<T> + lane, out + lane,
                                         &block.ahead, block.finite);
  });
}

// The sink of head h in log2 units.
template <class T>
inline A<T> sink(const AttentionParams& p, int64_t h) {
  int64_t at = h * p.sinks.stride[0];
  A<T> natural = 0;
  if (p.sinks.dtype == DType::f32)
    natural = A<T>(static_cast<const float*>(p.sinks.data)[at]);
  else
    with_dtype_beside<T>(p.sinks.dtype, [&]<class S>(S) {
      natural = A<T>(to_float(static_cast<const S*>(p.sinks.data)[at]));
    });
  return to_log2<T>(V<T>{} + natural)[0];
}

template <class T>
inline void start_state(const Problem<T>& problem, const Tile<T>& tile, bool with_sink, State<T>& state) {
  state.started = problem.p.sinks.data && with_sink;
  state.exact = false;
  for (int v = 0; v < NV; ++v) {
    state.reference[v] = V<T>{} - kInf<T>;
    state.sum[v] = V<T>{};
    if (problem.p.sinks.data && with_sink) {
      V<T> level;
      for (int i = 0; i < N<T>; ++i) level[i] = sink<T>(problem.p, tile.head[v * N<T> + i]);
      state.reference[v] = ceil(level);
      state.sum[v] = exp2<>(level - finite_or_zero(state.reference[v]));
    }
  }
}

// ln(2) (reference + log2(sum)). A mask or sink too large for log2 units has been cut off at kLargest; its
// log-sum-exp is the largest finite number of that sign.
template <class T>
FASTATTN_INLINE V<T> natural_lse(V<T> reference, V<T> sum) {
  constexpr A<T> kMost = sizeof(A<T>) == 8 ? A<T>(__DBL_MAX__) : A<T>(__FLT_MAX__);
  V<T> lse = (reference + log2<A<T>>(sum)) * A<T>(kLn2);
  const auto finite = reference - reference == 0;
  lse = ((reference <= -kLargest<T>)&finite) ? V<T>{} - kMost : lse;
  lse = ((reference >= kLargest<T>)&finite) ? V<T>{} + kMost : lse;
  return sum == 0 ? V<T>{} - kInf<T> : lse;
}

// 1 / sum, or 0 in rows that see nothing.
template <class T>
FASTATTN_INLINE V<T> inverse_sum(const Tile<T>& tile, const State<T>& state, int v) {
  V<T> inverse = A<T>(1) / state.sum[v];
  if (!tile.whole[v])
    for (int i = 0; i < N<T>; ++i)
      if (!tile.seen[v * N<T> + i]) inverse[i] = 0;
  return inverse;
}

// Writes the rows of a finished tile: out = out^T / sum, lse = ln(2) (reference + log2(sum)).
template <class S, class T>
inline void finish_tile_of(const Problem<T>& problem, const Tile<T>& tile, State<T>& state) {
  const AttentionParams& p = problem.p;
  S* out = static_cast<S*>(p.out.data);
  for (int v = 0; v < NV; ++v) {
    const V<T> inverse = inverse_sum(tile, state, v);
    for (int64_t d = 0; d < p.Dv && v * N<T> < tile.count; d += N<T>) {
      V<T> block[N<T>];
      if (d + N<T> <= p.Dv)
#pragma GCC unroll 16
        for (int i = 0; i < N<T>; ++i) block[i] = load(state.out + (d + i) * kTile<T> + v * N<T>) * inverse;
      else
        for (int i = 0; i < N<T>; ++i)
          block[i] = d + i < p.Dv ? load(state.out + (d + i) * kTile<T> + v * N<T>) * inverse : V<T>{};
      transpose<A<T>>(block);
      if (tile.whole[v] && d + N<T> <= p.Dv) {
#pragma GCC unroll 16
        for (int i = 0; i < N<T>; ++i)
          round_store(out + offset(p.out, tile.b, tile.head[v * N<T> + i], tile.row[v * N<T> + i], d),
                      block[i]);
        continue;
      }
      for (int i = 0; i < N<T>; ++i) {
        int r = v * N<T> + i;
        if (r >= tile.count) break;
        S* row = out + offset(p.out, tile.b, tile.head[r], tile.row[r]);
        store_row<A<T>>(row + d, 1, p.Dv - d, tile.seen[r] ? block[i] : V<T>{});
      }
    }
  }
  A<T>* lse = static_cast<A<T>*>(p.lse.data);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const V<T> level = natural_lse<T>(state.reference[v], state.sum[v]);
    for (int i = 0; i < N<T> && v * N<T> + i < tile.count; ++i)
      lse[offset(p.lse, tile.b, tile.head[v * N<T> + i], tile.row[v * N<T> + i])] = level[i];
  }
}
template <class T>
inline void finish_tile(const Problem<T>& problem, const Tile<T>& tile, State<T>& state) {
  with_dtype_beside<T>(problem.p.out.dtype, [&]<class S>(S) { finish_tile_of<S>(problem, tile, state); });
}

// What turns scores back into weights: 2^(score - reference - log_sum). The log-sum-exp alone says it
// (reference 0) as long as its last bit is small beside the weight's. Where it is not (a row that is
// finfo.min everywhere has equal weights, but its log-sum-exp cannot hold the logarithm of their number) the
// row is summed once more.
template <class T>
struct Level {
  V<T> reference[NV], log_sum[NV];
  bool exact;  // summed once more, from scores rounded to log2 units
};
// The log-sum-exp of row r of a tile in log2 units, inf for a row that sees nothing: its weights are 0. Sets
// `exact` where the row must be summed once more.
template <class T>
inline A<T> saved_level(const Problem<T>& problem, const Tile<T>& tile, int r, bool& exact) {
  if (!tile.seen[r]) return kInf<T>;
  // An error of 2^-19 in a float32 weight, of 2^-11 in a half precision one.
  const A<T> limit = problem.half ? A<T>(1 << 13) : A<T>(64);
  const A<T>* lse = static_cast<const A<T>*>(problem.p.lse.data);
  const A<T> level = lse[offset(problem.p.lse, tile.b, tile.head[r], tile.row[r])] * A<T>(kLog2e);
  exact |= !(level <= limit && level >= -limit);
  return level == kInf<T> ? kLargest<T> : level;  // made infinite by the change of units: it sees keys
}
template <class T>
inline void find_level(const Problem<T>& problem, const Tile<T>& tile, const E<T>* query_panel, Arena& arena,
                       const KeyScratch<T>& key_scratch, Scores<T>& s, Level<T>& level) {
  level.exact = false;
  for (int v = 0; v < NV; ++v) level.reference[v] = V<T>{};
  for (int r = 0; r < kTile<T>; ++r)
    level.log_sum[r / N<T>][r % N<T>] = saved_level(problem, tile, r, level.exact);
  if (!level.exact) return;
  State<T> state;
  state.out = arena.take_zero<A<T>>(round_up(problem.p.Dv, Format<T>::kRows) * kTile<T>);
  E<T>* weights = kPairs<T> ? arena.take<E<T>>(kBlock * kParts<T> * kTile<T>) : nullptr;
  start_state(problem, tile, true, state);
  for (int64_t begin = round_down(tile.lo_min, kBlock); begin < tile.hi_max; begin += kBlock) {
    KeyBlock<T> block = make_block(problem, tile.b, tile.head[0] / problem.group, begin,
                                   min(begin + kBlock, problem.p.S), Use::scores, key_scratch);
    if (score_tile(problem, tile, query_panel, block, s, nullptr))
      weigh_again(problem, tile, s, weights, state);
  }
  for (int v = 0; v < NV; ++v) {
    level.reference[v] = finite_or_zero(state.reference[v]);
    V<T> log_sum = log2<A<T>>(state.sum[v]);
    log_sum = state.sum[v] == 0 ? V<T>{} - kInf<T> : log_sum;
    level.log_sum[v] = level.log_sum[v] == kInf<T> ? level.log_sum[v] : log_sum;
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
