// The dot product of an edge's two ends, for every edge.
#pragma once
#include "aggregation_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class S>
struct DotTask {
  const Chunk& chunk;
  int64_t F;
  Nodes::Plane rows;
  const void** source;  // per edge of the chunk
  S* dot;               // likewise, a multiple of the lanes; added to
};

// Lanes of the last two vectors of a tile that count: not those that an earlier vector has where they overlap
// at the end of a row, nor those behind a row that is shorter than a vector.
template <class T, int V>
struct OwnLanes {
  Vec<Int<A<T>>> of[2];
  OwnLanes(const Tile& tile, int64_t F) {
    for (int v = V < 2 ? 0 : V - 2; v < V; ++v)
      for (int i = 0; i < N<T>; ++i) {
        const int64_t feature = vector_at<V, T>(tile, v) + i;
        const int64_t first = v ? vector_at<V, T>(tile, v - 1) + N<T> : tile.begin;
        of[v - (V - 2)][i] = feature >= first && feature < F ? -1 : 0;
      }
  }
  // By bits: a product that does not count may be infinite.
  FASTATTN_INLINE Vec<A<T>> select(int v, Vec<A<T>> x) const {
    return v < V - 2 ? x : bit_cast<Vec<A<T>>>(bit_cast<Vec<Int<A<T>>>>(x) & of[v - (V - 2)]);
  }
};

template <class T, class I, int V, bool kSelected>
__attribute__((noinline)) void dot_tiles(const DotTask<A<T>> t, const Selection selection,
                                         const Tiles tiles) {
  constexpr int kChains = V < 4 ? V : 4;
  const int64_t ahead = edges_ahead<T>(V), first = t.chunk.from.edge;
  const OwnLanes<T, V> lanes(tiles.at<T>(tiles.count - 1), t.F), all(tiles.at<T>(0), t.F);
  // The products of as many edges as there are lanes wait until one transposition sums them all, whichever
  // rows they belong to.
  Vec<A<T>> waiting[N<T>];
  const auto flush = [&](int64_t to) { store(t.dot + to, load(t.dot + to) + reduce_rows<A<T>>(waiting)); };
  for (RowCursor at(t.chunk.split, t.chunk.from, t.chunk.to); at.next();)
    for (int64_t i = at.begin - first, end = at.end - first; i < end;) {
      const int64_t group = round_down(i, N<T>), stop = min(end, group + N<T>);
      for (int64_t k = 0; k < tiles.count; ++k) {
        const Tile tile = tiles.at<T>(k);
        const OwnLanes<T, V>& own = k == tiles.count - 1 ? lanes : all;
        Vec<A<T>> a[V];
        const T* row = static_cast<const T*>(t.rows[at.row]);
        for (int v = 0; v < V; ++v) a[v] = load_wide(row + vector_at<V, T>(tile, v));
        for (int64_t j = i; j < stop; ++j) {
          prefetch<V * N<T>, T>(t.source[j + ahead], tile.begin);
          if constexpr (kSelected) prefetch<V * N<T>, I>(selection.arg[j + ahead], tile.begin);
          Vec<A<T>> sum[kChains]{};
          for (int v = 0; v < V; ++v) {
            const int64_t from = vector_at<V, T>(tile, v);
            Vec<A<T>> product = a[v] * load_wide(static_cast<const T*>(t.source[j]) + from);
            if constexpr (kSelected) product = selection.lanes<A<T>, I>(j, from) ? product : Vec<A<T>>{};
            sum[v % kChains] += own.select(v, product);
          }
          for (int c = kChains - 1; c > 0; --c) sum[c - 1] += sum[c];
          waiting[j - group] = k ? waiting[j - group] + sum[0] : sum[0];
        }
      }
      if (stop == group + N<T>) flush(group);
      i = stop;
    }
  const int64_t edges = t.chunk.edges(), last = round_down(edges, N<T>);
  if (last == edges) return;
  for (int64_t i = edges - last; i < N<T>; ++i) waiting[i] = Vec<A<T>>{};
  flush(last);
}

template <class S>
void edge_dot(EdgeDotParams p, const Parallel& all) {
  if (!p.per_head && heads_adjoin(p.a, p.H, p.F) && heads_adjoin(p.b, p.H, p.F) &&
      heads_adjoin(p.arg, p.H, p.F)) {
    p.F *= p.H;
    p.H = 1;
  }
  const GraphView& graph = p.graph;
  const Cuts cuts(graph, p.H * p.F);
  const int64_t chunks = cuts.split.chunks;
  const Parallel parallel = all.worth(operations(graph, p.B, p.H, p.F));
  const int64_t bytes = size_of(p.a.dtype);
  const Nodes rows(p.a, bytes, p.B, graph.rows, p.H, p.F, N<S>);
  const Nodes nodes(p.b, bytes, p.B, p.M, p.H, p.F, N<S>);
  const Nodes args(p.arg, graph.wide ? 8 : 4, p.B, p.arg_of_rows ? graph.rows : p.M, p.H, p.F, N<S>);
  const auto *row_scale = static_cast<const S*>(p.row_scale), *col_scale = static_cast<const S*>(p.col_scale);
  const int64_t columns = p.per_head ? p.H : 1;
  S* out = static_cast<S*>(p.out.data);

  for_each_task(parallel, chunks, [&](int64_t k, int) {
    Arena::Scope scope(thread_arena());
    const Chunk chunk(cuts, k);
    const int64_t edges = chunk.edges(), first = chunk.from.edge, padded = round_up(edges, N<S>);
    if (edges == 0) return;
    const void** source = scope.arena.take<const void*>(edges + kPadding);
    S* dots = scope.arena.take_zero<S>(columns * padded);
    Selection selection;
    if (p.arg.data) selection.take(scope.arena, chunk, graph);
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t h = 0; h < p.H; ++h) {
        point(chunk, graph, nodes.plane(b, h), source);
        if (p.arg.data) selection.point_to(chunk, graph, args.plane(b, h), p.arg_of_rows);
        const DotTask<S> t{chunk, p.F, rows.plane(b, h), source, dots + (p.per_head ? h : 0) * padded};
        with_dtype_beside<S>(p.a.dtype, [&]<class T>(T) {
          if (p.arg.data)
            with_compared_index<T>(graph.wide, FewWidths{}, [&]<class I>(I, auto some) {
              for_each_width<T>(some, p.F, [&](const Tiles& tiles, auto V) {
                dot_tiles<T, I, V, true>(t, selection, tiles);
              });
            });
          else
            for_each_width<T>(AllowedWidths<T>{}, p.F, [&](const Tiles& tiles, auto V) {
              dot_tiles<T, int32_t, V, false>(t, {}, tiles);
            });
        });
      }
    for (RowCursor at(cuts.split, chunk.from, chunk.to); at.next();)
      for (int64_t e = at.begin; e < at.end; ++e) {
        const S scale =
            (row_scale ? row_scale[at.row] : S(1)) * (col_scale ? col_scale[other_end(graph, e)] : S(1));
        const int64_t number = edge_number(graph, e);
        for (int64_t c = 0; c < columns; ++c)
          out[number * columns + c] = scale * dots[c * padded + e - first];
      }
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
