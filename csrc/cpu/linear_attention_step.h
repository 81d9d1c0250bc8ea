// One token: S = exp(decay) S + phi(k) v^T and phi(q)^T S in one pass over the state.
#pragma once
#include <atomic>

#include "linear_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Columns [c, c + NV N) of one head.
template <class T, int NV>
inline void step_columns(const LinearAttentionStepParams& p, const A<T>* query, const A<T>* key, A<T> decay,
                         const T* value, int64_t value_step, int64_t c, const View& from, const View& to,
                         int64_t b, int64_t h, V<T>* out) {
  V<T> v[NV], sum[NV] = {};
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i)
    v[i] = load_row<A<T>>(value + (c + i * N<T>)*value_step, value_step, p.Dv - c - i * N<T>);
  const A<T>* row = static_cast<const A<T>*>(from.data) + offset(from, b, h, 0, c);
  A<T>* new_row = static_cast<A<T>*>(to.data) + offset(to, b, h, 0, c);
  const bool whole = p.Dv - c >= NV * N<T> && from.stride[3] == 1 && to.stride[3] == 1;
  for (int64_t d = 0; d < p.D; ++d, row += from.stride[2], new_row += to.stride[2])
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const int64_t x = i * N<T>;
      const V<T> old =
          whole ? load(row + x) : load_row<A<T>>(row + x * from.stride[3], from.stride[3], p.Dv - c - x);
      const V<T> s = (decay == A<T>(0) ? V<T>{} : old * decay) + key[d] * v[i];
      if (whole)
        store(new_row + x, s);
      else
        store_row<A<T>>(new_row + x * to.stride[3], to.stride[3], p.Dv - c - x, s);
      sum[i] += query[d] * s;
    }
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i) out[i] = sum[i];
}

template <class T, FeatureMap kMap>
inline void step_head(const LinearAttentionStepParams& p, int64_t b, int64_t h, A<T>* query, A<T>* key) {
  const int64_t hk = h / (p.H / p.Hkv);
  const T* q = static_cast<const T*>(p.query.data) + offset(p.query, b, h);
  const T* k = static_cast<const T*>(p.key.data) + offset(p.key, b, hk);
  const T* v = static_cast<const T*>(p.value.data) + offset(p.value, b, hk);
  A<T> decay = 1;
  if (p.decay.data) {
    const int64_t x = offset(p.decay, b, h);
    const A<T> log_decay = p.decay.dtype == p.query.dtype
                               ? A<T>(to_float(static_cast<const T*>(p.decay.data)[x]))
                               : static_cast<const A<T>*>(p.decay.data)[x];
    decay = exp(broadcast(log_decay))[0];
  }
  A<T> den = 0;
  const A<T>* z = static_cast<const A<T>*>(p.z.data) + offset(p.z, b, h);
  A<T>* new_z = static_cast<A<T>*>(p.new_z.data) + offset(p.new_z, b, h);
  V<T> dot{};
  for (int64_t d = 0; d < p.D; d += N<T>) {
    const auto inside = lane_index<T>() < Int<A<T>>(min(p.D - d, N<T>));
    auto mapped = [&](const T* row, int64_t step) {
      const V<T> x = feature<A<T>, kMap>(load_row<A<T>>(row + d * step, step, p.D - d));
      return inside ? x : V<T>{};
    };
    const V<T> qf = mapped(q, p.query.stride[2]), kf = mapped(k, p.key.stride[2]);
    store(query + d, qf);
    store(key + d, kf);
    const V<T> old = load_row<A<T>>(z + d * p.z.stride[2], p.z.stride[2], p.D - d);
    const V<T> sum = (decay == A<T>(0) ? V<T>{} : old * decay) + kf;
    store_row<A<T>>(new_z + d * p.new_z.stride[2], p.new_z.stride[2], p.D - d, sum);
    dot += qf * sum;
  }
  den = reduce_add<A<T>>(dot);
  const A<T> factor = row_factor<A<T>>(p, den);
  const bool empty = is_empty<A<T>>(p, den);
  T* out = static_cast<T*>(p.out.data) + offset(p.out, b, h);
  auto columns = [&]<int NV>(int64_t c) {
    V<T> sum[NV];
    step_columns<T, NV>(p, query, key, decay, v, p.value.stride[2], c, p.kv, p.new_kv, b, h, sum);
    for (int i = 0; i < NV; ++i)
      store_row<A<T>>(out + c + i * N<T>, 1, p.Dv - c - i * N<T>, empty ? V<T>{} : sum[i] * factor);
  };
  int64_t c = 0;
  for (; p.Dv - c > 2 * N<T>; c += 4 * N<T>) columns.template operator()<4>(c);
  for (; p.Dv - c > 0; c += N<T>) columns.template operator()<1>(c);
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

template <class T>
inline void step(const LinearAttentionStepParams& p, const Parallel& parallel) {
  for_each_head(parallel, p.B * p.H, [&](int64_t head) {
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    A<T>*query = arena.take<A<T>>(p.D + N<T>), *key = arena.take<A<T>>(p.D + N<T>);
    with_map(p.feature_map,
             [&]<FeatureMap kMap>() { step_head<T, kMap>(p, head / p.H, head % p.H, query, key); });
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
