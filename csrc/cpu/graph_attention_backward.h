// Backward. With a = keep exp(score - lse), the gradient of a weight is <grad_out, value> + grad_attention,
// and
//   grad_score = exp(score - lse) (keep (<grad_out, value> + grad_attention) - delta),
//   delta      = <grad_out, out> + sum over the row of a grad_attention.
// 1. delta of every target, beside what turns scores back into weights.
// 2. By source: the rows of grad_out (and of queries) are gathered once, everything of an edge is recomputed,
//    the source's own gradients are summed, and grad_score is left at the edge.
// 3. By target: sums of grad_score, weighted by keys where the score is a product.
// No edge is written by two threads, and every sum has one order.
#pragma once
#include "graph_attention_forward.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Per target, each `padded` elements: largest score, 1 / sum, delta, alpha_dst.
constexpr int64_t kTargetFields = 4;

template <class T>
struct BackwardShared {
  const GraphAttentionGradParams& p;
  HeadLanes<T> lanes;
  Slots slots, key_slots;
  T* targets;    // (N_dst, kTargetFields, padded)
  T* att_parts;  // (chunks of by_target, slots of att), gatv2
  End<T> source, target;

  BackwardShared(const GraphAttentionGradParams& params, T* targets, T* att_parts)
      : p(params),
        lanes(p.H),
        slots(p.H, p.C, N<T>, p.dtype),
        key_slots(p.H, p.D, N<T>, p.dtype),
        targets(targets),
        att_parts(att_parts) {
    source = {p.key, static_cast<const T*>(p.alpha_src), p.H};
    target = {p.query, p.alpha_dst ? targets + 3 * lanes.padded : nullptr, kTargetFields * lanes.padded};
  }
  const T* target_field(int64_t field) const { return targets + field * lanes.padded; }
  bool own_key_grad() const { return p.grad_key != nullptr; }
};

// --- sums over the edges of a target ----------------------------------------------------------------------

// sums[n] = sum over row n of left[e] (right[e]), (E, H) in the caller's order.
template <class T>
struct EdgeSums {
  const GraphView& graph;
  HeadLanes<T> lanes;
  const T *left, *right;
  T* sums;
  int64_t stride;  // of sums
};
template <class T>
class EdgeSumsWork {
 public:
  EdgeSumsWork(const EdgeSums<T>& shared, Arena& arena, int64_t) : s_(shared) {
    left_ = arena.take_zero<T>(s_.lanes.block_size());
    right_ = s_.right ? arena.take_zero<T>(s_.lanes.block_size()) : nullptr;
  }
  void part(int64_t, int64_t begin, int64_t end, T* state) {
    const HeadLanes<T>& lanes = s_.lanes;
    std::memset(state, 0, size_t(lanes.size) * sizeof(T));
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t edges = min(kBlock, end - at), vectors = lanes.vectors(edges);
      const TableRows number = edge_numbers(s_.graph, at);
      lanes.gather(s_.left, lanes.H, edges, number, left_);
      if (right_) lanes.gather(s_.right, lanes.H, edges, number, right_);
      for (int64_t g = 0; g < lanes.groups; ++g) {
        V<T> sum{};
        for (int64_t i = g; i < vectors; i += lanes.groups) {
          V<T> v = load(left_ + i * N<T>);
          // A weight of 0 hides what came back for it, as it hides the edge.
          if (right_) v = v == 0 ? v : v * load(right_ + i * N<T>);
          sum += lanes.all_real(i, edges) ? v : lanes.real(i, edges) ? v : V<T>{};
        }
        store(state + g * N<T>, load(state + g * N<T>) + lanes.fold_sum(sum));
      }
    }
  }
  void join(T* state, T* later) {
    for (int64_t i = 0; i < s_.lanes.size; i += N<T>) store(state + i, load(state + i) + load(later + i));
  }
  void finish(int64_t row, T* state) {
    std::memcpy(s_.sums + row * s_.stride, state, size_t(s_.lanes.H) * sizeof(T));
  }

 private:
  const EdgeSums<T>& s_;
  T *left_, *right_;
};
template <class T>
inline void edge_sums(const EdgeSums<T>& shared, const Parallel& parallel) {
  for_rows<EdgeSumsWork<T>, T>(shared.graph, parallel, shared.lanes.size, shared);
}

// --- targets ----------------------------------------------------------------------------------------------

template <class T>
inline void describe_targets(const BackwardShared<T>& shared, const Parallel& parallel) {
  const GraphAttentionGradParams& p = shared.p;
  const HeadLanes<T>& lanes = shared.lanes;
  const int64_t stride = kTargetFields * lanes.padded;
  if (p.grad_attention)
    edge_sums<T>({p.by_target, lanes, static_cast<const T*>(p.attention),
                  static_cast<const T*>(p.grad_attention), shared.targets + 2 * lanes.padded, stride},
                 parallel);
  constexpr int64_t kRows = 256;
  const auto* stats = static_cast<const T*>(p.stats);
  const auto* alpha = static_cast<const T*>(p.alpha_dst);
  const FeatureRows out{const_cast<void*>(p.out), p.H * p.C};
  for_each_task(parallel, (p.N_dst + kRows - 1) / kRows, [&](int64_t task, int) {
    Arena::Scope scope(thread_arena());
    T* delta = scope.arena.template take<T>(p.H);
    for (int64_t n = task * kRows; n < min((task + 1) * kRows, p.N_dst); ++n) {
      T* to = shared.targets + n * stride;
      row_products(shared.slots, out, p.grad_out, n, delta);
      for (int64_t h = 0; h < p.H; ++h) {
        to[h] = stats[n * 2 * p.H + h];
        to[lanes.padded + h] = stats[(n * 2 + 1) * p.H + h];
        to[2 * lanes.padded + h] = delta[h] + (p.grad_attention ? to[2 * lanes.padded + h] : 0);
        if (alpha) to[3 * lanes.padded + h] = alpha[n * p.H + h];
      }
    }
  });
}

// --- by source --------------------------------------------------------------------------------------------

// The key's gradient through LeakyReLU from those of the scores, and that of the features of each edge.
template <class T>
__attribute__((noinline)) void add_to_key(const BlockRows& queries, const ReluRows<T>& relu, const T* grads,
                                          int64_t padded, T* grad_key, void* grad_edge) {
  const Slots& slots = queries.slots;
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    for (int64_t s = 0; s < slots.count; ++s) {
      const int64_t offset = slots.offset(s), width = slots.width(s), head = slots.head(s);
      V<T> sum = load(grad_key + s * N<T>);
      for (int64_t e = 0; e < queries.edges; ++e) {
        const V<T> query = load_part<T>(queries.at<E>(e) + offset, width);
        const V<T> x = relu.template sum<E>(queries, e, s, query);
        const V<T> grad = grads[e * padded + head] * relu.att_of(s) * relu.derivative(x);
        sum += grad;
        if (grad_edge) {
          const int64_t number = edge_number(queries.graph, queries.begin + e);
          store_row<T>(static_cast<E*>(grad_edge) + number * slots.H * slots.C + offset, 1, width, grad);
        }
      }
      store(grad_key + s * N<T>, sum);
    }
  });
}

// The state of a source: sums of grad_score, as lanes; grad_value and grad_key, as slots.
template <class T>
class SourceWork {
 public:
  static int64_t state_size(const BackwardShared<T>& shared) {
    return shared.lanes.size + shared.slots.size() + (shared.own_key_grad() ? shared.key_slots.size() : 0);
  }
  SourceWork(const BackwardShared<T>& shared, Arena& arena, int64_t)
      : shared_(shared),
        p_(shared.p),
        lanes_(shared.lanes),
        slots_(shared.slots),
        scorer_(p_, lanes_, p_.by_source, shared.source, shared.target, arena),
        dropout_(p_, lanes_, arena) {
    value_ = arena.take<T>(slots_.size());
    for (T** block : {&score_, &weight_, &grad_, &top_, &inverse_, &delta_})
      *block = arena.take_zero<T>(lanes_.block_size());
    grad_attention_ = p_.grad_attention ? arena.take_zero<T>(lanes_.block_size()) : nullptr;
  }

  void part(int64_t row, int64_t begin, int64_t end, T* state) {
    T *sum = state, *grad_value = sum + lanes_.size, *grad_key = grad_value + slots_.size();
    std::memset(state, 0, size_t(state_size(shared_)) * sizeof(T));
    if (begin == end) return;
    scorer_.begin_row(row);
    unpack_row(slots_, p_.value, row, value_);
    const GraphView& graph = p_.by_source;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t edges = min(kBlock, end - at);
      const TableRows number = edge_numbers(graph, at);
      scorer_.score(at, edges, score_);
      const BlockRows grads{p_.grad_out, slots_, graph, at, edges};
      head_products(grads, lanes_, true, value_, grad_);
      gather_targets(at, edges);
      if (grad_attention_)
        lanes_.gather(static_cast<const T*>(p_.grad_attention), p_.H, edges, number, grad_attention_);
      dropout_.begin_block(graph, lanes_, at, edges);
      const bool hidden = weigh(edges, sum);
      lanes_.scatter(grad_, edges, number, static_cast<T*>(p_.grad_score));
      add(grads, hidden, weight_, grad_value);
      const BlockRows queries{p_.query, shared_.key_slots, graph, at, edges};
      if (p_.score == GraphScore::dot) add(queries, hidden, grad_, grad_key);
      if (p_.score == GraphScore::gatv2)
        add_to_key(queries, scorer_.relu(), grad_, lanes_.padded, grad_value, p_.grad_edge);
    }
  }

  void join(T* state, T* later) {
    for (int64_t i = 0; i < state_size(shared_); i += N<T>)
      store(state + i, load(state + i) + load(later + i));
  }

  void finish(int64_t row, T* state) {
    T *grad_value = state + lanes_.size, *grad_key = grad_value + slots_.size();
    if (p_.grad_alpha_src)
      std::memcpy(static_cast<T*>(p_.grad_alpha_src) + row * p_.H, state, size_t(p_.H) * sizeof(T));
    pack_row<T>(slots_, grad_value, nullptr, p_.grad_value, row);
    if (p_.score == GraphScore::dot) {
      const Slots& slots = shared_.key_slots;
      for (int64_t i = 0; i < slots.size(); i += N<T>) store(grad_key + i, load(grad_key + i) * T(p_.scale));
      pack_row<T>(slots, grad_key, nullptr, p_.grad_key, row);
    }
  }

 private:
  FASTATTN_INLINE void gather_targets(int64_t at, int64_t edges) {
    const int64_t stride = kTargetFields * lanes_.padded;
    const TableRows target = other_ends(p_.by_source, at);
    lanes_.gather(shared_.target_field(0), stride, edges, target, top_);
    lanes_.gather(shared_.target_field(1), stride, edges, target, inverse_);
    lanes_.gather(shared_.target_field(2), stride, edges, target, delta_);
  }
  void add(const BlockRows& rows, bool hidden, const T* weights, T* sums) {
    if (hidden)
      add_visible(rows, weights, lanes_.padded, score_, -kInf<T>, sums);
    else
      add_weighted(rows, false, weights, lanes_.padded, sums);
  }
  // Raw scores in score_ and gradients of weights in grad_ to: scores, weights, gradients of raw scores.
  FASTATTN_INLINE bool weigh(int64_t edges, T* sums) {
    const int64_t vectors = lanes_.vectors(edges);
    Vec<Int<T>> any_hidden{};
    for (int64_t g = 0; g < lanes_.groups; ++g) {
      V<T> sum{};
      for (int64_t i = g; i < vectors; i += lanes_.groups) {
        const V<T> raw = load(score_ + i * N<T>), score = scorer_.score_of(raw);
        const auto real = lanes_.real(i, edges);
        const auto hidden = score == -kInf<T>;
        any_hidden |= hidden & real;
        V<T> probability = exp_below<T>(score, load(top_ + i * N<T>)) * load(inverse_ + i * N<T>);
        V<T> grad = load(grad_ + i * N<T>), weight = probability;
        if (grad_attention_) grad += load(grad_attention_ + i * N<T>);
        if (dropout_.on()) {
          const V<T> keep = dropout_.keep(i, g);
          weight *= keep;
          grad *= keep;
        }
        // An edge with all of the weight has no gradient but 0, whatever the roundings of delta; times 0, so
        // that a NaN stays.
        const V<T> lead = probability == 1 ? grad * T(0) : grad - load(delta_ + i * N<T>);
        grad = probability * lead * scorer_.derivative(raw);
        grad = hidden ? V<T>{} : grad;
        store(score_ + i * N<T>, score);
        store(weight_ + i * N<T>, weight);
        store(grad_ + i * N<T>, grad);
        sum += real ? grad : V<T>{};
      }
      store(sums + g * N<T>, load(sums + g * N<T>) + lanes_.fold_sum(sum));
    }
    return any(any_hidden);
  }

  const BackwardShared<T>& shared_;
  const GraphAttentionGradParams& p_;
  const HeadLanes<T>& lanes_;
  const Slots& slots_;
  Scorer<T> scorer_;
  EdgeDropout<T> dropout_;
  T *value_, *score_, *weight_, *grad_, *top_, *inverse_, *delta_, *grad_attention_;
};

// --- by target --------------------------------------------------------------------------------------------

// The query's gradient through LeakyReLU from those of the scores, and that of att.
template <class T>
__attribute__((noinline)) void add_to_query(const BlockRows& keys, const ReluRows<T>& relu, const T* grads,
                                            int64_t padded, T* grad_query, T* grad_att) {
  const Slots& slots = keys.slots;
  with_dtype_beside<T>(slots.dtype, [&]<class E>(E) {
    for (int64_t s = 0; s < slots.count; ++s) {
      const int64_t offset = slots.offset(s), width = slots.width(s), head = slots.head(s);
      V<T> sum = load(grad_query + s * N<T>), att_sum = load(grad_att + s * N<T>);
      for (int64_t e = 0; e < keys.edges; ++e) {
        if (s == 0) keys.prefetch<E>(e);
        const V<T> x = relu.template sum<E>(keys, e, s, load_part<T>(keys.at<E>(e) + offset, width));
        const T grad = grads[e * padded + head];
        sum += grad * relu.att_of(s) * relu.derivative(x);
        if (grad != 0) att_sum += grad * leaky_relu<T>(x, relu.slope);
      }
      store(grad_query + s * N<T>, sum);
      store(grad_att + s * N<T>, att_sum);
    }
  });
}

// grad_query from grad_score; of gatv2 also grad_att, one partial sum per chunk.
template <class T>
class TargetWork {
 public:
  TargetWork(const BackwardShared<T>& shared, Arena& arena, int64_t chunk)
      : shared_(shared),
        p_(shared.p),
        lanes_(shared.lanes),
        slots_(shared.key_slots),
        scorer_(p_, lanes_, p_.by_target, shared.target, shared.source, arena) {
    grad_ = arena.take_zero<T>(lanes_.block_size());
    if (p_.score == GraphScore::gatv2) grad_att_ = shared.att_parts + chunk * slots_.size();
  }

  void part(int64_t row, int64_t begin, int64_t end, T* state) {
    std::memset(state, 0, size_t(slots_.size()) * sizeof(T));
    if (begin == end) return;
    if (p_.score == GraphScore::gatv2) scorer_.begin_row(row);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t edges = min(kBlock, end - at);
      lanes_.gather(static_cast<const T*>(p_.grad_score), p_.H, edges, edge_numbers(p_.by_target, at), grad_);
      const BlockRows keys{p_.key, slots_, p_.by_target, at, edges};
      if (p_.score == GraphScore::gatv2) {
        add_to_query(keys, scorer_.relu(), grad_, lanes_.padded, state, grad_att_);
      } else if (some_zero(edges)) {
        // A visible edge with a key that is not finite has no gradient of exactly 0, a hidden one has.
        add_visible(keys, grad_, lanes_.padded, grad_, T(0), state);
      } else {
        add_weighted(keys, true, grad_, lanes_.padded, state);
      }
    }
  }
  void join(T* state, T* later) {
    for (int64_t i = 0; i < slots_.size(); i += N<T>) store(state + i, load(state + i) + load(later + i));
  }
  void finish(int64_t row, T* state) {
    const T scale = p_.score == GraphScore::dot ? T(p_.scale) : T(1);
    for (int64_t i = 0; i < slots_.size(); i += N<T>) store(state + i, load(state + i) * scale);
    pack_row<T>(slots_, state, nullptr, p_.grad_query, row);
  }

 private:
  bool some_zero(int64_t edges) const {
    Vec<Int<T>> zero{};
    for (int64_t i = 0, vectors = lanes_.vectors(edges); i < vectors; ++i)
      zero |= (load(grad_ + i * N<T>) == 0) & lanes_.real(i, edges);
    return any(zero);
  }

  const BackwardShared<T>& shared_;
  const GraphAttentionGradParams& p_;
  const HeadLanes<T>& lanes_;
  const Slots& slots_;
  Scorer<T> scorer_;
  T *grad_, *grad_att_ = nullptr;
};

// The sum of the chunks' parts, in their order.
template <class T>
inline void finish_att(const BackwardShared<T>& shared, int64_t chunks) {
  const Slots& slots = shared.key_slots;
  for (int64_t s = 0; s < slots.count; ++s) {
    V<T> sum{};
    for (int64_t k = 0; k < chunks; ++k) sum += load(shared.att_parts + k * slots.size() + s * N<T>);
    store_row<T>(static_cast<T*>(shared.p.grad_att) + slots.offset(s), 1, slots.width(s), sum);
  }
}

template <class T>
inline void backward(const GraphAttentionGradParams& p, const Parallel& parallel) {
  const HeadLanes<T> lanes(p.H);
  Buffer<T> targets(p.N_dst * kTargetFields * lanes.padded);
  const bool gatv2 = p.score == GraphScore::gatv2;
  const int64_t chunks = gatv2 ? split_edges(p.by_target.rowptr, p.N_dst).chunks : 0;
  const int64_t att_size = chunks * Slots(p.H, p.D, N<T>, p.dtype).size();
  Buffer<T> att_parts(att_size);
  std::memset(att_parts.data(), 0, size_t(att_size) * sizeof(T));
  const BackwardShared<T> shared(p, targets.data(), att_parts.data());
  describe_targets(shared, parallel);
  for_rows<SourceWork<T>, T>(p.by_source, parallel, SourceWork<T>::state_size(shared), shared);
  if (p.score == GraphScore::additive) {
    if (p.grad_alpha_dst)
      edge_sums<T>({p.by_target, lanes, static_cast<const T*>(p.grad_score), nullptr,
                    static_cast<T*>(p.grad_alpha_dst), p.H},
                   parallel);
  } else {
    for_rows<TargetWork<T>, T>(p.by_target, parallel, shared.key_slots.size(), shared);
    if (gatv2) finish_att(shared, chunks);
  }
}

// --- softmax alone ----------------------------------------------------------------------------------------

template <class T>
struct SoftmaxGradShared {
  const EdgeSoftmaxGradParams& p;
  const T* delta;  // (targets, H)
};
template <class T>
class SoftmaxGradWork {
 public:
  SoftmaxGradWork(const SoftmaxGradShared<T>& shared, Arena&, int64_t) : p_(shared.p), delta_(shared.delta) {}
  void part(int64_t row, int64_t begin, int64_t end, T*) {
    const auto *score = static_cast<const T*>(p_.score), *grad = static_cast<const T*>(p_.grad);
    const auto* attention = static_cast<const T*>(p_.attention);
    for (int64_t at = begin; at < end; ++at)
      for (int64_t h = 0, i = edge_number(p_.by_target, at) * p_.H; h < p_.H; ++h, ++i) {
        const T lead = attention[i] == 1 ? grad[i] * T(0) : grad[i] - delta_[row * p_.H + h];
        const T change = attention[i] * lead;
        static_cast<T*>(p_.grad_score)[i] = score[i] == -kInf<T> ? T(0) : change;
      }
  }
  void join(T*, T*) {}
  void finish(int64_t, T*) {}

 private:
  const EdgeSoftmaxGradParams& p_;
  const T* delta_;
};

template <class T>
inline void edge_softmax_backward(const EdgeSoftmaxGradParams& p, const Parallel& parallel) {
  Buffer<T> delta(p.by_target.rows * p.H);
  edge_sums<T>({p.by_target, HeadLanes<T>(p.H), static_cast<const T*>(p.attention),
                static_cast<const T*>(p.grad), delta.data(), p.H},
               parallel);
  for_rows<SoftmaxGradWork<T>, T>(p.by_target, parallel, 0, SoftmaxGradShared<T>{p, delta.data()});
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
