// Attention forward: tasks of a few tiles each, which share the key blocks that they walk through.
#pragma once
#include "attention_decode.h"
#include "attention_softmax.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// The tiles of a task against one key block. Matrix tiles work beside the vector units, if instructions of
// both are in flight together: the scores of the next tile and the output of the last one are then
// interleaved with the exponentials of this one. 16 keys at a time fit in the reorder buffer.
template <class T>
class Pipeline {
  static constexpr int64_t kChunk = 16;

 public:
  Pipeline(const Problem<T>& problem, Arena& arena) {
    for (int i = 0; i < (Format<T>::kBesideVectors ? 2 : 1); ++i) {
      scores_[i].take(arena, problem);
      weights_[i] = kPairs<T> ? arena.take<E<T>>(kBlock * kTile<T>) : nullptr;
    }
  }
  void run(const Problem<T>& problem, const Tile<T>* tiles, State<T>* states, const E<T>* panels,
           int64_t count, const KeyBlock<T>& block) {
    if constexpr (Format<T>::kBesideVectors)
      run_interleaved(problem, tiles, states, panels, count, block);
    else
      run_in_turn(problem, tiles, states, panels, count, block);
  }

 private:
  void run_in_turn(const Problem<T>& problem, const Tile<T>* tiles, State<T>* states, const E<T>* panels,
                   int64_t count, const KeyBlock<T>& block) {
    const int64_t rows_v = round_up(problem.p.Dv, Format<T>::kRows);
    Scores<T>& s = scores_[0];
    for (int64_t t = 0; t < count; ++t) {
      const E<T>* panel = panels + t * problem.depth * kTile<T>;
      if (!score_tile(problem, tiles[t], panel, block, s, nullptr)) continue;
      if (!states[t].started) raise_reference(problem, s, states[t]);
      Added<T> added;
      added.clear();
      weigh(problem, tiles[t], s, s.span.begin, s.span.end, weights_[0], states[t], added);
      if (!accept(s, states[t], added)) {
        if constexpr (!kPairs<T>)
          score_tile(problem, tiles[t], panel, block, s, nullptr);  // weights lie over the scores
        weigh_again(problem, tiles[t], s, weights_[0], states[t]);
      }
      if constexpr (kPairs<T>)
        add_values(block, s.span, weights_[0], 0, rows_v, states[t].out);
      else
        add_values(block, s.span, s.scores, 0, rows_v, states[t].out);
    }
  }
  void run_interleaved(const Problem<T>& problem, const Tile<T>* tiles, State<T>* states, const E<T>* panels,
                       int64_t count, const KeyBlock<T>& block) {
    const int64_t rows_v = round_up(problem.p.Dv, Format<T>::kRows);
    const int64_t rows_per_chunk = round_up((rows_v * kChunk + kBlock - 1) / kBlock, Format<T>::kRows);
    bool live[3] = {false, false, false};  // of the next, this and the last tile
    Span last{};
    for (int64_t t = -1; t <= count; ++t) {
      Scores<T>& next = scores_[(t + 1) & 1];
      Scores<T>& now = scores_[t & 1];
      Added<T> added;
      added.clear();
      live[0] = t + 1 < count && next.start(problem, tiles[t + 1], block);
      if (live[1]) {
        now.transform(problem, tiles[t], nullptr);
        if (!states[t].started) raise_reference(problem, now, states[t]);
      }
      int64_t row = 0;
      for (int64_t from = 0; from < kBlock; from += kChunk) {
        if (live[0] && from >= next.span.begin && from < next.span.end)
          next.multiply(problem, panels + (t + 1) * problem.depth * kTile<T>, block, from, from + kChunk);
        if (live[1] && from >= now.span.begin && from < now.span.end)
          weigh(problem, tiles[t], now, from, from + kChunk, weights_[t & 1], states[t], added);
        if (live[2] && row < rows_v) {
          int64_t to = from + kChunk == kBlock ? rows_v : min(rows_v, row + rows_per_chunk);
          add_values(block, last, weights_[(t - 1) & 1], row, to, states[t - 1].out);
          row = to;
        }
      }
      if (live[1]) {
        if (!accept(now, states[t], added)) weigh_again(problem, tiles[t], now, weights_[t & 1], states[t]);
        last = now.span;
      }
      live[2] = live[1];
      live[1] = live[0];
    }
  }

  Scores<T> scores_[2];
  E<T>* weights_[2];
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
  Pipeline<T> pipeline(problem, arena);
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
    pipeline.run(problem, tiles, states, panels, count, block);
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
