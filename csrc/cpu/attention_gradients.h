// The gradient of the scores of one tile and key block, and its products. With P = exp(score - lse),
// dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of a (masked, biased) score is
// dS = P * (dP - delta). Everything else is a product with P or dS.
#pragma once
#include "attention_softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
struct GradTile {
  V<T> delta[NV], grad_lse[NV];
  Level<T> level;
  double alibi[kTile<T>];  // sum of dS * distance per row
  bool one_block;          // all keys of the tile lie in one block: delta comes from P and dP themselves
  E<T>* query_t;           // panels
  E<T>* query;
  E<T>* grad_out_t;
  E<T>* grad_out;
  A<T>* grad_query_t;  // [D][kTile]
};
template <class T>
struct GradScratch {
  Scores<T> scores;
  A<T>* grad_weights;
  A<T>* bend;
  E<T>* weights_rows;  // pair format: P and dS with pairs along the rows, dS along the keys
  E<T>* grad_rows;
  E<T>* grad_pairs;
  int64_t columns, columns_v;  // D and Dv as padded in grad_key, grad_value and the row panels
  void take(Arena& arena, const Problem<T>& problem) {
    scores.take(arena, problem);
    grad_weights = arena.take<A<T>>(kBlock * kTile<T>);
    bend = problem.p.softcap > 0 ? arena.take<A<T>>(kBlock * kTile<T>) : nullptr;
    constexpr int64_t kSize = kBlock * kParts<T> * kTile<T>;
    weights_rows = kPairs<T> ? arena.take<E<T>>(kSize) : nullptr;
    grad_rows = kPairs<T> ? arena.take<E<T>>(kSize) : nullptr;
    grad_pairs = kPairs<T> ? arena.take<E<T>>(kSize) : nullptr;
    columns = round_up(problem.p.D, N<T>);
    columns_v = round_up(problem.p.Dv, N<T>);
  }
};

template <class T>
inline void reserve(const Problem<T>& problem, const GradScratch<T>& scratch, Arena& arena, GradTile<T>& g) {
  constexpr int64_t kRow = kParts<T> * kTile<T>;
  g.query_t = arena.take<E<T>>(problem.depth * kRow);
  g.grad_out_t = arena.take<E<T>>(problem.depth_v * kRow);
  g.query = arena.take<E<T>>(kRow * scratch.columns);
  g.grad_out = arena.take<E<T>>(kRow * scratch.columns_v);
  g.grad_query_t = arena.take<A<T>>(round_up(problem.p.D, Format<T>::kRows) * kTile<T>);
}
// rowsum(dO * O) of the rows of vector v; 0 for those that see nothing.
template <class S, class T>
inline V<T> row_products(const AttentionGradParams& p, const Tile<T>& tile, int v) {
  V<T> products{};
  for (int i = 0; i < N<T>; ++i) {
    const int r = v * N<T> + i;
    if (!tile.seen[r]) continue;
    const S* out = static_cast<const S*>(p.out.data) + offset(p.out, tile.b, tile.head[r], tile.row[r]);
    const S* grad =
        static_cast<const S*>(p.grad_out.data) + offset(p.grad_out, tile.b, tile.head[r], tile.row[r]);
    const int64_t stride = p.grad_out.stride[3];
    V<T> sum{};
    for (int64_t d = 0; d < p.Dv; d += N<T>)
      sum += load_row<A<T>>(out + d, 1, p.Dv - d) * load_row<A<T>>(grad + d * stride, stride, p.Dv - d);
    products[i] = reduce_add<A<T>>(sum);  // in the order of dP, so that roundings cancel where P is 1
  }
  return products;
}

template <class T>
inline void prepare(const Problem<T>& problem, const AttentionGradParams& p, Tile<T>& tile,
                    GradScratch<T>& scratch, const KeyScratch<T>& key_scratch, Arena& arena, GradTile<T>& g) {
  pack_transposed(tile, p.query, p.D, problem.depth, g.query_t);
  pack_transposed(tile, p.grad_out, p.Dv, problem.depth_v, g.grad_out_t);
  pack_rows(tile, p.query, p.D, scratch.columns, g.query);
  pack_rows(tile, p.grad_out, p.Dv, scratch.columns_v, g.grad_out);
  std::memset(static_cast<void*>(g.grad_query_t), 0,
              size_t(round_up(p.D, Format<T>::kRows) * kTile<T>) * sizeof(A<T>));
  find_level(problem, tile, g.query_t, arena, key_scratch, scratch.scores, g.level);
  const A<T>* grad_lse = static_cast<const A<T>*>(p.grad_lse.data);
  for (int v = 0; v < NV; ++v) {
    V<T> lse{};
    for (int r = v * N<T>; grad_lse && r < min(tile.count, (v + 1) * N<T>); ++r)
      lse[r % N<T>] = grad_lse[offset(p.grad_lse, tile.b, tile.head[r], tile.row[r])];
    g.grad_lse[v] = lse;
    g.delta[v] = -lse;
    if (v * N<T> < tile.count)
      with_dtype_beside<T>(p.out.dtype, [&]<class S>(S) { g.delta[v] += row_products<S>(p, tile, v); });
  }
  for (double& x : g.alibi) x = 0;
  g.one_block = (problem.half || g.level.exact) && tile.lo_min < tile.hi_max &&
                tile.lo_min / kBlock == (tile.hi_max - 1) / kBlock;
}

// The sink is a score whose value vector is zero: dS = P_sink (0 - delta). A row that sees no key has it
// alone.
template <class T>
inline void add_grad_sink(const AttentionGradParams& p, const Tile<T>& tile, int r, A<T> reference,
                          A<T> log_sum, A<T> delta) {
  const A<T> level = sink<T>(p, tile.head[r]);
  A<T> weight = level == -kInf<T> ? A<T>(0) : A<T>(1);
  if (tile.seen[r]) weight = exp2<>(V<T>{} + level - reference - log_sum)[0];
  static_cast<A<T>*>(p.grad_sinks.data)[tile.b * p.H + tile.head[r]] -= weight * delta;
}

// dS for one tile and key block into scratch.grad_weights (before the softcap's derivative); in pair format
// also the operands of the products. The scores become P after dropout.
template <class T>
inline bool grad_score_tile(const Problem<T>& problem, const Tile<T>& tile, GradTile<T>& g,
                            KeyBlock<T>& block, GradScratch<T>& scratch) {
  if (!score_tile(problem, tile, g.query_t, block, scratch.scores, scratch.bend)) return false;
  if (g.level.exact) scratch.scores.apply_factor();
  const Span span = scratch.scores.span;
  const A<T> factor = scratch.scores.factor;
  A<T>* scores = scratch.scores.scores;
  const int64_t keys = span.end - span.begin, at = span.begin * kTile<T>;
  for_visible(tile, block.begin, span, [&](Span part, auto vectors, int lane) {
    Format<T>::template scores<vectors>(
        part.end - part.begin, problem.depth_v, block.value.data + part.begin * block.value.ld,
        block.value.ld, g.grad_out_t + lane, scratch.grad_weights + part.begin * kTile<T> + lane,
        &block.ahead, tile.finite && block.finite);
  });
  const bool dropout = problem.has_dropout();
  auto weight = [&](int64_t x, int v) {
    return exp2<>(load(scores + x) * factor - g.level.reference[v] - g.level.log_sum[v]);
  };
  V<T> delta[NV], alibi[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) delta[v] = g.delta[v], alibi[v] = V<T>{};
  if (g.one_block) {
    // rowsum(dO * O) is off by the rounding of O, which is all that is left where one key has nearly all the
    // weight and dP - delta cancels.
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) delta[v] = -g.grad_lse[v];
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int64_t x = at + j * kTile<T> + v * N<T>;
        V<T> term = weight(x, v) * load(scratch.grad_weights + x);
        if (dropout) term *= dropout_keep(problem, tile, v, block.begin + span.begin + j);
        delta[v] += load(scores + x) == -kInf<T> ? V<T>{} : term;
      }
  }
  for (int64_t j = 0; j < keys; ++j) {
    [[maybe_unused]] V<T> kept_rows[NV], grad_rows[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const int64_t x = at + j * kTile<T> + v * N<T>, key = block.begin + span.begin + j;
      V<T> s = load(scores + x);
      V<T> p = weight(x, v);
      V<T> dp = load(scratch.grad_weights + x);
      V<T> kept = p;
      if (dropout) {
        V<T> keep = dropout_keep(problem, tile, v, key);
        kept = p * keep;
        dp *= keep;
      }
      V<T> ds = p * (dp - delta[v]);
      ds = s == -kInf<T> ? V<T>{} : ds;
      if (problem.p.alibi.data) {
        V<T> distance = load(tile.diagonal + v * N<T>) - A<T>(key);
        alibi[v] += ds * (distance < 0 ? -distance : distance);
      }
      store(scratch.grad_weights + x, ds);
      if constexpr (kPairs<T>) {
        if (scratch.bend) ds *= load(scratch.bend + x);
        store(scores + x, ds);
        if constexpr (kParts<T> > 1) {
          kept_rows[v] = kept, grad_rows[v] = ds;
        } else {
          round_store(scratch.weights_rows + x, kept);
          round_store(scratch.grad_rows + x, ds);
        }
      } else {
        store(scores + x, kept);
      }
    }
    if constexpr (kParts<T> > 1) {
      bool finite = true;
      const int64_t row = (at + j * kTile<T>)*kParts<T>;
      store_parts(scratch.weights_rows + row, kTile<T>, split(kept_rows[0], kept_rows[1], finite));
      store_parts(scratch.grad_rows + row, kTile<T>, split(grad_rows[0], grad_rows[1], finite));
    }
  }
  if (problem.p.alibi.data)
    for (int r = 0; r < kTile<T>; ++r) g.alibi[r] += double(alibi[r / N<T>][r % N<T>]);
  return true;
}

template <class T>
inline void grad_products(const Problem<T>& problem, const Tile<T>& tile, GradTile<T>& g,
                          const KeyBlock<T>& block, const GradScratch<T>& scratch, A<T>* grad_key,
                          A<T>* grad_value) {
  const Span span = scratch.scores.span;
  const A<T>* scores = scratch.scores.scores;
  const int64_t keys = span.end - span.begin, at = span.begin * kTile<T>;
  const E<T>* weights;
  const E<T>* grads;
  const E<T>* pairs;
  if constexpr (kParts<T> > 1) {
    bool finite = true;
    for (int64_t j0 = 0; j0 < keys; j0 += 2 * N<T>)
      for (int64_t j = 0; j < N<T>; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const A<T>* from = scores + at + (j0 + j) * kTile<T> + v * N<T>;
          store_parts(scratch.grad_pairs + (at + (j0 + 2 * j) * kTile<T>)*kParts<T> + v * 2 * N<T>,
                      2 * kTile<T>, split(load(from), load(from + N<T> * kTile<T>), finite));
        }
  } else if constexpr (kPairs<T>) {
    for (int64_t j = 0; j < keys; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int64_t x = at + j * kTile<T> + v * N<T>;
        store_pair(scratch.grad_pairs + at + j * kTile<T> + v * 2 * N<T>, load(scores + x),
                   load(scores + x + kTile<T>));
      }
  }
  if constexpr (kPairs<T>) {
    weights = scratch.weights_rows;
    grads = scratch.grad_rows;
    pairs = scratch.grad_pairs;
  } else {
    if (scratch.bend)
      for (int64_t x = at; x < at + keys * kTile<T>; x += N<T>)
        store(scratch.grad_weights + x, load(scratch.grad_weights + x) * load(scratch.bend + x));
    weights = scores;
    grads = pairs = scratch.grad_weights;
  }
  for_visible(tile, block.begin, span, [&](Span part, auto vectors, int lane) {
    const int64_t first = part.begin, count = part.end - part.begin;
    const int64_t from = first * kParts<T> * kTile<T> + lane;
    const int64_t columns = scratch.columns, columns_v = scratch.columns_v;
    const int64_t rows = min(vectors * N<T>, tile.count - lane);
    Format<T>::keys(count, rows, columns_v, weights + from, g.grad_out + lane * columns_v,
                    grad_value + first * columns_v, tile.finite);
    Format<T>::keys(count, rows, columns, grads + from, g.query + lane * columns, grad_key + first * columns,
                    tile.finite);
    Format<T>::template outputs<vectors>(round_up(problem.p.D, Format<T>::kRows), count,
                                         block.key_t.at(0, first), block.key_t.ld, pairs + from,
                                         g.grad_query_t + lane, nullptr, block.finite);
  });
}

// Rows [begin, end) of grad_key or grad_value. A key that no query sees has zero gradient even where a NaN of
// some query met its zero weight.
template <class S, class T>
inline void put_grad_keys_of(const Problem<T>& problem, const View& view, int64_t columns, int64_t b,
                             int64_t hk, int64_t begin, int64_t end, const A<T>* grad, int64_t padded,
                             A<T> scale) {
  S* data = static_cast<S*>(view.data);
  for (int64_t j = begin; j < end; ++j) {
    const A<T>* from = grad + (j - begin) * padded;
    S* to = data + offset(view, b, hk, j);
    V<T> finite{};
    for (int64_t d = 0; d < columns; d += N<T>) finite += load(from + d) * A<T>(0);
    const bool hide = any(finite != 0) && !problem.key_is_seen(b, hk, j);
    for (int64_t d = 0; d < columns; d += N<T>)
      store_row<A<T>>(to + d * view.stride[3], view.stride[3], columns - d,
                      hide ? V<T>{} : load(from + d) * scale);
  }
}
template <class T>
inline void put_grad_keys(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                          int64_t begin, int64_t end, const A<T>* grad, int64_t padded, A<T> scale) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    put_grad_keys_of<S>(problem, view, columns, b, hk, begin, end, grad, padded, scale);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
