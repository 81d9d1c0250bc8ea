// One token: S = exp(decay) S + phi(k) v^T and phi(q)^T S in one pass over the state.
#pragma once
#include <atomic>

#include "linear_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Row (b, h) of a tensor, mapped; zero behind its end, up to `room`.
template <class T>
inline void read_row(FeatureMap map, const View& view, int64_t b, int64_t h, int64_t columns, int64_t room,
                     T* to) {
  const int64_t stride = view.stride[2];
  with_dtype_beside<T>(view.dtype, [&]<class S>(S) {
    const S* row = static_cast<const S*>(view.data) + offset(view, b, h);
    with_map(map, [&]<FeatureMap kMap>() {
      for (int64_t c = 0; c < room; c += N<T>) {
        const int64_t left = max(columns - c, 0);
        const V<T> x = feature<T, kMap>(load_row<T>(row + c * stride, stride, left));
        store(to + c, lane_index<T>() < Int<T>(min(left, N<T>)) ? x : V<T>{});
      }
    });
  });
}

// Columns [c, c + NV N) of one head, which are read and written in whole vectors if kWhole. Without decay a
// multiplication less is needed, which is a third of the arithmetic.
template <class T, int NV, bool kWhole, bool kDecays>
inline void step_columns(const LinearAttentionStepParams& p, const T* query, const T* key, T decay,
                         const T* value, int64_t c, int64_t b, int64_t h, V<T>* out) {
  const View &from = p.kv, &to = p.new_kv;
  V<T> v[NV], sum[NV] = {};
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i) v[i] = load(value + c + i * N<T>);
  const T* row = static_cast<const T*>(from.data) + offset(from, b, h, 0, c);
  T* new_row = static_cast<T*>(to.data) + offset(to, b, h, 0, c);
  // Copies: what is written might be the parameters, as far as the compiler knows.
  const int64_t rows = p.D, left = p.Dv - c, step = from.stride[2], new_step = to.stride[2];
  const int64_t column = from.stride[3], new_column = to.stride[3];
  for (int64_t d = 0; d < rows; ++d, row += step, new_row += new_step) {
    const V<T> k = broadcast(key[d]), q = broadcast(query[d]);
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const int64_t x = i * N<T>;
      V<T> s = kWhole ? load(row + x) : load_row<T>(row + x * column, column, left - x);
      if (kWhole) prefetch<3>(row + x, 8 * step);  // also of the head that comes next
      if (kDecays) s = scaled<T>(s, decay);
      s += k * v[i];
      if (kWhole)
        store(new_row + x, s);
      else
        store_row<T>(new_row + x * new_column, new_column, left - x, s);
      sum[i] += q * s;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i) out[i] = sum[i];
}

template <class T>
inline void step_head(const LinearAttentionStepParams& p, int64_t b, int64_t h, Arena& arena) {
  constexpr int kWide = 4;  // vectors
  const int64_t hk = h / (p.H / p.Hkv), room = round_up(p.D, N<T>), room_v = round_up(p.Dv, kWide * N<T>);
  T *query = arena.take<T>(room), *key = arena.take<T>(room), *value = arena.take<T>(room_v);
  read_row(p.feature_map, p.query, b, h, p.D, room, query);
  read_row(p.feature_map, p.key, b, hk, p.D, room, key);
  read_row(FeatureMap::identity, p.value, b, hk, p.Dv, room_v, value);
  T decay = 1;
  if (p.decay.data)
    with_dtype_beside<T>(p.decay.dtype, [&]<class S>(S) {
      decay = exp(broadcast(T(to_float(static_cast<const S*>(p.decay.data)[offset(p.decay, b, h)]))))[0];
    });
  const T* z = static_cast<const T*>(p.z.data) + offset(p.z, b, h);
  T* new_z = static_cast<T*>(p.new_z.data) + offset(p.new_z, b, h);
  V<T> dot{};
  for (int64_t d = 0; d < p.D; d += N<T>) {
    const V<T> old = load_row<T>(z + d * p.z.stride[2], p.z.stride[2], p.D - d);
    const V<T> sum = (decay == T(0) ? V<T>{} : old * decay) + load(key + d);
    store_row<T>(new_z + d * p.new_z.stride[2], p.new_z.stride[2], p.D - d, sum);
    dot += load(query + d) * sum;
  }
  const T den = reduce_add<T>(dot), factor = row_factor<T>(p, den);
  const bool empty = is_empty<T>(p, den);
  auto columns = [&]<int NV>(int64_t c) {
    V<T> sum[NV];
    const bool whole = p.Dv - c >= NV * N<T> && p.kv.stride[3] == 1 && p.new_kv.stride[3] == 1;
    const auto run = !whole         ? step_columns<T, NV, false, true>
                     : p.decay.data ? step_columns<T, NV, true, true>
                                    : step_columns<T, NV, true, false>;
    run(p, query, key, decay, value, c, b, h, sum);
    for (int i = 0; i < NV; ++i) store(value + c + i * N<T>, empty ? V<T>{} : sum[i] * factor);
  };
  int64_t c = 0;
  for (; p.Dv - c > 2 * N<T>; c += kWide * N<T>) columns.template operator()<kWide>(c);
  for (; p.Dv - c > 0; c += N<T>) columns.template operator()<1>(c);
  with_dtype_beside<T>(p.out.dtype, [&]<class S>(S) {
    S* out = static_cast<S*>(p.out.data) + offset(p.out, b, h);
    for (int64_t c = 0; c < p.Dv; c += N<T>) store_row<T>(out + c, 1, p.Dv - c, load(value + c));
  });
}

// f(head) for every head. A worker begins with its own share of consecutive ones, whose states its core still
// has in its cache since the step before, and then helps with those of others.
template <class F>
inline void for_each_head(const Parallel& parallel, int64_t heads, F&& f) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t workers = min(heads, parallel.threads);
  std::vector<Share> shares(workers);
  for (int64_t w = 0; w < workers; ++w) {
    shares[w].next = heads * w / workers;
    shares[w].end = heads * (w + 1) / workers;
  }
  for_each_task(parallel, workers, [&](int64_t, int worker) {
    for (int64_t w = worker; w < worker + workers; ++w) {
      Share& share = shares[w % workers];
      for (int64_t head; (head = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) f(head);
    }
  });
}

// T is the dtype of the state.
template <class T>
inline void step(const LinearAttentionStepParams& p, const Parallel& parallel) {
  for_each_head(parallel, p.B * p.H, [&](int64_t head) {
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    step_head<T>(p, head / p.H, head % p.H, arena);
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
