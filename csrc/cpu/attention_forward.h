// Attention forward: tasks of a few tiles each, which share the key blocks that they walk through.
#pragma once
#include "attention_decode.h"
#include "attention_softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One tile against one key block: weights, then their product with the values.
template <class T>
class BlockStep {
  static constexpr int64_t kChunk = 16;  // keys

 public:
  BlockStep(const Problem<T>& problem, Arena& arena) {
    scores_.take(arena, problem);
    pairs_ = kPairs<T> ? arena.take<E<T>>(kBlock * kTile<T>) : nullptr;
  }
  void run(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, const KeyBlock<T>& block,
           State<T>& state) {
    if (!scores_.start(problem, tile, block)) return;
    if constexpr (kPairs<T>)
      weigh_chunks(problem, tile, panel, block, state);
    else
      weigh_block(problem, tile, panel, block, state);
    const E<T>* weights;
    if constexpr (kPairs<T>)
      weights = pairs_;
    else
      weights = scores_.scores;
    add_values(tile, block, scores_.span, weights, round_up(problem.p.Dv, Format<T>::kRows), state.out);
  }

 private:
  void weigh_block(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel,
                   const KeyBlock<T>& block, State<T>& state) {
    const Span span = scores_.span;
    Added<T> added;
    added.clear();
    score(problem, tile, panel, block);
    if (!state.started)
      raise_reference(problem, scores_, span.begin, min(span.begin + kChunk, span.end), state);
    weigh(problem, tile, scores_, span.begin, span.end, pairs_, state, added);
    if (accept(scores_, state, added)) return;
    score(problem, tile, panel, block);  // weights lie over the scores
    weigh_again(problem, tile, scores_, pairs_, state);
  }
  // Products of the next chunk are under way while this one is weighed: both fit in the reorder buffer.
  void weigh_chunks(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel,
                    const KeyBlock<T>& block, State<T>& state) {
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
      if (!state.started) raise_reference(problem, s, from, to, state);
      weigh(problem, tile, s, from, to, pairs_, state, added);
    }
    s.ring = -1;
    if (accept(s, state, added)) return;
    score(problem, tile, panel, block);
    weigh_again(problem, tile, s, pairs_, state);
  }
  void score(const Problem<T>& problem, const Tile<T>& tile, const E<T>* panel, const KeyBlock<T>& block) {
    scores_.multiply(problem, tile, panel, block);
    scores_.transform(problem, tile, scores_.span.begin, scores_.span.end, nullptr);
  }

  Scores<T> scores_;
  E<T>* pairs_;  // weights as pairs of keys, where products take them so
};

template <class T>
inline int64_t tiles_per_task(const Problem<T>& problem, int threads, int64_t panel) {
  // Enough tasks that uneven ones balance, few enough that a packed key block is shared; panels stay in L2.
  int64_t all = problem.p.B * problem.p.Hkv * problem.tiles;
  int64_t fit = max(1, (512 << 10) / (panel * kTile<T> * int64_t(sizeof(A<T>))));
  return max(1, min(min(8, fit), all / (int64_t(threads) * 6)));
}
// Keys are split over tasks when there are few tiles. A function of the shape alone, so that results do not
// depend on the number of threads.
template <class T>
struct Splits {
  int64_t count;
  int64_t begin, keys;  // split s has the keys [begin + s * keys, begin + (s + 1) * keys)
  int64_t rows_v;
  int64_t size;  // of a tile's partial result: reference, sum, out^T
  explicit Splits(const Problem<T>& problem) {
    const int64_t tiles = problem.p.B * problem.p.Hkv * problem.tiles,
                  all = problem.key_end - problem.key_begin;
    count = max(1, min(64 / max(tiles, 1), all / 512));
    begin = round_down(problem.key_begin, kBlock);
    keys = round_up((all + count - 1) / count, kBlock);
    rows_v = round_up(problem.p.Dv, Format<T>::kRows);
    size = rows_v * kTile<T> + 2 * kTile<T>;
  }
};

// Tiles [first, first + count) of one key/value head against the keys of one split: finished where there is
// only one, else a partial result.
template <class T>
inline void forward_tiles(const Problem<T>& problem, int64_t b, int64_t hk, int64_t first, int64_t count,
                          const Splits<T>& splits, int64_t split, A<T>* partial) {
  typename Format<T>::Configuration configuration;
  const AttentionParams& p = problem.p;
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>* tiles = arena.take<Tile<T>>(count);
  State<T>* states = arena.take<State<T>>(count);
  E<T>* panels = arena.take<E<T>>(count * problem.depth * kTile<T>);
  BlockStep<T> step(problem, arena);
  KeyScratch<T> scratch;
  scratch.take(arena, problem, Use::forward);
  int64_t key_begin = p.S, key_end = 0;
  for (int64_t t = 0; t < count; ++t) {
    make_tile(problem, b, hk, first + t, tiles[t]);
    pack_transposed(tiles[t], p.query, p.D, problem.depth, panels + t * problem.depth * kTile<T>);
    states[t].out = arena.take_zero<A<T>>(splits.rows_v * kTile<T>);
    start_state(problem, tiles[t], split == 0, states[t]);
    key_begin = min(key_begin, tiles[t].lo_min);
    key_end = max(key_end, tiles[t].hi_max);
  }
  if (splits.count > 1) {
    key_begin = max(key_begin, splits.begin + split * splits.keys);
    key_end = min(key_end, splits.begin + (split + 1) * splits.keys);
  }
  for (int64_t begin = round_down(key_begin, kBlock); begin < key_end; begin += kBlock) {
    KeyBlock<T> block = make_block(problem, b, hk, begin, min(begin + kBlock, p.S), Use::forward, scratch);
    for (int64_t t = 0; t < count; ++t)
      step.run(problem, tiles[t], panels + t * problem.depth * kTile<T>, block, states[t]);
  }
  if (splits.count > 1) {
    std::memcpy(partial, states[0].reference, sizeof states[0].reference);
    std::memcpy(partial + kTile<T>, states[0].sum, sizeof states[0].sum);
    std::memcpy(partial + 2 * kTile<T>, states[0].out, size_t(p.Dv * kTile<T>) * sizeof(A<T>));
    return;
  }
  for (int64_t t = 0; t < count; ++t) finish_tile(problem, tiles[t], states[t]);
}

// Finishes tile t of one key/value head from the partial results of its splits, in their order.
template <class T>
inline void merge_tile(const Problem<T>& problem, int64_t b, int64_t hk, int64_t t, const Splits<T>& splits,
                       const A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  make_tile(problem, b, hk, t, tile);
  State<T> state;
  state.out = arena.take_zero<A<T>>(splits.rows_v * kTile<T>);
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    V<T> top = V<T>{} - kInf<T>;
    for (int64_t s = 0; s < splits.count; ++s) top = maximum(top, load(partial + s * splits.size + v * N<T>));
    state.reference[v] = top;
    state.sum[v] = V<T>{};
    V<T> shift = finite_or_zero(top);
    for (int64_t s = 0; s < splits.count; ++s) {
      const A<T>* part = partial + s * splits.size;
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
inline void forward(const AttentionParams& p, const Parallel& parallel) {
  if (p.B * p.H * p.L == 0) return;
  const Problem<T> problem(p);
  if (has_few_rows(problem)) return forward_decode(problem, parallel);
  const Splits<T> splits(problem);
  const bool split_keys = splits.count > 1;
  const int64_t heads = p.B * p.Hkv, tiles = problem.tiles;
  const int64_t per_task = split_keys ? 1 : tiles_per_task(problem, parallel.threads, problem.depth + p.Dv);
  const int64_t tasks_per_head = (tiles + per_task - 1) / per_task;
  const Buffer<A<T>> partial(split_keys ? heads * tiles * splits.count * splits.size : 0);

  for_each_task(parallel, heads * tasks_per_head * splits.count, [&](int64_t task, int) {
    const int64_t split = task % splits.count, unit = task / splits.count;
    // The last tiles first: under a causal mask they are the longest.
    const int64_t head = unit / tasks_per_head, part = tasks_per_head - 1 - unit % tasks_per_head;
    const int64_t first = part * per_task, count = min(per_task, tiles - first);
    A<T>* to =
        partial.data() + (split_keys ? ((head * tiles + first) * splits.count + split) * splits.size : 0);
    forward_tiles(problem, head / p.Hkv, head % p.Hkv, first, count, splits, split, to);
  });
  if (split_keys)
    for_each_task(parallel, heads * tiles, [&](int64_t task, int) {
      const int64_t head = task / tiles;
      const A<T>* from = partial.data() + task * splits.count * splits.size;
      merge_tile(problem, head / p.Hkv, head % p.Hkv, task % tiles, splits, from);
    });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
