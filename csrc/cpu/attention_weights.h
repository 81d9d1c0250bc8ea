// The attention weights themselves, or their mean over heads.
#pragma once
#include "attention_softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
inline void weights(const AttentionWeightsParams& p, const Parallel& parallel) {
  if (p.B * p.H * p.L * p.S == 0) return;
  Problem<T> problem(p);
  const int64_t row_tiles = (p.L + kTile<T> - 1) / kTile<T>;
  const int64_t outer = p.average ? 1 : p.H, inner = p.average ? p.H : 1;
  const A<T> factor_out = A<T>(1) / A<T>(inner);
  for_each_task(parallel, p.B * outer * row_tiles, [&](int64_t task, int) {
    typename Format<T>::Configuration configuration;
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    const int64_t rt = task % row_tiles, h0 = task / row_tiles % outer, b = task / row_tiles / outer;
    Tile<T>* tiles = arena.take<Tile<T>>(inner);
    E<T>* panels = arena.take<E<T>>(inner * problem.depth * kTile<T>);
    Level<T>* levels = arena.take<Level<T>>(inner);
    A<T>* sum = arena.take<A<T>>(kBlock * kTile<T>);
    Scores<T> s;
    s.take(arena, problem);
    KeyScratch<T> scratch;
    scratch.take(arena, problem, Use::scores);
    for (int64_t x = 0; x < inner; ++x) {
      make_tile_of_head(problem, b, h0 + x, rt * kTile<T>, tiles[x]);
      hide_unused(tiles[x]);
      pack_transposed(tiles[x], p.query, p.D, problem.depth, panels + x * problem.depth * kTile<T>);
      find_level(problem, tiles[x], panels + x * problem.depth * kTile<T>, arena, scratch, s, levels[x]);
    }
    for (int64_t begin = 0; begin < p.S; begin += kBlock) {
      const int64_t end = min(begin + kBlock, p.S);
      std::memset(static_cast<void*>(sum), 0, size_t(kBlock * kTile<T>) * sizeof(A<T>));
      KeyBlock<T> block{};
      for (int64_t x = 0; x < inner; ++x) {
        if (x == 0 || (h0 + x) % problem.group == 0)
          block = make_block(problem, b, (h0 + x) / problem.group, begin, end, Use::scores, scratch);
        if (!score_tile(problem, tiles[x], panels + x * problem.depth * kTile<T>, block, s, nullptr))
          continue;
        if (levels[x].exact) s.apply_factor();
        for (int64_t j = s.span.begin; j < s.end - begin; ++j)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) {
            V<T> w = exp2<>(load(s.scores + j * kTile<T> + v * N<T>) * s.factor - levels[x].reference[v] -
                            levels[x].log_sum[v]);
            if (problem.has_dropout()) w *= dropout_keep(problem, tiles[x], v, begin + j);
            A<T>* at = sum + j * kTile<T> + v * N<T>;
            store(at, load(at) + w * factor_out);
          }
      }
      put_tile(p.weights, tiles[0], begin, end - begin, sum, false);
    }
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
