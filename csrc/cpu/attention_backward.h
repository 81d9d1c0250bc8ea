// Attention backward: one pass over the scores of each chunk of keys gives every gradient.
#pragma once
#include "attention_few_keys_grad.h"
#include "attention_mask_grad.h"
#include "attention_tasks.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Rows of grad_query (times scale) out of a tile's grad_query^T.
template <class S, class T>
inline void put_grad_query_of(const Problem<T>& problem, const View& view, const Tile<T>& tile,
                              const A<T>* grad_t) {
  S* data = static_cast<S*>(view.data);
  for (int v = 0; v < NV; ++v)
    for (int64_t d = 0; d < problem.p.D && v * N<T> < tile.count; d += N<T>) {
      V<T> block[N<T>];
      for (int i = 0; i < N<T>; ++i)
        block[i] = d + i < problem.p.D ? load(grad_t + (d + i) * kTile<T> + v * N<T>) * A<T>(problem.p.scale)
                                       : V<T>{};
      transpose<A<T>>(block);
      for (int i = 0; i < N<T>; ++i) {
        int r = v * N<T> + i;
        if (r >= tile.count) break;
        S* row = data + offset(view, tile.b, tile.head[r], tile.row[r], d);
        store_row<A<T>>(row, view.stride[3], problem.p.D - d, tile.seen[r] ? block[i] : V<T>{});
      }
    }
}
template <class T>
inline void put_grad_query(const Problem<T>& problem, const View& view, const Tile<T>& tile,
                           const A<T>* grad_t) {
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) { put_grad_query_of<S>(problem, view, tile, grad_t); });
}

// How backward is cut into tasks: each takes one chunk of the keys of one key/value head, all its tiles.
template <class T>
struct Chunks {
  bool few_rows;
  bool few_keys;    // then a chunk is of the tiles instead
  bool fused_mask;  // dS goes to the mask's gradient as it arises
  bool by_head;   // a mask shared by the batch is summed by the one task that owns its head, in order of the
                  // batch
  int64_t units;  // key/value heads, or key/value heads of all batches
  int64_t count, keys;  // chunk c has the keys [c * keys, (c + 1) * keys)
  int64_t size;         // of what a chunk contributes to grad_query, of all heads
  int64_t slopes_per_task;
  int64_t tasks, merges, memory;
  int64_t threads;
  Chunks(const Problem<T>& problem, const AttentionGradParams& p, const Work& all, int threads)
      : threads(threads) {
    fused_mask = mask_grad_is_fused<T>(p);
    by_head = fused_mask && mask_is_shared_by_batch(p);
    units = by_head ? p.Hkv : p.B * p.Hkv;
    Work own;
    own.add(problem);
    // As many as its part of the work deserves.
    const double wanted = own.keys > 0 ? 4 * threads * (own.keys / all.keys) / double(units) : 1;
    const int64_t visible = p.L > 0 ? problem.key_end - problem.key_begin : 0;
    few_rows = has_few_rows(problem, kDecodeGradRows);
    few_keys = !few_rows && has_few_keys_grad(problem);
    count = few_rows ? decode_splits(problem, all.heads)
                     : max(1, min(int64_t(__builtin_ceil(wanted)), visible / 512));
    keys = max(kBlock, round_up((p.S + count - 1) / count, kBlock));
    count = max(1, (p.S + keys - 1) / keys);  // none is empty, which would begin within the last block
    slopes_per_task = p.B * p.H / units;
    size = p.B * p.Hkv * (few_rows ? decode_grad_size(problem) : problem.tiles * p.D * kTile<T>);
    tasks = units * count;
    merges = count > 1 ? p.B * p.Hkv * problem.tiles : 0;
    memory = count > 1 ? count * size : 0;
    if (few_keys) {
      // A function of the shape alone: their sums are rounded. Four tiles make up for the keys being copied.
      count = max(1, min(16 / max(all.heads, 1), problem.tiles / 4));
      tasks = units * count;
      merges = count > 1 ? units : 0;
      size = few_keys_grad_size(problem);
      memory = merges * count * size;
    }
  }
};

// Has tile t of another key/value head, as one of so many tiles, and its share of that head's keys brought.
template <class T>
inline void bring_tile(const Problem<T>& problem, const AttentionGradParams& p, int64_t head, int64_t t,
                       int64_t count, Ahead& ahead) {
  // Where a block of keys does not stay in the first-level cache its misses wait behind these.
  constexpr int64_t kCache = 48 << 10;
  if (kPairs<T> || kBlock * max(p.D, p.Dv) * int64_t(sizeof(E<T>)) > kCache) return;
  const int64_t b = head / p.Hkv, h = head % p.Hkv * problem.group + t / problem.tiles_per_head;
  const int64_t row = t % problem.tiles_per_head * kTile<T>, rows = min(kTile<T>, p.L - row);
  ahead = {};
  for (const View* view : {&p.query, &p.out, &p.grad_out})
    if (view->stride[3] == 1) bring_rows(*view, b, h, row, rows, view == &p.query ? p.D : p.Dv, ahead);
  bring_keys(problem, head, t, count, ahead);
}

// Everything that the keys of one chunk of one key/value head contribute. grad_query goes to `partial` where
// there is more than one chunk: grad_query^T of every tile of every head.
template <class T>
inline void backward_head(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                          int64_t next_head, const Chunks<T>& chunks, int64_t chunk, A<T>* partial,
                          double* alibi) {
  const int64_t chunk_begin = min(p.S, chunk * chunks.keys), chunk_end = min(p.S, chunk_begin + chunks.keys);
  typename Format<T>::Configuration configuration;
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  GradScratch<T> scratch;
  scratch.take(arena, problem);
  KeyScratch<T> key_scratch;
  key_scratch.take(arena, problem, Use::backward);
  const int64_t span_keys = round_up(chunk_end - chunk_begin, kKeyStep<T>);
  A<T>* grad_key = arena.take_zero<A<T>>(span_keys * scratch.columns);
  A<T>* grad_value = arena.take_zero<A<T>>(span_keys * scratch.columns_v);
  const int64_t panels = 2 * max(1, problem.depth + problem.depth_v);
  const int64_t together = max(1, min(8, (512 << 10) / (panels * kTile<T> * int64_t(sizeof(A<T>)))));
  Tile<T>* tiles = arena.take<Tile<T>>(together);
  GradTile<T>* grads = arena.take<GradTile<T>>(together);
  // Panels of the tiles in flight are the same size every time: take them once.
  for (int64_t t = 0; t < together; ++t) reserve(problem, scratch, arena, grads[t]);

  // The keys of the chunk before which a tile's part of the mask's gradient is complete.
  int64_t* complete = arena.take<int64_t>(together);
  const bool add_mask = chunks.by_head && b > 0;

  for (int64_t first = 0; first < problem.tiles; first += together) {
    const int64_t count = min(together, problem.tiles - first);
    int64_t key_begin = p.S, key_end = 0;
    std::fill_n(complete, count, chunk_begin);
    for (int64_t t = 0; t < count; ++t) {
      make_tile(problem, b, hk, first + t, tiles[t]);
      hide_unused(tiles[t]);
      prepare(problem, p, tiles[t], scratch, key_scratch, arena, grads[t]);
      key_begin = min(key_begin, tiles[t].lo_min);
      key_end = max(key_end, tiles[t].hi_max);
    }
    key_begin = max(key_begin, chunk_begin);
    key_end = min(key_end, chunk_end);
    for (int64_t begin = round_down(key_begin, kBlock); begin < key_end; begin += kBlock) {
      KeyBlock<T> block =
          make_block(problem, b, hk, begin, min(begin + kBlock, p.S), Use::backward, key_scratch);
      const bool last = begin + kBlock >= key_end && first + together >= problem.tiles;
      for (int64_t t = 0; t < count; ++t) {
        if (last && next_head >= 0) bring_tile(problem, p, next_head, t, count, block.ahead);
        if (!grad_score_tile(problem, tiles[t], grads[t], block, scratch)) continue;
        const Scores<T>& s = scratch.scores;
        if (chunks.fused_mask) {
          put_tile(p.grad_mask, tiles[t], s.begin, s.end - s.begin,
                   scratch.grad_weights + s.span.begin * kTile<T>, add_mask);
          if (!add_mask) clear_tile(p.grad_mask, tiles[t], complete[t], s.begin);
          complete[t] = s.end;
        }
        grad_products(problem, tiles[t], grads[t], block, scratch,
                      grad_key + (begin - chunk_begin) * scratch.columns,
                      grad_value + (begin - chunk_begin) * scratch.columns_v);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      if (chunks.fused_mask && !add_mask) clear_tile(p.grad_mask, tiles[t], complete[t], chunk_end);
      if (partial)
        std::memcpy(partial + ((b * p.Hkv + hk) * problem.tiles + first + t) * p.D * kTile<T>,
                    grads[t].grad_query_t, size_t(p.D * kTile<T>) * sizeof(A<T>));
      else
        put_grad_query(problem, p.grad_query, tiles[t], grads[t].grad_query_t);
      for (int r = 0; r < tiles[t].count; ++r) {
        const int64_t h = tiles[t].head[r];
        if (alibi) alibi[b * p.H + h] += grads[t].alibi[r];
        if (p.grad_sinks.data && chunk == 0) {
          const Level<T>& level = grads[t].level;
          add_grad_sink(p, tiles[t], r, level.reference[r / N<T>][r % N<T>],
                        level.log_sum[r / N<T>][r % N<T>], grads[t].delta[r / N<T>][r % N<T>]);
        }
      }
    }
  }
  put_grad_keys(problem, p.grad_key, p.D, b, hk, chunk_begin, chunk_end, grad_key, scratch.columns,
                A<T>(p.scale));
  put_grad_keys(problem, p.grad_value, p.Dv, b, hk, chunk_begin, chunk_end, grad_value, scratch.columns_v,
                A<T>(1));
}

// grad_query of tile t of one key/value head from what its chunks contributed, in their order.
template <class T>
inline void merge_grad_query(const Problem<T>& problem, const View& view, int64_t b, int64_t hk, int64_t t,
                             int64_t chunks, A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  make_tile(problem, b, hk, t, tile);
  const AttentionParams& p = problem.p;
  const int64_t size = p.D * kTile<T>, all = p.B * p.Hkv * problem.tiles * size;
  A<T>* sum = partial + ((b * p.Hkv + hk) * problem.tiles + t) * size;
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t x = 0; x < size; x += N<T>) store(sum + x, load(sum + x) + load(sum + c * all + x));
  put_grad_query(problem, view, tile, sum);
}

// The gradients of slopes from what the chunks of one problem contributed, in their order.
template <class T>
inline void merge_grad_alibi(const AttentionGradParams& p, const Chunks<T>& chunks, const double* partial) {
  const int64_t slopes = p.B * p.H;
  for (int64_t x = 0; x < slopes; ++x) {
    double sum = 0;
    for (int64_t c = 0; c < chunks.count; ++c) sum += partial[c * slopes + x];
    static_cast<A<T>*>(p.grad_alibi.data)[x] = A<T>(-sum);
  }
}

template <class T>
inline void backward_task(const Problem<T>& problem, const AttentionGradParams& p, const Chunks<T>& chunks,
                          int64_t task, A<T>* partial, double* alibi) {
  if (chunks.few_keys) task = spread(task, chunks.tasks, chunks.threads);
  const int64_t chunk = task % chunks.count, unit = task / chunks.count;
  if (chunks.few_keys) {
    if constexpr (kHasFewKeys<T>)
      few_keys_backward(problem, p, unit / p.Hkv, unit % p.Hkv, chunk * problem.tiles / chunks.count,
                        (chunk + 1) * problem.tiles / chunks.count,
                        chunks.count > 1 ? partial + task * chunks.size : nullptr);
    return;
  }
  const int64_t first = chunks.by_head ? 0 : unit / p.Hkv, last = chunks.by_head ? p.B : first + 1;
  const int64_t hk = unit % p.Hkv, begin = min(p.S, chunk * chunks.keys), end = min(p.S, begin + chunks.keys);
  A<T>* queries = chunks.count > 1 ? partial + chunk * chunks.size : nullptr;
  double* slopes = alibi ? alibi + chunk * p.B * p.H : nullptr;
  const int64_t next = (task + chunks.threads) / chunks.count;
  const int64_t next_head = chunks.by_head || next == unit || next >= chunks.units ? -1 : next;
  for (int64_t b = first; b < last; ++b)
    if (chunks.few_rows)
      decode_backward(problem, p, b, hk, {begin, end, chunk == 0, chunks.fused_mask, chunks.by_head && b > 0},
                      queries ? queries + (b * p.Hkv + hk) * decode_grad_size(problem) : nullptr, slopes);
    else
      backward_head(problem, p, b, hk, next_head, chunks, chunk, queries, slopes);
}

template <class T>
inline void backward(const AttentionGradParams& p, const Parallel& parallel) {
  if (p.grad_mask.data && p.B * p.H * p.L * p.S == 0) clear_mask_grad(p);
  if (p.B * p.Hkv == 0) return;
  const Problems<T, AttentionGradParams> problems(p);
  const Schedule<Chunks<T>> schedule(problems, parallel.threads);
  const bool fused_mask = schedule.parts()[0].plan.fused_mask;
  const Buffer<A<T>> partial(schedule.memory);
  const int64_t slopes = p.grad_alibi.data ? schedule.parts()[0].plan.slopes_per_task : 0;
  const Buffer<double> alibi(schedule.tasks * slopes);
  if (alibi.data()) std::memset(alibi.data(), 0, size_t(schedule.tasks * slopes) * sizeof(double));
  if (p.grad_sinks.data) std::memset(p.grad_sinks.data, 0, size_t(p.B * p.H) * sizeof(A<T>));
  if (fused_mask && schedule.parts()[0].plan.few_rows) clear_mask_grad(p);

  for_each_task(parallel, schedule.tasks, [&](int64_t task, int) {
    const auto& part = schedule.of_task(task);
    problems.with(part.problem, [&](const Problem<T>& problem, const AttentionGradParams& own) {
      backward_task(problem, own, part.plan, task - part.task, partial.data() + part.memory,
                    alibi.data() ? alibi.data() + part.task * slopes : nullptr);
    });
  });
  for_each_task(parallel, schedule.merges, [&](int64_t merge, int) {
    const auto& part = schedule.of_merge(merge);
    problems.with(part.problem, [&](const Problem<T>& problem, const AttentionGradParams& own) {
      const int64_t task = merge - part.merge;
      A<T>* from = partial.data() + part.memory;
      if (part.plan.few_keys)
        return merge_few_keys(problem, own, task / own.Hkv, task % own.Hkv, part.plan.count,
                              from + task * part.plan.count * part.plan.size);
      const int64_t head = task / problem.tiles, t = task % problem.tiles;
      if (part.plan.few_rows)
        merge_decode_query(problem, own, head / p.Hkv, head % p.Hkv, part.plan.count, part.plan.size, from);
      else
        merge_grad_query(problem, own.grad_query, head / p.Hkv, head % p.Hkv, t, part.plan.count, from);
    });
  });
  if (p.grad_alibi.data)
    for (const auto& part : schedule.parts())
      problems.with(part.problem, [&](const Problem<T>&, const AttentionGradParams& own) {
        merge_grad_alibi(own, part.plan, alibi.data() + part.task * slopes);
      });
  if (p.grad_mask.data && !fused_mask) mask_gradient(Problem<T>(p), p, parallel);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
