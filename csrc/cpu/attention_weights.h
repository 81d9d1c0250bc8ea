// The attention weights themselves, or their mean over heads: from the log-sum-exp, or together with the
// output.
#pragma once
#include "attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Tiles of rows of one head, or of all heads where their weights are averaged.
template <class T>
struct WeightsPlan {
  int64_t row_tiles, outer, inner;  // tasks are (b, one of `outer` heads, row tile)
  int64_t tasks;
  explicit WeightsPlan(const AttentionWeightsParams& p) {
    row_tiles = (p.L + kTile<T> - 1) / kTile<T>;
    outer = p.average ? 1 : p.H, inner = p.average ? p.H : 1;
    tasks = p.B * outer * row_tiles;
  }
};

template <class T>
inline void weights(const AttentionWeightsParams& p, const Parallel& parallel) {
  if (p.B * p.H * p.L * p.S == 0) return;
  Problem<T> problem(p);
  const WeightsPlan<T> plan(p);
  const int64_t inner = plan.inner;
  const A<T> factor_out = A<T>(1) / A<T>(inner);
  for_each_task(parallel, plan.tasks, [&](int64_t task, int) {
    typename Format<T>::Configuration configuration;
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    const int64_t row = task % plan.row_tiles * kTile<T>, h0 = task / plan.row_tiles % plan.outer,
                  b = task / plan.row_tiles / plan.outer;
    Tile<T>* tiles = arena.take<Tile<T>>(inner);
    const int64_t panel = problem.depth * kParts<T> * kTile<T>;
    E<T>* panels = arena.take<E<T>>(inner * panel);
    Level<T>* levels = arena.take<Level<T>>(inner);
    A<T>* sum = arena.take<A<T>>(kBlock * kTile<T>);
    Scores<T> s;
    s.take(arena, problem);
    KeyScratch<T> scratch;
    scratch.take(arena, problem, Use::scores);
    for (int64_t x = 0; x < inner; ++x) {
      make_tile_of_head(problem, b, h0 + x, row, tiles[x]);
      hide_unused(tiles[x]);
      pack_transposed(tiles[x], p.query, p.D, problem.depth, panels + x * panel);
      find_level(problem, tiles[x], panels + x * panel, arena, scratch, s, levels[x]);
    }
    for (int64_t begin = 0; begin < p.S; begin += kBlock) {
      const int64_t end = min(begin + kBlock, p.S);
      std::memset(static_cast<void*>(sum), 0, size_t(kBlock * kTile<T>) * sizeof(A<T>));
      KeyBlock<T> block{};
      for (int64_t x = 0; x < inner; ++x) {
        if (x == 0 || (h0 + x) % problem.group == 0)
          block = make_block(problem, b, (h0 + x) / problem.group, begin, end, Use::scores, scratch);
        if (!score_tile(problem, tiles[x], panels + x * panel, block, s, nullptr)) continue;
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

// The same together with the output, in one pass: the weights of a tile for all keys are held until its sums
// are known. The output is bit for bit that of `forward`, whose tiles these are.
template <class T>
class HeldWeights {
  static constexpr int64_t kMemory = 1 << 20;  // of a task: half of a second-level cache
  static constexpr int64_t kMost = 4;          // tiles of a task, which share the blocks of keys
  static constexpr int64_t kTiles = 8;         // with fewer, the output had better be of more tasks

 public:
  explicit HeldWeights(const AttentionWeightsParams& params)
      : p_(params), plan_(params), problem_(params), keys_(round_up(p_.S, kBlock)) {
    if (p_.B * p_.H * p_.L * p_.S == 0 || plan_.tasks < kTiles) return;
    Work all;
    all.add(problem_);
    const ForwardPlan<T> forward(problem_, p_, all, 1);
    if (forward.few_rows || forward.few_keys || forward.splits > 1) return;
    if (problem_.flat && problem_.group > 1) return;  // whose tiles are of rows of several heads
    fit_ = min(kMost, kMemory / (2 * keys_ * kTile<T> * int64_t(sizeof(A<T>))));
  }
  bool fit() const { return fit_ > 0; }
  void run(const Parallel& parallel) const {
    const int64_t per_task = max(1, min(fit_, plan_.tasks / (3 * int64_t(parallel.threads))));
    const int64_t per_head = (plan_.row_tiles + per_task - 1) / per_task;
    for_each_task(parallel, p_.B * plan_.outer * per_head, [&](int64_t task, int) {
      const int64_t first = task % per_head * per_task;
      of_tiles(task / per_head / plan_.outer, task / per_head % plan_.outer, first,
               min(per_task, plan_.row_tiles - first));
    });
  }

 private:
  struct Held {
    Tile<T> tile;
    State<T> state;
    E<T>* panel;
    A<T>*weights, *sum;  // of a head before they are divided by its sums; of all heads
    Span* spans;         // of each block, and the reference of its weights
    V<T>* references;
  };
  void of_tiles(int64_t b, int64_t h0, int64_t first, int64_t count) const {
    typename Format<T>::Configuration configuration;
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    const int64_t blocks = keys_ / kBlock, rows_v = round_up(p_.Dv, Format<T>::kRows);
    Held* all = arena.take<Held>(count);
    for (Held* held = all; held < all + count; ++held) {
      held->panel = arena.take<E<T>>(problem_.depth * kParts<T> * kTile<T>);
      held->state.out = arena.take<A<T>>(rows_v * kTile<T>);
      held->weights = arena.take<A<T>>(keys_ * kTile<T>);
      held->sum = arena.take_zero<A<T>>(keys_ * kTile<T>);
      held->spans = arena.take<Span>(blocks);
      held->references = arena.take<V<T>>(blocks * NV);
    }
    BlockStep<T> step(problem_, arena);
    KeyScratch<T> scratch;
    scratch.take(arena, problem_, Use::forward);
    for (int64_t h = h0; h < h0 + plan_.inner; ++h) {
      int64_t begin = blocks, end = 0;
      for (int64_t t = 0; t < count; ++t) {
        auto& [tile, state, panel, weights, sum, spans, references] = all[t];
        make_tile_of_head(problem_, b, h, (first + t) * kTile<T>, tile);
        pack_transposed(tile, p_.query, p_.D, problem_.depth, panel);
        std::memset(static_cast<void*>(state.out), 0, size_t(rows_v * kTile<T>) * sizeof(A<T>));
        start_state(problem_, tile, true, state);
        begin = min(begin, tile.lo_min / kBlock);
        end = max(end, (tile.hi_max + kBlock - 1) / kBlock);
      }
      for (int64_t n = begin; n < end; ++n) {
        KeyBlock<T> block = make_block(problem_, b, h / problem_.group, n * kBlock,
                                       min((n + 1) * kBlock, p_.S), Use::forward, scratch);
        for (Held* held = all; held < all + count; ++held) {
          held->spans[n] = step.run(problem_, held->tile, held->panel, block, held->state,
                                    held->weights + n * kBlock * kTile<T>);
          for (int v = 0; v < NV; ++v) held->references[n * NV + v] = held->state.reference[v];
        }
        step.finish();
      }
      for (Held* held = all; held < all + count; ++held) {
        finish_tile(problem_, held->tile, held->state);
        add_weights(*held, begin, end);
      }
    }
    for (Held* held = all; held < all + count; ++held)
      put_tile(p_.weights, held->tile, 0, p_.S, held->sum, false);
  }
  void add_weights(const Held& held, int64_t begin, int64_t end) const {
    for (int v = 0; v < held.tile.vectors; ++v) {
      const V<T> factor = inverse_sum(held.tile, held.state, v) / A<T>(plan_.inner);
      const V<T> reference = finite_or_zero(held.state.reference[v]);
      for (int64_t n = begin; n < end; ++n) {
        // Of a block without a visible key the reference is -inf, and its weights stay 0.
        const V<T> scale = exp2<>(held.references[n * NV + v] - reference) * factor;
        const int64_t at = n * kBlock * kTile<T> + v * N<T>;
        for (int64_t j = held.spans[n].begin * kTile<T>; j < held.spans[n].end * kTile<T>; j += kTile<T>)
          store(held.sum + at + j, load(held.sum + at + j) + load(held.weights + at + j) * scale);
      }
    }
  }

  const AttentionWeightsParams& p_;
  const WeightsPlan<T> plan_;
  const Problem<T> problem_;
  const int64_t keys_;  // whole blocks
  int64_t fit_ = 0;     // tiles that a task can hold
};

template <class T>
inline void forward_with_weights(const AttentionWeightsParams& p, const Parallel& parallel) {
  if constexpr (kSame<T, A<T>>)
    if (p.H > 0)
      if (const HeldWeights<T> held(p); held.fit()) return held.run(parallel);
  forward<T>(p, parallel);
  weights<T>(p, parallel);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
