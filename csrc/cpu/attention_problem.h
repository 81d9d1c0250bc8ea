// What one call of attention asks for: its types, its options reduced to what kernels test, which keys a
// query sees, and its query rows cut into tiles.
#pragma once
#include "attention.h"
#include "dtype.h"
#include "float_parts.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
struct FormatOf {
#if defined(__AMX_BF16__)
  using type = Parts;
#else
  using type = Plain<float>;
#endif
};
template <>
struct FormatOf<double> {
  using type = Plain<double>;
};
#if defined(__AVX512BF16__)
template <>
struct FormatOf<bf16> {
  using type = Pair;
};
#endif
template <int kBytes>
struct UnsignedOf {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint64_t;
};

// All function templates of attention are `inline`, although linkage does not need it: GCC then inlines them
// as eagerly as members of a class, without which the backward is measurably slower.

// The alphabet of these kernels. T is what products are made of: float, double, or bf16 where there are
// products of its pairs. S is the dtype of a tensor: half precision that has no products becomes float as it
// is read, and functions `_of` a dtype are all that is compiled for it.
template <class T>
using Format = typename FormatOf<T>::type;  // how its products are formed
template <class T>
using E = typename Format<T>::Element;  // what products read
template <class T>
using A = typename Format<T>::Accumulator;  // what products are summed in; scores, weights, gradients
template <class T>
using V = Vec<A<T>>;  // N<T> of them
template <class T>
using Word = typename UnsignedOf<sizeof(A<T>)>::type;  // an unsigned integer for each of them
template <class T>
constexpr int N = kLanes<A<T>>;
constexpr int NV = kColumns;  // vectors per tile
template <class T>
constexpr int kTile = NV * N<T>;  // query rows per tile
constexpr int64_t kBlock = 128;   // keys per block: a 128 x 32 fp32 score tile is 16 KB, half of a small L1
template <class T>
constexpr bool kPairs = Format<T>::kStep == 2;
template <class T>
constexpr int kParts = Format<T>::kParts;  // numbers of an operand per element
// Keys per tile are rounded to this: the depth of out^T += V^T P^T, and the rows of the scores.
template <class T>
constexpr int64_t kKeyStep = Format<T>::kDepth > Format<T>::kRows ? Format<T>::kDepth : Format<T>::kRows;
template <class T>
constexpr A<T> kInf = A<T>(__builtin_inf());

// f(T{}) for tensors of a dtype, of which some have no products where bf16 has: see `suits`.
template <class F>
void with_products(DType dtype, F&& f) {
  if constexpr (kPairs<bf16>)
    if (dtype == DType::bf16) return f(bf16{});
  if constexpr (kPairs<float> || !kPairs<bf16>)
    if (dtype != DType::f64) return f(float{});
  if constexpr (!kPairs<bf16>) f(double{});
}

// b, h, i, j are a batch, query head, query row and key; hk is a key/value head.
template <class T>
struct Problem {
  const AttentionParams& p;
  int64_t group;                  // query heads per key/value head
  int64_t tiles_per_head, tiles;  // tiles of one key/value head, over all its query heads
  bool flat;                      // short queries: a tile takes rows of several heads
  int64_t depth, depth_v;         // D and Dv as padded for the products
  int64_t shift;                  // the diagonal of query i is key i + shift
  int64_t key_begin, key_end;     // keys inside some query's band
  bool masked;                    // some keys may be hidden by attn_mask or key_padding_mask
  bool biased, hides;             // a mask holds numbers; one is boolean
  bool half;                      // tensors are in half precision
  bool general;                   // scores need more than a positive scale (then they are transformed first)
  Word<T> threshold;              // dropout drops words below it
  A<T> keep_scale;

  explicit Problem(const AttentionParams& params) : p(params) {
    group = p.H / p.Hkv;
    flat = p.L < kTile<T>;
    tiles_per_head = (p.L + kTile<T> - 1) / kTile<T>;
    tiles = flat ? (group * p.L + kTile<T> - 1) / kTile<T> : group * tiles_per_head;
    depth = round_up(p.D, Format<T>::kDepth);
    depth_v = round_up(p.Dv, Format<T>::kDepth);
    shift = p.lower_right ? p.S - p.L : 0;
    int64_t lo, hi;
    band(0, lo, hi);
    key_begin = lo;
    band(p.L - 1, lo, hi);
    key_end = hi;
    masked = p.mask.data || p.key_padding.data;
    half = p.query.dtype == DType::bf16 || p.query.dtype == DType::f16;
    biased = p.mask.data && p.mask.dtype != DType::boolean;
    hides = p.key_padding.data || (p.mask.data && !biased);
    // Hidden scores are -inf, and stay so only times a factor that is not 0 in A<T>.
    general = biased || p.alibi.data || p.softcap > 0 || !(A<T>(p.scale * kLog2e) >= A<T>(__FLT_MIN__));
    double limit = p.dropout_p * 4294967296.0 + 0.5;
    threshold = limit >= 4294967295.0 ? Word<T>(4294967295u) : Word<T>(limit);
    keep_scale = p.dropout_p < 1 ? A<T>(1 / (1 - p.dropout_p)) : A<T>(0);
  }
  bool has_dropout() const { return p.dropout_p > 0; }
  // Where key j of a (B, Hkv, S, X) tensor begins, and the end of the piece of memory, in steps of stride[2],
  // that it is in.
  int64_t key_offset(const View& view, int64_t b, int64_t hk, int64_t j) const {
    if (!p.pages) return offset(view, b, hk, j);
    return offset(view, p.pages[j / p.page_size], hk, j % p.page_size);
  }
  int64_t piece_end(int64_t j) const { return p.pages ? (j / p.page_size + 1) * p.page_size : p.S; }
  // Keys [lo, hi) that the band leaves to query i; lo >= hi where it leaves none.
  void band(int64_t i, int64_t& lo, int64_t& hi) const {
    int64_t diagonal = i + shift;
    lo = p.window_left < 0 ? 0 : min(max(diagonal - p.window_left, 0), p.S);
    hi = p.window_right < 0 ? p.S : max(min(diagonal + min(p.window_right, p.S + p.L) + 1, p.S), 0);
  }
  bool mask_shows(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const View &padding = p.key_padding, &mask = p.mask;
    if (padding.data && !static_cast<const uint8_t*>(padding.data)[offset(padding, b, j)]) return false;
    if (!mask.data) return true;
    bool shown = false;
    with_mask_dtype(
        [&]<class S>(S) { shown = shows(static_cast<const S*>(mask.data)[offset(mask, b, h, i, j)]); });
    return shown;
  }
  // Whether query (b, h, i) sees any key: by the masks and the band, never by a score's value.
  bool row_sees(int64_t b, int64_t h, int64_t i) const {
    int64_t lo, hi;
    band(i, lo, hi);
    if (lo >= hi || !masked) return lo < hi;
    if (mask_shows(b, h, i, hi - 1)) return true;  // as behind padding on the left, however long
    for (int64_t j = lo; j < hi; ++j)
      if (mask_shows(b, h, i, j)) return true;
    return false;
  }
  // Rows of attn_mask that the queries of one key/value head have between them.
  int64_t mask_rows() const {
    if (!p.mask.data) return 1;
    return (p.mask.stride[1] ? group : 1) * (p.mask.stride[2] ? p.L : 1);
  }
  // Whether find_shown is quicker than finding that keys and values are finite.
  bool knows_shown_keys_sooner(int64_t keys) const {
    const int64_t per_row = 32 + keys / (p.mask.dtype == DType::boolean ? 16 : 2);  // cycles
    return mask_rows() * per_row <= keys * (8 + (p.D + p.Dv) / N<T>);
  }
  // Which of the keys [begin, end) the masks show to some query that reads key/value head hk, among keys in
  // reach of any: the quick way where there are few rows.
  void find_shown(int64_t b, int64_t hk, int64_t begin, int64_t end, uint8_t* shown) const {
    const View &padding = p.key_padding, &mask = p.mask;
    std::memset(shown, mask.data == nullptr, size_t(end - begin));
    if (mask.data)
      with_mask_dtype([&]<class S>(S) {
        for (int64_t g = 0; g < (mask.stride[1] ? group : 1); ++g)
          for (int64_t i = 0; i < (mask.stride[2] ? p.L : 1); ++i) {
            int64_t lo = begin, hi = end;
            if (mask.stride[2]) band(i, lo, hi);  // a row that all share is seen up to the last one's reach
            lo = max(lo, begin), hi = min(hi, end);
            const S* row = static_cast<const S*>(mask.data) + offset(mask, b, hk * group + g, i, lo);
            for_each_strided(row, mask.stride[3], hi - lo, shown + (lo - begin),
                             [](uint8_t& s, S m) { s |= uint8_t(shows(m)); });
          }
      });
    if (padding.data)
      for_each_strided(static_cast<const uint8_t*>(padding.data) + offset(padding, b, begin),
                       padding.stride[1], end - begin, shown,
                       [](uint8_t& s, uint8_t m) { s &= uint8_t(m != 0); });
  }
  // Whether any query that reads key/value head hk sees key j.
  bool key_is_seen(int64_t b, int64_t hk, int64_t j) const {
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < p.L; ++i) {
        int64_t lo, hi;
        band(i, lo, hi);
        if (j >= lo && j < hi && mask_shows(b, hk * group + g, i, j)) return true;
      }
    return false;
  }

 private:
  template <class S>
  static bool shows(S mask) {
    if constexpr (kSame<S, uint8_t>)
      return mask != 0;
    else if constexpr (kSame<S, bf16>)
      return mask.bits != 0xFF80;  // infinities, compared without a conversion of each
    else if constexpr (kSame<S, f16>)
      return mask.bits != 0xFC00;
    else
      return mask != -__builtin_inf();
  }
  // f(to[j], from[j * stride]), in vectors where they lie together.
  template <class S, class F>
  static void for_each_strided(const S* from, int64_t stride, int64_t count, uint8_t* to, F&& f) {
    if (stride == 1)
      for (int64_t j = 0; j < count; ++j) f(to[j], from[j]);
    else
      for (int64_t j = 0; j < count; ++j) f(to[j], from[j * stride]);
  }
  template <class F>
  void with_mask_dtype(F&& f) const {
    if (p.mask.dtype == DType::boolean) return f(uint8_t());
    if (p.mask.dtype == DType::f32) return f(float());
    with_dtype_beside<T>(p.mask.dtype, f);
  }
};

template <class T>
struct Tile {
  int count;    // rows in use; the lanes behind them repeat the last row's limits
  int vectors;  // that products and softmax take: those in use, in pairs all
  int64_t b;
  int64_t head[kTile<T>], row[kTile<T>];
  int64_t mask_row[kTile<T>];            // where in attn_mask
  Int<A<T>> lo[kTile<T>], hi[kTile<T>];  // visible band of each row
  int64_t lo_min, lo_max, hi_min, hi_max;
  int64_t vector_lo[NV], vector_hi[NV];  // keys that some row of a vector may see
  bool seen[kTile<T>];
  bool finite;     // what has been packed of its rows
  bool whole[NV];  // no lane of the vector is empty or behind the last row
  A<T> slope[kTile<T>], diagonal[kTile<T>];
  Word<T> key1[kTile<T>], key2[kTile<T>];  // dropout: two words per row
};

// Of the seed, from row to row.
constexpr uint64_t kRowStep = 0x9E3779B97F4A7C15u;
inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Fills in a tile: rows of one key/value head, row_of(r, head, row) for each of its `count`.
template <class T, class F>
FASTATTN_INLINE void describe(const Problem<T>& problem, int64_t b, int64_t count, Tile<T>& tile,
                              F&& row_of) {
  const AttentionParams& p = problem.p;
  tile.count = int(count);
  tile.b = b;
  tile.finite = true;
  // What a call needs not is not looked at for each row: short queries consist of this.
  for (int r = 0; r < tile.count; ++r) row_of(r, tile.head[r], tile.row[r]);
  const bool banded = p.window_left >= 0 || p.window_right >= 0;
  if (banded)
    for (int r = 0; r < tile.count; ++r) {
      int64_t lo, hi;
      problem.band(tile.row[r], lo, hi);
      tile.lo[r] = Int<A<T>>(lo);
      tile.hi[r] = Int<A<T>>(hi);
      tile.seen[r] = lo < hi;
    }
  else
    for (int r = 0; r < tile.count; ++r) tile.lo[r] = 0, tile.hi[r] = Int<A<T>>(p.S), tile.seen[r] = p.S > 0;
  if (problem.masked)
    for (int r = 0; r < tile.count; ++r) {
      if (p.mask.data) tile.mask_row[r] = offset(p.mask, b, tile.head[r], tile.row[r]);
      tile.seen[r] = problem.row_sees(b, tile.head[r], tile.row[r]);
    }
  tile.lo_min = p.S, tile.lo_max = 0, tile.hi_min = p.S, tile.hi_max = 0;
  for (int v = 0; v < NV; ++v) {
    const int first = v * int(N<T>), last = int(min(tile.count, first + N<T>));
    int64_t lo_min = p.S, lo_max = 0, hi_min = p.S, hi_max = 0;
    const int rows = int(max(last - first, 0));
    const bool whole = rows == N<T> && !std::memchr(tile.seen + first, false, size_t(rows));
    for (int r = first; r < first + (banded ? rows : min(rows, 1)); ++r) {
      const int64_t lo = tile.lo[r], hi = tile.hi[r];
      lo_max = max(lo_max, lo), hi_min = min(hi_min, hi);
      lo_min = min(lo_min, lo < hi ? lo : p.S), hi_max = max(hi_max, lo < hi ? hi : 0);
    }
    tile.vector_lo[v] = lo_min, tile.vector_hi[v] = hi_max, tile.whole[v] = whole;
    tile.lo_min = min(tile.lo_min, lo_min), tile.lo_max = max(tile.lo_max, lo_max);
    tile.hi_min = min(tile.hi_min, hi_min), tile.hi_max = max(tile.hi_max, hi_max);
  }
  if (p.alibi.data)
    for (int r = 0; r < tile.count; ++r) {
      tile.slope[r] = static_cast<const A<T>*>(p.alibi.data)[offset(p.alibi, b, tile.head[r])];
      tile.diagonal[r] = A<T>(tile.row[r] + problem.shift);
    }
  if (problem.has_dropout())
    for (int r = 0; r < tile.count; ++r) {
      uint64_t z = mix(p.seed + uint64_t(offset(p.lse, b, tile.head[r], tile.row[r]) + 1) * kRowStep);
      tile.key1[r] = Word<T>(uint32_t(z));
      tile.key2[r] = Word<T>(uint32_t(z >> 32));
    }
  // A vector without any row sees no key: its scores are not even formed.
  const int last = tile.count - 1, used = int(round_up(count, N<T>));
  tile.vectors = kPairs<T> ? NV : used / N<T>;
  for (int r = tile.count; r < kTile<T>; ++r) {
    tile.head[r] = tile.head[last], tile.row[r] = tile.row[last];
    tile.mask_row[r] = tile.mask_row[last];
    tile.lo[r] = r < used ? tile.lo[last] : 0;
    tile.hi[r] = r < used ? tile.hi[last] : 0;
    tile.seen[r] = false;
  }
  if (p.alibi.data)
    for (int r = tile.count; r < kTile<T>; ++r)
      tile.slope[r] = tile.slope[last], tile.diagonal[r] = tile.diagonal[last];
  if (problem.has_dropout())
    for (int r = tile.count; r < kTile<T>; ++r)
      tile.key1[r] = tile.key1[last], tile.key2[r] = tile.key2[last];
}
// Has the scores of vectors without rows hidden, for those who read them all.
template <class T>
inline void hide_unused(Tile<T>& tile) {
  if (tile.count <= (NV - 1) * N<T>) tile.hi_min = 0;
}
// Rows [first, first + kTile) of one query head.
template <class T>
inline void make_tile_of_head(const Problem<T>& problem, int64_t b, int64_t h, int64_t first, Tile<T>& tile) {
  describe(problem, b, min(kTile<T>, problem.p.L - first), tile, [&](int r, int64_t& head, int64_t& row) {
    head = h;
    row = first + r;
  });
}
// Tile t of key/value head hk.
template <class T>
inline void make_tile(const Problem<T>& problem, int64_t b, int64_t hk, int64_t t, Tile<T>& tile) {
  const int64_t L = problem.p.L, per_head = problem.tiles_per_head;
  if (!problem.flat)
    return make_tile_of_head(problem, b, hk * problem.group + t / per_head, t % per_head * kTile<T>, tile);
  const int64_t first = t * kTile<T>;
  int64_t next_head = hk * problem.group + first / L, next_row = first % L;
  describe(problem, b, min(kTile<T>, problem.group * L - first), tile, [&](int, int64_t& head, int64_t& row) {
    head = next_head;
    row = next_row;
    if (++next_row == L) next_row = 0, ++next_head;
  });
}

// 1 / (1 - p) where dropout keeps key j for the rows of vector v, else 0.
template <class T>
FASTATTN_INLINE V<T> dropout_keep(const Problem<T>& problem, const Tile<T>& tile, int v, int64_t j) {
  using VU = Vec<Word<T>>;
  constexpr Word<T> kWord = Word<T>(0xffffffffu);
  VU x = (Word<T>(uint32_t(j) * 0x9E3779B9u) + load(tile.key1 + v * N<T>)) & kWord;
  x ^= x >> 16;
  x = (x * Word<T>(0x85EBCA6Bu)) & kWord;
  x ^= load(tile.key2 + v * N<T>);
  x ^= x >> 13;
  x = (x * Word<T>(0xC2B2AE35u)) & kWord;
  x ^= x >> 16;
  return x >= VU{} + problem.threshold ? V<T>{} + problem.keep_scale : V<T>{};
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
