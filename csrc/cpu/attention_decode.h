// Attention of few query rows, as in decoding. Every key and value is read once for a handful of rows, so the
// lanes of a tile would stay empty: here lanes are columns in the products and keys in the softmax, and the
// rows of a group share each key and value loaded.
#pragma once
#include "attention_decode_tiles.h"
#include "attention_softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kDecodeRows = 8;       // two rows of weights of each fill a matrix tile
constexpr int64_t kDecodeGradRows = 16;  // of the backward, where a tile has twice as many panels to pack
// Keys that are computed with while the next ones are on their way from memory, where each is read once. They
// stay in the first-level cache for all rows of a group.
constexpr int64_t kStrip = 16;
// How many keys ahead rows are fetched whole, of which a core has only so many on their way; and how many
// ahead they are touched, which finds their addresses and starts the prefetching of the hardware: it ends
// with a page.
constexpr int64_t kFetch = 8, kTouch = 24;
template <class T>
inline bool has_few_rows(const Problem<T>& problem, int64_t limit) {
  const int64_t rows = problem.group * problem.p.L;
  return rows > 0 && rows <= min(limit, kTile<T>) && !problem.has_dropout();
}

// Whether matrix tiles, whole ones, have the products of the forward. A single row gains nothing: its keys
// and values come no faster. Less work than this does not make up for the lower clock of a processor that has
// tiles in use.
template <class T>
inline bool uses_tiles(const AttentionParams& p, int64_t rows, int64_t keys) {
  return kDecodeTiles<T> && p.D >= 32 && p.Dv >= 32 && rows > 1 && rows * keys >= 256;
}

template <class T>
struct Decode {
  Tile<T> tile;
  A<T> reference[kDecodeGradRows], sum[kDecodeGradRows];
  int64_t columns, columns_v;  // D and Dv as padded
  A<T>* query;                 // [rows][columns]
  A<T>* out;                   // [rows][columns_v]
  A<T>* scores;                // [rows][kBlock]
  A<T>* bend;  // where d(capped score) / d(scaled score) goes, [rows][kBlock]; null: not wanted
  A<T>* key;   // rows that cannot be read as they lie, converted
  A<T>* value;
};
// Of one row's partial result: reference, sum, out.
template <class T>
inline int64_t decode_size(const Problem<T>& problem) {
  return 2 + round_up(problem.p.Dv, N<T>);
}

// The tile's rows of a (B, H, L, X) tensor, padded; those that see nothing are zero.
template <class T>
inline void load_rows(const View& view, const Tile<T>& tile, int64_t columns, int64_t padded, A<T>* rows) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    for (int r = 0; r < tile.count; ++r) {
      const S* row = static_cast<const S*>(view.data) + offset(view, tile.b, tile.head[r], tile.row[r]);
      const int64_t stride = view.stride[3];
      for (int64_t d = 0; d < padded; d += N<T>)
        store(rows + r * padded + d,
              tile.seen[r] ? load_row<A<T>>(row + d * stride, stride, columns - d) : V<T>{});
    }
  });
}

template <class T>
inline void take_decode(const Problem<T>& problem, int64_t b, int64_t hk, Arena& arena, Decode<T>& decode) {
  make_tile(problem, b, hk, 0, decode.tile);
  decode.columns = round_up(problem.p.D, N<T>);
  decode.columns_v = round_up(problem.p.Dv, N<T>);
  decode.query = arena.take<A<T>>(decode.tile.count * decode.columns);
  decode.out = arena.take_zero<A<T>>(decode.tile.count * decode.columns_v);
  decode.scores = arena.take<A<T>>(decode.tile.count * kBlock);
  decode.bend = nullptr;
  decode.key = arena.take<A<T>>(kBlock * decode.columns);
  decode.value = arena.take<A<T>>(kBlock * decode.columns_v);
  load_rows(problem.p.query, decode.tile, problem.p.D, decode.columns, decode.query);
}

// Calls f(rows) with keys [begin, end) of one head as pointers to rows of `columns`, in place or converted.
template <class S, class F, class T>
FASTATTN_INLINE void with_rows_of(const Problem<T>& problem, const View& view, int64_t columns, int64_t b,
                                  int64_t hk, int64_t begin, int64_t end, const ShownKeys<T>& shown,
                                  int64_t padded, A<T>* scratch, F&& f) {
  const S* rows[kBlock];
  const bool null = key_rows<S>(problem, view, columns, b, hk, begin, end, shown, rows);
  if (!null && view.stride[3] == 1) return f(rows);
  const A<T>* converted[kBlock];
  for (int64_t j = 0; j < end - begin; ++j) {
    converted[j] = scratch + j * padded;
    for (int64_t d = 0; d < padded; d += N<T>)
      store(scratch + j * padded + d,
            rows[j] ? load_row<A<T>>(rows[j] + d * view.stride[3], view.stride[3], columns - d) : V<T>{});
  }
  f(converted);
}
template <class F, class T>
FASTATTN_INLINE void with_rows(const Problem<T>& problem, const View& view, int64_t columns, int64_t b,
                               int64_t hk, int64_t begin, int64_t end, const ShownKeys<T>& shown,
                               int64_t padded, A<T>* scratch, F&& f) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    with_rows_of<S>(problem, view, columns, b, hk, begin, end, shown, padded, scratch, f);
  });
}

template <class M, class T>
FASTATTN_INLINE V<T> mask_row_as(const AttentionParams& p, const Tile<T>& tile, int r, int64_t key,
                                 int64_t count) {
  const View& mask = p.mask;
  const M* row = static_cast<const M*>(mask.data) + offset(mask, tile.b, tile.head[r], tile.row[r], key);
  return load_mask<T>(row, mask.stride[3], count);
}
// What hides or biases keys [key, key + N) from row r, in log2 units.
template <class T>
FASTATTN_INLINE V<T> mask_row(const Problem<T>& problem, const Tile<T>& tile, int r, int64_t key,
                              int64_t count) {
  const AttentionParams& p = problem.p;
  V<T> bias{};
  if (p.mask.data) {
    if (p.mask.dtype == DType::boolean)
      bias = mask_row_as<uint8_t>(p, tile, r, key, count);
    else if (p.mask.dtype == DType::f32)
      bias = to_log2<T>(mask_row_as<float>(p, tile, r, key, count));
    else
      with_dtype_beside<T>(p.mask.dtype,
                           [&]<class S>(S) { bias = to_log2<T>(mask_row_as<S>(p, tile, r, key, count)); });
  }
  if (p.key_padding.data) {
    V<T> shown =
        load_mask<T>(static_cast<const uint8_t*>(p.key_padding.data) + offset(p.key_padding, tile.b, key),
                     p.key_padding.stride[1], count);
    bias = shown == -kInf<T> ? shown : bias;
  }
  return bias;
}

// Keys [begin, end), the first of a block that comes next, up to where its strips go on.
template <class T>
inline void prefetch_keys(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                          int64_t begin, int64_t end) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    for (int64_t j = begin; j < end;) {
      const S* row = static_cast<const S*>(view.data) + problem.key_offset(view, b, hk, j);
      for (const int64_t piece = min(end, problem.piece_end(j)); j < piece; ++j) {
        prefetch_row(row, columns);
        row += view.stride[2];
      }
    }
  });
}
// f(first, count) for the strips of a block, each while later keys are fetched.
template <class Row, class F>
FASTATTN_INLINE void for_each_strip(const Row* const* rows, int64_t columns, int64_t keys, F&& f) {
  for (int64_t first = 0; first < keys; first += kStrip) {
    for (int64_t j = first + kFetch; j < min(first + kFetch + kStrip, keys); ++j)
      prefetch_row(rows[j], columns);
    for (int64_t j = first + kTouch; j < min(first + kTouch + kStrip, keys); ++j)
      __builtin_prefetch(rows[j], 0, 2);
    f(first, min(kStrip, keys - first));
  }
}

// scores[R rows][keys] = query . key: R rows and N / R keys at a time, whose N sums are reduced together.
// Keys have D columns, queries are padded.
template <class T, int R, class Row>
inline void score_rows(const A<T>* query, int64_t columns, const Row* const* key, int64_t D, int64_t keys,
                       A<T>* scores) {
  constexpr int K = N<T> / R;
  for (int64_t j = 0; j < keys; j += K) {
    const Row* row[K];
    for (int k = 0; k < K; ++k) row[k] = key[min(j + k, keys - 1)];
    V<T> acc[N<T>];
#pragma GCC unroll 16
    for (int i = 0; i < N<T>; ++i) acc[i] = V<T>{};
    auto add = [&](int64_t d, auto&& load_key) __attribute__((always_inline)) {
      V<T> x[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) x[r] = load(query + r * columns + d);
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) {
        V<T> y = load_key(row[k] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r * K + k] += x[r] * y;
      }
    };
    int64_t d = 0;
    for (; d + N<T> <= D; d += N<T>) add(d, [](const Row* x) { return load_wide(x); });
    if (d < D) add(d, [&](const Row* x) { return load_row<A<T>>(x, 1, D - d); });
    const V<T> sums = reduce_rows<A<T>>(acc);
    for (int r = 0; r < R; ++r)
      std::memcpy(scores + r * kBlock + j, reinterpret_cast<const A<T>*>(&sums) + r * K, K * sizeof(A<T>));
  }
}
// scores[rows][kBlock] of `keys` keys.
template <class T, class Row>
inline void decode_scores(const A<T>* query, int rows, int64_t columns, const Row* const* key, int64_t D,
                          int64_t keys, A<T>* scores) {
  auto take = [&](int count) { query += count * columns, scores += count * kBlock, rows -= count; };
  if constexpr (N<T> >= 4)
    for (; rows >= 4; take(4)) score_rows<T, 4>(query, columns, key, D, keys, scores);
  for (; rows >= 2; take(2)) score_rows<T, 2>(query, columns, key, D, keys, scores);
  if (rows > 0) score_rows<T, 1>(query, columns, key, D, keys, scores);
}

// From q.k to log2 units with hidden scores, and those behind the last key, at -inf: scores[rows][kBlock] of
// `keys` keys from `begin` on, of which masks leave all to all rows unless `masked`. `bend` receives d(capped
// score) / d(scaled score) where there is a softcap.
template <class T>
inline void transform_rows(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t keys,
                           bool masked, A<T>* scores, A<T>* bend) {
  const AttentionParams& p = problem.p;
  using VI = Vec<Int<A<T>>>;
  VI lane;
  for (int i = 0; i < N<T>; ++i) lane[i] = i;
  for (int r = 0; r < tile.count; ++r)
    for (int64_t j = 0; j < keys; j += N<T>) {
      V<T> s = load(scores + r * kBlock + j) * A<T>(p.scale);
      if (p.softcap > 0) {
        const V<T> t = tanh(s * A<T>(1 / p.softcap));
        if (bend) store(bend + r * kBlock + j, A<T>(1) - t * t);
        s = t * A<T>(p.softcap);
      }
      s *= A<T>(kLog2e);
      VI position = lane + Int<A<T>>(begin + j);
      if (p.alibi.data) {
        V<T> distance = tile.diagonal[r] - __builtin_convertvector(position, V<T>);
        s -= (distance < 0 ? -distance : distance) * (tile.slope[r] * A<T>(kLog2e));
      }
      if (masked) {
        V<T> bias = mask_row(problem, tile, r, begin + j, keys - j);
        s = bias == -kInf<T> ? bias : s + bias;
      }
      VI shown = (position >= tile.lo[r]) & (position < tile.hi[r]) & (position < Int<A<T>>(begin + keys));
      store(scores + r * kBlock + j, shown ? s : V<T>{} - kInf<T>);
    }
}

// out[rows][columns_v] += weights[rows][keys] value[keys][Dv], R rows and C vectors from column `at` on, of
// the last of which there is a part.
template <class T, int R, int C, bool kPart, class Row>
FASTATTN_INLINE void add_columns(const A<T>* weights, const Row* const* value, int64_t at, int64_t Dv,
                                 int64_t keys, A<T>* out, int64_t out_stride) {
  V<T> acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * out_stride + at + c * N<T>);
  for (int64_t j = 0; j < keys; ++j) {
    V<T> x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      x[c] = kPart && c == C - 1 ? load_row<A<T>>(value[j] + at + c * N<T>, 1, Dv - at - c * N<T>)
                                 : load_wide(value[j] + at + c * N<T>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] += weights[r * kBlock + j] * x[c];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + r * out_stride + at + c * N<T>, acc[r][c]);
}
template <int R, class T, class Row>
inline void add_rows(const A<T>* weights, const Row* const* value, int64_t Dv, int64_t keys, A<T>* out,
                     int64_t columns) {
  // As many accumulators as the registers hold beside the operands.
  constexpr int C = kVectorRegisters == 32 || R < 3 ? 4 : 2;
  int64_t d = 0;
  for (; d + C * N<T> <= Dv; d += C * N<T>)
    add_columns<T, R, C, false>(weights, value, d, Dv, keys, out, columns);
  if (d + 2 * N<T> <= Dv) {
    add_columns<T, R, 2, false>(weights, value, d, Dv, keys, out, columns);
    d += 2 * N<T>;
  }
  if (d + N<T> < Dv)
    add_columns<T, R, 2, true>(weights, value, d, Dv, keys, out, columns);
  else if (d + N<T> == Dv)
    add_columns<T, R, 1, false>(weights, value, d, Dv, keys, out, columns);
  else if (d < Dv)
    add_columns<T, R, 1, true>(weights, value, d, Dv, keys, out, columns);
}
// out[rows][columns] += weights[rows][kBlock] of `keys` keys times their rows.
template <class T, class Row>
inline void decode_values(const A<T>* weights, int rows, const Row* const* value, int64_t Dv, int64_t keys,
                          int64_t columns, A<T>* out) {
  for (; rows >= 4; rows -= 4) {
    add_rows<4, T>(weights, value, Dv, keys, out, columns);
    weights += 4 * kBlock, out += 4 * columns;
  }
  if (rows == 3) add_rows<3, T>(weights, value, Dv, keys, out, columns);
  if (rows == 2) add_rows<2, T>(weights, value, Dv, keys, out, columns);
  if (rows == 1) add_rows<1, T>(weights, value, Dv, keys, out, columns);
}

template <class T>
inline void start_decode(const AttentionParams& p, bool with_sink, Decode<T>& decode) {
  for (int r = 0; r < decode.tile.count; ++r) {
    const A<T> level = p.sinks.data && with_sink ? sink<T>(p, decode.tile.head[r]) : -kInf<T>;
    V<T> reference = ceil(V<T>{} + level);
    decode.reference[r] = reference[0];
    decode.sum[r] = exp2<>(level - finite_or_zero(reference))[0];
  }
}
// Scores of a block to weights; what has been summed before is rescaled.
template <class T>
inline void decode_weigh(Decode<T>& decode, int64_t keys) {
  for (int r = 0; r < decode.tile.count; ++r) {
    A<T>* row = decode.scores + r * kBlock;
    V<T> top = V<T>{} - kInf<T>;
    for (int64_t j = 0; j < keys; j += N<T>) top = maximum(top, load(row + j));
    A<T> highest = top[0];
    for (int i = 1; i < N<T>; ++i) highest = top[i] > highest || top[i] != top[i] ? top[i] : highest;
    V<T> reference = maximum(V<T>{} + decode.reference[r], ceil(V<T>{} + highest));
    if (reference[0] != decode.reference[r]) {
      V<T> alpha = exp2<>(V<T>{} + decode.reference[r] - finite_or_zero(reference));
      decode.sum[r] *= alpha[0];
      for (int64_t d = 0; d < decode.columns_v; d += N<T>)
        store(decode.out + r * decode.columns_v + d, load(decode.out + r * decode.columns_v + d) * alpha);
      decode.reference[r] = reference[0];
    }
    const V<T> shift = finite_or_zero(reference);
    V<T> sum{};
    for (int64_t j = 0; j < keys; j += N<T>) {
      V<T> weight = exp2<>(load(row + j) - shift);
      sum += weight;
      store(row + j, weight);
    }
    decode.sum[r] += reduce_add<A<T>>(sum);
  }
}

// Keys [begin, end) of those up to `last`.
template <class T>
inline void decode_block(const Problem<T>& problem, Decode<T>& decode, int64_t hk, int64_t begin, int64_t end,
                         int64_t last) {
  const AttentionParams& p = problem.p;
  const int64_t keys = end - begin, b = decode.tile.b;
  const ShownKeys<T> shown(problem, b, hk, begin, end);
  if (!shown.any) return;
  with_rows(problem, p.key, p.D, b, hk, begin, end, shown, decode.columns, decode.key, [&](auto* key) {
    for_each_strip(key, decode.columns, keys, [&](int64_t first, int64_t count) {
      decode_scores<T>(decode.query, decode.tile.count, decode.columns, key + first, p.D, count,
                       decode.scores + first);
    });
  });
  prefetch_keys(problem, p.value, p.Dv, b, hk, begin, min(begin + kFetch, end));
  transform_rows(problem, decode.tile, begin, keys, shown.masked(problem), decode.scores, decode.bend);
  decode_weigh(decode, keys);
  with_rows(problem, p.value, p.Dv, b, hk, begin, end, shown, decode.columns_v, decode.value,
            [&](auto* value) {
              for_each_strip(value, decode.columns_v, keys, [&](int64_t first, int64_t count) {
                if (first + count == keys)
                  prefetch_keys(problem, p.key, p.D, b, hk, end, min(end + kFetch, last));
                decode_values<T>(decode.scores + first, decode.tile.count, value + first, p.Dv, count,
                                 decode.columns_v, decode.out);
              });
            });
}

template <class T>
inline void finish_decode(const Problem<T>& problem, const Decode<T>& decode) {
  const AttentionParams& p = problem.p;
  for (int r = 0; r < decode.tile.count; ++r) {
    const A<T> inverse = decode.tile.seen[r] ? A<T>(1) / decode.sum[r] : A<T>(0);
    const int64_t at = offset(p.out, decode.tile.b, decode.tile.head[r], decode.tile.row[r]);
    with_dtype_beside<T>(p.out.dtype, [&]<class S>(S) {
      S* out = static_cast<S*>(p.out.data) + at;
      for (int64_t d = 0; d < p.Dv; d += N<T>)
        store_row<A<T>>(out + d, 1, p.Dv - d,
                        decode.tile.seen[r] ? load(decode.out + r * decode.columns_v + d) * inverse : V<T>{});
    });
    static_cast<A<T>*>(p.lse.data)[offset(p.lse, decode.tile.b, decode.tile.head[r], decode.tile.row[r])] =
        natural_lse<T>(V<T>{} + decode.reference[r], V<T>{} + decode.sum[r])[0];
  }
}

#if defined(__AMX_BF16__)
// What the products on tiles take beside it.
struct DecodeTiles {
  bf16* query;      // see pack_tile_query
  bf16* copy;       // a strip of keys or values
  uint32_t* pairs;  // see pack_tile_weights
  int64_t ld;
  float* sums;  // [16][ld], two rows of each query; nobody reads those behind
};
inline void take_tiles(const AttentionParams& p, const Decode<bf16>& decode, Arena& arena,
                       DecodeTiles& tiles) {
  tiles.query = arena.take<bf16>(chunks_of(p.D) * kTileRows * kTileColumns);
  tiles.copy = arena.take<bf16>(kTileRows * max(p.D, p.Dv));
  tiles.pairs = arena.take<uint32_t>(kBlock * kTileRows);
  tiles.ld = chunks_of(p.Dv) * 16;
  tiles.sums = arena.take<float>(kTileRows * tiles.ld);
  std::memset(tiles.sums, 0, size_t(2 * decode.tile.count * tiles.ld) * sizeof(float));
  pack_tile_query(decode.query, decode.tile.count, p.D, decode.columns, tiles.query);
}

// As decode_block; sums are rescaled as rows of twice as many columns.
inline void decode_block_with_tiles(const Problem<bf16>& problem, Decode<bf16>& decode,
                                    const DecodeTiles& tiles, int64_t hk, int64_t begin, int64_t end,
                                    int64_t last) {
  const AttentionParams& p = problem.p;
  const int64_t keys = end - begin, b = decode.tile.b;
  const int count = decode.tile.count;
  const ShownKeys<bf16> shown(problem, b, hk, begin, end);
  if (!shown.any) return;
  const bf16* rows[kBlock];
  key_rows<bf16>(problem, p.key, p.D, b, hk, begin, end, shown, rows);
  hold_query(tiles.query, p.D);
  for_each_tile(rows, keys, p.key, p.D, tiles.copy, [&](int64_t first, const bf16* key, int64_t ld) {
    if (count <= 4)
      score_tile<4>(tiles.query, count, key, ld, p.D, decode.scores + first);
    else
      score_tile<kDecodeRows>(tiles.query, count, key, ld, p.D, decode.scores + first);
  });
  prefetch_keys(problem, p.value, p.Dv, b, hk, begin, min(begin + kTileRows, end));
  transform_rows(problem, decode.tile, begin, keys, shown.masked(problem), decode.scores, decode.bend);
  decode_weigh(decode, keys);
  pack_tile_weights(decode.scores, count, keys, tiles.pairs);
  key_rows<bf16>(problem, p.value, p.Dv, b, hk, begin, end, shown, rows);
  prefetch_keys(problem, p.key, p.D, b, hk, end, min(end + kTileRows, last));
  add_tile_values(p.Dv, tiles.pairs, tiles.sums, tiles.ld,
                  [&](auto&& f) { for_each_tile(rows, keys, p.value, p.Dv, tiles.copy, f); });
}
// Keys [first, last); false, with nothing summed, where a sum is not finite.
inline bool decode_keys_with_tiles(const Problem<bf16>& problem, Arena& arena, Decode<bf16>& decode,
                                   int64_t hk, int64_t first, int64_t last) {
  const TileConfiguration configuration;
  DecodeTiles tiles;
  take_tiles(problem.p, decode, arena, tiles);
  float* const out = std::exchange(decode.out, tiles.sums);
  const int64_t columns = std::exchange(decode.columns_v, 2 * tiles.ld);
  for (int64_t begin = first; begin < last; begin += kBlock)
    decode_block_with_tiles(problem, decode, tiles, hk, begin, min(begin + kBlock, last), last);
  decode.out = out;
  decode.columns_v = columns;
  Vec<float> zeros{};  // x * 0 is 0 for finite x, NaN otherwise
  for (int64_t x = 0; x < 2 * decode.tile.count * tiles.ld; x += 16) zeros += load(tiles.sums + x) * 0.f;
  if (any(zeros != 0)) return false;
  for (int r = 0; r < decode.tile.count; ++r) {
    const float* even = tiles.sums + 2 * r * tiles.ld;
    sort_columns(even, even + tiles.ld, problem.p.Dv, out + r * columns);
  }
  return true;
}
#endif

// Keys [first, last) from the start.
template <class T>
inline void decode_keys(const Problem<T>& problem, Arena& arena, Decode<T>& decode, int64_t hk, int64_t first,
                        int64_t last, bool with_sink) {
  start_decode(problem.p, with_sink, decode);
#if defined(__AMX_BF16__)
  if constexpr (kDecodeTiles<T>)
    if (uses_tiles<T>(problem.p, decode.tile.count, last - first)) {
      if (decode_keys_with_tiles(problem, arena, decode, hk, first, last)) return;
      start_decode(problem.p, with_sink, decode);
    }
#endif
  for (int64_t begin = first; begin < last; begin += kBlock)
    decode_block(problem, decode, hk, begin, min(begin + kBlock, last), last);
}

// The first of keys [first, last) that the masks show to some row, or one before it: padding on the left is
// not read.
template <class T>
inline int64_t first_shown(const Problem<T>& problem, int64_t b, int64_t hk, int64_t first, int64_t last) {
  for (; problem.masked && first < last; first += kBlock) {
    const int64_t end = min(first + kBlock, last);
    const ShownKeys<T> keys(problem, b, hk, first, end);
    if (!keys.any) continue;
    for (const uint8_t* shown = keys.shown; keys.known && !*shown; ++shown) ++first;
    break;
  }
  return min(first, last);
}

// The keys of one split against all rows of a key/value head: finished where there is only one split, else
// partial[rows][reference, sum, out].
template <class T>
inline void decode_head(const Problem<T>& problem, int64_t b, int64_t hk, int64_t splits, int64_t split,
                        A<T>* partial) {
  const AttentionParams& p = problem.p;
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Decode<T>& decode = *arena.take<Decode<T>>(1);
  take_decode(problem, b, hk, arena, decode);
  int64_t first = decode.tile.lo_min, last = min(decode.tile.hi_max, p.S);
  if (splits > 1) {
    const int64_t keys = round_up((problem.key_end - problem.key_begin + splits - 1) / splits, kBlock);
    first = max(first, problem.key_begin + split * keys);
    last = min(last, problem.key_begin + (split + 1) * keys);
  }
  first = first_shown(problem, b, hk, first, last);
  decode_keys(problem, arena, decode, hk, first, last, split == 0);
  if (splits == 1) return finish_decode(problem, decode);
  for (int r = 0; r < decode.tile.count; ++r, partial += decode_size(problem)) {
    partial[0] = decode.reference[r];
    partial[1] = decode.sum[r];
    std::memcpy(partial + 2, decode.out + r * decode.columns_v, size_t(decode.columns_v) * sizeof(A<T>));
  }
}

// Finishes the rows of a key/value head from the partial results of its splits, in their order.
template <class T>
inline void merge_decode(const Problem<T>& problem, int64_t b, int64_t hk, int64_t splits,
                         const A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Decode<T>& decode = *arena.take<Decode<T>>(1);
  take_decode(problem, b, hk, arena, decode);
  const int64_t size = decode_size(problem), next = decode.tile.count * size;
  for (int r = 0; r < decode.tile.count; ++r) {
    const A<T>* from = partial + r * size;
    V<T> top = V<T>{} - kInf<T>;
    for (int64_t s = 0; s < splits; ++s) top = maximum(top, V<T>{} + from[s * next]);
    decode.reference[r] = top[0];
    decode.sum[r] = 0;
    for (int64_t s = 0; s < splits; ++s, from += next) {
      const V<T> alpha = exp2<>(from[0] - finite_or_zero(top));
      decode.sum[r] += from[1] * alpha[0];
      for (int64_t d = 0; d < decode.columns_v; d += N<T>) {
        A<T>* at = decode.out + r * decode.columns_v + d;
        store(at, load(at) + load(from + 2 + d) * alpha);
      }
    }
  }
  finish_decode(problem, decode);
}

// A function of the shape alone, so that results do not depend on the number of threads.
template <class T>
inline int64_t decode_splits(const Problem<T>& problem, int64_t heads) {
  return max(1, min(128 / max(heads, 1), (problem.key_end - problem.key_begin) / 512));
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
