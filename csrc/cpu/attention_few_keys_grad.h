// Backward of many query rows and few keys. The gradients of keys and values, sums over all rows, stay in the
// first-level cache as well; and with all of a row's keys at hand its delta is their sum of P dP.
#pragma once
#include "attention_decode_grad.h"
#include "attention_few_keys.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Not where a gradient may be wanted beside those of queries, keys and values: whether it is changes no
// other.
template <class T>
inline bool has_few_keys_grad(const Problem<T>& problem) {
  return has_few_keys(problem) && !problem.biased && !problem.p.alibi.data && !problem.p.sinks.data;
}
// Of grad_key and grad_value together.
template <class T>
inline int64_t few_keys_grad_size(const Problem<T>& problem) {
  const AttentionParams& p = problem.p;
  return (problem.key_end - problem.key_begin) * (round_up(p.D, N<T>) + round_up(p.Dv, N<T>));
}

template <class T>
struct FewKeysGrad {
  A<T>*scores, *weights, *grads, *bend;    // [kTile][kBlock]; grads: dP, then dS
  A<T>*query_rows, *out_rows, *grad_rows;  // of a tile, where they do not lie as products take them
  A<T>*grad_key, *grad_value;              // [count][columns]
  void take(Arena& arena, const Problem<T>& problem, const FewKeys<T>& keys) {
    for (A<T>** rows : {&scores, &weights, &grads}) *rows = arena.take<A<T>>(kTile<T> * kBlock);
    bend = problem.p.softcap > 0 ? arena.take<A<T>>(kTile<T> * kBlock) : nullptr;
    query_rows = arena.take<A<T>>(kTile<T> * keys.columns);
    out_rows = arena.take<A<T>>(kTile<T> * keys.columns_v);
    grad_rows = arena.take<A<T>>(kTile<T> * keys.columns);
  }
};

// dS times the scale, of `keys` keys.
template <class T>
inline void grad_few_keys(const Problem<T>& problem, const AttentionGradParams& p, const Tile<T>& tile,
                          int64_t keys, const FewKeysGrad<T>& g) {
  const A<T>* grad_lse = static_cast<const A<T>*>(p.grad_lse.data);
  for (int first = 0; first < tile.count; first += N<T>) {
    V<T> rows[N<T>], incoming{};
    A<T> delta[N<T>];
#pragma GCC unroll 16
    for (int i = 0; i < N<T>; ++i) {
      rows[i] = V<T>{};
      for (int64_t j = 0; j < keys; j += N<T>) {
        const int64_t x = (first + i) * kBlock + j;
        const V<T> term = load(g.weights + x) * load(g.grads + x);
        rows[i] += load(g.scores + x) == -kInf<T> ? V<T>{} : term;
      }
    }
    for (int i = 0; grad_lse && i < min(N<T>, tile.count - first); ++i)
      incoming[i] = grad_lse[offset(p.grad_lse, tile.b, tile.head[first + i], tile.row[first + i])];
    store(delta, reduce_rows<A<T>>(rows) - incoming);
#pragma GCC unroll 16
    for (int i = 0; i < N<T>; ++i)
      for (int64_t j = 0; j < keys; j += N<T>) {
        const int64_t x = (first + i) * kBlock + j;
        V<T> ds = load(g.weights + x) * (load(g.grads + x) - delta[i]) * A<T>(p.scale);
        if (g.bend) ds *= load(g.bend + x);
        store(g.grads + x, load(g.scores + x) == -kInf<T> ? V<T>{} : ds);
      }
  }
}

template <class T>
inline void few_keys_grad_tile(const Problem<T>& problem, const AttentionGradParams& p, const Tile<T>& tile,
                               const FewKeys<T>& keys, const FewKeysGrad<T>& g) {
  using F = Plain<A<T>>;
  const Span span = few_keys_span(keys, tile);
  const int64_t count = span.end - span.begin, columns = keys.columns, columns_v = keys.columns_v;
  const Rows<T> query = take_rows(problem, tile, p.query, p.D, true, g.query_rows);
  const Rows<T> grad_out = take_rows(problem, tile, p.grad_out, p.Dv, true, g.out_rows);
  few_keys_scores(tile, keys, span, query, p.D, keys.key, keys.key_t, g.scores);
  few_keys_scores(tile, keys, span, grad_out, p.Dv, keys.value, keys.value_t, g.grads);
  const A<T> factor = few_keys_transform(problem, tile, keys.begin + span.begin, count, g.scores, g.bend);
  V<T> reference[NV], sum[NV];
  weigh_rows(problem, tile, count, factor, g.scores, g.weights, reference, sum);
  grad_few_keys(problem, p, tile, count, g);
  F::template product<Product::sums>(count, tile.count, columns, g.grads, kBlock, query.data, query.ld,
                                     g.grad_key + span.begin * columns, columns);
  F::template product<Product::sums>(count, tile.count, columns_v, g.weights, kBlock, grad_out.data,
                                     grad_out.ld, g.grad_value + span.begin * columns_v, columns_v);
  put_rows_product(problem, tile, g.grads, count, keys.key + span.begin * columns, columns, p.grad_query, p.D,
                   g.grad_rows);
}

// grad_key and grad_value of a key/value head out of its sums.
template <class T>
inline void put_few_keys(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                         const A<T>* sums) {
  const int64_t begin = problem.key_begin, end = problem.key_end, columns = round_up(p.D, N<T>);
  const A<T>* of_values = sums + (end - begin) * columns;
  put_grad_keys(problem, p.grad_key, p.D, b, hk, begin, end, sums, columns, A<T>(1));
  put_grad_keys(problem, p.grad_value, p.Dv, b, hk, begin, end, of_values, round_up(p.Dv, N<T>), A<T>(1));
  with_dtype_beside<T>(p.grad_key.dtype, [&]<class S>(S) {
    for (const auto& [from, to] : {Span{0, begin}, Span{end, p.S}}) {
      clear_keys<S, T>(p.grad_key, b, hk, from, to, p.D);
      clear_keys<S, T>(p.grad_value, b, hk, from, to, p.Dv);
    }
  });
}

// Tiles [first, last) of one key/value head. What keys and values get from them goes to `partial` where there
// are others.
template <class T>
inline void few_keys_backward(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                              int64_t first, int64_t last, A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  const FewKeys<T> keys = take_few_keys(problem, b, hk, Use::backward, arena);
  FewKeysGrad<T> g;
  g.take(arena, problem, keys);
  A<T>* sums = partial ? partial : arena.take<A<T>>(few_keys_grad_size(problem));
  std::memset(sums, 0, size_t(few_keys_grad_size(problem)) * sizeof(A<T>));
  g.grad_key = sums, g.grad_value = sums + keys.count * keys.columns;
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  for (int64_t t = first; t < last; ++t) {
    make_tile(problem, b, hk, t, tile);
    few_keys_grad_tile(problem, p, tile, keys, g);
  }
  if (!partial) put_few_keys(problem, p, b, hk, sums);
}
// From what the tiles of `parts` tasks contributed, in their order.
template <class T>
inline void merge_few_keys(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                           int64_t parts, A<T>* partial) {
  const int64_t size = few_keys_grad_size(problem);
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t x = 0; x < size; x += N<T>)
      store(partial + x, load(partial + x) + load(partial + part * size + x));
  put_few_keys(problem, p, b, hk, partial);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
