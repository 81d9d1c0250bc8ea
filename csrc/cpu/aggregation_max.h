// The largest neighbour, feature by feature, and the edge that it came along. The smallest is the largest of
// the negatives.
#pragma once
#include "aggregation_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T, class I>
struct MaxTask {
  const Chunk& chunk;
  const GraphView& graph;
  int64_t F;
  const T** source;         // per edge of the chunk
  const A<T>* weight;       // likewise, negative for the smallest; null = 1
  const Int<A<T>>* number;  // likewise: the caller's number of the edge, or its place in the chunk
  A<T> sign;
  T* out;  // row n at n * out_stride
  I* arg;  // likewise, or null: then `number` and the partial args are null too
  int64_t out_stride;
  A<T>*head, *tail;  // of divided rows
  I *head_arg, *tail_arg;
};

// An edge's number stands in a lane of A where it fits into one; otherwise its place in the chunk does.
template <class T, class I>
constexpr bool kNumbersFit = sizeof(I) <= sizeof(A<T>);

template <class A, bool kArg>
FASTATTN_INLINE void take_larger(Vec<A>& best, Vec<Int<A>>& arg, Vec<A> x, Vec<Int<A>> number) {
  // Larger, or the first NaN: not (x <= best) unless best is one already.
#if defined(__AVX512F__)
  if constexpr (kSame<A, float>) {
    __mmask16 better = _mm512_cmp_ps_mask((__m512)best, (__m512)best, _CMP_ORD_Q);
    better = _mm512_mask_cmp_ps_mask(better, (__m512)x, (__m512)best, _CMP_NLE_UQ);
    best = (Vec<A>)_mm512_mask_mov_ps((__m512)best, better, (__m512)x);
    if (kArg) arg = (Vec<Int<A>>)_mm512_mask_mov_epi32((__m512i)arg, better, (__m512i)number);
  } else {
    __mmask8 better = _mm512_cmp_pd_mask((__m512d)best, (__m512d)best, _CMP_ORD_Q);
    better = _mm512_mask_cmp_pd_mask(better, (__m512d)x, (__m512d)best, _CMP_NLE_UQ);
    best = (Vec<A>)_mm512_mask_mov_pd((__m512d)best, better, (__m512d)x);
    if (kArg) arg = (Vec<Int<A>>)_mm512_mask_mov_epi64((__m512i)arg, better, (__m512i)number);
  }
#else
  const Vec<Int<A>> better = (x > best) | ((x != x) & (best == best));
  best = better ? x : best;
  if (kArg) arg = better ? number : arg;
#endif
}

template <int V, class T, class I>
FASTATTN_INLINE void store_arg(const MaxTask<T, I>& t, I* to, Vec<Int<A<T>>> arg) {
  typedef I Indices __attribute__((vector_size(N<T> * sizeof(I))));
  Indices numbers = __builtin_convertvector(arg, Indices);
  if constexpr (!kNumbersFit<T, I>) {
    const int64_t first = t.chunk.from.edge;
    for (int i = 0; i < N<T>; ++i)
      numbers[i] = numbers[i] < 0 ? I(-1) : edge_number<I>(t.graph, first + numbers[i]);
  }
  if (V > 1 || t.F >= N<T>)
    std::memcpy(to, &numbers, sizeof numbers);
  else
    copy_some<N<T>>(to, reinterpret_cast<const I*>(&numbers), t.F);
}

template <class T, class I, int V, bool kWeighted>
FASTATTN_INLINE Vec<A<T>> message(const MaxTask<T, I>& t, const Tile& tile, int64_t i, int v) {
  const Vec<A<T>> x = load_wide(t.source[i] + vector_at<V, T>(tile, v));
  return kWeighted ? t.weight[i] * x : x;
}

template <class T, class I, int V, bool kWeighted, bool kArg>
FASTATTN_INLINE void finish_max(const MaxTask<T, I>& t, const Tile& tile, int64_t row, RowPart part,
                                const Vec<A<T>> (&best)[V], const Vec<Int<A<T>>> (&arg)[V]) {
  I* arg_row = kArg ? t.arg + row * t.out_stride : nullptr;
  if (part == RowPart::whole) {
    T* out_row = t.out + row * t.out_stride;
    for (int v = 0; v < V; ++v)
      store_features<V>(out_row + vector_at<V, T>(tile, v), t.F, kWeighted ? best[v] * t.sign : best[v]);
  } else {
    A<T>* partial = part == RowPart::head ? t.head : t.tail;
    arg_row = part == RowPart::head ? t.head_arg : t.tail_arg;
    for (int v = 0; v < V; ++v) store_features<V>(partial + vector_at<V, T>(tile, v), t.F, best[v]);
  }
  for (int v = 0; kArg && v < V; ++v) store_arg<V>(t, arg_row + vector_at<V, T>(tile, v), arg[v]);
}

// The extremes of edges that follow each other, none of them taken yet.
template <class T, class I, int V, bool kWeighted, bool kArg>
struct Extremes {
  Vec<A<T>> best[V];
  Vec<Int<A<T>>> arg[V];

  FASTATTN_INLINE void begin(const MaxTask<T, I>& t, const Tile& tile, int64_t i) {
    for (int v = 0; v < V; ++v) {
      best[v] = message<T, I, V, kWeighted>(t, tile, i, v);
      if (kArg) arg[v] = Vec<Int<A<T>>>{} + t.number[i];
    }
  }
  FASTATTN_INLINE void take(const MaxTask<T, I>& t, const Tile& tile, int64_t i, int64_t ahead) {
    prefetch<V * N<T>>(t.source[i + ahead] + tile.begin);
    for (int v = 0; v < V; ++v)
      take_larger<A<T>, kArg>(best[v], arg[v], message<T, I, V, kWeighted>(t, tile, i, v),
                              Vec<Int<A<T>>>{} + (kArg ? t.number[i] : 0));
  }
  FASTATTN_INLINE void take(const Extremes& later) {
    for (int v = 0; v < V; ++v) take_larger<A<T>, kArg>(best[v], arg[v], later.best[v], later.arg[v]);
  }
};

template <class T, class I, int V, bool kWeighted, bool kArg>
__attribute__((noinline)) void max_tiles(const MaxTask<T, I>& t, const Tiles tiles) {
  // A comparison waits for the one before it. With few vectors a row, parts of a long row take turns.
  constexpr int kChains = V == 1 ? 4 : V == 2 ? 2 : 1;
  constexpr int64_t kLong = 8 * kChains;
  const int64_t ahead = edges_ahead<T>(V), first = t.chunk.from.edge;
  for (RowCursor at(t.chunk.split, t.chunk.from, t.chunk.to); at.next_with_edges();)
    for (int64_t k = 0; k < tiles.count; ++k) {
      const Tile tile = tiles.at<T>(k);
      const int64_t end = at.end - first;
      int64_t i = at.begin - first;
      Extremes<T, I, V, kWeighted, kArg> chains[kChains];
      if (kChains > 1 && end - i >= kLong) {
        const int64_t part = (end - i) / kChains;
        for (int c = 0; c < kChains; ++c) chains[c].begin(t, tile, i + c * part);
        for (int64_t j = 1; j < part; ++j)
          for (int c = 0; c < kChains; ++c) chains[c].take(t, tile, i + c * part + j, ahead);
        for (int c = 1; c < kChains; ++c) chains[0].take(chains[c]);
        i += kChains * part;
      } else {
        chains[0].begin(t, tile, i);
        prefetch<V * N<T>>(t.source[i + ahead] + tile.begin);
        ++i;
      }
      for (; i < end; ++i) chains[0].take(t, tile, i, ahead);
      finish_max<T, I, V, kWeighted, kArg>(t, tile, at.row, at.part, chains[0].best, chains[0].arg);
    }
}

template <class T, class I, bool kArg>
void max_over_edges(AggregateMaxParams p, const Parallel& all) {
  if ((!p.edge_weight.data || p.edge_weight.stride[1] == 0) && heads_adjoin(p.x, p.H, p.F)) {
    p.F *= p.H;
    p.H = 1;
  }
  const GraphView& graph = p.graph;
  const Cuts cuts(graph, p.H * p.F);
  const int64_t chunks = cuts.split.chunks;
  const Parallel parallel = all.worth(operations(graph, p.B, p.H, p.F));
  const bool weighted = p.edge_weight.data || p.minimum || !(kUsual<T, I> && kFrequent<T>);
  const A<T> sign = p.minimum ? -1 : 1;
  const Nodes<T> nodes(p.x, p.B, p.M, p.H, p.F, N<T>);
  const int64_t partials = p.B * p.H * cuts.slots * p.F;
  Buffer<A<T>> partial(partials);
  Buffer<I> partial_arg(kArg ? partials : 0);
  const auto partial_at = [&](int64_t plane, int64_t slot) { return (plane * cuts.slots + slot) * p.F; };
  const auto out_at = [&](int64_t plane) { return (plane / p.H * graph.rows * p.H + plane % p.H) * p.F; };
  T* out = static_cast<T*>(p.out.data);
  I* arg = static_cast<I*>(p.arg);

  for_each_task(parallel, p.B * chunks, [&](int64_t task, int) {
    Arena::Scope scope(thread_arena());
    const int64_t b = task / chunks, k = task % chunks;
    const Chunk chunk(cuts, k);
    const int64_t edges = chunk.edges();
    const int64_t width = p.H * p.F, start = b * graph.rows * width;
    fill_empty_rows(chunk, out + start, width, 0);
    if (kArg) fill_empty_rows(chunk, arg + start, width, 0xff);  // -1
    const T** source = scope.arena.take<const T*>(edges + kPadding);
    A<T>* weight = weighted ? scope.arena.take<A<T>>(edges) : nullptr;
    auto* number = kArg ? scope.arena.take<Int<A<T>>>(edges) : nullptr;
    for (int64_t i = 0; kArg && i < edges; ++i)
      number[i] = kNumbersFit<T, I> ? Int<A<T>>(edge_number<I>(graph, chunk.from.edge + i)) : Int<A<T>>(i);
    for (int64_t h = 0; h < p.H; ++h) {
      const int64_t plane = b * p.H + h, head = partial_at(plane, cuts.head(k)),
                    tail = partial_at(plane, cuts.tail(k)), at = out_at(plane);
      point<I, T>(chunk, graph, nodes.plane(b, h), source);
      if (weight && (h == 0 || p.edge_weight.stride[1]))
        weigh<T, I>(chunk, graph, p.edge_weight, h, nullptr, sign, weight);
      const MaxTask<T, I> t{chunk,
                            graph,
                            p.F,
                            source,
                            weight,
                            number,
                            sign,
                            out + at,
                            kArg ? arg + at : nullptr,
                            p.H * p.F,
                            partial.data() + head,
                            partial.data() + tail,
                            kArg ? partial_arg.data() + head : nullptr,
                            kArg ? partial_arg.data() + tail : nullptr};
      if (weighted) {
        using Sizes = typename If<kUsual<T, I>, FewWidths, OneWidth>::type;
        for_each_width<T>(Sizes{}, p.F,
                          [&](const Tiles& tiles, auto V) { max_tiles<T, I, V, true, kArg>(t, tiles); });
      } else if constexpr (kUsual<T, I> && kFrequent<T>) {
        // A value and an edge number in registers for each vector.
        using Sizes = typename If<kVectorRegisters == 32, AllWidths, Widths<1, 2, 4>>::type;
        for_each_width<T>(Sizes{}, p.F,
                          [&](const Tiles& tiles, auto V) { max_tiles<T, I, V, false, kArg>(t, tiles); });
      }
    }
  });

  for_each_task(parallel, p.B * p.H, [&](int64_t plane, int) {
    int64_t best = 0;
    const auto next = [&](int64_t, int64_t k) {
      const int64_t head = partial_at(plane, cuts.head(k));
      for (int64_t f = 0; f < p.F; ++f) {
        A<T>& old = partial.data()[best + f];
        const A<T> x = partial.data()[head + f];
        if (!(x > old || (x != x && old == old))) continue;
        old = x;
        if (kArg) partial_arg.data()[best + f] = partial_arg.data()[head + f];
      }
    };
    const auto last = [&](int64_t row) {
      const int64_t at = out_at(plane) + row * p.H * p.F;
      for (int64_t f = 0; f < p.F; ++f) round_to(out + at + f, sign * partial.data()[best + f]);
      if (kArg) std::memcpy(arg + at, partial_arg.data() + best, size_t(p.F) * sizeof(I));
    };
    for_each_divided_row(
        cuts.split, cuts.at.data(), [&](int64_t, int64_t k) { best = partial_at(plane, cuts.tail(k)); }, next,
        last);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
