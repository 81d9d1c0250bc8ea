// Scores of a tile of query rows against a block of keys: products, scale, softcap, ALiBi, masks, bands.
#pragma once
#include "attention_pack.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One vector of a mask row: booleans as 0 or -inf, numbers as they are.
template <class T, class M>
FASTATTN_INLINE V<T> load_mask(const M* m, int64_t stride, int64_t count) {
  if constexpr (kSame<M, uint8_t>) {
    uint8_t buffer[N<T>];
    if (stride == 1 && count >= N<T>) {
      __builtin_memcpy(buffer, m, N<T>);
    } else {
      for (int i = 0; i < N<T>; ++i) buffer[i] = i < count ? m[i * stride] : 0;
    }
    typedef uint8_t Bytes __attribute__((vector_size(N<T>)));
    Bytes bytes;
    __builtin_memcpy(&bytes, buffer, N<T>);
    Vec<Int<A<T>>> shown = __builtin_convertvector(bytes, Vec<Int<A<T>>>);
    return shown != 0 ? V<T>{} : V<T>{} - kInf<T>;
  } else if constexpr (sizeof(A<T>) == 8 && sizeof(M) == 4) {
    V<T> v{};
    for (int i = 0; i < N<T> && i < count; ++i) v[i] = A<T>(m[i * stride]);
    return v;
  } else {
    return load_row<A<T>>(m, stride, count);
  }
}

// A mask or sink in log2 units. Only an infinity is one there: the largest finite numbers must not become it.
template <class T>
constexpr A<T> kLargest = sizeof(A<T>) == 8 ? A<T>(0x1p1023) : A<T>(0x1p127);
template <class T>
FASTATTN_INLINE V<T> to_log2(V<T> natural) {
  const V<T> most = V<T>{} + kLargest<T>;
  const V<T> scaled = maximum(-most, minimum(most, natural * A<T>(kLog2e)));
  const auto finite = natural - natural == 0;
  return finite ? scaled : natural;
}

// What masks leave of a tile. Bit 0: something is visible, bit 1: something is hidden or biased.
FASTATTN_INLINE int content_of(bool visible, bool altered) { return int(visible) | int(altered) << 1; }

// Whether rows of a tile have masks of their own.
template <class T>
FASTATTN_INLINE bool mask_rows_differ(const Problem<T>& problem) {
  const View& mask = problem.p.mask;
  return mask.data && (mask.stride[2] || (problem.flat && mask.stride[1]));
}

// Booleans: fills shown[(key - begin) / kWordKeys][kTile] with one bit per key.
constexpr int64_t kWordKeys = 32;
template <class T>
inline int fill_shown(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t end,
                      Word<T>* shown) {
  const View &padding = problem.p.key_padding, mask = problem.biased ? View{} : problem.p.mask;
  const int rows = mask.data && mask_rows_differ(problem) ? tile.count : 1;
  uint32_t of_keys[kBlock / kWordKeys];
  auto bits = [](const uint8_t* row, int64_t stride, int64_t j, int64_t count) {
    return row ? nonzero_bits(row + j * stride, stride, count) : uint32_t((uint64_t(1) << count) - 1);
  };
  const uint8_t* row = static_cast<const uint8_t*>(padding.data);
  if (row) row += offset(padding, tile.b, begin);
  for (int64_t j = 0; j < end - begin; j += kWordKeys)
    of_keys[j / kWordKeys] = bits(row, padding.stride[1], j, min(kWordKeys, end - begin - j));
  bool visible = false, hidden = false;
  for (int r = 0; r < rows; ++r) {
    row = static_cast<const uint8_t*>(mask.data);
    if (row) row += offset(mask, tile.b, tile.head[r], tile.row[r], begin);
    for (int64_t j = 0; j < end - begin; j += kWordKeys) {
      const int64_t count = min(kWordKeys, end - begin - j);
      const uint32_t word = bits(row, mask.stride[3], j, count) & of_keys[j / kWordKeys];
      visible |= word != 0;
      hidden |= word != bits(nullptr, 0, 0, count);
      shown[j / kWordKeys * kTile<T> + r] = word;
    }
  }
  const int content = content_of(visible, hidden);
  if (content == 3)
    for (int64_t j = 0; j < end - begin; j += kWordKeys, shown += kTile<T>)
      for (int r = rows; r < kTile<T>; ++r) shown[r] = shown[rows - 1];
  return content;
}

// f(M{}) for a mask of numbers
template <class T, class F>
FASTATTN_INLINE void with_mask_of_numbers(DType dtype, F&& f) {
  if (dtype == DType::f32) return f(float{});
  with_dtype_beside<T>(dtype, f);
}
// Of the elements of a row of numbers.
template <class M>
FASTATTN_INLINE int content_of_row(const M* row, int64_t count) {
  bool visible = false, altered = false;
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (kSame<M, bf16> || kSame<M, f16>) {
      visible |= row[j].bits != (kSame<M, bf16> ? 0xFF80 : 0xFC00);
      altered |= (row[j].bits & 0x7FFF) != 0;
    } else {
      visible |= row[j] != -__builtin_inf();
      altered |= row[j] != 0;
    }
  }
  return content_of(visible, altered);
}
// Of what a mask of numbers holds for a tile, or 3 where that takes as long as reading it: most blocks of
// most masks show or hide everything.
template <class M, class T>
inline int content_of_tile(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t end) {
  const View& mask = problem.p.mask;
  if (mask.stride[3] != 1) return 3;
  int content = 0;
  for (int r = 0; r < (mask_rows_differ(problem) ? tile.count : 1) && content != 3; ++r)
    content |= content_of_row(
        static_cast<const M*>(mask.data) + offset(mask, tile.b, tile.head[r], tile.row[r], begin),
        end - begin);
  return content;
}
template <class T>
inline int content_of_bias(const Problem<T>& problem, const Tile<T>& tile, int64_t begin, int64_t end) {
  int content = 0;
  with_mask_of_numbers<T>(problem.p.mask.dtype,
                          [&]<class M>(M) { content = content_of_tile<M>(problem, tile, begin, end); });
  return content;
}
// bias[i]: what a mask of numbers adds to the scores of key `key` + i and the rows of vector v, in log2
// units, for `count` keys.
template <class M, class T>
FASTATTN_INLINE void load_bias_as(const Problem<T>& problem, const Tile<T>& tile, int v, int64_t key,
                                  int64_t count, V<T> (&bias)[N<T>]) {
  const View& mask = problem.p.mask;
  const M* data = static_cast<const M*>(mask.data);
  const int64_t stride = mask.stride[3];
  if (!mask_rows_differ(problem)) {
    const V<T> of_keys =
        to_log2<T>(load_mask<T>(data + offset(mask, tile.b, tile.head[0], 0, key), stride, count));
    for (int i = 0; i < N<T>; ++i) bias[i] = V<T>{} + of_keys[i];
    return;
  }
  data += key * stride;
  const int64_t* row = tile.mask_row + v * N<T>;
  if (stride == 1 && count >= N<T>) {
    const int64_t ahead = kTile<T> * mask.stride[2];  // the same keys of the next tile, which comes next
#pragma GCC unroll 16
    for (int r = 0; r < N<T>; ++r) {
      bias[r] = to_log2<T>(load_mask<T>(data + row[r], 1, N<T>));
      __builtin_prefetch(data + row[r] + ahead);
    }
  } else {
    for (int r = 0; r < N<T>; ++r) bias[r] = to_log2<T>(load_mask<T>(data + row[r], stride, count));
  }
  transpose<A<T>>(bias);
}
template <class T>
FASTATTN_INLINE void load_bias(const Problem<T>& problem, const Tile<T>& tile, int v, int64_t key,
                               int64_t count, V<T> (&bias)[N<T>]) {
  with_mask_of_numbers<T>(problem.p.mask.dtype,
                          [&]<class M>(M) { load_bias_as<M>(problem, tile, v, key, count, bias); });
}

// The part of a block that a tile visits: [begin, end) rounded to what products need, relative to the block.
struct Span {
  int64_t begin, end;
};
template <class T>
inline Span span_of(const KeyBlock<T>& block, const Tile<T>& tile) {
  int64_t begin = max(block.begin, tile.lo_min), end = min(block.end, tile.hi_max);
  if (begin >= end) return {0, 0};
  return {round_down(begin - block.begin, kKeyStep<T>), round_up(end - block.begin, kKeyStep<T>)};
}

// Calls f(part, vectors, lane) for the parts of a span and the vectors of the tile, from `lane` on, that see
// some of its keys: on the diagonal of a causal mask, and in a tile with few rows, half of the products is of
// no use. What is left out must not be read before it has been hidden by the band.
template <class T, class F>
FASTATTN_INLINE void for_visible(const Tile<T>& tile, int64_t block_begin, Span span, F&& f) {
  static_assert(NV == 2);
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, NV> both;
  if constexpr (!kPairs<T>) {
    int64_t lo[NV], hi[NV];
    for (int v = 0; v < NV; ++v) {
      lo[v] = max(tile.vector_lo[v] - block_begin, span.begin);
      hi[v] = min(tile.vector_hi[v] - block_begin, span.end);
    }
    const bool sees[NV] = {lo[0] < hi[0], lo[1] < hi[1]};
    if (sees[0] != sees[1]) return f(span, one, sees[0] ? 0 : N<T>);
    const Span common{max(lo[0], lo[1]), min(hi[0], hi[1])};
    if (common.begin < common.end) {
      if (span.begin < common.begin) f(Span{span.begin, common.begin}, one, lo[0] < lo[1] ? 0 : N<T>);
      f(common, both, 0);
      if (common.end < span.end) f(Span{common.end, span.end}, one, hi[0] > hi[1] ? 0 : N<T>);
      return;
    }
  }
  f(span, both, 0);
}

// Scores of one tile and key block on their way. row(key - block.begin) holds a key's kTile scores; while a
// tile is weighed chunk by chunk, rows share a ring that stays in the first-level cache.
template <class T>
struct Scores {
  A<T>* scores;
  Word<T>* shown;  // of boolean masks
  Span span;
  int64_t block_begin;
  int64_t begin, end;   // keys of the span that exist
  bool biased, hidden;  // by masks
  A<T> factor;          // the score in log2 units is scores * factor
  int64_t ring;         // mask of the rows in use: all, or those of the ring
  bool kept = false;    // weights are wanted in place of the scores, beside parts of them

  void take(Arena& arena, const Problem<T>& problem) {
    scores = arena.take<A<T>>(kBlock * kTile<T>);
    shown = problem.hides ? arena.take<Word<T>>(kBlock / kWordKeys * kTile<T>) : nullptr;
    ring = -1;
  }
  FASTATTN_INLINE A<T>* row(int64_t j) const { return scores + (j & ring) * kTile<T>; }
  // False where the tile sees nothing of the block.
  bool start(const Problem<T>& problem, const Tile<T>& tile, const KeyBlock<T>& block) {
    span = span_of(block, tile);
    if (span.begin >= span.end) return false;
    block_begin = block.begin;
    begin = block.begin + span.begin;
    end = min(block.begin + span.end, block.end);
    const int bias = problem.biased ? content_of_bias(problem, tile, begin, end) : content_of(true, false);
    const int mask = shown ? fill_shown(problem, tile, begin, end, shown) : content_of(true, false);
    biased = bias & 2, hidden = mask & 2;
    return bias & mask & 1;
  }
  // The products of the span.
  void multiply(const Problem<T>& problem, const Tile<T>& tile, const E<T>* query_panel, KeyBlock<T>& block) {
    for_visible(tile, block_begin, span, [&](Span part, auto vectors, int lane) {
      Format<T>::template scores<vectors>(
          part.end - part.begin, problem.depth, block.key.data + part.begin * block.key.ld, block.key.ld,
          query_panel + lane, row(part.begin) + lane, &block.ahead, tile.finite && block.finite);
    });
  }
  // Takes over the factor, so that scores are rounded as their maximum is.
  void apply_factor() {
    for (int64_t j = span.begin; j < span.end; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store(row(j) + v * N<T>, load(row(j) + v * N<T>) * factor);
    factor = 1;
  }
  // The general case of `transform`: `keys` rows that begin with key `from` of the block.
  template <bool kBent>  // by a softcap or slopes
  void to_log2_units(const Problem<T>& problem, const Tile<T>& tile, A<T>* rows, int64_t from, int64_t keys,
                     A<T>* bend) const {
    const AttentionParams& p = problem.p;
    const A<T> cap = kBent ? A<T>(p.softcap) : A<T>(0), cap_log2 = A<T>(p.softcap * kLog2e);
    const A<T> scale = A<T>(cap > 0 ? p.scale : p.scale * kLog2e);
    const A<T> inverse_cap = cap > 0 ? A<T>(1) / cap : A<T>(0);
    const int64_t first = block_begin + from;
    for (int64_t j0 = 0; j0 < keys; j0 += N<T>)
      for (int v = 0; v < tile.vectors; ++v) {
        const int64_t count = min(N<T>, keys - j0);
        V<T> bias[N<T>];
        if (biased) load_bias(problem, tile, v, first + j0, count, bias);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t j = j0 + i;
          A<T>* at = rows + j * kTile<T> + v * N<T>;
          V<T> s = load(at) * scale;
          if (kBent && cap > 0) {
            V<T> t = tanh(s * inverse_cap);
            s = t * cap_log2;
            // A score that is NaN may be hidden, and its gradient 0.
            if (bend) store(bend + (from + j) * kTile<T> + v * N<T>, t == t ? A<T>(1) - t * t : V<T>{});
          }
          if (kBent && p.alibi.data) {
            V<T> distance = load(tile.diagonal + v * N<T>) - A<T>(first + j);
            distance = distance < 0 ? -distance : distance;
            s -= load(tile.slope + v * N<T>) * distance * A<T>(kLog2e);
          }
          if (biased) s = bias[i] == -kInf<T> ? bias[i] : s + bias[i];
          store(at, s);
        }
      }
  }
  // Where parts are used, scores are formed in several places: not inlined, a product and a sum are rounded
  // together in all of them or in none.
  template <bool kBent>
  __attribute__((noinline)) void to_log2_units_apart(const Problem<T>& problem, const Tile<T>& tile,
                                                     A<T>* rows, int64_t from, int64_t keys,
                                                     A<T>* bend) const {
    to_log2_units<kBent>(problem, tile, rows, from, keys, bend);
  }
  // From q.k to log2 units (up to `factor`) with hidden scores at -inf, keys [from, to) of the block. `bend`
  // receives d(capped score) / d(scaled score) where there is a softcap.
  void transform(const Problem<T>& problem, const Tile<T>& tile, int64_t from, int64_t to, A<T>* bend) {
    const AttentionParams& p = problem.p;
    A<T>* rows = row(from);
    const int64_t keys = to - from, first = block_begin + from, last = min(end, block_begin + to);
    factor = A<T>(p.scale * kLog2e);
    if (problem.general) {
      const bool bent = p.softcap > 0 || p.alibi.data;
      if constexpr (kParts<T> > 1)
        bent ? to_log2_units_apart<true>(problem, tile, rows, from, last - first, bend)
             : to_log2_units_apart<false>(problem, tile, rows, from, last - first, bend);
      else
        bent ? to_log2_units<true>(problem, tile, rows, from, last - first, bend)
             : to_log2_units<false>(problem, tile, rows, from, last - first, bend);
      if (bend)  // dS is 0 in the rows behind the last key; so must be what it is multiplied with
        for (int64_t x = (last - block_begin) * kTile<T>; x < to * kTile<T>; x += N<T>)
          store(bend + x, V<T>{});
      factor = 1;
    }
    if (hidden)
      for (int64_t j = 0; j < last - first; ++j) {
        const int64_t at = from - span.begin + j;
        const Word<T>* word = shown + at / kWordKeys * kTile<T>;
        const Word<T> bit = Word<T>(1) << at % kWordKeys;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          A<T>* score = rows + j * kTile<T> + v * N<T>;
          store(score, (load(word + v * N<T>) & bit) != 0 ? load(score) : V<T>{} - kInf<T>);
        }
      }
    // Keys that some lane's band does not include.
    using VI = Vec<Int<A<T>>>;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t key = first + j;
      if (key >= tile.lo_max && key < tile.hi_min) {
        j = min(keys, tile.hi_min - first) - 1;
        continue;
      }
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        A<T>* at = rows + j * kTile<T> + v * N<T>;
        VI position = VI{} + Int<A<T>>(key);
        VI shown = (position >= load(tile.lo + v * N<T>)) & (position < load(tile.hi + v * N<T>));
        store(at, shown ? load(at) : V<T>{} - kInf<T>);
      }
    }
  }
};
// Beyond this a score in log2 units is exact to less than 2^-4: its product with `factor` must then be
// rounded before a reference is subtracted, as the reference was, or what is left is the rounding.
template <class T>
constexpr A<T> kExact = A<T>(1 << 20);
template <class T>
inline bool score_tile(const Problem<T>& problem, const Tile<T>& tile, const E<T>* query_panel,
                       KeyBlock<T>& block, Scores<T>& s, A<T>* bend) {
  if (!s.start(problem, tile, block)) return false;
  s.multiply(problem, tile, query_panel, block);
  s.transform(problem, tile, s.span.begin, s.span.end, bend);
  return true;
}

// Stores or adds the first `count` lanes at `to`.
template <class T, class M>
FASTATTN_INLINE void put_vector(M* to, int64_t count, V<T> values, bool add) {
  if constexpr (sizeof(A<T>) == 8 && sizeof(M) == 4) {
    for (int64_t k = 0; k < min(N<T>, count); ++k) to[k] = M(A<T>(to[k]) * A<T>(add) + values[k]);
  } else {
    if (add) values += load_row<A<T>>(to, 1, count);
    store_row<A<T>>(to, 1, count, values);
  }
}
// The way back: stores or adds values[keys][kTile] at the tile's rows of a (B, H, L, S) tensor, from key
// `begin` on.
template <class M, class T>
inline void put_tile_as(const View& view, const Tile<T>& tile, int64_t begin, int64_t keys,
                        const A<T>* values, bool add) {
  M* data = static_cast<M*>(view.data);
  for (int v = 0; v < NV; ++v)
    for (int64_t j = 0; j < keys; j += N<T>) {
      V<T> block[N<T>];
      if (keys - j >= N<T>)
#pragma GCC unroll 16
        for (int i = 0; i < N<T>; ++i) block[i] = load(values + (j + i) * kTile<T> + v * N<T>);
      else
        for (int i = 0; i < N<T>; ++i)
          block[i] = j + i < keys ? load(values + (j + i) * kTile<T> + v * N<T>) : V<T>{};
      transpose<A<T>>(block);
      for (int i = 0; i < N<T>; ++i) {
        int r = v * N<T> + i;
        if (r >= tile.count) break;
        M* to = data + offset(view, tile.b, tile.head[r], tile.row[r], begin + j);
        put_vector<T>(to, keys - j, block[i], add);
      }
    }
}
template <class T>
inline void put_tile(const View& view, const Tile<T>& tile, int64_t begin, int64_t keys, const A<T>* values,
                     bool add) {
  if (view.dtype == DType::f32) return put_tile_as<float>(view, tile, begin, keys, values, add);
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) { put_tile_as<S>(view, tile, begin, keys, values, add); });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
