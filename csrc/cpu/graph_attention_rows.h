// Feature rows (H, C) of nodes as vectors of one head each, and what is done with the rows of a block of
// edges: products per head, and sums weighted per head. Only here are features read and written: functions
// that take `Slots` are for any of their dtypes, those `_of` one are compiled for each, E.
#pragma once
#include "dtype.h"
#include "graph_attention_lanes.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// `count` elements, at most a vector; nothing behind them is touched, the other lanes are 0.
template <class T, class E>
FASTATTN_INLINE V<T> load_part(const E* p, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (uint32_t(1) << count) - 1;
  if constexpr (kSame<E, float>) return (V<T>)_mm512_maskz_loadu_ps(__mmask16(mask), p);
  if constexpr (kSame<E, double>) return (V<T>)_mm512_maskz_loadu_pd(__mmask8(mask), p);
  if constexpr (kSame<E, bf16>)
    return (V<T>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(mask), p)), 16);
  if constexpr (kSame<E, f16>) return (V<T>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16(mask), p));
#else
  return load_row<T>(p, 1, count);
#endif
}

// A row as vectors, "slots": those of a head follow one another, the last of a head may be partly filled.
struct Slots {
  int64_t H, C, per_head, count;
  int64_t lanes;
  bool full;  // every slot is
  DType dtype;

  Slots(int64_t heads, int64_t channels, int64_t lanes, DType dtype)
      : H(heads),
        C(channels),
        per_head((channels + lanes - 1) / lanes),
        count(heads * per_head),
        lanes(lanes),
        full(channels % lanes == 0),
        dtype(dtype) {}
  FASTATTN_INLINE int64_t head(int64_t slot) const { return slot / per_head; }
  FASTATTN_INLINE int64_t offset(int64_t slot) const {
    return full ? slot * lanes : head(slot) * C + slot % per_head * lanes;
  }
  FASTATTN_INLINE int64_t width(int64_t slot) const {
    return full ? lanes : min(lanes, C - slot % per_head * lanes);
  }
  int64_t size() const { return count * lanes; }  // elements of a row held as slots
};

template <class E>
FASTATTN_INLINE const E* row_of(const FeatureRows& rows, int64_t at) {
  return static_cast<const E*>(rows.data) + at * rows.stride;
}
template <class T>
__attribute__((noinline)) void unpack_row(const Slots& slots, const FeatureRows& rows, int64_t at, T* to) {
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    const E* row = row_of<E>(rows, at);
    for (int64_t s = 0; s < slots.count; ++s)
      store(to + s * N<T>, load_part<T>(row + slots.offset(s), slots.width(s)));
  });
}
// Row `at` of contiguous ones = slots * factor, where the factor is one of its head.
template <class T>
__attribute__((noinline)) void pack_row(const Slots& slots, const T* from, const T* factor, void* rows,
                                        int64_t at) {
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    E* row = static_cast<E*>(rows) + at * slots.H * slots.C;
    for (int64_t s = 0; s < slots.count; ++s) {
      V<T> v = load(from + s * N<T>);
      if (factor) v *= factor[slots.head(s)];
      store_row<T>(row + slots.offset(s), 1, slots.width(s), v);
    }
  });
}
// to[h] = <row `at` of a [h], row `at` of b [h]>
template <class T>
__attribute__((noinline)) void row_products(const Slots& slots, const FeatureRows& a, const FeatureRows& b,
                                            int64_t at, T* to) {
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    const E *left = row_of<E>(a, at), *right = row_of<E>(b, at);
    for (int64_t h = 0, s = 0; h < slots.H; ++h) {
      V<T> sum{};
      for (int64_t i = 0; i < slots.per_head; ++i, ++s) {
        const int64_t from = slots.offset(s), width = slots.width(s);
        sum += load_part<T>(left + from, width) * load_part<T>(right + from, width);
      }
      to[h] = reduce_add<T>(sum);
    }
  });
}

// Where the rows at the other end of a block's edges lie.
struct BlockRows {
  const FeatureRows& rows;
  const Slots& slots;
  const GraphView& graph;
  int64_t begin, edges;  // positions [begin, begin + edges) in the graph's order

  template <class E>
  FASTATTN_INLINE const E* at(int64_t e) const {
    return row_of<E>(rows, other_end(graph, begin + e));
  }
  // Rows are scattered over memory, so that no hardware prefetcher sees them coming.
  template <class E>
  FASTATTN_INLINE void prefetch(int64_t e) const {
    constexpr int64_t kAhead = 12;
    const int64_t position = begin + e + kAhead, bytes = slots.H * slots.C * int64_t(sizeof(E));
    if (position >= graph.edges) return;
    const char* p = reinterpret_cast<const char*>(row_of<E>(rows, other_end(graph, position)));
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(p + byte);
  }
};

// --- products ---------------------------------------------------------------------------------------------

// to[e][h] = sum over the slots of head h of term(e, slot, row of edge e), in the lanes' order.
template <class E, int kPerHead, class T, class Term>
inline void head_sums_(const BlockRows& rows, const HeadLanes<T>& lanes, bool first_use, Term&& term, T* to) {
  const Slots& slots = rows.slots;
  const int64_t per_head = kPerHead ? kPerHead : slots.per_head;
  V<T> partial[N<T>];
  int filled = 0;
  const auto add = [&](V<T> v) {
    partial[filled++] = v;
    if (filled < N<T>) return;
    store(to, reduce_rows<T>(partial));
    to += N<T>;
    filled = 0;
  };
  for (int64_t e = 0; e < rows.edges; ++e) {
    if (first_use) rows.prefetch<E>(e);
    const E* row = rows.at<E>(e);
    int64_t slot = 0;
    for (int64_t h = 0; h < slots.H; ++h) {
      V<T> sum{};
#pragma GCC unroll 4
      for (int64_t i = 0; i < per_head; ++i, ++slot) {
        const E* p = row + slots.offset(slot);
        sum += term(e, slot, slots.full ? load_wide(p) : load_part<T>(p, slots.width(slot)));
      }
      add(sum);
    }
    for (int64_t h = slots.H; h < lanes.padded; ++h) add(V<T>{});
  }
  while (filled) add(V<T>{});
}
// `first_use` says that the rows have not been read in this block before.
template <class E, class T, class Term>
inline void head_sums_of(const BlockRows& rows, const HeadLanes<T>& lanes, bool first_use, Term&& term,
                         T* to) {
  switch (rows.slots.per_head) {
    case 1:
      return head_sums_<E, 1>(rows, lanes, first_use, term, to);
    case 2:
      return head_sums_<E, 2>(rows, lanes, first_use, term, to);
    case 4:
      return head_sums_<E, 4>(rows, lanes, first_use, term, to);
    default:
      return head_sums_<E, 0>(rows, lanes, first_use, term, to);
  }
}
// to[e][h] = <own[h], row of edge e [h]>
template <class T>
__attribute__((noinline)) void head_products(const BlockRows& rows, const HeadLanes<T>& lanes, bool first_use,
                                             const T* own, T* to) {
  with_dtype_beside<T>(rows.slots.dtype, [&]<class E>(E) {
    head_sums_of<E>(
        rows, lanes, first_use,
        [&](int64_t, int64_t slot, V<T> v)
            __attribute__((always_inline)) { return v * load(own + slot * N<T>); },
        to);
  });
}

// --- weighted sums ----------------------------------------------------------------------------------------

template <class E, int kSlots, bool kFull, class T>
inline void add_weighted_tile(const BlockRows& rows, int64_t first, bool first_use, const T* weights,
                              int64_t padded, T* sums) {
  const Slots& slots = rows.slots;
  int64_t offset[kSlots], width[kSlots], head[kSlots];
  V<T> sum[kSlots];
#pragma GCC unroll 8
  for (int i = 0; i < kSlots; ++i) {
    offset[i] = slots.offset(first + i);
    width[i] = slots.width(first + i);
    head[i] = slots.head(first + i);
    sum[i] = load(sums + (first + i) * N<T>);
  }
  for (int64_t e = 0; e < rows.edges; ++e) {
    if (first_use) rows.prefetch<E>(e);
    const E* row = rows.at<E>(e) + (kFull ? offset[0] : 0);
    const T* weight = weights + e * padded;
#pragma GCC unroll 8
    for (int i = 0; i < kSlots; ++i)
      sum[i] +=
          weight[head[i]] * (kFull ? load_wide(row + i * N<T>) : load_part<T>(row + offset[i], width[i]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSlots; ++i) store(sums + (first + i) * N<T>, sum[i]);
}
// Leaves out what is hidden: there 0 * NaN must not be added.
template <class T>
__attribute__((noinline)) void add_visible(const BlockRows& rows, const T* weights, int64_t padded,
                                           const T* marks, T hidden, T* sums) {
  const Slots& slots = rows.slots;
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    for (int64_t s = 0; s < slots.count; ++s) {
      const int64_t offset = slots.offset(s), width = slots.width(s), head = slots.head(s);
      V<T> sum = load(sums + s * N<T>);
      for (int64_t e = 0; e < rows.edges; ++e)
        if (marks[e * padded + head] != hidden)
          sum += weights[e * padded + head] * load_part<T>(rows.at<E>(e) + offset, width);
      store(sums + s * N<T>, sum);
    }
  });
}
// sums[h] += weights[e][h] * row of edge e [h] for every edge of the block.
template <class T>
__attribute__((noinline)) void add_weighted(const BlockRows& rows, bool first_use, const T* weights,
                                            int64_t padded, T* sums) {
  const Slots& slots = rows.slots;
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    int64_t s = 0;
    const auto tiles = [&]<int kSlots>(std::integral_constant<int, kSlots>) {
      for (; s + kSlots <= slots.count; s += kSlots)
        if (slots.full)
          add_weighted_tile<E, kSlots, true>(rows, s, first_use && s == 0, weights, padded, sums);
        else
          add_weighted_tile<E, kSlots, false>(rows, s, first_use && s == 0, weights, padded, sums);
    };
    tiles(std::integral_constant<int, 8>{});
    tiles(std::integral_constant<int, 4>{});
    tiles(std::integral_constant<int, 2>{});
    tiles(std::integral_constant<int, 1>{});
  });
}

// --- rows of the graph ------------------------------------------------------------------------------------

// Work<T>(shared, arena) computes parts of rows: part(row, begin, end, state) for the edges [begin, end) of a
// row, join(state, later state), finish(row, state). `state_size` elements hold what a part leaves.
template <class Work, class T, class Shared>
inline void for_rows(const GraphView& graph, const Parallel& parallel, int64_t state_size,
                     const Shared& shared) {
  const EdgeSplit split = split_edges(graph.rowptr, graph.rows);
  if (split.chunks == 0) return;
  Buffer<EdgeCut> cuts(split.chunks + 1);
  for (int64_t k = 0; k <= split.chunks; ++k) cuts.data()[k] = edge_cut(split, k);
  Buffer<T> parts(split.chunks * 2 * state_size + 1);
  const auto part_of = [&](int64_t chunk, bool tail) {
    return parts.data() + (chunk * 2 + tail) * state_size;
  };
  for_each_task(parallel, split.chunks, [&](int64_t chunk, int) {
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    T* own = arena.take<T>(state_size);
    Work work(shared, arena, chunk);
    for_each_row(split, cuts.data()[chunk], cuts.data()[chunk + 1],
                 [&](int64_t row, int64_t begin, int64_t end, RowPart part) {
                   T* state = part == RowPart::whole ? own : part_of(chunk, part == RowPart::tail);
                   work.part(row, begin, end, state);
                   if (part == RowPart::whole) work.finish(row, state);
                 });
  });
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Work work(shared, arena, 0);
  T* sum = nullptr;
  for_each_divided_row(
      split, cuts.data(), [&](int64_t, int64_t chunk) { sum = part_of(chunk, true); },
      [&](int64_t, int64_t chunk) { work.join(sum, part_of(chunk, false)); },
      [&](int64_t row) { work.finish(row, sum); });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
