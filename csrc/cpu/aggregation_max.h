// The largest neighbour, feature by feature, and the edge that it came along. The smallest is the largest of
// the negatives.
#pragma once
#include "aggregation_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Where rows of results lie: what was found, and the edges that it was found at, or null.
struct MaxRows {
  char *out, *arg;
  FASTATTN_INLINE MaxRows row(int64_t row, int64_t bytes, int64_t arg_bytes) const {
    return {out + row * bytes, arg ? arg + row * arg_bytes : nullptr};
  }
};
template <class S>
struct MaxTask {
  const Chunk& chunk;
  const GraphView& graph;
  int64_t F;
  const void** source;   // per edge of the chunk
  const S* weight;       // likewise, negative for the smallest; null = 1
  const Int<S>* number;  // likewise: the caller's number of the edge, or where that does not fit into a lane
                         // its place in the chunk; null: not wanted
  S sign;
  MaxRows rows, head, tail;  // of divided rows, whose partial results are of S
  int64_t bytes, arg_bytes;  // from row to row
};

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

// From places in the chunk to the caller's numbers; none stays none.
template <class Numbers, class S>
__attribute__((noinline)) void number_places(const MaxTask<S>& t, Numbers& numbers) {
  for (int i = 0; i < N<S>; ++i)
    numbers[i] = numbers[i] < 0 ? -1 : edge_number(t.graph, t.chunk.from.edge + numbers[i]);
}
template <int V, class I, class S>
FASTATTN_INLINE void store_arg(const MaxTask<S>& t, I* to, Vec<Int<S>> arg) {
  typedef I Numbers __attribute__((vector_size(N<S> * sizeof(I))));
  Numbers numbers = __builtin_convertvector(arg, Numbers);
  if constexpr (sizeof(I) > sizeof(S)) number_places(t, numbers);
  if (V > 1 || t.F >= N<S>)
    std::memcpy(to, &numbers, sizeof numbers);
  else
    copy_some<N<S>>(to, reinterpret_cast<const I*>(&numbers), t.F);
}

template <class T, int V, bool kWeighted>
FASTATTN_INLINE Vec<A<T>> message(const MaxTask<A<T>>& t, const Tile& tile, int64_t i, int v) {
  const Vec<A<T>> x = load_wide(static_cast<const T*>(t.source[i]) + vector_at<V, T>(tile, v));
  return kWeighted ? t.weight[i] * x : x;
}

template <class T, int V, bool kWeighted, bool kArg>
FASTATTN_INLINE void finish_max(const MaxTask<A<T>>& t, const Tile& tile, int64_t row, RowPart part,
                                const Vec<A<T>> (&best)[V], const Vec<Int<A<T>>> (&arg)[V]) {
  MaxRows to = part == RowPart::head ? t.head : t.tail;
  if (part == RowPart::whole) {
    to = t.rows.row(row, t.bytes, t.arg_bytes);
    for (int v = 0; v < V; ++v)
      store_features<V>(reinterpret_cast<T*>(to.out) + vector_at<V, T>(tile, v), t.F,
                        kWeighted ? best[v] * t.sign : best[v]);
  } else {
    for (int v = 0; v < V; ++v)
      store_features<V>(reinterpret_cast<A<T>*>(to.out) + vector_at<V, T>(tile, v), t.F, best[v]);
  }
  if constexpr (kArg)
    with_index(t.graph.wide, [&]<class I>(I) {
      for (int v = 0; v < V; ++v)
        store_arg<V>(t, reinterpret_cast<I*>(to.arg) + vector_at<V, T>(tile, v), arg[v]);
    });
}

// The extremes of edges that follow each other, none of them taken yet.
template <class T, int V, bool kWeighted, bool kArg>
struct Extremes {
  Vec<A<T>> best[V];
  Vec<Int<A<T>>> arg[V];

  FASTATTN_INLINE void begin(const MaxTask<A<T>>& t, const Tile& tile, int64_t i) {
    for (int v = 0; v < V; ++v) {
      best[v] = message<T, V, kWeighted>(t, tile, i, v);
      if (kArg) arg[v] = Vec<Int<A<T>>>{} + t.number[i];
    }
  }
  FASTATTN_INLINE void take(const MaxTask<A<T>>& t, const Tile& tile, int64_t i, int64_t ahead) {
    prefetch<V * N<T>, T>(t.source[i + ahead], tile.begin);
    for (int v = 0; v < V; ++v)
      take_larger<A<T>, kArg>(best[v], arg[v], message<T, V, kWeighted>(t, tile, i, v),
                              Vec<Int<A<T>>>{} + (kArg ? t.number[i] : 0));
  }
  FASTATTN_INLINE void take(const Extremes& later) {
    for (int v = 0; v < V; ++v) take_larger<A<T>, kArg>(best[v], arg[v], later.best[v], later.arg[v]);
  }
};

template <class T, int V, bool kWeighted, bool kArg>
__attribute__((noinline)) void max_tiles(const MaxTask<A<T>>& t, const Tiles tiles) {
  // A comparison waits for the one before it. With few vectors a row, parts of a long row take turns.
  constexpr int kChains = V == 1 ? 4 : V == 2 ? 2 : 1;
  constexpr int64_t kLong = 8 * kChains;
  const int64_t ahead = edges_ahead<T>(V), first = t.chunk.from.edge;
  for (RowCursor at(t.chunk.split, t.chunk.from, t.chunk.to); at.next_with_edges();)
    for (int64_t k = 0; k < tiles.count; ++k) {
      const Tile tile = tiles.at<T>(k);
      const int64_t end = at.end - first;
      int64_t i = at.begin - first;
      Extremes<T, V, kWeighted, kArg> chains[kChains];
      if (kChains > 1 && end - i >= kLong) {
        const int64_t part = (end - i) / kChains;
        for (int c = 0; c < kChains; ++c) chains[c].begin(t, tile, i + c * part);
        for (int64_t j = 1; j < part; ++j)
          for (int c = 0; c < kChains; ++c) chains[c].take(t, tile, i + c * part + j, ahead);
        for (int c = 1; c < kChains; ++c) chains[0].take(chains[c]);
        i += kChains * part;
      } else {
        chains[0].begin(t, tile, i);
        prefetch<V * N<T>, T>(t.source[i + ahead], tile.begin);
        ++i;
      }
      for (; i < end; ++i) chains[0].take(t, tile, i, ahead);
      finish_max<T, V, kWeighted, kArg>(t, tile, at.row, at.part, chains[0].best, chains[0].arg);
    }
}

template <class S>
void max_over_edges(AggregateMaxParams p, const Parallel& all) {
  if ((!p.edge_weight.data || p.edge_weight.stride[1] == 0) && heads_adjoin(p.x, p.H, p.F)) {
    p.F *= p.H;
    p.H = 1;
  }
  const GraphView& graph = p.graph;
  const Cuts cuts(graph, p.H * p.F);
  const int64_t chunks = cuts.split.chunks;
  const Parallel parallel = all.worth(operations(graph, p.B, p.H, p.F));
  const bool weighted = p.edge_weight.data || p.minimum || !is_frequent(p.x.dtype);
  const S sign = p.minimum ? -1 : 1;
  const int64_t bytes = size_of(p.x.dtype), arg_bytes = graph.wide ? 8 : 4;
  const Nodes nodes(p.x, bytes, p.B, p.M, p.H, p.F, N<S>);
  const int64_t partials = p.B * p.H * cuts.slots * p.F;
  Buffer<S> partial(partials);
  Buffer<char> partial_arg(p.arg ? partials * arg_bytes : 0);
  const auto partial_at = [&](int64_t plane, int64_t slot) { return (plane * cuts.slots + slot) * p.F; };
  const auto out_at = [&](int64_t plane) { return (plane / p.H * graph.rows * p.H + plane % p.H) * p.F; };
  const MaxRows out{static_cast<char*>(p.out.data), static_cast<char*>(p.arg)};
  const MaxRows parts{reinterpret_cast<char*>(partial.data()), partial_arg.data()};

  for_each_task(parallel, p.B * chunks, [&](int64_t task, int) {
    Arena::Scope scope(thread_arena());
    const int64_t b = task / chunks, k = task % chunks;
    const Chunk chunk(cuts, k);
    const int64_t edges = chunk.edges();
    const int64_t width = p.H * p.F;
    const MaxRows start = out.row(b * graph.rows, width * bytes, width * arg_bytes);
    fill_empty_rows(chunk, start.out, width * bytes, 0);
    if (p.arg) fill_empty_rows(chunk, start.arg, width * arg_bytes, 0xff);  // -1
    const void** source = scope.arena.take<const void*>(edges + kPadding);
    S* weight = weighted ? scope.arena.take<S>(edges) : nullptr;
    auto* number = p.arg ? scope.arena.take<Int<S>>(edges) : nullptr;
    if (number && sizeof(Int<S>) < size_t(arg_bytes))
      for (int64_t i = 0; i < edges; ++i) number[i] = Int<S>(i);
    else if (number)
      number_edges(chunk, graph, number);
    for (int64_t h = 0; h < p.H; ++h) {
      const int64_t plane = b * p.H + h;
      point(chunk, graph, nodes.plane(b, h), source);
      if (weight && (h == 0 || p.edge_weight.stride[1]))
        weigh<S>(chunk, graph, p.edge_weight, h, nullptr, sign, weight);
      const MaxTask<S> t{chunk,
                         graph,
                         p.F,
                         source,
                         weight,
                         number,
                         sign,
                         out.row(out_at(plane), bytes, arg_bytes),
                         parts.row(partial_at(plane, cuts.head(k)), sizeof(S), arg_bytes),
                         parts.row(partial_at(plane, cuts.tail(k)), sizeof(S), arg_bytes),
                         width * bytes,
                         width * arg_bytes};
      with_dtype_beside<S>(p.x.dtype, [&]<class T>(T) {
        const auto run = [&]<bool kWeighted>(auto widths) {
          for_each_width<T>(widths, p.F, [&](const Tiles& tiles, auto V) {
            number ? max_tiles<T, V, kWeighted, true>(t, tiles) : max_tiles<T, V, kWeighted, false>(t, tiles);
          });
        };
        if constexpr (kFrequent<T>)
          if (!weighted) {  // a value and an edge number in registers for each vector
            using Free = std::conditional_t<kVectorRegisters == 32, AllWidths, Widths<1, 2, 4>>;
            return run.template operator()<false>(Free{});
          }
        run.template operator()<true>(FewWidths{});
      });
    }
  });

  for_each_task(parallel, p.B * p.H, [&](int64_t plane, int) {
    int64_t best = 0;
    const auto next = [&](int64_t, int64_t k) {
      const int64_t head = partial_at(plane, cuts.head(k));
      for (int64_t f = 0; f < p.F; ++f) {
        S& old = partial.data()[best + f];
        const S x = partial.data()[head + f];
        if (!(x > old || (x != x && old == old))) continue;
        old = x;
        if (p.arg)
          std::memcpy(partial_arg.data() + (best + f) * arg_bytes,
                      partial_arg.data() + (head + f) * arg_bytes, size_t(arg_bytes));
      }
    };
    const auto last = [&](int64_t row) {
      const int64_t at = out_at(plane) + row * p.H * p.F;
      const MaxRows to = out.row(at, bytes, arg_bytes), from = parts.row(best, sizeof(S), arg_bytes);
      with_dtype_beside<S>(p.x.dtype, [&]<class T>(T) {
        for (int64_t f = 0; f < p.F; ++f)
          round_to(reinterpret_cast<T*>(to.out) + f, sign * partial.data()[best + f]);
      });
      if (p.arg) std::memcpy(to.arg, from.arg, size_t(p.F * arg_bytes));
    };
    for_each_divided_row(
        cuts.split, cuts.at.data(), [&](int64_t, int64_t k) { best = partial_at(plane, cuts.tail(k)); }, next,
        last);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
