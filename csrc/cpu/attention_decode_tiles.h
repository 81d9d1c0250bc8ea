// The products of few query rows on matrix tiles. Keys and values are read where they lie, 16 rows and 32
// columns at a time, and never rearranged:
//
//   scores^T [16 keys, rows] = K [16 keys, D] . Q^T
//   out [2 rows, Dv / 2]    += W [2 rows, 16 keys] . V [16 keys, Dv / 2]
//
// Tiles are multiplied in pairs of elements, which of the values are neighbouring columns: a query row has
// two rows of weights, pairs (w, 0) and (0, w), of which one picks the even columns and the other the odd
// ones. So an infinity or a NaN spoils the column beside it; results that are not finite are computed without
// tiles.
#pragma once
#include "attention_pack.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class Row>
FASTATTN_INLINE void prefetch_row(const Row* row, int64_t columns) {
  for (int64_t d = 0; d < columns; d += 64 / int64_t(sizeof(Row))) __builtin_prefetch(row + d);
}
// Whether few query rows may have their products on tiles.
template <class T>
#if defined(__AMX_BF16__)
constexpr bool kDecodeTiles = kSame<T, bf16>;
#else
constexpr bool kDecodeTiles = false;
#endif

#if defined(__AMX_BF16__)
constexpr int64_t kTileRows = 16, kTileColumns = 32;  // of a tile of bf16

// Columns are cut into chunks, of which the last overlaps the one before rather than reach beyond them.
inline int64_t chunks_of(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }
inline int64_t chunk_begin(int64_t chunk, int64_t columns) {
  return min(chunk * kTileColumns, columns - kTileColumns);
}

// Null rows are zero.
inline void copy_row(const bf16* row, int64_t stride, int64_t columns, bf16* to) {
  if (!row)
    std::memset(static_cast<void*>(to), 0, size_t(columns) * sizeof(bf16));
  else if (stride == 1)
    std::memcpy(to, row, size_t(columns) * sizeof(bf16));
  else
    for (int64_t d = 0; d < columns; ++d) to[d] = row[d * stride];
}
// f(first, rows, ld) for strips of 16 keys, where they lie or, with zeros for those that are null or behind
// the last, copied. The next strip is touched meanwhile: the hardware prefetches within a page of memory
// only, and a strip of a paged cache is hardly longer.
template <class F>
FASTATTN_INLINE void for_each_tile(const bf16* const* rows, int64_t keys, const View& view, int64_t columns,
                                   bf16* copy, F&& f) {
  const int64_t row_stride = view.stride[2], stride = view.stride[3];
  for (int64_t first = 0; first < keys; first += kTileRows) {
    const bf16* const* strip = rows + first;
    const int64_t count = min(keys - first, kTileRows);
    bool in_place = stride == 1 && count == kTileRows && strip[0];
    for (int64_t j = 1; j < count; ++j) in_place &= strip[j] == strip[0] + j * row_stride;
    for (int64_t j = first + kTileRows; j < min(first + 2 * kTileRows, keys); j += 4)
      __builtin_prefetch(rows[j]);
    if (in_place) {
      f(first, strip[0], row_stride);
      continue;
    }
    for (int64_t j = 0; j < kTileRows; ++j)
      copy_row(j < count ? strip[j] : nullptr, stride, columns, copy + j * columns);
    asm volatile("" ::: "memory");  // compilers do not know what the loads of tiles read
    f(first, copy, columns);
  }
}

// Panel [chunks][16 pairs of columns][16 rows][2] of rows of `padded` floats that come from bf16. Columns
// that are in two chunks are zero in the last.
inline void pack_tile_query(const float* query, int64_t rows, int64_t D, int64_t padded, bf16* panel) {
  for (int64_t c = 0; c < chunks_of(D); ++c) {
    const int64_t begin = chunk_begin(c, D);
    const __mmask32 own = ~__mmask32(0) << (c * kTileColumns - begin);
    Vec<float> block[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) {
      const float* row = query + min(r, rows - 1) * padded + begin;
      const auto pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(row + 16), (__m512)load(row));
      block[r] = r < rows ? (Vec<float>)_mm512_maskz_mov_epi16(own, pairs) : Vec<float>{};
    }
    transpose<float>(block);
    for (int64_t i = 0; i < kTileRows; ++i)
      store(reinterpret_cast<float*>(panel) + (c * kTileRows + i) * kTileRows, block[i]);
  }
  asm volatile("" ::: "memory");
}

// The panel of queries in tiles 4-7 where it fits, for score_tile.
inline void hold_query(const bf16* panel, int64_t D) {
  constexpr int64_t kTile = kTileRows * kTileColumns;
  _tile_loadd(4, panel, 64);
  if (D > 32) _tile_loadd(5, panel + kTile, 64);
  if (D > 64) _tile_loadd(6, panel + 2 * kTile, 64);
  if (D > 96) _tile_loadd(7, panel + 3 * kTile, 64);
}
// scores[rows][kBlock] of 16 keys, R rows of them at most.
template <int R>
inline void score_tile(const bf16* panel, int rows, const bf16* key, int64_t ld, int64_t D, float* scores) {
  alignas(64) float products[kTileRows * kTileRows];
  _tile_zero(0);
  if (D <= 128) {
    _tile_loadd(1, key, ld * 2);
    _tile_dpbf16ps(0, 1, 4);
    if (D > 32) {
      _tile_loadd(2, key + chunk_begin(1, D), ld * 2);
      _tile_dpbf16ps(0, 2, 5);
    }
    if (D > 64) {
      _tile_loadd(3, key + chunk_begin(2, D), ld * 2);
      _tile_dpbf16ps(0, 3, 6);
    }
    if (D > 96) {
      _tile_loadd(1, key + chunk_begin(3, D), ld * 2);
      _tile_dpbf16ps(0, 1, 7);
    }
  } else {
    for (int64_t c = 0; c < chunks_of(D); ++c) {
      _tile_loadd(1, key + chunk_begin(c, D), ld * 2);
      _tile_loadd(2, panel + c * kTileRows * kTileColumns, 64);
      _tile_dpbf16ps(0, 1, 2);
    }
  }
  _tile_stored(0, products, 64);
  Vec<float> block[kTileRows];
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) block[i] = load(products + i * kTileRows);
  transpose<float>(block);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    if (r < rows) store(scores + r * kBlock, block[r]);
}

// Pairs [strips of 16 keys][16 rows, two of each][16] of weights [rows][kBlock].
inline void pack_tile_weights(const float* weights, int rows, int64_t keys, uint32_t* pairs) {
  for (int r = 0; r < rows; ++r)
    for (int64_t j = 0; j < keys; j += kTileRows) {
      const auto half = (__m256i)_mm512_cvtneps_pbh((__m512)load(weights + r * kBlock + j));
      const __m512i even = _mm512_cvtepu16_epi32(half);
      uint32_t* to = pairs + (j + 2 * r) * kTileRows;
      _mm512_storeu_si512(to, even);
      _mm512_storeu_si512(to + kTileRows, _mm512_slli_epi32(even, 16));
    }
  asm volatile("" ::: "memory");
}

// Sums of C chunks of columns in tiles 0-3; tile 4 holds weights, 5-6 values.
template <int C>
struct ValueTiles {
  static FASTATTN_INLINE void load(const float* sums, int64_t ld) {
    _tile_loadd(0, sums, ld * 4);
    if constexpr (C > 1) _tile_loadd(1, sums + 16, ld * 4);
    if constexpr (C > 2) _tile_loadd(2, sums + 32, ld * 4);
    if constexpr (C > 3) _tile_loadd(3, sums + 48, ld * 4);
  }
  static FASTATTN_INLINE void store(float* sums, int64_t ld) {
    _tile_stored(0, sums, ld * 4);
    if constexpr (C > 1) _tile_stored(1, sums + 16, ld * 4);
    if constexpr (C > 2) _tile_stored(2, sums + 32, ld * 4);
    if constexpr (C > 3) _tile_stored(3, sums + 48, ld * 4);
  }
  static FASTATTN_INLINE void add(const uint32_t* pairs, const bf16* const (&value)[C], int64_t ld) {
    _tile_loadd(4, pairs, 64);
    _tile_loadd(5, value[0], ld * 2);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) {
      _tile_loadd(6, value[1], ld * 2);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(5, value[2], ld * 2);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (C > 3) {
      _tile_loadd(6, value[3], ld * 2);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
};
// sums [16][ld] of chunks [chunk, chunk + C) += pairs times values. for_each: see for_each_tile.
template <int C, class F>
inline void add_chunks(int64_t chunk, int64_t Dv, const uint32_t* pairs, float* sums, int64_t ld,
                       F&& for_each) {
  ValueTiles<C>::load(sums + chunk * 16, ld);
  for_each([&](int64_t first, const bf16* value, int64_t value_ld) {
    const bf16* columns[C];
    for (int c = 0; c < C; ++c) columns[c] = value + chunk_begin(chunk + c, Dv);
    ValueTiles<C>::add(pairs + first * kTileRows, columns, value_ld);
  });
  ValueTiles<C>::store(sums + chunk * 16, ld);
}
template <class F>
inline void add_tile_values(int64_t Dv, const uint32_t* pairs, float* sums, int64_t ld, F&& for_each) {
  int64_t chunk = 0, left = chunks_of(Dv);
  for (; left >= 4; chunk += 4, left -= 4) add_chunks<4>(chunk, Dv, pairs, sums, ld, for_each);
  if (left == 3) add_chunks<3>(chunk, Dv, pairs, sums, ld, for_each);
  if (left == 2) add_chunks<2>(chunk, Dv, pairs, sums, ld, for_each);
  if (left == 1) add_chunks<1>(chunk, Dv, pairs, sums, ld, for_each);
}

// Columns of one row from its sums of even columns, [chunks][16], and of odd ones.
inline void sort_columns(const float* even, const float* odd, int64_t Dv, float* out) {
  for (int64_t c = 0; c < chunks_of(Dv); ++c) {
    Vec<float> low, high;
    zip(load(even + c * 16), load(odd + c * 16), low, high, std::make_integer_sequence<int, 16>{});
    store(out + chunk_begin(c, Dv), low);
    store(out + chunk_begin(c, Dv) + 16, high);
  }
}
#endif

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
