// Attention forward: tasks of a few tiles each, which share the key blocks that they walk through.
#pragma once
#include "attention_few_keys.h"
#include "attention_tasks.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One tile against one key block: weights, then their product with the values.
template <class T>
class BlockStep {
  static constexpr int64_t kChunk = 16;  // keys

 public:
  BlockStep(const Problem<T>& problem, Arena& arena) {
    scores_.take(arena, problem);
    // One is read while the other is written: a multiple of 4 KB apart, reads would wait for writes.
    constexpr int64_t kApart = kParts<T> > 1 ? 1024 : 0;
    for (E<T>*& weights : weights_)
      weights = kPairs<T> ? arena.take<E<T>>(kBlock * kParts<T> * kTile<T> + kApart) : nullptr;
  }
  // The part of the block that the tile visits. Where `held` is given its weights stay there.
  Span run(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, KeyBlock<T>& block,
           State<T>& state, A<T>* held = nullptr) {
    if (held) scores_.scores = held, scores_.kept = true;
    if (!scores_.start(problem, tile, block)) return {0, 0};
    const int64_t rows = round_up(problem.p.Dv, Format<T>::kRows);
    if constexpr (kParts<T> > 1) {
      weigh_beside(problem, tile, panel, block, state);
      pending_ = {&block, scores_.span, weights_[current_], rows, state.out};
      current_ ^= 1;
    } else if constexpr (kPairs<T>) {
      weigh_chunks(problem, tile, panel, block, state);
      add_values(tile, block, scores_.span, weights_[0], rows, state.out);
    } else {
      weigh_block(problem, tile, panel, block, state);
      add_values(tile, block, scores_.span, scores_.scores, rows, state.out);
    }
    return scores_.span;
  }
  // The products of the last tile, which wait for the softmax of the next.
  void finish() {
    if constexpr (kParts<T> > 1) beside_pending(0, [](int64_t) {});
  }

 private:
  void weigh_block(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, KeyBlock<T>& block,
                   State<T>& state) {
    const Span span = scores_.span;
    Added<T> added;
    added.clear();
    score(problem, tile, panel, block);
    if (!state.started)
      raise_reference(problem, tile, scores_, span.begin, min(span.begin + kChunk, span.end), state);
    weigh(problem, tile, scores_, span.begin, span.end, weights_[current_], state, added);
    if (accept(scores_, state, added)) return;
    score(problem, tile, panel, block);  // weights lie over the scores
    weigh_again(problem, tile, scores_, weights_[current_], state);
  }
  // What is left of the tile before is done beside this one's softmax.
  void weigh_beside(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, KeyBlock<T>& block,
                    State<T>& state) {
    const Span span = scores_.span;
    if (problem.has_dropout() || scores_.kept) {
      finish();
      return weigh_block(problem, tile, panel, block, state);
    }
    Added<T> added;
    added.clear();
    score(problem, tile, panel, block);
    if (!state.started)
      raise_reference(problem, tile, scores_, span.begin, min(span.begin + kChunk, span.end), state);
    WeighUnits<T> units(scores_, span.begin, weights_[current_], state, added);
    beside_pending(units.units(span.begin, span.end), units);
    units.end(added);
    if (accept(scores_, state, added)) return;
    weigh_again(problem, tile, scores_, weights_[current_], state);
  }
  template <class F>
  FASTATTN_INLINE void beside_pending(int64_t units, F&& unit) {
    const Pending& p = pending_;
    const int64_t keys = p.block ? p.span.end - p.span.begin : 0;
    if (keys == 0) {
      for (int64_t done = 0; done < units; ++done) unit(done);
      return;
    }
    const Sideways<T>& value = p.block->value_t;
    Format<T>::outputs_beside(p.rows, keys, value.at(0, p.span.begin), value.ld,
                              p.weights + p.span.begin * kParts<T> * kTile<T>, p.out, p.block->finite, units,
                              unit);
    pending_.block = nullptr;
  }
  // Products of the next chunk are under way while this one is weighed: both fit in the reorder buffer.
  void weigh_chunks(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, KeyBlock<T>& block,
                    State<T>& state) {
    Scores<T>& s = scores_;
    const Span span = s.span;
    Added<T> added;
    added.clear();
    s.ring = 2 * kChunk - 1;
    const bool held = Format<T>::hold(problem.depth, panel);
    auto multiply = [&](int64_t from) {
      Format<T>::scores_chunk(held, min(kChunk, span.end - from), problem.depth,
                              block.key.data + from * block.key.ld, block.key.ld, panel, s.row(from));
    };
    multiply(span.begin);
    for (int64_t from = span.begin; from < span.end; from += kChunk) {
      const int64_t to = min(from + kChunk, span.end);
      if (to < span.end) multiply(to);
      s.transform(problem, tile, from, to, nullptr);
      if (!state.started) raise_reference(problem, tile, s, from, to, state);
      weigh(problem, tile, s, from, to, weights_[current_], state, added);
    }
    s.ring = -1;
    if (accept(s, state, added)) return;
    score(problem, tile, panel, block);
    weigh_again(problem, tile, s, weights_[current_], state);
  }
  void score(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, KeyBlock<T>& block) {
    scores_.multiply(problem, tile, panel, block);
    scores_.transform(problem, tile, scores_.span.begin, scores_.span.end, nullptr);
  }

  struct Pending {
    const KeyBlock<T>* block;
    Span span;
    const E<T>* weights;
    int64_t rows;
    A<T>* out;
  };
  Scores<T> scores_;
  E<T>* weights_[kParts<T> > 1 ? 2 : 1];  // as pairs of keys, where products take them so
  int current_ = 0;
  Pending pending_{};  // the last tile's products
};

// How one problem is cut. Keys are split over tasks when there are few tiles or rows. Splits are a function
// of the shape alone, so that results do not depend on the number of threads.
template <class T>
struct ForwardPlan {
  bool few_rows, few_keys;
  int64_t splits, begin, keys;  // split s has the keys [begin + s * keys, begin + (s + 1) * keys)
  int64_t deals;                // tasks that the splits are dealt to
  int64_t rows_v;
  int64_t size;      // of a partial result: of a tile reference, sum, out^T; of few rows see decode_size
  int64_t per_task;  // tiles
  int64_t tasks_per_head;
  int64_t tasks, merges, memory;
  int64_t heads, threads;
  ForwardPlan(const Problem<T>& problem, const AttentionParams& p, const Work& all, int threads)
      : heads(p.B * p.Hkv), threads(threads) {
    const int64_t visible = problem.key_end - problem.key_begin;
    few_rows = has_few_rows(problem, kDecodeRows);
    few_keys = !few_rows && forwards_few_keys(problem);
    rows_v = round_up(p.Dv, Format<T>::kRows);
    if (few_rows) {
      splits = decode_splits(problem, all.heads);
      size = problem.group * p.L * decode_size(problem);
      per_task = tasks_per_head = 1;
    } else {
      splits = max(1, min(64 / max(all.tiles, 1), visible / 512));
      begin = round_down(problem.key_begin, kBlock);
      keys = round_up((visible + splits - 1) / splits, kBlock);
      size = rows_v * kTile<T> + 2 * kTile<T>;
      const int64_t together = kParts<T> > 1 ? max(1, min(4, problem.tiles)) : 1;
      per_task = splits == 1 ? tiles_per_task(problem, all, threads) : together;
      tasks_per_head = (problem.tiles + per_task - 1) / per_task;
    }
    const int64_t units = heads * (few_rows ? 1 : problem.tiles);
    deals = p.num_splits > 0 ? min(p.num_splits, splits) : splits;
    tasks = p.L ? heads * tasks_per_head * deals : 0;
    merges = tasks && splits > 1 ? units : 0;
    memory = merges * splits * size;
  }
  int64_t head(int64_t task) const { return task / deals / tasks_per_head; }
  // The head of the task that whoever has this one takes next, if all take as long; -1 if that is the same.
  int64_t next_head(int64_t task) const {
    const int64_t next = head(task + threads);
    return next == head(task) || next >= heads ? -1 : next;
  }

 private:
  static int64_t tiles_per_task(const Problem<T>& problem, const Work& all, int threads) {
    // Enough tasks that uneven ones balance, few enough that a packed key block is shared, which pairs cannot
    // do without; panels stay in L2.
    const int64_t panel = max(1, problem.depth + problem.p.Dv);
    const int64_t fit = max(1, (512 << 10) / (panel * kTile<T> * int64_t(sizeof(A<T>))));
    const int64_t tiles = int64_t(all.keys / Work::keys_per_tile(problem));  // like these, in all
    if (forwards_few_keys(problem)) {
      const int64_t least = kRowsPerKey * (problem.key_end - problem.key_begin) / (2 * kTile<T>);
      return max(max(1, least), min(8, tiles / (int64_t(threads) * 3)));
    }
    // Keys as parts take as long to pack as one tile does.
    constexpr int64_t kMost = kParts<T> > 1 ? 16 : 8;
    const int64_t least = kParts<T> > 1 ? min(4, tiles / threads) : 1;
    return max(max(1, least), min(min(kMost, fit), tiles / (int64_t(threads) * (kPairs<T> ? 3 : 6))));
  }
};

// Has what comes after tile t of a task brought: the place of its output, where its rows are equally far
// apart, and a share of the first keys and values of the next head.
template <class T>
inline void bring_next(const Problem<T>& problem, const Tile<T>& tile, int64_t next_head, int64_t t,
                       int64_t count, Ahead& ahead) {
  const AttentionParams& p = problem.p;
  if (kPairs<T>) return;
  ahead = {};
  if (!problem.flat || p.out.stride[1] == p.L * p.out.stride[2])
    bring_rows(p.out, tile.b, tile.head[0], tile.row[0], tile.count, p.Dv, ahead);
  if (next_head >= 0) bring_keys(problem, next_head, t, count, ahead);
}

// Tiles [first, first + count) of one key/value head against the keys of one split: finished where there is
// only one, else partial results, those of neighbouring tiles plan.splits apart.
template <class T>
inline void forward_tiles(const Problem<T>& problem, int64_t b, int64_t hk, int64_t first, int64_t count,
                          int64_t next_head, const ForwardPlan<T>& plan, int64_t split, A<T>* partial) {
  typename Format<T>::Configuration configuration;
  const AttentionParams& p = problem.p;
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>* tiles = arena.take<Tile<T>>(count);
  State<T>* states = arena.take<State<T>>(count);
  const int64_t panel = problem.depth * kParts<T> * kTile<T>;
  E<T>* panels = arena.take<E<T>>(count * panel);
  BlockStep<T> step(problem, arena);
  KeyScratch<T> scratch;
  scratch.take(arena, problem, Use::forward);
  int64_t key_begin = p.S, key_end = 0;
  for (int64_t t = 0; t < count; ++t) {
    make_tile(problem, b, hk, first + t, tiles[t]);
    pack_transposed(tiles[t], p.query, p.D, problem.depth, panels + t * panel);
    states[t].out = arena.take_zero<A<T>>(plan.rows_v * kTile<T>);
    start_state(problem, tiles[t], split == 0, states[t]);
    key_begin = min(key_begin, tiles[t].lo_min);
    key_end = max(key_end, tiles[t].hi_max);
  }
  if (plan.splits > 1) {
    key_begin = max(key_begin, plan.begin + split * plan.keys);
    key_end = min(key_end, plan.begin + (split + 1) * plan.keys);
  }
  for (int64_t begin = round_down(key_begin, kBlock); begin < key_end; begin += kBlock) {
    KeyBlock<T> block = make_block(problem, b, hk, begin, min(begin + kBlock, p.S), Use::forward, scratch);
    for (int64_t t = 0; t < count; ++t) {
      if (begin + kBlock >= key_end && plan.splits == 1)
        bring_next(problem, tiles[t], next_head, t, count, block.ahead);
      step.run(problem, tiles[t], panels + t * panel, block, states[t]);
    }
    step.finish();
  }
  if (plan.splits > 1) {
    for (int64_t t = 0; t < count; ++t, partial += plan.splits * plan.size) {
      std::memcpy(partial, states[t].reference, sizeof states[t].reference);
      std::memcpy(partial + kTile<T>, states[t].sum, sizeof states[t].sum);
      std::memcpy(partial + 2 * kTile<T>, states[t].out, size_t(p.Dv * kTile<T>) * sizeof(A<T>));
    }
    return;
  }
  for (int64_t t = 0; t < count; ++t) finish_tile(problem, tiles[t], states[t]);
}

// Finishes tile t of one key/value head from the partial results of its splits, in their order.
template <class T>
inline void merge_tile(const Problem<T>& problem, int64_t b, int64_t hk, int64_t t,
                       const ForwardPlan<T>& plan, const A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  make_tile(problem, b, hk, t, tile);
  State<T> state;
  state.out = arena.take_zero<A<T>>(plan.rows_v * kTile<T>);
  for (int v = 0; v < NV; ++v) {
    V<T> top = V<T>{} - kInf<T>;
    for (int64_t s = 0; s < plan.splits; ++s) top = maximum(top, load(partial + s * plan.size + v * N<T>));
    state.reference[v] = top;
    state.sum[v] = V<T>{};
    V<T> shift = finite_or_zero(top);
    for (int64_t s = 0; s < plan.splits; ++s) {
      const A<T>* part = partial + s * plan.size;
      V<T> alpha = exp2<>(load(part + v * N<T>) - shift);
      state.sum[v] += load(part + kTile<T> + v * N<T>) * alpha;
      for (int64_t d = 0; d < problem.p.Dv; ++d) {
        A<T>* at = state.out + d * kTile<T> + v * N<T>;
        store(at, load(at) + load(part + (2 + d) * kTile<T> + v * N<T>) * alpha);
      }
    }
  }
  finish_tile(problem, tile, state);
}

template <class T>
inline void forward_task(const Problem<T>& problem, const ForwardPlan<T>& plan, int64_t task, A<T>* partial) {
  const AttentionParams& p = problem.p;
  if (plan.few_keys) task = spread(task, plan.tasks, plan.threads);
  const int64_t deal = task % plan.deals, head = plan.head(task);
  // The last tiles first: under a causal mask they are the longest.
  const int64_t part = plan.tasks_per_head - 1 - task / plan.deals % plan.tasks_per_head;
  const int64_t first = part * plan.per_task, count = min(plan.per_task, problem.tiles - first);
  const int64_t units = plan.few_rows ? head : head * problem.tiles + first;
  for (int64_t split = deal * plan.splits / plan.deals; split < (deal + 1) * plan.splits / plan.deals;
       ++split) {
    A<T>* to = partial + (plan.splits > 1 ? (units * plan.splits + split) * plan.size : 0);
    if (plan.few_rows)
      decode_head(problem, head / p.Hkv, head % p.Hkv, plan.splits, split, to);
    else if (plan.few_keys) {
      if constexpr (kHasFewKeys<T>) few_keys_forward(problem, head / p.Hkv, head % p.Hkv, first, count);
    } else
      forward_tiles(problem, head / p.Hkv, head % p.Hkv, first, count, plan.next_head(task), plan, split, to);
  }
}
template <class T>
inline void merge_task(const Problem<T>& problem, const ForwardPlan<T>& plan, int64_t task,
                       const A<T>* partial) {
  const int64_t Hkv = problem.p.Hkv, head = plan.few_rows ? task : task / problem.tiles;
  const A<T>* from = partial + task * plan.splits * plan.size;
  if (plan.few_rows) return merge_decode(problem, head / Hkv, head % Hkv, plan.splits, from);
  merge_tile(problem, head / Hkv, head % Hkv, task % problem.tiles, plan, from);
}

template <class T>
inline void forward(const AttentionParams& p, const Parallel& parallel) {
  if (p.B * p.H * p.L == 0) return;
  const Problems<T, AttentionParams> problems(p);
  const Schedule<ForwardPlan<T>> schedule(problems, parallel.threads);
  const Buffer<A<T>> partial(schedule.memory);
  for_each_task(parallel, schedule.tasks, [&](int64_t task, int) {
    const auto& part = schedule.of_task(task);
    problems.with(part.problem, [&](const Problem<T>& problem, const AttentionParams&) {
      forward_task(problem, part.plan, task - part.task, partial.data() + part.memory);
    });
  });
  for_each_task(parallel, schedule.merges, [&](int64_t merge, int) {
    const auto& part = schedule.of_merge(merge);
    problems.with(part.problem, [&](const Problem<T>& problem, const AttentionParams&) {
      merge_task(problem, part.plan, merge - part.merge, partial.data() + part.memory);
    });
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
