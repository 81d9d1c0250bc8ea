// Attention of many query rows to few keys, as to a handful of tokens. The keys and values of a head stay in
// the first-level cache, and with all of a row's keys at hand its softmax needs no second look; what takes
// time is bringing query rows in and results out. So lanes are keys in the scores and columns in the results,
// as in attention_decode.h, and rows are read and written where they lie.
#pragma once
#include "attention_decode.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kFewKeys = 64;
// So many rows make up for a key that is copied and transposed; half of them in each task.
constexpr int64_t kRowsPerKey = 4;
// These products are of single numbers.
template <class T>
constexpr bool kHasFewKeys = !kSame<T, bf16>;
template <class T>
inline bool has_few_keys(const Problem<T>& problem) {
  const AttentionParams& p = problem.p;
  const int64_t keys = problem.key_end - problem.key_begin;
  return kHasFewKeys<T> && keys > 0 && keys <= kFewKeys && problem.group * p.L >= kRowsPerKey * keys &&
         p.D > 0 && p.Dv > 0 && !problem.has_dropout();
}

// Whether most lanes would be without a key: their scores are sums over lanes then.
template <class T>
inline bool reduces_scores(int64_t keys) {
  return 4 * keys <= N<T>;
}

// Rows of few columns save little, and lanes without a key take time.
template <class T>
inline bool forwards_few_keys(const Problem<T>& problem) {
  const int64_t keys = problem.key_end - problem.key_begin, empty = round_up(keys, N<T>) - keys;
  return has_few_keys(problem) && (!empty || 32 + (reduces_scores<T>(keys) ? 0 : 2 * empty) <= problem.p.D);
}

// The tasks in an order in which those of the same time, one of each thread, are far apart: rows of
// neighbouring heads may lie side by side, of which processors fetch lines together and the system hands out
// pages.
inline int64_t spread(int64_t task, int64_t tasks, int64_t threads) {
  const int64_t thread = task % threads;
  return thread * (tasks / threads) + min(thread, tasks % threads) + task / threads;
}

// Rows of numbers as products take them.
template <class T>
struct Rows {
  A<T>* data;
  int64_t ld;
};

// Keys that some query may see, and their values, converted and padded with zeros.
template <class T>
struct FewKeys {
  int64_t begin, count, padded;  // padded to whole vectors
  int64_t columns, columns_v;    // D and Dv likewise
  A<T>*key, *value;              // [padded][columns]
  A<T>*key_t, *value_t;          // [columns][padded]
};
template <class S, class T>
inline void copy_keys_of(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                         const FewKeys<T>& keys, int64_t padded, A<T>* to) {
  const int64_t end = keys.begin + keys.count, stride = view.stride[3];
  const S* rows[kBlock];
  key_rows<S>(problem, view, columns, b, hk, keys.begin, end, {problem, b, hk, keys.begin, end}, rows);
  for (int64_t j = 0; j < keys.padded; ++j) {
    const S* row = j < keys.count ? rows[j] : nullptr;
    for (int64_t d = 0; d < padded; d += N<T>)
      store(to + j * padded + d, row ? load_row<A<T>>(row + d * stride, stride, columns - d) : V<T>{});
  }
}
template <class T>
inline A<T>* copy_keys(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                       const FewKeys<T>& keys, int64_t padded, Arena& arena) {
  A<T>* to = arena.take<A<T>>(keys.padded * padded);
  with_dtype_beside<T>(view.dtype,
                       [&]<class S>(S) { copy_keys_of<S>(problem, view, columns, b, hk, keys, padded, to); });
  return to;
}
template <class T>
inline A<T>* transposed(const A<T>* from, int64_t rows, int64_t columns, Arena& arena) {
  A<T>* to = arena.take<A<T>>(rows * columns);
  for (int64_t j = 0; j < rows; j += N<T>)
    for (int64_t d = 0; d < columns; d += N<T>) {
      V<T> block[N<T>];
#pragma GCC unroll 16
      for (int i = 0; i < N<T>; ++i) block[i] = load(from + (j + i) * columns + d);
      transpose<A<T>>(block);
#pragma GCC unroll 16
      for (int i = 0; i < N<T>; ++i) store(to + (d + i) * rows + j, block[i]);
    }
  return to;
}
template <class T>
inline FewKeys<T> take_few_keys(const Problem<T>& problem, int64_t b, int64_t hk, Use use, Arena& arena) {
  const AttentionParams& p = problem.p;
  FewKeys<T> keys{};
  keys.begin = problem.key_begin;
  keys.count = problem.key_end - problem.key_begin;
  keys.padded = round_up(keys.count, N<T>);
  keys.columns = round_up(p.D, N<T>);
  keys.columns_v = round_up(p.Dv, N<T>);
  keys.key = copy_keys(problem, p.key, p.D, b, hk, keys, keys.columns, arena);
  keys.value = copy_keys(problem, p.value, p.Dv, b, hk, keys, keys.columns_v, arena);
  keys.key_t = transposed<T>(keys.key, keys.padded, keys.columns, arena);
  if (use == Use::backward) keys.value_t = transposed<T>(keys.value, keys.padded, keys.columns_v, arena);
  return keys;
}
// The keys that rows of a tile see, relative to the first, from a whole vector on.
template <class T>
inline Span few_keys_span(const FewKeys<T>& keys, const Tile<T>& tile) {
  if (tile.lo_min >= tile.hi_max) return {0, keys.count};
  return {round_down(tile.lo_min - keys.begin, N<T>), tile.hi_max - keys.begin};
}

// The tile's rows of a (B, H, L, X) tensor if they lie as products take them: of its own type, equally far
// apart, none of a row that sees nothing. Else `scratch`, which is padded.
template <class T>
inline Rows<T> place_of_rows(const Problem<T>& problem, const Tile<T>& tile, const View& view, bool fits,
                             int64_t padded, A<T>* scratch) {
  constexpr DType kOwn = sizeof(A<T>) == 8 ? DType::f64 : DType::f32;
  fits &= view.dtype == kOwn && view.stride[3] == 1;
  fits &= !problem.flat || view.stride[1] == problem.p.L * view.stride[2];
  if (!fits || std::memchr(tile.seen, false, size_t(tile.count))) return {scratch, padded};
  return {static_cast<A<T>*>(view.data) + offset(view, tile.b, tile.head[0], tile.row[0]), view.stride[2]};
}
// To be read; `whole_vectors` of them, or single numbers.
template <class T>
inline Rows<T> take_rows(const Problem<T>& problem, const Tile<T>& tile, const View& view, int64_t columns,
                         bool whole_vectors, A<T>* scratch) {
  const int64_t padded = round_up(columns, N<T>);
  const bool fits = !whole_vectors || columns == padded;
  const Rows<T> rows = place_of_rows(problem, tile, view, fits, padded, scratch);
  if (rows.data == scratch) load_rows(view, tile, columns, padded, scratch);
  return rows;
}
// Stores rows of a product that are not in their place.
template <class T>
inline void store_rows(const Tile<T>& tile, const View& view, int64_t columns, const Rows<T>& rows) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    for (int r = 0; r < tile.count; ++r) {
      S* to = static_cast<S*>(view.data) + offset(view, tile.b, tile.head[r], tile.row[r]);
      for (int64_t d = 0; d < columns; d += N<T>)
        store_row<A<T>>(to + d * view.stride[3], view.stride[3], columns - d,
                        tile.seen[r] ? load(rows.data + r * rows.ld + d) : V<T>{});
    }
  });
}
// C[rows, columns] = weights[rows][kBlock] B[keys, columns], where C is the tile's rows of `view`.
template <class T>
inline void put_rows_product(const Problem<T>& problem, const Tile<T>& tile, const A<T>* weights,
                             int64_t keys, const A<T>* b, int64_t padded, const View& view, int64_t columns,
                             A<T>* scratch) {
  const Rows<T> rows = place_of_rows(problem, tile, view, columns >= N<T>, padded, scratch);
  Plain<A<T>>::template product<Product::rows>(tile.count, keys, rows.data == scratch ? padded : columns,
                                               weights, kBlock, b, padded, rows.data, rows.ld);
  if (rows.data == scratch) store_rows(tile, view, columns, rows);
}

// The softmax of N<T> rows of scores, in log2 units times `factor` and in whole vectors, of which there are
// kVectors or else `vectors`: weights, which sum to 1 together with a sink of weight 2^level.
template <int kVectors, class T>
FASTATTN_INLINE void weigh_rows_of(A<T>* scores, int64_t vectors, A<T> factor, V<T> level, V<T> seen,
                                   A<T>* weights, V<T>& reference, V<T>& sum) {
  const int64_t keys = (kVectors ? kVectors : vectors) * N<T>;
  V<T> rows[N<T>];
  A<T> of_row[N<T>];
#pragma GCC unroll 16
  for (int i = 0; i < N<T>; ++i) {
    rows[i] = V<T>{} - kInf<T>;
    for (int64_t j = 0; j < keys; j += N<T>) {
      const V<T> score = load(scores + i * kBlock + j) * factor;  // rounded as their maximum is
      store(scores + i * kBlock + j, score);
      rows[i] = maximum(rows[i], score);
    }
  }
  reference = maximum(
      ceil(level), ceil(reduce_rows<A<T>>(
                       rows, [](V<T> a, V<T> b) __attribute__((always_inline)) { return maximum(a, b); })));
  const V<T> shift = finite_or_zero(reference);
  store(of_row, shift);
#pragma GCC unroll 16
  for (int i = 0; i < N<T>; ++i) {
    rows[i] = V<T>{};
    for (int64_t j = 0; j < keys; j += N<T>) {
      const V<T> weight = exp2<>(load(scores + i * kBlock + j) - of_row[i]);
      store(weights + i * kBlock + j, weight);
      rows[i] += weight;
    }
  }
  sum = reduce_rows<A<T>>(rows) + exp2<>(level - shift);
  store(of_row, seen != 0 ? A<T>(1) / sum : V<T>{});
#pragma GCC unroll 16
  for (int i = 0; i < N<T>; ++i)
    for (int64_t j = 0; j < keys; j += N<T>)
      store(weights + i * kBlock + j, load(weights + i * kBlock + j) * of_row[i]);
}
// weights[kTile][kBlock] of scores alike; those of rows behind the last mean nothing.
template <class T>
inline void weigh_rows(const Problem<T>& problem, const Tile<T>& tile, int64_t keys, A<T> factor,
                       A<T>* scores, A<T>* weights, V<T> (&reference)[NV], V<T> (&sum)[NV]) {
  const int64_t vectors = (keys + N<T> - 1) / N<T>;
  for (int v = 0; v * N<T> < tile.count; ++v) {
    const int64_t at = v * N<T> * kBlock;
    V<T> level = V<T>{} - kInf<T>, seen = V<T>{} + A<T>(1);
    if (problem.p.sinks.data)
      for (int i = 0; i < N<T>; ++i) level[i] = sink<T>(problem.p, tile.head[v * N<T> + i]);
    if (!tile.whole[v])
      for (int i = 0; i < N<T>; ++i) seen[i] = tile.seen[v * N<T> + i];
    if (vectors == 1)
      weigh_rows_of<1, T>(scores + at, 1, factor, level, seen, weights + at, reference[v], sum[v]);
    else
      weigh_rows_of<0, T>(scores + at, vectors, factor, level, seen, weights + at, reference[v], sum[v]);
  }
}

// scores[rows][kBlock] of query rows and keys from `first` on, or of incoming gradients and values.
template <class T>
inline void few_keys_scores(const Tile<T>& tile, const FewKeys<T>& keys, Span span, const Rows<T>& rows,
                            int64_t columns, const A<T>* key, const A<T>* key_t, A<T>* scores) {
  const int64_t count = span.end - span.begin, padded = round_up(columns, N<T>);
  if (reduces_scores<T>(count)) {
    const A<T>* each[N<T>];
    for (int64_t j = 0; j < count; ++j) each[j] = key + (span.begin + j) * padded;
    return decode_scores<T>(rows.data, tile.count, rows.ld, each, padded, count, scores);
  }
  Plain<A<T>>::template product<Product::rows>(tile.count, columns, round_up(count, N<T>), rows.data, rows.ld,
                                               key_t + span.begin, keys.padded, scores, kBlock);
}

// Hides keys by bands and boolean masks.
template <class T>
inline void hide_keys(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t keys,
                      A<T>* scores) {
  Word<T> words[(kFewKeys + kWordKeys - 1) / kWordKeys * kTile<T>];
  const int content =
      problem.hides ? fill_shown(problem, tile, begin, begin + keys, words) : content_of(true, false);
  const bool visible = content & 1, masked = content & 2;
  const bool whole = !masked && tile.lo_max <= begin && tile.hi_min >= begin + keys;
  Vec<Int<A<T>>> lane;
  Vec<Word<T>> bit;
  for (int i = 0; i < N<T>; ++i) lane[i] = i, bit[i] = Word<T>(1) << i;
  for (int r = 0; r < tile.count; ++r)
    for (int64_t j = whole ? round_down(keys, N<T>) : 0; j < keys; j += N<T>) {
      const auto position = lane + Int<A<T>>(begin + j);
      auto shown = (position >= tile.lo[r]) & (position < Int<A<T>>(min(tile.hi[r], begin + keys)));
      if (masked) {
        const Word<T> word = visible ? words[j / kWordKeys * kTile<T> + r] >> j % kWordKeys : 0;
        shown &= (word & bit) != 0;
      }
      A<T>* at = scores + r * kBlock + j;
      store(at, shown ? load(at) : V<T>{} - kInf<T>);
    }
}
// As transform_rows, but for a factor that is still to be taken over, which it returns. Rows behind the last,
// up to a whole vector of them, become numbers.
template <class T>
inline A<T> few_keys_transform(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t keys,
                               A<T>* scores, A<T>* bend) {
  for (int64_t r = tile.count; r < round_up(tile.count, N<T>); ++r)
    std::memset(scores + r * kBlock, 0, size_t(round_up(keys, N<T>)) * sizeof(A<T>));
  if (problem.general) {
    transform_rows(problem, tile, begin, keys, problem.masked, scores, bend);
    return 1;
  }
  hide_keys(problem, tile, begin, keys, scores);
  return A<T>(problem.p.scale * kLog2e);
}

template <class T>
inline void few_keys_tile(const Problem<T>& problem, const Tile<T>& tile, const FewKeys<T>& keys,
                          A<T>* weights, A<T>* query_rows, A<T>* out_rows) {
  const AttentionParams& p = problem.p;
  const Span span = few_keys_span(keys, tile);
  const int64_t count = span.end - span.begin;
  const Rows<T> query = take_rows(problem, tile, p.query, p.D, reduces_scores<T>(count), query_rows);
  few_keys_scores(tile, keys, span, query, p.D, keys.key, keys.key_t, weights);
  const A<T> factor = few_keys_transform<T>(problem, tile, keys.begin + span.begin, count, weights, nullptr);
  V<T> reference[NV], sum[NV];
  weigh_rows(problem, tile, count, factor, weights, weights, reference, sum);
  put_rows_product(problem, tile, weights, count, keys.value + span.begin * keys.columns_v, keys.columns_v,
                   p.out, p.Dv, out_rows);
  A<T>* lse = static_cast<A<T>*>(p.lse.data);
  for (int r = 0; r < tile.count; r += N<T>) {
    const V<T> level = natural_lse<T>(reference[r / N<T>], sum[r / N<T>]);
    for (int i = 0; i < N<T> && r + i < tile.count; ++i)
      lse[offset(p.lse, tile.b, tile.head[r + i], tile.row[r + i])] = level[i];
  }
}

// Tiles [first, first + count) of one key/value head.
template <class T>
inline void few_keys_forward(const Problem<T>& problem, int64_t b, int64_t hk, int64_t first, int64_t count) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  const FewKeys<T> keys = take_few_keys(problem, b, hk, Use::forward, arena);
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  A<T>* weights = arena.take<A<T>>(kTile<T> * kBlock);
  A<T>* query = arena.take<A<T>>(kTile<T> * keys.columns);
  A<T>* out = arena.take<A<T>>(kTile<T> * keys.columns_v);
  for (int64_t t = first; t < first + count; ++t) {
    make_tile(problem, b, hk, t, tile);
    few_keys_tile(problem, tile, keys, weights, query, out);
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
