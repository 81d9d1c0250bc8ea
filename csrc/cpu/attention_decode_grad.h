// Backward of few query rows, as attention_decode.h is their forward: lanes are columns in the products and
// keys in the softmax. Each row of grad_key and grad_value is a sum over the few rows of a group, which is
// formed in registers and written once.
#pragma once
#include "attention_decode.h"
#include "attention_gradients.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
struct DecodeGrad {
  Decode<T> decode;  // its scores become weights, 2^(score - reference - log_sum)
  A<T> log_sum[kDecodeGradRows], delta[kDecodeGradRows], grad_lse[kDecodeGradRows];
  double alibi[kDecodeGradRows];  // sum of dS * distance per row
  bool one_block;                 // see GradTile
  bool finite;                    // queries and incoming gradients are
  A<T>* grad_out;                 // [rows][columns_v]
  A<T>* grad_query;               // [rows][columns]
  A<T>* grads;                    // [rows][kBlock]: dP, then dS
};

// Keys [begin, end) of one head as pointers to rows of `columns`, converted where they are in half precision.
template <class S, class T>
inline void wide_rows(const Problem<T>& problem, const View& view, int64_t columns, int64_t b, int64_t hk,
                      int64_t begin, int64_t end, int64_t padded, A<T>* scratch, const A<T>** rows) {
  with_rows_of<S>(problem, view, columns, b, hk, begin, end, {problem, b, hk, begin, end}, padded, scratch,
                  [&]<class Row>(const Row* const* given) {
                    for (int64_t j = 0; j < end - begin; ++j)
                      if constexpr (kSame<Row, A<T>>) {
                        rows[j] = given[j];
                      } else {
                        rows[j] = scratch + j * padded;
                        for (int64_t d = 0; d < padded; d += N<T>)
                          store(scratch + j * padded + d, load_row<A<T>>(given[j] + d, 1, columns - d));
                      }
                  });
}

// Scores of keys [begin, end) in log2 units.
template <class S, class T>
inline void decode_scores_again(const Problem<T>& problem, DecodeGrad<T>& g, int64_t hk, int64_t begin,
                                int64_t end, const A<T>** key) {
  Decode<T>& decode = g.decode;
  wide_rows<S>(problem, problem.p.key, problem.p.D, decode.tile.b, hk, begin, end, decode.columns, decode.key,
               key);
  decode_scores<T>(decode.query, decode.tile.count, decode.columns, key, problem.p.D, end - begin,
                   decode.scores);
  transform_rows(problem, decode.tile, begin, end - begin, problem.masked, decode.scores, decode.bend);
}

// As find_level; returns whether rows were summed once more.
template <class S, class T>
inline bool find_decode_level(const Problem<T>& problem, int64_t hk, DecodeGrad<T>& g) {
  Decode<T>& decode = g.decode;
  const Tile<T>& tile = decode.tile;
  bool exact = false;
  for (int r = 0; r < tile.count; ++r) {
    decode.reference[r] = 0;
    g.log_sum[r] = saved_level(problem, tile, r, exact);
  }
  if (!exact) return false;
  start_decode(problem.p, true, decode);
  const A<T>* key[kBlock];
  for (int64_t begin = tile.lo_min; begin < tile.hi_max; begin += kBlock) {
    const int64_t end = min(begin + kBlock, tile.hi_max);
    decode_scores_again<S>(problem, g, hk, begin, end, key);
    decode_weigh(decode, end - begin);
  }
  for (int r = 0; r < tile.count; ++r) {
    decode.reference[r] = finite_or_zero(V<T>{} + decode.reference[r])[0];
    const A<T> log_sum = decode.sum[r] == 0 ? -kInf<T> : log2<A<T>>(V<T>{} + decode.sum[r])[0];
    if (g.log_sum[r] != kInf<T>) g.log_sum[r] = log_sum;
  }
  return true;
}

template <class S, class T>
inline void take_decode_grad(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                             Arena& arena, DecodeGrad<T>& g) {
  Decode<T>& decode = g.decode;
  const Tile<T>& tile = decode.tile;
  take_decode(problem, b, hk, arena, decode);
  if (p.softcap > 0) decode.bend = arena.take<A<T>>(tile.count * kBlock);
  g.grad_out = arena.take<A<T>>(tile.count * decode.columns_v);
  g.grad_query = arena.take_zero<A<T>>(tile.count * decode.columns);
  g.grads = arena.take<A<T>>(tile.count * kBlock);
  load_rows(p.grad_out, tile, p.Dv, decode.columns_v, g.grad_out);
  const bool exact = find_decode_level<S>(problem, hk, g);
  g.one_block = (problem.half || exact) && tile.hi_max - tile.lo_min <= kBlock;
  const A<T>* grad_lse = static_cast<const A<T>*>(p.grad_lse.data);
  V<T> zeros{};  // unless a NaN or an infinity is among what they are products of
  for (int64_t x = 0; x < tile.count * decode.columns; x += N<T>) zeros += load(decode.query + x) * A<T>(0);
  for (int r = 0; r < tile.count; ++r) {
    const A<T>* grad = g.grad_out + r * decode.columns_v;
    const S* out = static_cast<const S*>(p.out.data) + offset(p.out, tile.b, tile.head[r], tile.row[r]);
    V<T> sum{};
    for (int64_t d = 0; d < p.Dv; d += N<T>) {
      zeros += load(grad + d) * A<T>(0);
      if (tile.seen[r]) sum += load(grad + d) * load_row<A<T>>(out + d, 1, p.Dv - d);
    }
    g.grad_lse[r] = grad_lse ? grad_lse[offset(p.grad_lse, b, tile.head[r], tile.row[r])] : A<T>(0);
    g.delta[r] = reduce_add<A<T>>(sum) - g.grad_lse[r];
    g.alibi[r] = 0;
  }
  g.finite = !any(zeros != 0);
}

// Of keys [begin, begin + keys): scores to weights, dP to dS.
template <class T>
inline void grad_row(const Problem<T>& problem, DecodeGrad<T>& g, int r, int64_t begin, int64_t keys) {
  A<T>* scores = g.decode.scores + r * kBlock;
  A<T>* grads = g.grads + r * kBlock;
  const A<T> reference = g.decode.reference[r], log_sum = g.log_sum[r];
  A<T> delta = g.delta[r];
  auto weight = [&](V<T> score) { return exp2<>(score - reference - log_sum); };
  if (g.one_block) {
    V<T> sum{};
    for (int64_t j = 0; j < keys; j += N<T>) {
      const V<T> s = load(scores + j), term = weight(s) * load(grads + j);
      sum += s == -kInf<T> ? V<T>{} : term;
    }
    delta = reduce_add<A<T>>(sum) - g.grad_lse[r];
  }
  V<T> lane, alibi{};
  for (int i = 0; i < N<T>; ++i) lane[i] = A<T>(i);
  for (int64_t j = 0; j < keys; j += N<T>) {
    const V<T> s = load(scores + j), p = weight(s);
    const auto hidden = s == -kInf<T>;
    V<T> ds = p * (load(grads + j) - delta);
    ds = hidden ? V<T>{} : ds;
    store(scores + j, hidden ? V<T>{} : p);
    store(grads + j, ds);
    if (problem.p.alibi.data) {
      const V<T> distance = g.decode.tile.diagonal[r] - (lane + A<T>(begin + j));
      alibi += ds * (distance < 0 ? -distance : distance);
    }
  }
  if (problem.p.alibi.data) g.alibi[r] += double(reduce_add<A<T>>(alibi));
}

// K rows of a gradient of keys, C vectors from a column on, `left` columns before the end:
// weights^T [K][rows] x[rows][padded].
template <class S, class T, int K, int C>
FASTATTN_INLINE void put_columns(const A<T>* weights, const A<T>* x, int rows, int64_t padded, int64_t left,
                                 S* to, int64_t row_stride, int64_t stride) {
  V<T> acc[K][C];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[k][c] = V<T>{};
  for (int r = 0; r < rows; ++r) {
    V<T> y[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) y[c] = load(x + r * padded + c * N<T>);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[k][c] += weights[r * kBlock + k] * y[c];
  }
  if (stride == 1 && left >= C * N<T>) {  // the other case is a loop, or it would be most of the code
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) round_store(to + k * row_stride + c * N<T>, acc[k][c]);
    return;
  }
  A<T> sums[K][C][N<T>];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(sums[k][c], acc[k][c]);
#pragma GCC unroll 1
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 1
    for (int c = 0; c < C; ++c)
      store_row<A<T>>(to + k * row_stride + c * N<T> * stride, stride, left - c * N<T>, load(sums[k][c]));
}
template <class S, class T, int K>
inline void put_rows(const A<T>* weights, const A<T>* x, int rows, int64_t columns, int64_t padded, S* to,
                     int64_t row_stride, int64_t stride) {
  constexpr int C = kVectorRegisters == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + C * N<T> <= padded; d += C * N<T>)
    put_columns<S, T, K, C>(weights, x + d, rows, padded, columns - d, to + d * stride, row_stride, stride);
  for (; d < padded; d += N<T>)
    put_columns<S, T, K, 1>(weights, x + d, rows, padded, columns - d, to + d * stride, row_stride, stride);
}
// Rows [begin, begin + keys) of grad_key or grad_value.
template <class S, class T>
inline void put_decode_keys(const View& view, const Tile<T>& tile, int64_t hk, int64_t begin, int64_t keys,
                            const A<T>* weights, const A<T>* x, int64_t columns, int64_t padded) {
  constexpr int K = 4;
  S* to = static_cast<S*>(view.data) + offset(view, tile.b, hk, begin);
  const int64_t row_stride = view.stride[2], stride = view.stride[3];
  int64_t j = 0;
  for (; j + K <= keys; j += K)
    put_rows<S, T, K>(weights + j, x, tile.count, columns, padded, to + j * row_stride, row_stride, stride);
  for (; j < keys; ++j)
    put_rows<S, T, 1>(weights + j, x, tile.count, columns, padded, to + j * row_stride, row_stride, stride);
}
template <class S, class T>
inline void clear_keys(const View& view, int64_t b, int64_t hk, int64_t begin, int64_t end, int64_t columns) {
  for (int64_t j = begin; j < end; ++j) {
    S* to = static_cast<S*>(view.data) + offset(view, b, hk, j);
    for (int64_t d = 0; d < columns; d += N<T>)
      store_row<A<T>>(to + d * view.stride[3], view.stride[3], columns - d, V<T>{});
  }
}

// Stores or adds dS at the rows of the mask.
template <class T>
inline void put_decode_mask(const View& mask, const DecodeGrad<T>& g, int64_t begin, int64_t keys, bool add) {
  const Tile<T>& tile = g.decode.tile;
  auto put = [&]<class M>(M) {
    for (int r = 0; r < tile.count; ++r) {
      M* to = static_cast<M*>(mask.data) + offset(mask, tile.b, tile.head[r], tile.row[r], begin);
      for (int64_t j = 0; j < keys; j += N<T>)
        put_vector<T>(to + j, keys - j, load(g.grads + r * kBlock + j), add);
    }
  };
  if (mask.dtype == DType::f32) return put(float());
  with_dtype_beside<T>(mask.dtype, put);
}

// Everything that keys [begin, end) contribute.
template <class S, class T>
inline void decode_grad_block(const Problem<T>& problem, const AttentionGradParams& p, int64_t hk,
                              int64_t begin, int64_t end, bool fused_mask, bool add_mask, DecodeGrad<T>& g) {
  Decode<T>& decode = g.decode;
  const Tile<T>& tile = decode.tile;
  const int64_t keys = end - begin;
  const A<T>*key[kBlock], *value[kBlock];
  decode_scores_again<S>(problem, g, hk, begin, end, key);
  wide_rows<S>(problem, p.value, p.Dv, tile.b, hk, begin, end, decode.columns_v, decode.value, value);
  decode_scores<T>(g.grad_out, tile.count, decode.columns_v, value, p.Dv, keys, g.grads);
  for (int r = 0; r < tile.count; ++r) grad_row(problem, g, r, begin, keys);
  if (fused_mask) put_decode_mask(p.grad_mask, g, begin, keys, add_mask);
  for (int r = 0; r < tile.count; ++r)
    for (int64_t j = 0; j < keys; j += N<T>) {
      A<T>* at = g.grads + r * kBlock + j;
      const V<T> ds = load(at) * A<T>(p.scale);
      store(at, decode.bend ? ds * load(decode.bend + r * kBlock + j) : ds);
    }
  decode_values<T>(g.grads, tile.count, key, p.D, keys, decode.columns, g.grad_query);
  put_decode_keys<S>(p.grad_key, tile, hk, begin, keys, g.grads, decode.query, p.D, decode.columns);
  put_decode_keys<S>(p.grad_value, tile, hk, begin, keys, decode.scores, g.grad_out, p.Dv, decode.columns_v);
  // A key that no query sees has zero gradient even where a NaN of some query met its zero weight.
  if (!g.finite)
    for (int64_t j = begin; j < end; ++j)
      if (!problem.key_is_seen(tile.b, hk, j)) {
        clear_keys<S, T>(p.grad_key, tile.b, hk, j, j + 1, p.D);
        clear_keys<S, T>(p.grad_value, tile.b, hk, j, j + 1, p.Dv);
      }
}

template <class T>
inline void put_decode_query(const AttentionGradParams& p, const Tile<T>& tile, const A<T>* grad,
                             int64_t padded) {
  const View& view = p.grad_query;
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    for (int r = 0; r < tile.count; ++r) {
      S* to = static_cast<S*>(view.data) + offset(view, tile.b, tile.head[r], tile.row[r]);
      for (int64_t d = 0; d < p.D; d += N<T>)
        store_row<A<T>>(to + d * view.stride[3], view.stride[3], p.D - d,
                        tile.seen[r] ? load(grad + r * padded + d) : V<T>{});
    }
  });
}

// What one chunk of the keys of a key/value head contributes to a call's gradients.
struct DecodeChunk {
  int64_t begin, end;
  bool first;
  bool fused_mask, add_mask;  // to the mask's gradient: stored, or added to it
};
template <class S, class T>
inline void decode_backward_of(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                               const DecodeChunk& chunk, A<T>* partial, double* alibi) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  DecodeGrad<T>& g = *arena.take<DecodeGrad<T>>(1);
  take_decode_grad<S>(problem, p, b, hk, arena, g);
  const Tile<T>& tile = g.decode.tile;
  const int64_t first = min(max(chunk.begin, tile.lo_min), chunk.end);
  const int64_t last = max(first, min(chunk.end, tile.hi_max));
  for (int64_t begin = first; begin < last; begin += kBlock)
    decode_grad_block<S>(problem, p, hk, begin, min(begin + kBlock, last), chunk.fused_mask, chunk.add_mask,
                         g);
  for (const auto& [from, to] : {Span{chunk.begin, first}, Span{last, chunk.end}}) {
    clear_keys<S, T>(p.grad_key, b, hk, from, to, p.D);
    clear_keys<S, T>(p.grad_value, b, hk, from, to, p.Dv);
  }
  if (partial)
    std::memcpy(partial, g.grad_query, size_t(tile.count * g.decode.columns) * sizeof(A<T>));
  else
    put_decode_query(p, tile, g.grad_query, g.decode.columns);
  for (int r = 0; r < tile.count; ++r) {
    if (alibi) alibi[b * p.H + tile.head[r]] += g.alibi[r];
    if (p.grad_sinks.data && chunk.first)
      add_grad_sink(p, tile, r, g.decode.reference[r], g.log_sum[r], g.delta[r]);
  }
}
template <class T>
inline void decode_backward(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                            const DecodeChunk& chunk, A<T>* partial, double* alibi) {
  with_dtype_beside<T>(p.query.dtype,
                       [&]<class S>(S) { decode_backward_of<S>(problem, p, b, hk, chunk, partial, alibi); });
}

// Of one chunk's contribution to grad_query.
template <class T>
inline int64_t decode_grad_size(const Problem<T>& problem) {
  return problem.group * problem.p.L * round_up(problem.p.D, N<T>);
}
// grad_query of one key/value head from what its chunks contributed, in their order, `all` elements apart.
template <class T>
inline void merge_decode_query(const Problem<T>& problem, const AttentionGradParams& p, int64_t b, int64_t hk,
                               int64_t chunks, int64_t all, A<T>* partial) {
  Arena& arena = thread_arena();
  Arena::Scope scope(arena);
  Tile<T>& tile = *arena.take<Tile<T>>(1);
  make_tile(problem, b, hk, 0, tile);
  const int64_t size = decode_grad_size(problem);
  partial += (b * p.Hkv + hk) * size;
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t x = 0; x < size; x += N<T>)
      store(partial + x, load(partial + x) + load(partial + c * all + x));
  put_decode_query(p, tile, partial, round_up(p.D, N<T>));
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
