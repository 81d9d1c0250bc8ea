// The gradient of a mask, in the mask's own shape: written as dS arises where each of its elements belongs to
// one score, otherwise by a pass of its own.
#pragma once
#include "attention_gradients.h"

namespace fastattn::FASTATTN_ISA {
namespace {

inline int64_t mask_extent(const View& mask, int dimension, int64_t size) {
  return mask.stride[dimension] ? size : 1;
}

inline int64_t mask_bytes(const View& mask) {
  return mask.dtype == DType::f64 ? 8 : mask.dtype == DType::f32 ? 4 : 2;
}

inline void clear_mask_grad(const AttentionGradParams& p) {
  const View& mask = p.grad_mask;
  const int64_t outer = mask_extent(mask, 0, p.B) * mask_extent(mask, 1, p.H);
  const int64_t inner = mask_extent(mask, 2, p.L) * mask_extent(mask, 3, p.S);
  std::memset(mask.data, 0, size_t(outer * inner * mask_bytes(mask)));
}
// Keys [begin, end) of a tile's rows, where the gradient has a row for each.
template <class T>
inline void clear_tile(const View& mask, const Tile<T>& tile, int64_t begin, int64_t end) {
  if (begin >= end) return;
  for (int r = 0; r < tile.count; ++r)
    std::memset(static_cast<char*>(mask.data) +
                    offset(mask, tile.b, tile.head[r], tile.row[r], begin) * mask_bytes(mask),
                0, size_t((end - begin) * mask_bytes(mask)));
}

inline bool mask_is_shared_by_batch(const AttentionGradParams& p) {
  return !p.grad_mask.stride[0] && p.B > 1;
}

// Whether dS can go to the mask's gradient as it arises: no rows, keys or heads share an element, and a batch
// that does can be summed in the gradient itself.
template <class T>
inline bool mask_grad_is_fused(const AttentionGradParams& p) {
  const View& mask = p.grad_mask;
  if (!mask.data) return false;
  const bool whole =
      (mask.stride[2] || p.L == 1) && (mask.stride[3] || p.S == 1) && (mask.stride[1] || p.H == 1);
  const bool accurate = mask.dtype == DType::f64 || (mask.dtype == DType::f32 && sizeof(A<T>) == 4);
  return whole && (accurate || !mask_is_shared_by_batch(p));
}

// The gradient of a mask whose elements are shared by several scores: scores are formed once more, so that
// each element is summed in full precision, in a fixed order, and rounded once.
template <class T>
inline void mask_gradient(const Problem<T>& problem, const AttentionGradParams& p, const Parallel& parallel) {
  const View& mask = p.grad_mask;
  const int64_t batches = mask_extent(mask, 0, p.B), heads = mask_extent(mask, 1, p.H);
  const int64_t row_tiles = (p.L + kTile<T> - 1) / kTile<T>, key_blocks = (p.S + kBlock - 1) / kBlock;
  const bool rows_shared = !mask.stride[2], keys_shared = !mask.stride[3];
  const int64_t outer_rows = rows_shared ? 1 : row_tiles, outer_keys = keys_shared ? 1 : key_blocks;
  for_each_task(parallel, batches * heads * outer_rows * outer_keys, [&](int64_t task, int) {
    typename Format<T>::Configuration configuration;
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    GradScratch<T> scratch;
    scratch.take(arena, problem);
    KeyScratch<T> key_scratch;
    key_scratch.take(arena, problem, Use::backward);
    A<T>* sum = arena.take_zero<A<T>>(kBlock * kTile<T>);
    Tile<T>& tile = *arena.take<Tile<T>>(1);
    GradTile<T>& g = *arena.take<GradTile<T>>(1);
    reserve(problem, scratch, arena, g);
    const int64_t key_task = task % outer_keys, row_task = task / outer_keys % outer_rows;
    const int64_t mb = task / outer_keys / outer_rows / heads, mh = task / outer_keys / outer_rows % heads;
    for (int64_t b = mb; b < (batches == 1 ? p.B : mb + 1); ++b)
      for (int64_t h = mh; h < (heads == 1 ? p.H : mh + 1); ++h)
        for (int64_t rt = row_task; rt < (rows_shared ? row_tiles : row_task + 1); ++rt) {
          make_tile_of_head(problem, b, h, rt * kTile<T>, tile);
          hide_unused(tile);
          prepare(problem, p, tile, scratch, key_scratch, arena, g);
          for (int64_t kb = key_task; kb < (keys_shared ? key_blocks : key_task + 1); ++kb) {
            if (kb * kBlock >= tile.hi_max || (kb + 1) * kBlock <= tile.lo_min) continue;
            KeyBlock<T> block = make_block(problem, b, h / problem.group, kb * kBlock,
                                           min((kb + 1) * kBlock, p.S), Use::backward, key_scratch);
            if (!grad_score_tile(problem, tile, g, block, scratch)) continue;
            const Scores<T>& s = scratch.scores;
            for (int64_t j = s.span.begin; j < s.end - block.begin; ++j)
#pragma GCC unroll 4
              for (int v = 0; v < NV; ++v) {
                A<T>* at = sum + v * N<T> + (keys_shared ? 0 : j * kTile<T>);
                store(at, load(at) + load(scratch.grad_weights + j * kTile<T> + v * N<T>));
              }
          }
        }
    const int64_t key_begin = key_task * kBlock;
    const int64_t keys = keys_shared ? 1 : min(kBlock, p.S - key_begin);
    if (rows_shared) {
      for (int64_t j = 0; j < keys; ++j) {
        A<T> total = 0;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) total += reduce_add<A<T>>(load(sum + j * kTile<T> + v * N<T>));
        store(sum + j * kTile<T>, V<T>{} + total);
      }
      tile.count = 1;
      tile.row[0] = 0;
    }
    tile.b = mb;
    for (int r = 0; r < tile.count; ++r) tile.head[r] = mh;
    if (row_tiles && key_blocks) put_tile(mask, tile, key_begin, keys, sum, false);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
