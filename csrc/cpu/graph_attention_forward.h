// Forward: an online softmax per target and head, then the weights themselves where they are asked for.
#pragma once
#include "graph_attention_scores.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
FASTATTN_INLINE V<T> finite_or_zero(V<T> top) {
  return top == -kInf<T> ? V<T>{} : top;
}
// exp(score - top): the difference is formed before anything is rounded, whatever the scores' size.
template <class T>
FASTATTN_INLINE V<T> exp_below(V<T> score, V<T> top) {
  return exp2<>((score - top) * T(kLog2e));
}

template <class T>
struct ForwardShared {
  const GraphAttentionParams& p;
  HeadLanes<T> lanes;
  Slots slots;  // of values
  End<T> target, source;

  explicit ForwardShared(const GraphAttentionParams& params)
      : p(params), lanes(p.H), slots(p.H, p.C, N<T>, p.dtype) {
    target = {p.query, static_cast<const T*>(p.alpha_dst), p.H};
    source = {p.key, static_cast<const T*>(p.alpha_src), p.H};
  }
  int64_t state_size() const { return 2 * lanes.size + slots.size(); }
};

// The state of a row: its largest score and the sum of exp(score - largest), as lanes; the weighted sum of
// values, as slots.
template <class T>
class ForwardWork {
 public:
  ForwardWork(const ForwardShared<T>& shared, Arena& arena, int64_t)
      : p_(shared.p),
        lanes_(shared.lanes),
        slots_(shared.slots),
        scorer_(p_, lanes_, p_.by_target, shared.target, shared.source, arena),
        dropout_(p_, lanes_, arena) {
    score_ = arena.take_zero<T>(lanes_.block_size());
    weight_ = arena.take_zero<T>(lanes_.block_size());
    factor_ = arena.take<T>(lanes_.size);
  }

  void part(int64_t row, int64_t begin, int64_t end, T* state) {
    T *top = state, *sum = top + lanes_.size, *out = sum + lanes_.size;
    for (int64_t i = 0; i < lanes_.size; ++i) top[i] = -kInf<T>;
    std::memset(sum, 0, size_t(lanes_.size + slots_.size()) * sizeof(T));
    if (begin < end) scorer_.begin_row(row);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t edges = min(kBlock, end - at);
      scorer_.score(at, edges, score_);
      dropout_.begin_block(p_.by_target, lanes_, at, edges);
      const bool hidden = weigh(edges, top, sum);
      if (at > begin) scale(out, factor_);
      const BlockRows values{p_.value, slots_, p_.by_target, at, edges};
      // Dot products have read the keys of this block, whose values may be the same rows.
      const bool first_use = p_.score == GraphScore::additive || p_.value.data != p_.key.data;
      if (hidden)
        add_visible(values, weight_, lanes_.padded, score_, -kInf<T>, out);
      else
        add_weighted(values, first_use, weight_, lanes_.padded, out);
      if (p_.attention)
        lanes_.scatter(score_, edges, edge_numbers(p_.by_target, at), static_cast<T*>(p_.attention));
    }
  }

  void join(T* state, T* later) {
    for (int64_t i = 0; i < lanes_.size; i += N<T>) {
      const V<T> top = load(state + i), later_top = load(later + i);
      const V<T> largest = maximum(top, later_top), base = finite_or_zero<T>(largest);
      const V<T> factor = exp_below<T>(top, base), later_factor = exp_below<T>(later_top, base);
      store(state + i, largest);
      T *sum = state + lanes_.size + i, *later_sum = later + lanes_.size + i;
      store(sum, load(sum) * factor + load(later_sum) * later_factor);
      store(factor_ + i, factor);
      store(later_sum, later_factor);
    }
    T *out = state + 2 * lanes_.size, *later_out = later + 2 * lanes_.size;
    scale(out, factor_);
    scale(later_out, later + lanes_.size);
    for (int64_t i = 0; i < slots_.size(); i += N<T>) store(out + i, load(out + i) + load(later_out + i));
  }

  void finish(int64_t row, T* state) {
    T *sum = state + lanes_.size, *stats = static_cast<T*>(p_.stats) + row * 2 * p_.H;
    for (int64_t i = 0; i < lanes_.size; i += N<T>) {
      const V<T> total = load(sum + i);
      store(state + i, finite_or_zero<T>(load(state + i)));
      store(sum + i, total == 0 ? V<T>{} : T(1) / total);
    }
    for (int64_t h = 0; h < p_.H; ++h) {
      stats[h] = state[h];
      stats[p_.H + h] = sum[h];
    }
    pack_row(slots_, sum + lanes_.size, sum, p_.out, row);
  }

 private:
  // Scores to weights; factor_ is what the sums of earlier blocks have to be multiplied with. Whether any
  // edge is hidden from a head.
  FASTATTN_INLINE bool weigh(int64_t edges, T* tops, T* sums) {
    const int64_t vectors = lanes_.vectors(edges), groups = lanes_.groups;
    Vec<Int<T>> hidden{};
    for (int64_t g = 0; g < groups; ++g) {
      const V<T> earlier = load(tops + g * N<T>);
      V<T> top = earlier;
      for (int64_t i = g; i < vectors; i += groups) {
        V<T> score = scorer_.score_of(load(score_ + i * N<T>));
        if (lanes_.all_real(i, edges)) {
          hidden |= score == -kInf<T>;
        } else {
          const auto real = lanes_.real(i, edges);
          hidden |= (score == -kInf<T>)&real;
          score = real ? score : V<T>{} - kInf<T>;
        }
        store(score_ + i * N<T>, score);
        top = maximum(top, score);
      }
      top = lanes_.fold_max(top);
      const V<T> base = finite_or_zero<T>(top);
      V<T> sum{};
      for (int64_t i = g; i < vectors; i += groups) {
        V<T> weight = exp_below<T>(load(score_ + i * N<T>), base);
        sum += weight;
        if (dropout_.on()) weight *= dropout_.keep(i, g);
        store(weight_ + i * N<T>, weight);
      }
      const V<T> factor = exp_below<T>(earlier, base);
      store(sums + g * N<T>, load(sums + g * N<T>) * factor + lanes_.fold_sum(sum));
      store(tops + g * N<T>, top);
      store(factor_ + g * N<T>, factor);
    }
    return any(hidden);
  }
  void scale(T* out, const T* factors) {
    for (int64_t s = 0; s < slots_.count; ++s)
      store(out + s * N<T>, load(out + s * N<T>) * factors[slots_.head(s)]);
  }

  const GraphAttentionParams& p_;
  const HeadLanes<T>& lanes_;
  const Slots& slots_;
  Scorer<T> scorer_;
  EdgeDropout<T> dropout_;
  T *score_, *weight_, *factor_;
};

// Turns the scores that the forward left in `attention` into weights.
template <class T>
class AttentionWork {
 public:
  AttentionWork(const ForwardShared<T>& shared, Arena& arena, int64_t)
      : p_(shared.p), lanes_(shared.lanes), dropout_(p_, lanes_, arena) {
    block_ = arena.take_zero<T>(lanes_.block_size());
    top_ = arena.take<T>(lanes_.size);
    inverse_ = arena.take<T>(lanes_.size);
  }
  void part(int64_t row, int64_t begin, int64_t end, T*) {
    const T* stats = static_cast<const T*>(p_.stats) + row * 2 * p_.H;
    T* attention = static_cast<T*>(p_.attention);
    lanes_.spread(stats, top_);
    lanes_.spread(stats + p_.H, inverse_);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t edges = min(kBlock, end - at);
      const TableRows number = edge_numbers(p_.by_target, at);
      lanes_.gather(attention, p_.H, edges, number, block_);
      dropout_.begin_block(p_.by_target, lanes_, at, edges);
      for (int64_t i = 0, vectors = lanes_.vectors(edges); i < vectors; ++i) {
        const int64_t g = i % lanes_.groups;
        const V<T> score = load(block_ + i * N<T>);
        V<T> weight = exp_below<T>(score, load(top_ + g * N<T>)) * load(inverse_ + g * N<T>);
        if (dropout_.on()) weight *= dropout_.keep(i, g);
        store(block_ + i * N<T>, score == -kInf<T> ? V<T>{} : weight);
      }
      lanes_.scatter(block_, edges, number, attention);
    }
  }
  void join(T*, T*) {}
  void finish(int64_t, T*) {}

 private:
  const GraphAttentionParams& p_;
  const HeadLanes<T>& lanes_;
  EdgeDropout<T> dropout_;
  T *block_, *top_, *inverse_;
};

template <class T>
inline void forward(const GraphAttentionParams& p, const Parallel& parallel) {
  const ForwardShared<T> shared(p);
  for_rows<ForwardWork<T>, T>(p.by_target, parallel, shared.state_size(), shared);
  if (p.attention) for_rows<AttentionWork<T>, T>(p.by_target, parallel, 0, shared);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
