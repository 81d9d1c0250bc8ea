// Sums over neighbours: of all edges, or of those that an arg selects.
#pragma once
#include "aggregation_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// What the tiles of a chunk read and write, for one head of one batch.
template <class S>
struct SumTask {
  const Chunk& chunk;
  int64_t F;
  const void** source;  // per edge of the chunk
  const S* weight;      // likewise
  const S* row_scale;   // per row, or null
  char* out;            // row n at n * out_stride bytes
  int64_t out_stride;
  S *head, *tail;  // partial sums of divided rows
};

template <class T, int V>
FASTATTN_INLINE void finish_sum(const SumTask<A<T>>& t, const Tile& tile, int64_t row, RowPart part,
                                Vec<A<T>> (&sum)[V]) {
  if (part != RowPart::whole) {
    A<T>* to = part == RowPart::head ? t.head : t.tail;
    for (int v = 0; v < V; ++v) store_features<V>(to + vector_at<V, T>(tile, v), t.F, sum[v]);
    return;
  }
  if (t.row_scale) {
    for (int v = 0; v < V; ++v) sum[v] *= t.row_scale[row];
  }
  T* out = reinterpret_cast<T*>(t.out + row * t.out_stride);
  for (int v = 0; v < V; ++v) store_features<V>(out + vector_at<V, T>(tile, v), t.F, sum[v]);
}

template <class T, int V, bool kWeighted>
FASTATTN_INLINE void add_edge(const SumTask<A<T>>& t, const Tile& tile, int64_t i, int64_t ahead,
                              Vec<A<T>> (&sum)[V]) {
  prefetch<V * N<T>, T>(t.source[i + ahead], tile.begin);
  const T* x = static_cast<const T*>(t.source[i]);
  for (int v = 0; v < V; ++v) {
    const Vec<A<T>> features = load_wide(x + vector_at<V, T>(tile, v));
    sum[v] += kWeighted ? t.weight[i] * features : features;
  }
}

// Tiles get their task by value, which no store can change: it stays in registers.
template <class T, int V, bool kWeighted>
__attribute__((noinline)) void sum_tiles(const SumTask<A<T>> t, const Tiles tiles) {
  // With few vectors a row the additions would wait for each other: several sums take turns.
  constexpr int kChains = V == 1 ? 4 : V <= 3 ? 2 : 1;
  const int64_t ahead = edges_ahead<T>(V), first = t.chunk.from.edge;
  for (RowCursor at(t.chunk.split, t.chunk.from, t.chunk.to); at.next_with_edges();)
    for (int64_t k = 0; k < tiles.count; ++k) {
      const Tile tile = tiles.at<T>(k);
      Vec<A<T>> sum[kChains][V]{};
      const int64_t end = at.end - first;
      int64_t i = at.begin - first;
      for (; i + kChains <= end; i += kChains)
        for (int c = 0; c < kChains; ++c) add_edge<T, V, kWeighted>(t, tile, i + c, ahead, sum[c]);
      for (; i < end; ++i) add_edge<T, V, kWeighted>(t, tile, i, ahead, sum[0]);
      for (int c = kChains - 1; c > 0; --c)
        for (int v = 0; v < V; ++v) sum[c - 1][v] += sum[c][v];
      finish_sum<T, V>(t, tile, at.row, at.part, sum[0]);
    }
}

// Only the edges that `arg` names, feature by feature.
template <class T, class I, int V>
__attribute__((noinline)) void sum_selected_tiles(const SumTask<A<T>> t, const Selection selection,
                                                  const Tiles tiles) {
  const int64_t ahead = edges_ahead<T>(V), first = t.chunk.from.edge;
  for (RowCursor at(t.chunk.split, t.chunk.from, t.chunk.to); at.next_with_edges();)
    for (int64_t k = 0; k < tiles.count; ++k) {
      const Tile tile = tiles.at<T>(k);
      Vec<A<T>> sum[V]{};
      for (int64_t i = at.begin - first; i < at.end - first; ++i) {
        prefetch<V * N<T>, T>(t.source[i + ahead], tile.begin);
        prefetch<V * N<T>, I>(selection.arg[i + ahead], tile.begin);
        for (int v = 0; v < V; ++v) {
          const int64_t from = vector_at<V, T>(tile, v);
          const Vec<A<T>> product = t.weight[i] * load_wide(static_cast<const T*>(t.source[i]) + from);
          sum[v] += selection.lanes<A<T>, I>(i, from) ? product : Vec<A<T>>{};
        }
      }
      finish_sum<T, V>(t, tile, at.row, at.part, sum);
    }
}

template <class S>
void sum(AggregateSumParams p, const Parallel& all) {
  if ((!p.edge_weight.data || p.edge_weight.stride[1] == 0) && heads_adjoin(p.x, p.H, p.F) &&
      heads_adjoin(p.arg, p.H, p.F)) {
    p.F *= p.H;
    p.H = 1;
  }
  const GraphView& graph = p.graph;
  const Cuts cuts(graph, p.H * p.F);
  const int64_t chunks = cuts.split.chunks;
  const Parallel parallel = all.worth(operations(graph, p.B, p.H, p.F));
  const bool weighted = p.edge_weight.data || p.col_scale || p.arg.data || !is_frequent(p.x.dtype);
  const int64_t bytes = size_of(p.x.dtype);
  const Nodes nodes(p.x, bytes, p.B, p.M, p.H, p.F, N<S>);
  const Nodes args(p.arg, graph.wide ? 8 : 4, p.B, p.arg_of_rows ? graph.rows : p.M, p.H, p.F, N<S>);
  const auto* row_scale = static_cast<const S*>(p.row_scale);
  Buffer<S> partial(p.B * p.H * cuts.slots * p.F);
  const auto partial_at = [&](int64_t plane, int64_t slot) {
    return partial.data() + (plane * cuts.slots + slot) * p.F;
  };
  const auto out_of = [&](int64_t b, int64_t h) {
    return static_cast<char*>(p.out.data) + (b * graph.rows * p.H + h) * p.F * bytes;
  };

  for_each_task(parallel, p.B * chunks, [&](int64_t task, int) {
    Arena::Scope scope(thread_arena());
    const int64_t b = task / chunks, k = task % chunks;
    const Chunk chunk(cuts, k);
    const int64_t edges = chunk.edges();
    fill_empty_rows(chunk, out_of(b, 0), p.H * p.F * bytes, 0);
    const void** source = scope.arena.take<const void*>(edges + kPadding);
    S* weight = weighted ? scope.arena.take<S>(edges) : nullptr;
    Selection selection;
    if (p.arg.data) selection.take(scope.arena, chunk, graph);
    for (int64_t h = 0; h < p.H; ++h) {
      const int64_t plane = b * p.H + h;
      const SumTask<S> t{chunk,
                         p.F,
                         source,
                         weight,
                         row_scale,
                         out_of(b, h),
                         p.H * p.F * bytes,
                         partial_at(plane, cuts.head(k)),
                         partial_at(plane, cuts.tail(k))};
      point(chunk, graph, nodes.plane(b, h), source);
      if (weight && (h == 0 || p.edge_weight.stride[1]))
        weigh<S>(chunk, graph, p.edge_weight, h, p.col_scale, 1, weight);
      if (p.arg.data) selection.point_to(chunk, graph, args.plane(b, h), p.arg_of_rows);
      with_dtype_beside<S>(p.x.dtype, [&]<class T>(T) {
        const AllowedWidths<T> widths;
        if (p.arg.data)
          with_compared_index<T>(graph.wide, widths, [&]<class I>(I, auto some) {
            for_each_width<T>(some, p.F, [&](const Tiles& tiles, auto V) {
              sum_selected_tiles<T, I, V>(t, selection, tiles);
            });
          });
        else
          for_each_width<T>(widths, p.F, [&](const Tiles& tiles, auto V) {
            weighted ? sum_tiles<T, V, true>(t, tiles) : sum_tiles<T, V, !kFrequent<T>>(t, tiles);
          });
      });
    }
  });

  for_each_task(parallel, p.B * p.H, [&](int64_t plane, int) {
    S* total = nullptr;
    const auto next = [&](int64_t, int64_t k) {
      const S* head = partial_at(plane, cuts.head(k));
      for (int64_t f = 0; f < p.F; ++f) total[f] += head[f];
    };
    const auto last = [&](int64_t row) {
      const S scale = row_scale ? row_scale[row] : S(1);
      with_dtype_beside<S>(p.x.dtype, [&]<class T>(T) {
        T* out = reinterpret_cast<T*>(out_of(plane / p.H, plane % p.H) + row * p.H * p.F * bytes);
        for (int64_t f = 0; f < p.F; ++f) round_to(out + f, scale * total[f]);
      });
    };
    for_each_divided_row(
        cuts.split, cuts.at.data(), [&](int64_t, int64_t k) { total = partial_at(plane, cuts.tail(k)); },
        next, last);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
