// Linear attention backward, in two walks over the chunks. With num_i = phi(q_i)^T S_i, out_i = num_i /
// (den_i + eps), and dO_i, dden_i the gradients of num_i and den_i:
//   in order    grad phi(q_i) = sum_{j <= i} (dO_i.v_j + dden_i) phi(k_j)           carried by S^T and z
//   in reverse  grad phi(k_j) = sum_{i >= j} (dO_i.v_j + dden_i) phi(q_i)           carried by dS^T and dz
//               grad v_j      = sum_{i >= j} (phi(q_i).phi(k_j)) dO_i               carried by dS
// Every line is linear attention of its own, with decay between i and j where there is any. Nothing is kept
// per chunk, except the states of the first walk where decay has a gradient.
#pragma once
#include "linear_attention_key_grad.h"
#include "linear_attention_query_grad.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
inline void backward(const LinearAttentionGradParams& p, const Parallel& parallel) {
  if (p.H == 0) return;
  const Problem<T> problem(p);
  const int64_t heads = p.Hkv;
  const Segments segments = problem.segments(parallel.threads);
  const std::vector<Segment>&keys = segments.keys, &queries = segments.queries;
  const int64_t kinds = problem.kinds();
  const int64_t key_items = int64_t(keys.size()) * heads, query_items = int64_t(queries.size()) * heads;
  const Buffer<double> decay_sums(p.grad_decay.data && p.decay_per_head ? key_items * kinds : 0);

  // States between segments, where there are any.
  const SegmentStates<T> before(keys, heads, kinds, problem.state_shape(true));
  const SegmentStates<T> behind(queries, heads, kinds, problem.state_shape(false));
  if (!before.empty()) {
    for_each_item<T>(parallel, key_items + query_items, [&](int64_t task, Arena& arena) {
      const bool of_keys = task < key_items;
      const int64_t item = of_keys ? task : task - key_items, s = item / heads, hk = item % heads;
      A<T>* decays = arena.take<A<T>>(problem.group);
      if (of_keys) {
        if (keys[s].alone || (p.causal && keys[s].last)) return;
        QueryGrad<T> walk(problem, p, arena);
        walk.clear();
        walk.walk(keys[s], hk, false, true, decays);
        for (int64_t k = 0; k < kinds; ++k) before.put(s, hk, k, walk.states[k], decays[k]);
      } else {
        if (queries[s].alone || (p.causal && queries[s].first)) return;
        KeyGrad<T> walk(problem, p, arena);
        walk.clear();
        walk.absorb(queries[s], hk, decays);
        for (int64_t k = 0; k < kinds; ++k) behind.put(s, hk, k, walk.states[k], decays[k]);
      }
    });
    before.carry(parallel, p.causal, false, [&](int64_t n, int64_t hk, int64_t kind, State<T>& state) {
      if (p.initial_z.data)
        add_state(p, p.initial_kv, p.initial_z, n, hk * problem.group + kind, true, state);
    });
    behind.carry(parallel, p.causal, true, [&](int64_t n, int64_t hk, int64_t kind, State<T>& state) {
      KeyGrad<T>::add_final(problem, p, n, hk, kind, state);
    });
  }

  auto grad_queries = [&](int64_t s, int64_t hk, Arena& arena, const Flow<T>* flow) {
    const Segment& segment = queries[s];
    QueryGrad<T> walk(problem, p, arena);
    if (segment.alone) {
      walk.clear();
      for (int64_t k = 0; k < kinds; ++k) walk.add_initial(segment.n, hk * problem.group + k, walk.states[k]);
      if (!p.causal) walk.walk(keys[s], hk, false, true, nullptr);
    } else {
      for (int64_t k = 0; k < kinds; ++k)
        before.get(p.causal ? s : before.first_of(segment.n), hk, k, walk.states[k]);
    }
    if (flow) walk.record(*flow);
    if (p.causal)
      walk.walk(segment, hk, true, false, nullptr);
    else
      walk.look_up(segment, hk);
  };
  auto grad_keys = [&](int64_t s, int64_t hk, Arena& arena, const Flow<T>* flow) {
    const Segment& segment = keys[s];
    KeyGrad<T> walk(problem, p, arena);
    if (segment.alone) {
      walk.clear();
      for (int64_t k = 0; k < kinds; ++k) walk.add_final(problem, p, segment.n, hk, k, walk.states[k]);
      A<T>* decays = arena.take<A<T>>(problem.group);
      if (!p.causal) walk.absorb(queries[s], hk, decays);
    } else {
      for (int64_t k = 0; k < kinds; ++k)
        behind.get(p.causal ? s : behind.last_of(segment.n), hk, k, walk.states[k]);
    }
    double* sums = decay_sums.data() ? decay_sums.data() + (s * heads + hk) * kinds : nullptr;
    for (int64_t k = 0; k < kinds && sums; ++k) sums[k] = 0;
    walk.walk(segment, hk, p.causal, segment.first && p.grad_initial_z.data, flow, sums);
    if (segment.first) walk.finish(segment.n, hk);
  };

  if (p.grad_decay.data) {  // one after the other: the second reads what the first has recorded
    for_each_item<T>(parallel, key_items, [&](int64_t task, Arena& arena) {
      const int64_t s = task / heads, hk = task % heads, tokens = keys[s].end - keys[s].begin;
      const int64_t chunks = (tokens + problem.chunk - 1) / problem.chunk;
      const Buffer<A<T>> states(chunks * kinds * problem.state_shape(true).size());
      const Buffer<A<T>> flows(kinds * tokens);
      const Flow<T> flow{states.data(), flows.data()};
      grad_queries(s, hk, arena, &flow);
      grad_keys(s, hk, arena, &flow);
    });
  } else {  // the longer tasks first
    for_each_item<T>(parallel, key_items + query_items, [&](int64_t task, Arena& arena) {
      if (task < key_items)
        grad_keys(task / heads, task % heads, arena, nullptr);
      else
        grad_queries((task - key_items) / heads, (task - key_items) % heads, arena, nullptr);
    });
  }
  if (p.grad_decay.data && p.decay_per_head)  // also where there are no sequences
    for (int64_t h = 0; h < p.H; ++h) {
      double sum = 0;
      for (size_t s = 0; s < keys.size(); ++s)
        sum += decay_sums.data()[(int64_t(s) * heads + h / problem.group) * kinds + h % problem.group];
      put_decay<T>(p.grad_decay, offset(p.grad_decay, 0, h), A<T>(sum));
    }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
