// Scores of the edges of one row. Seen from a target or from a source they are the same formula with the ends
// exchanged, and the same bits: sums are formed in an order that both share.
#pragma once
#include <optional>

#include "graph_attention_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One end of the edges: its features, or its terms of the score (rows `alpha_stride` apart).
template <class T>
struct End {
  FeatureRows rows;
  const T* alpha = nullptr;
  int64_t alpha_stride = 0;
};

template <class T>
FASTATTN_INLINE V<T> leaky_relu(V<T> x, T slope) {
  return x > 0 ? x : x * slope;
}

// What LeakyReLU is applied to between two nodes: the sum of their rows, and of one that the edge may have.
template <class T>
struct ReluRows {
  const T *own, *att;  // slots
  const FeatureRows& edge;
  T slope;
  // For slot s of the edge at a position.
  template <class E>
  FASTATTN_INLINE V<T> sum(const BlockRows& rows, int64_t e, int64_t s, V<T> other) const {
    V<T> x = load(own + s * N<T>) + other;
    if (edge.data)
      x += load_part<T>(row_of<E>(edge, edge_number(rows.graph, rows.begin + e)) + rows.slots.offset(s),
                        rows.slots.width(s));
    return x;
  }
  FASTATTN_INLINE V<T> att_of(int64_t s) const { return load(att + s * N<T>); }
  FASTATTN_INLINE V<T> derivative(V<T> x) const { return x > 0 ? V<T>{} + T(1) : V<T>{} + slope; }
};
// to[e][h] = <att[h], leaky_relu(sum of the rows of edge e) [h]>
template <class T>
__attribute__((noinline)) void relu_products(const BlockRows& rows, const HeadLanes<T>& lanes,
                                             const ReluRows<T>& relu, T* to) {
  with_dtype_beside<T>(rows.slots.dtype, [&]<class E>(E) {
    head_sums_of<E>(
        rows, lanes, true,
        [&](int64_t e, int64_t s, V<T> other) __attribute__((always_inline)) {
          return relu.att_of(s) * leaky_relu<T>(relu.template sum<E>(rows, e, s, other), relu.slope);
        },
        to);
  });
}

// For a block of edges: raw scores, -inf where the edge is hidden; the score from the raw one; and the factor
// that turns the gradient of a score into that of its terms.
template <class T>
class Scorer {
 public:
  Scorer(const GraphAttentionParams& p, const HeadLanes<T>& lanes, const GraphView& graph, const End<T>& own,
         const End<T>& other, Arena& arena)
      : kind_(p.score),
        lanes_(lanes),
        graph_(graph),
        own_(own),
        other_(other),
        slots_(p.H, kind_ == GraphScore::additive ? 0 : p.D, N<T>, p.dtype),
        scale_(T(p.scale)),
        slope_(kind_ == GraphScore::additive ? T(p.negative_slope) : T(1)),
        term_table_(static_cast<const T*>(p.score_term)) {
    if (term_table_) term_ = arena.take_zero<T>(lanes.block_size());
    if (kind_ == GraphScore::additive) {
      own_alpha_ = arena.take_zero<T>(lanes.size);
      other_alpha_ = arena.take_zero<T>(lanes.block_size());
      return;
    }
    own_row_ = arena.take<T>(slots_.size());
    if (kind_ == GraphScore::dot) return;
    T* att = arena.take<T>(slots_.size());
    for (int64_t s = 0; s < slots_.count; ++s)
      store(att + s * N<T>, load_row<T>(static_cast<const T*>(p.att) + slots_.offset(s), 1, slots_.width(s)));
    relu_.emplace(ReluRows<T>{own_row_, att, p.edge, T(p.negative_slope)});
  }
  void begin_row(int64_t row) {
    if (kind_ != GraphScore::additive)
      unpack_row(slots_, own_.rows, row, own_row_);
    else if (own_.alpha)
      lanes_.spread(own_.alpha + row * own_.alpha_stride, own_alpha_);
  }
  void score(int64_t begin, int64_t edges, T* raw) {
    const BlockRows rows{other_.rows, slots_, graph_, begin, edges};
    if (kind_ == GraphScore::gatv2) return relu_products(rows, lanes_, *relu_, raw);
    if (term_) lanes_.gather(term_table_, lanes_.H, edges, edge_numbers(graph_, begin), term_);
    const int64_t vectors = lanes_.vectors(edges);
    if (kind_ == GraphScore::dot) {
      head_products(rows, lanes_, true, own_row_, raw);
      for (int64_t i = 0; i < vectors; ++i) store(raw + i * N<T>, add_term(load(raw + i * N<T>) * scale_, i));
      return;
    }
    if (other_.alpha)
      lanes_.gather(other_.alpha, other_.alpha_stride, edges, other_ends(graph_, begin), other_alpha_);
    for (int64_t i = 0; i < vectors; ++i) {
      const V<T> own = load(own_alpha_ + i % lanes_.groups * N<T>), other = load(other_alpha_ + i * N<T>);
      const V<T> sum = add_term(own + other, i);
      store(raw + i * N<T>, ((own == -kInf<T>) | (other == -kInf<T>)) ? V<T>{} - kInf<T> : sum);
    }
  }
  // A slope of 1 leaves every score as it is.
  FASTATTN_INLINE V<T> score_of(V<T> raw) const { return raw == -kInf<T> ? raw : leaky_relu<T>(raw, slope_); }
  FASTATTN_INLINE V<T> derivative(V<T> raw) const { return raw > 0 ? V<T>{} + T(1) : V<T>{} + slope_; }
  const ReluRows<T>& relu() const { return *relu_; }

 private:
  FASTATTN_INLINE V<T> add_term(V<T> score, int64_t i) const {
    if (!term_) return score;
    const V<T> term = load(term_ + i * N<T>);
    return term == -kInf<T> ? term : score + term;
  }

  GraphScore kind_;
  const HeadLanes<T>& lanes_;
  const GraphView& graph_;
  const End<T>&own_, &other_;
  Slots slots_;
  T scale_, slope_;
  const T* term_table_;
  T *term_ = nullptr, *own_alpha_ = nullptr, *other_alpha_ = nullptr, *own_row_ = nullptr;
  std::optional<ReluRows<T>> relu_;  // of gatv2
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
