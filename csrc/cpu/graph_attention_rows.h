// Feature rows (H, C) of nodes as vectors of one head each, and what is done with the rows of a block of
// edges: products per head, and sums weighted per head.
#pragma once
#include "graph_attention_lanes.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// `count` elements, at most a vector; nothing behind them is touched, the other lanes are 0.
template <class T>
FASTATTN_INLINE V<T> load_part(const T* p, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t mask = (uint32_t(1) << count) - 1;
  if constexpr (kSame<T, float>) return (V<T>)_mm512_maskz_loadu_ps(__mmask16(mask), p);
  if constexpr (kSame<T, double>) return (V<T>)_mm512_maskz_loadu_pd(__mmask8(mask), p);
  if constexpr (kSame<T, bf16>)
    return (V<T>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(mask), p)), 16);
  if constexpr (kSame<T, f16>) return (V<T>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16(mask), p));
#else
  return load_row<A<T>>(p, 1, count);
#endif
}

// A row as vectors, "slots": those of a head follow one another, the last of a head may be partly filled.
struct Slots {
  int64_t H, C, per_head, count;
  int64_t lanes;
  bool full;  // every slot is

  Slots(int64_t heads, int64_t channels, int64_t lanes)
      : H(heads),
        C(channels),
        per_head((channels + lanes - 1) / lanes),
        count(heads * per_head),
        lanes(lanes),
        full(channels % lanes == 0) {}
  FASTATTN_INLINE int64_t head(int64_t slot) const { return slot / per_head; }
  FASTATTN_INLINE int64_t offset(int64_t slot) const {
    return full ? slot * lanes : head(slot) * C + slot % per_head * lanes;
  }
  FASTATTN_INLINE int64_t width(int64_t slot) const {
    return full ? lanes : min(lanes, C - slot % per_head * lanes);
  }
  int64_t size() const { return count * lanes; }  // elements of a row held as slots
};

template <class T>
FASTATTN_INLINE const T* row_of(const FeatureRows& rows, int64_t at) {
  return static_cast<const T*>(rows.data) + at * rows.stride;
}
template <class T>
inline void unpack_row(const Slots& slots, const T* row, A<T>* to) {
  for (int64_t s = 0; s < slots.count; ++s)
    store(to + s * N<T>, load_part(row + slots.offset(s), slots.width(s)));
}
// row = slots * factor, where the factor is one of its head.
template <class T>
inline void pack_row(const Slots& slots, const A<T>* from, const A<T>* factor, T* row) {
  for (int64_t s = 0; s < slots.count; ++s) {
    V<T> v = load(from + s * N<T>);
    if (factor) v *= factor[slots.head(s)];
    store_row<A<T>>(row + slots.offset(s), 1, slots.width(s), v);
  }
}

// Where the rows at the other end of a block's edges lie.
template <class T>
struct BlockRows {
  const FeatureRows& rows;
  const GraphView& graph;
  int64_t begin, edges;  // positions [begin, begin + edges) in the graph's order
  int64_t row_bytes;

  BlockRows(const FeatureRows& rows, const Slots& slots, const GraphView& graph, int64_t begin, int64_t edges)
      : rows(rows),
        graph(graph),
        begin(begin),
        edges(edges),
        row_bytes(slots.H * slots.C * int64_t(sizeof(T))) {}
  FASTATTN_INLINE const T* operator[](int64_t e) const {
    return row_of<T>(rows, other_end(graph, begin + e));
  }
  // Rows are scattered over memory, so that no hardware prefetcher sees them coming.
  FASTATTN_INLINE void prefetch(int64_t e) const {
    constexpr int64_t kAhead = 12;
    const int64_t at = begin + e + kAhead;
    if (at >= graph.edges) return;
    const char* p = reinterpret_cast<const char*>(row_of<T>(rows, other_end(graph, at)));
    for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(p + byte);
  }
};

// --- products ---------------------------------------------------------------------------------------------

// to[e][h] = sum over the slots of head h of term(e, slot, row of edge e), in the lanes' order.
template <class T, int kPerHead, class Term>
inline void head_sums_(const BlockRows<T>& rows, const Slots& slots, const HeadLanes<T>& lanes,
                       bool first_use, Term&& term, A<T>* to) {
  const int64_t per_head = kPerHead ? kPerHead : slots.per_head;
  V<T> partial[N<T>];
  int filled = 0;
  const auto add = [&](V<T> v) {
    partial[filled++] = v;
    if (filled < N<T>) return;
    store(to, reduce_rows<A<T>>(partial));
    to += N<T>;
    filled = 0;
  };
  for (int64_t e = 0; e < rows.edges; ++e) {
    if (first_use) rows.prefetch(e);
    const T* row = rows[e];
    int64_t slot = 0;
    for (int64_t h = 0; h < slots.H; ++h) {
      V<T> sum{};
#pragma GCC unroll 4
      for (int64_t i = 0; i < per_head; ++i, ++slot) {
        const T* p = row + slots.offset(slot);
        sum += term(e, slot, slots.full ? load_wide(p) : load_part(p, slots.width(slot)));
      }
      add(sum);
    }
    for (int64_t h = slots.H; h < lanes.padded; ++h) add(V<T>{});
  }
  while (filled) add(V<T>{});
}
// `first_use` says that the rows have not been read in this block before.
template <class T, class Term>
inline void head_sums(const BlockRows<T>& rows, const Slots& slots, const HeadLanes<T>& lanes, bool first_use,
                      Term&& term, A<T>* to) {
  switch (slots.per_head) {
    case 1:
      return head_sums_<T, 1>(rows, slots, lanes, first_use, term, to);
    case 2:
      return head_sums_<T, 2>(rows, slots, lanes, first_use, term, to);
    case 4:
      return head_sums_<T, 4>(rows, slots, lanes, first_use, term, to);
    default:
      return head_sums_<T, 0>(rows, slots, lanes, first_use, term, to);
  }
}
// to[e][h] = <own[h], row of edge e [h]>
template <class T>
inline void head_products(const BlockRows<T>& rows, const Slots& slots, const HeadLanes<T>& lanes,
                          bool first_use, const A<T>* own, A<T>* to) {
  head_sums(
      rows, slots, lanes, first_use,
      [&](int64_t, int64_t slot, V<T> v)
          __attribute__((always_inline)) { return v * load(own + slot * N<T>); },
      to);
}

// --- weighted sums ----------------------------------------------------------------------------------------

template <class T, int kSlots, bool kFull>
inline void add_weighted_tile(const BlockRows<T>& rows, const Slots& slots, int64_t first, bool first_use,
                              const A<T>* weights, int64_t padded, A<T>* sums) {
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
    if (first_use) rows.prefetch(e);
    const T* row = rows[e] + (kFull ? offset[0] : 0);
    const A<T>* weight = weights + e * padded;
#pragma GCC unroll 8
    for (int i = 0; i < kSlots; ++i)
      sum[i] += weight[head[i]] * (kFull ? load_wide(row + i * N<T>) : load_part(row + offset[i], width[i]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSlots; ++i) store(sums + (first + i) * N<T>, sum[i]);
}
// Leaves out what is hidden: there 0 * NaN must not be added.
template <class T>
inline void add_visible(const BlockRows<T>& rows, const Slots& slots, const A<T>* weights, int64_t padded,
                        const A<T>* marks, A<T> hidden, A<T>* sums) {
  for (int64_t s = 0; s < slots.count; ++s) {
    const int64_t offset = slots.offset(s), width = slots.width(s), head = slots.head(s);
    V<T> sum = load(sums + s * N<T>);
    for (int64_t e = 0; e < rows.edges; ++e)
      if (marks[e * padded + head] != hidden)
        sum += weights[e * padded + head] * load_part(rows[e] + offset, width);
    store(sums + s * N<T>, sum);
  }
}
// sums[h] += weights[e][h] * row of edge e [h] for every edge of the block.
template <class T>
inline void add_weighted(const BlockRows<T>& rows, const Slots& slots, bool first_use, const A<T>* weights,
                         int64_t padded, A<T>* sums) {
  int64_t s = 0;
  const auto tiles = [&]<int kSlots>(std::integral_constant<int, kSlots>) {
    for (; s + kSlots <= slots.count; s += kSlots)
      if (slots.full)
        add_weighted_tile<T, kSlots, true>(rows, slots, s, first_use && s == 0, weights, padded, sums);
      else
        add_weighted_tile<T, kSlots, false>(rows, slots, s, first_use && s == 0, weights, padded, sums);
  };
  tiles(std::integral_constant<int, 8>{});
  tiles(std::integral_constant<int, 4>{});
  tiles(std::integral_constant<int, 2>{});
  tiles(std::integral_constant<int, 1>{});
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
  Buffer<A<T>> parts(split.chunks * 2 * state_size + 1);
  const auto part_of = [&](int64_t chunk, bool tail) {
    return parts.data() + (chunk * 2 + tail) * state_size;
  };
  for_each_task(parallel, split.chunks, [&](int64_t chunk, int) {
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    A<T>* own = arena.take<A<T>>(state_size);
    Work work(shared, arena, chunk);
    for_each_row(split, cuts.data()[chunk], cuts.data()[chunk + 1],
                 [&](int64_t row, int64_t begin, int64_t end, RowPart part) {
                   A<T>* state = part == RowPart::whole ? own : part_of(chunk, part == RowPart::tail);
                   work.part(row, begin, end, state);
                   if (part == RowPart::whole) work.finish(row, state);
                 });
  });
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Work work(shared, arena, 0);
  A<T>* sum = nullptr;
  for_each_divided_row(
      split, cuts.data(), [&](int64_t, int64_t chunk) { sum = part_of(chunk, true); },
      [&](int64_t, int64_t chunk) { work.join(sum, part_of(chunk, false)); },
      [&](int64_t row) { work.finish(row, sum); });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
