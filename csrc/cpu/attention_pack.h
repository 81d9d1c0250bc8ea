// Operands of the products: panels of query rows, and blocks of keys and values, which are read in place
// wherever the format allows it.
#pragma once
#include "attention_problem.h"
#include "memory.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class Row, int... I>
FASTATTN_INLINE void zip(Row a, Row b, Vec<float>& low, Vec<float>& high, std::integer_sequence<int, I...>) {
  constexpr int n = sizeof...(I);
  low = bit_cast<Vec<float>>(__builtin_shufflevector(a, b, (I / 2 + (I & 1) * n)...));
  high = bit_cast<Vec<float>>(__builtin_shufflevector(a, b, (n / 2 + I / 2 + (I & 1) * n)...));
}
// Two elements per lane of a row, as they lie; those from `count` on are zero.
FASTATTN_INLINE Vec<uint32_t> load_pairs(const bf16* p, int64_t stride, int64_t count) {
  constexpr int kCount = 2 * kLanes<float>;
  if (stride == 1 && count >= kCount) {
    Vec<uint32_t> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
#if defined(__AVX512BW__)
  if (stride == 1) return (Vec<uint32_t>)_mm512_maskz_loadu_epi16((__mmask32(1) << max(count, 0)) - 1, p);
#endif
  bf16 buffer[kCount];
  std::memset(buffer, 0, sizeof buffer);
  int64_t n = min(count, kCount);
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  Vec<uint32_t> v;
  __builtin_memcpy(&v, buffer, sizeof v);
  return v;
}
// Element pairs (first[d + i], second[d + i]) of two rows, for as many columns as there are lanes in `low`,
// and for the next ones in `high`; null rows and columns from `columns` on are zero.
FASTATTN_INLINE void interleave(const bf16* first, const bf16* second, int64_t stride, int64_t d,
                                int64_t columns, Vec<float>& low, Vec<float>& high) {
  typedef uint16_t Row __attribute__((vector_size(kVectorBytes)));
  auto row = [&](const bf16* p) {
    return p ? bit_cast<Row>(load_pairs(p + d * stride, stride, columns - d)) : Row{};
  };
  const Row a = row(first), b = row(second);
  zip(a, b, low, high, std::make_integer_sequence<int, 2 * kLanes<float>>{});
}

// Panel [depth / step][kTile][step] of the tile's rows of a (B, H, L, X) tensor; rows that see nothing and
// padding are zero.
template <class S, class T>
inline void pack_transposed_of(Tile<T>& tile, const View& view, int64_t columns, int64_t depth, E<T>* panel) {
  const S* data = static_cast<const S*>(view.data);
  const int64_t stride = view.stride[3];
  for (int v = 0; v < NV; ++v) {
    if (!kPairs<T> && v * N<T> >= tile.count) break;
    const S* row[N<T>];
    for (int r = 0; r < N<T>; ++r) {
      int s = v * N<T> + r;
      row[r] = tile.seen[s] ? data + offset(view, tile.b, tile.head[s], tile.row[s]) : nullptr;
    }
    auto load_block = [&](int64_t d, V<T>(&block)[N<T>]) __attribute__((always_inline)) {
      if (tile.whole[v] && stride == 1 && columns - d >= N<T>)
#pragma GCC unroll 16
        for (int r = 0; r < N<T>; ++r) block[r] = load_wide(row[r] + d);
      else
        for (int r = 0; r < N<T>; ++r)
          block[r] = row[r] ? load_row<A<T>>(row[r] + d * stride, stride, columns - d) : V<T>{};
      transpose<A<T>>(block);
    };
    if constexpr (kParts<T> > 1) {
      for (int64_t d = 0; d < depth; d += 2 * N<T>) {
        V<T> low[N<T>], high[N<T>];
        load_block(d, low);
        load_block(d + N<T>, high);
        E<T>* to = panel + d * kParts<T> * kTile<T> + v * 2 * N<T>;
#pragma GCC unroll 16
        for (int i = 0; i < N<T>; ++i, to += kParts<T> * 2 * kTile<T>)
          store_parts(to, 2 * kTile<T>, split(low[i], high[i], tile.finite));
      }
    } else if constexpr (kPairs<T>) {
      for (int64_t d = 0; d < depth; d += 2 * N<T>) {
        Vec<float> block[N<T>];
        for (int r = 0; r < N<T>; ++r) {
          Vec<uint32_t> pairs =
              row[r] ? load_pairs(row[r] + d * stride, stride, columns - d) : Vec<uint32_t>{};
          block[r] = bit_cast<Vec<float>>(pairs);
        }
        transpose<float>(block);
        for (int i = 0; i < N<T> && d + 2 * i < depth; ++i)
          store(reinterpret_cast<float*>(panel) + (d / 2 + i) * kTile<T> + v * N<T>, block[i]);
      }
    } else {
      for (int64_t d = 0; d < depth; d += N<T>) {
        V<T> block[N<T>];
        load_block(d, block);
        for (int i = 0; i < N<T> && d + i < depth; ++i)
          store(panel + (d + i) * kTile<T> + v * N<T>, block[i]);
      }
    }
  }
}
template <class T>
inline void pack_transposed(Tile<T>& tile, const View& view, int64_t columns, int64_t depth, E<T>* panel) {
  with_dtype_beside<T>(view.dtype,
                       [&]<class S>(S) { pack_transposed_of<S>(tile, view, columns, depth, panel); });
}
// Panel [kTile / step][columns][step] of the same rows, not transposed: what grad_key and grad_value
// multiply with.
template <class S, class T>
inline void pack_rows_of(Tile<T>& tile, const View& view, int64_t columns, int64_t padded, E<T>* panel) {
  const S* data = static_cast<const S*>(view.data);
  const int64_t stride = view.stride[3];
  auto row = [&](int r) -> const S* {
    return tile.seen[r] ? data + offset(view, tile.b, tile.head[r], tile.row[r]) : nullptr;
  };
  if constexpr (kParts<T> > 1) {
    for (int r = 0; r < N<T>; ++r) {
      const S *first = row(r), *second = row(r + N<T>);
      for (int64_t d = 0; d < padded; d += N<T>) {
        auto of = [&](const S* p) {
          return p ? load_row<A<T>>(p + d * stride, stride, columns - d) : V<T>{};
        };
        store_parts(panel + r * kParts<T> * 2 * padded + 2 * d, 2 * padded,
                    split(of(first), of(second), tile.finite));
      }
    }
  } else if constexpr (kPairs<T>) {
    for (int r = 0; r < kTile<T>; r += 2) {
      const S *first = row(r), *second = row(r + 1);
      for (int64_t d = 0; d < padded; d += 2 * N<T>) {
        Vec<float> low, high;
        interleave(first, second, stride, d, columns, low, high);
        float* to = reinterpret_cast<float*>(panel) + (r / 2) * padded + d;
        store(to, low);
        if (d + N<T> < padded) store(to + N<T>, high);
      }
    }
  } else {
    for (int r = 0; r < tile.count; ++r) {
      const S* from = row(r);
      for (int64_t d = 0; d < padded; d += N<T>)
        store(panel + r * padded + d, from ? load_row<A<T>>(from + d * stride, stride, columns - d) : V<T>{});
    }
  }
}
template <class T>
inline void pack_rows(Tile<T>& tile, const View& view, int64_t columns, int64_t padded, E<T>* panel) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) { pack_rows_of<S>(tile, view, columns, padded, panel); });
}

// [keys, X]: row k at data + k * ld.
template <class T>
struct Straight {
  const E<T>* data;
  int64_t ld;
};
// [X, keys] for Format::outputs: the straight operand itself, or a transposed copy where products take pairs
// of keys.
template <class T>
struct Sideways {
  const E<T>* data;
  int64_t ld;
  const E<T>* at(int64_t row, int64_t key) const {
    return kPairs<T> ? data + row * ld + key : data + row + key * ld;
  }
};
template <class T>
struct KeyBlock {
  int64_t begin, end;  // keys [begin, end); begin is a multiple of kBlock
  bool finite;         // what has been packed of them
  Straight<T> key, value;
  Sideways<T> key_t, value_t;
  Ahead ahead;  // the next block, where it is read in place
};
enum class Use { scores, forward, backward };  // which operands of a block are wanted
template <class T>
struct KeyScratch {
  E<T>* key;
  E<T>* value;
  E<T>* key_t;
  E<T>* value_t;
  void take(Arena& arena, const Problem<T>& problem, Use use) {
    const bool value_used = use == Use::backward || (use == Use::forward && !kPairs<T>);
    constexpr int64_t kKeys = kBlock * kParts<T>;
    key = arena.take<E<T>>(kKeys * problem.depth);
    value = value_used ? arena.take<E<T>>(kKeys * problem.depth_v) : nullptr;
    const int64_t rows = round_up(problem.p.D, Format<T>::kRows);
    const int64_t rows_v = round_up(problem.p.Dv, Format<T>::kRows);
    key_t = kPairs<T> && use == Use::backward ? arena.take<E<T>>(kKeys * rows) : nullptr;
    value_t = kPairs<T> && use == Use::forward ? arena.take<E<T>>(kKeys * rows_v) : nullptr;
  }
};

template <class T>
inline bool row_is_finite(const T* row, int64_t stride, int64_t columns) {
  if (stride == 1) {
    V<T> total{};  // x * 0 is 0 for finite x, NaN otherwise
    int64_t d = 0;
    for (; d + N<T> <= columns; d += N<T>) total += load_wide(row + d) * A<T>(0);
    if (any(total != 0)) return false;
    row += d;
    columns -= d;
  }
  A<T> sum = 0;
  for (int64_t d = 0; d < columns; ++d) sum += A<T>(to_float(row[d * stride])) * A<T>(0);
  return sum == 0;
}

// Of `count` rows together, which takes a fraction of the time. False may be wrong: then rows are asked.
template <class T, class S>
inline bool rows_are_finite(const S* const* rows, int64_t count, int64_t stride, int64_t columns) {
  if (stride != 1) return false;
  V<T> total[2] = {};  // x * 0 is 0 for finite x, NaN otherwise
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < columns; d += 2 * N<T>) {
      total[0] += load_row<A<T>>(rows[j] + d, 1, columns - d) * A<T>(0);
      if (d + N<T> < columns) total[1] += load_row<A<T>>(rows[j] + d + N<T>, 1, columns - d - N<T>) * A<T>(0);
    }
  return !any(total[0] + total[1] != 0);
}

// Which keys of a block some query sees, whether it is any and all, as far as finding that is quicker than
// finding that the keys and values are finite: reading every one of their rows costs as much as decoding
// does.
template <class T>
struct ShownKeys {
  bool known;
  bool any = true, all = false;
  uint8_t shown[kBlock];
  ShownKeys(const Problem<T>& problem, int64_t b, int64_t hk, int64_t begin, int64_t end) {
    known = problem.masked && problem.knows_shown_keys_sooner(end - begin);
    if (!known) return;
    problem.find_shown(b, hk, begin, end, shown);
    uint8_t one = 0, each = 1;
    for (int64_t j = 0; j < end - begin; ++j) one |= shown[j], each &= shown[j];
    any = one, all = each;
  }
  // Whether masks may hide a key from some row, or bias it.
  bool masked(const Problem<T>& problem) const {
    return problem.masked && !(all && !problem.biased && problem.mask_rows() == 1);
  }
};
// Rows [begin, end) of a (B, Hkv, S, X) tensor as pointers: null for keys outside every band, and for keys
// that hold NaN or inf while no query sees them (they must not reach 0 * NaN). Returns whether any is null.
template <class S, class T>
inline bool key_rows(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                     int64_t begin, int64_t end, const ShownKeys<T>& keys, const S** rows) {
  const int64_t first = max(begin, problem.key_begin), last = max(first, min(end, problem.key_end));
  for (int64_t j = begin; j < end; ++j)
    if (j < first || j >= last) rows[j - begin] = nullptr;
  // Plain clips tiles to the band exactly, so that keys outside it are not touched.
  bool any = kPairs<T> && last - first < end - begin;
  for (int64_t j = first; j < last;) {
    const S* row = static_cast<const S*>(view.data) + problem.key_offset(view, b, hk, j);
    for (const int64_t piece = min(last, problem.piece_end(j)); j < piece; ++j, row += view.stride[2])
      rows[j - begin] = row;
  }
  if (!problem.masked || keys.all) return any;
  if (!keys.known && rows_are_finite<T>(rows + (first - begin), last - first, view.stride[3], columns))
    return any;
  for (int64_t j = first; j < last; ++j) {
    if (keys.known && keys.shown[j - begin]) continue;
    if (row_is_finite(rows[j - begin], view.stride[3], columns)) continue;
    if (!keys.known && problem.key_is_seen(b, hk, j)) continue;
    rows[j - begin] = nullptr;
    any = true;
  }
  return any;
}

// [keys, X] as the A operand: in place where it can be read as it lies, in one piece from `first` on, else
// (`first` is null) copied and padded with zeros.
template <class S, class T>
inline Straight<T> straight(const View& view, const S* first, int64_t columns, int64_t padded, const S** rows,
                            int64_t count, E<T>* scratch, [[maybe_unused]] bool& finite) {
  if constexpr (kSame<S, E<T>> && kParts<T> == 1) {
    bool fits = count % kKeyStep<T> == 0 && columns == padded && view.stride[3] == 1;
    if (fits && first) return {first, view.stride[2]};
  }
  int64_t filled = round_up(count, kKeyStep<T>);
  for (int64_t j = 0; j < filled; ++j) {
    const S* row = j < count ? rows[j] : nullptr;
    E<T>* to = scratch + j * padded * kParts<T>;
    if (!row) {
      std::memset(static_cast<void*>(to), 0, size_t(padded * kParts<T>) * sizeof(E<T>));
    } else if constexpr (kParts<T> > 1) {
      if (view.stride[3] == 1 && columns == padded)
        for (int64_t d = 0; d < padded; d += 2 * N<T>)
          store_parts(to + d, padded, split(load_wide(row + d), load_wide(row + d + N<T>), finite));
      else
        for (int64_t d = 0; d < padded; d += 2 * N<T>) {
          auto of = [&](int64_t x) {
            return load_row<A<T>>(row + x * view.stride[3], view.stride[3], columns - x);
          };
          store_parts(to + d, padded, split(of(d), of(d + N<T>), finite));
        }
    } else if constexpr (kPairs<T>) {
      for (int64_t d = 0; d < padded; d += 2 * N<T>) {
        Vec<uint32_t> pairs = load_pairs(row + d * view.stride[3], view.stride[3], columns - d);
        if (padded - d >= 2 * N<T>)
          __builtin_memcpy(to + d, &pairs, sizeof pairs);
        else
          __builtin_memcpy(to + d, &pairs, size_t(padded - d) * 2);
      }
    } else {
      int64_t d = 0;
      for (; d + N<T> <= padded; d += N<T>)
        store(to + d, load_row<A<T>>(row + d * view.stride[3], view.stride[3], columns - d));
      for (; d < padded; ++d) to[d] = A<T>(to_float(row[d * view.stride[3]]));
    }
  }
  return {scratch, padded * kParts<T>};
}
template <class S, class T>
inline Sideways<T> sideways(const View& view, int64_t columns, const S** rows, int64_t count,
                            const Straight<T>& straight, E<T>* scratch, [[maybe_unused]] bool& finite) {
  if constexpr (!kPairs<T>) {
    return {straight.data, straight.ld};
  } else if constexpr (kParts<T> > 1) {
    const int64_t stride = view.stride[3], filled = round_up(columns, Format<T>::kRows);
    for (int64_t j = 0; j < count; j += 2 * N<T>) {
      bool whole = stride == 1 && j + 2 * N<T> <= count;
      for (int64_t k = j; whole && k < j + 2 * N<T>; ++k) whole = rows[k] != nullptr;
      for (int64_t d = 0; d < filled; d += N<T>) {
        Vec<float> low[N<T>], high[N<T>];  // keys [j, j + N) and [j + N, j + 2 N)
        auto load_block = [&](int64_t k, Vec<float>(&block)[N<T>]) __attribute__((always_inline)) {
          if (whole && d + N<T> <= columns)
#pragma GCC unroll 16
            for (int r = 0; r < N<T>; ++r) block[r] = load_wide(rows[k + r] + d);
          else
            for (int r = 0; r < N<T>; ++r) {
              const S* row = k + r < count ? rows[k + r] : nullptr;
              block[r] = row ? load_row<A<T>>(row + d * stride, stride, columns - d) : Vec<float>{};
            }
          transpose<float>(block);
        };
        load_block(j, low);
        load_block(j + N<T>, high);
        E<T>* to = scratch + d * kParts<T> * kBlock + j;
#pragma GCC unroll 16
        for (int i = 0; i < N<T>; ++i, to += kParts<T> * kBlock)
          store_parts(to, kBlock, split(low[i], high[i], finite));
      }
    }
    return {scratch, kParts<T> * kBlock};
  } else {
    const int64_t filled = round_up(columns, Format<T>::kRows);
    for (int64_t j = 0; j < count; j += 2 * N<T>)
      for (int64_t d = 0; d < filled; d += 2 * N<T>) {
        Vec<float> low[N<T>], high[N<T>];  // pairs of columns [d, d + N) and [d + N, d + 2 N)
        for (int r = 0; r < N<T>; ++r) {
          int64_t k = j + 2 * r;
          const S* first = k < count ? rows[k] : nullptr;
          const S* second = k + 1 < count ? rows[k + 1] : nullptr;
          interleave(first, second, view.stride[3], d, columns, low[r], high[r]);
        }
        transpose<float>(low);
        transpose<float>(high);
        float* to = reinterpret_cast<float*>(scratch + d * kBlock + j);
        const int64_t left = filled - d;
        for (int i = 0; i < N<T> && i < left; ++i) store(to + i * (kBlock / 2), low[i]);
        for (int i = 0; i < N<T> && N<T> + i < left; ++i) store(to + (N<T> + i) * (kBlock / 2), high[i]);
      }
    return {scratch, kBlock};
  }
}

template <class S, class T>
inline KeyBlock<T> make_block_of(const Problem<T>& problem, int64_t b, int64_t hk, int64_t begin, int64_t end,
                                 Use use, const KeyScratch<T>& scratch) {
  const AttentionParams& p = problem.p;
  const S* rows[kBlock];
  const int64_t count = end - begin;
  KeyBlock<T> block{begin, end, true, {}, {}, {}, {}, {}};
  const bool in_pieces = problem.piece_end(begin) < end;
  const ShownKeys<T> shown(problem, b, hk, begin, end);
  auto first_row = [&](const View& view, int64_t columns) -> const S* {
    const bool null = key_rows<S>(problem, view, columns, b, hk, begin, end, shown, rows);
    if (null || in_pieces) return nullptr;
    return static_cast<const S*>(view.data) + problem.key_offset(view, b, hk, begin);
  };
  const S* first = first_row(p.key, p.D);
  auto bring_next = [&](const Straight<T>& operand, const E<T>* copy, int64_t columns) {
    if (kPairs<T> || operand.data == copy) return;
    constexpr int64_t kSize = sizeof(E<T>);
    block.ahead.add(operand.data + kBlock * operand.ld, operand.ld * kSize,
                    min(kBlock, problem.key_end - end), columns * kSize);
  };
  block.key = straight<S, T>(p.key, first, p.D, problem.depth, rows, count, scratch.key, block.finite);
  bring_next(block.key, scratch.key, p.D);
  if (use == Use::backward)
    block.key_t = sideways<S, T>(p.key, p.D, rows, count, block.key, scratch.key_t, block.finite);
  if (use == Use::scores) return block;
  first = first_row(p.value, p.Dv);
  if (scratch.value) {
    block.value =
        straight<S, T>(p.value, first, p.Dv, problem.depth_v, rows, count, scratch.value, block.finite);
    bring_next(block.value, scratch.value, p.Dv);
  }
  if (use == Use::forward)
    block.value_t = sideways<S, T>(p.value, p.Dv, rows, count, block.value, scratch.value_t, block.finite);
  return block;
}
template <class T>
inline KeyBlock<T> make_block(const Problem<T>& problem, int64_t b, int64_t hk, int64_t begin, int64_t end,
                              Use use, const KeyScratch<T>& scratch) {
  KeyBlock<T> block;
  with_dtype_beside<T>(problem.p.key.dtype, [&]<class S>(S) {
    block = make_block_of<S>(problem, b, hk, begin, end, use, scratch);
  });
  return block;
}

// Has rows [row, row + count) of a head of a (B, H, L, X) tensor brought.
inline void bring_rows(const View& view, int64_t b, int64_t h, int64_t row, int64_t count, int64_t columns,
                       Ahead& ahead) {
  const int64_t size = view.dtype == DType::f64 ? 8 : view.dtype == DType::f32 ? 4 : 2;
  ahead.add(static_cast<const char*>(view.data) + offset(view, b, h, row) * size, view.stride[2] * size,
            count, columns * size);
}
// The same of one of so many shares of the first keys and values of a key/value head of some batch.
template <class T>
inline void bring_keys(const Problem<T>& problem, int64_t head, int64_t share, int64_t shares, Ahead& ahead) {
  const AttentionParams& p = problem.p;
  if (p.pages) return;
  const int64_t keys = min(kBlock, problem.key_end - problem.key_begin), from = keys * share / shares;
  const int64_t count = keys * (share + 1) / shares - from;
  for (const View* view : {&p.key, &p.value})
    if (view->stride[3] == 1)
      bring_rows(*view, head / p.Hkv, head % p.Hkv, problem.key_begin + from, count,
                 view == &p.key ? p.D : p.Dv, ahead);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
