// Scores of the edges of one row. Seen from a target or from a source they are the same formula with the ends
// exchanged, and the same bits: sums are formed in an order that both share.
#pragma once
#include "graph_attention_rows.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// One end of the edges: its features, or its terms of the score (A, rows `alpha_stride` apart).
template <class T>
struct End {
  FeatureRows rows;
  const A<T>* alpha = nullptr;
  int64_t alpha_stride = 0;
};

template <class T>
FASTATTN_INLINE V<T> leaky_relu(V<T> x, A<T> slope) {
  return x > 0 ? x : x * slope;
}

// For a block of edges: raw scores, -inf where the edge is hidden; the score from the raw one; and the factor
// that turns the gradient of a score into that of its terms.
template <class T, GraphScore kScore>
class Scorer;

// What the forms share: the per-edge term, and which edges it hides.
template <class T>
class EdgeTerm {
 public:
  EdgeTerm(const GraphAttentionParams& p, const HeadLanes<T>& lanes, Arena& arena)
      : table_(static_cast<const A<T>*>(p.score_term)),
        term_(table_ ? arena.take_zero<A<T>>(lanes.block_size()) : nullptr) {}
  void begin_block(const GraphView& graph, const HeadLanes<T>& lanes, int64_t begin, int64_t edges) {
    if (term_)
      lanes.gather(table_, lanes.H, edges, [&](int64_t e) { return edge_number(graph, begin + e); }, term_);
  }
  FASTATTN_INLINE V<T> add(V<T> score, int64_t i) const {
    if (!term_) return score;
    const V<T> term = load(term_ + i * N<T>);
    return term == -kInf<T> ? term : score + term;
  }

 private:
  const A<T>* table_;
  A<T>* term_;
};

template <class T>
class Scorer<T, GraphScore::additive> {
 public:
  Scorer(const GraphAttentionParams& p, const HeadLanes<T>& lanes, const GraphView& graph, const End<T>& own,
         const End<T>& other, Arena& arena)
      : lanes_(lanes),
        graph_(graph),
        own_(own),
        other_(other),
        term_(p, lanes, arena),
        slope_(A<T>(p.negative_slope)) {
    own_alpha_ = arena.take_zero<A<T>>(lanes.size);
    other_alpha_ = arena.take_zero<A<T>>(lanes.block_size());
  }
  void begin_row(int64_t row) {
    if (own_.alpha) lanes_.spread(own_.alpha + row * own_.alpha_stride, own_alpha_);
  }
  void score(int64_t begin, int64_t edges, A<T>* raw) {
    if (other_.alpha)
      lanes_.gather(
          other_.alpha, other_.alpha_stride, edges, [&](int64_t e) { return other_end(graph_, begin + e); },
          other_alpha_);
    term_.begin_block(graph_, lanes_, begin, edges);
    for (int64_t i = 0, vectors = lanes_.vectors(edges); i < vectors; ++i) {
      const V<T> own = load(own_alpha_ + i % lanes_.groups * N<T>), other = load(other_alpha_ + i * N<T>);
      V<T> sum = term_.add(own + other, i);
      sum = ((own == -kInf<T>) | (other == -kInf<T>)) ? V<T>{} - kInf<T> : sum;
      store(raw + i * N<T>, sum);
    }
  }
  FASTATTN_INLINE V<T> score_of(V<T> raw) const { return raw == -kInf<T> ? raw : leaky_relu<T>(raw, slope_); }
  FASTATTN_INLINE V<T> derivative(V<T> raw) const { return raw > 0 ? V<T>{} + A<T>(1) : V<T>{} + slope_; }

 private:
  const HeadLanes<T>& lanes_;
  const GraphView& graph_;
  const End<T>&own_, &other_;
  EdgeTerm<T> term_;
  A<T> slope_;
  A<T>*own_alpha_, *other_alpha_;
};

template <class T>
class Scorer<T, GraphScore::dot> {
 public:
  Scorer(const GraphAttentionParams& p, const HeadLanes<T>& lanes, const GraphView& graph, const End<T>& own,
         const End<T>& other, Arena& arena)
      : lanes_(lanes),
        graph_(graph),
        own_(own),
        other_(other),
        term_(p, lanes, arena),
        slots_(p.H, p.D, N<T>),
        scale_(A<T>(p.scale)) {
    own_row_ = arena.take<A<T>>(slots_.size());
  }
  void begin_row(int64_t row) { unpack_row(slots_, row_of<T>(own_.rows, row), own_row_); }
  void score(int64_t begin, int64_t edges, A<T>* raw) {
    head_products<T>({other_.rows, slots_, graph_, begin, edges}, slots_, lanes_, true, own_row_, raw);
    term_.begin_block(graph_, lanes_, begin, edges);
    for (int64_t i = 0, vectors = lanes_.vectors(edges); i < vectors; ++i)
      store(raw + i * N<T>, term_.add(load(raw + i * N<T>) * scale_, i));
  }
  FASTATTN_INLINE V<T> score_of(V<T> raw) const { return raw; }
  FASTATTN_INLINE V<T> derivative(V<T>) const { return V<T>{} + A<T>(1); }
  const Slots& slots() const { return slots_; }

 private:
  const HeadLanes<T>& lanes_;
  const GraphView& graph_;
  const End<T>&own_, &other_;
  EdgeTerm<T> term_;
  Slots slots_;
  A<T> scale_;
  A<T>* own_row_;
};

template <class T>
class Scorer<T, GraphScore::gatv2> {
 public:
  Scorer(const GraphAttentionParams& p, const HeadLanes<T>& lanes, const GraphView& graph, const End<T>& own,
         const End<T>& other, Arena& arena)
      : lanes_(lanes),
        graph_(graph),
        own_(own),
        other_(other),
        edge_(p.edge),
        slots_(p.H, p.D, N<T>),
        slope_(A<T>(p.negative_slope)) {
    own_row_ = arena.take<A<T>>(slots_.size());
    att_ = arena.take<A<T>>(slots_.size());
    for (int64_t s = 0; s < slots_.count; ++s)
      store(att_ + s * N<T>,
            load_row<A<T>>(static_cast<const A<T>*>(p.att) + slots_.offset(s), 1, slots_.width(s)));
  }
  void begin_row(int64_t row) { unpack_row(slots_, row_of<T>(own_.rows, row), own_row_); }
  void score(int64_t begin, int64_t edges, A<T>* raw) {
    head_sums<T>(
        {other_.rows, slots_, graph_, begin, edges}, slots_, lanes_, true,
        [&](int64_t e, int64_t s, V<T> other) __attribute__((always_inline)) {
          return load(att_ + s * N<T>) * leaky_relu<T>(add_up(begin + e, s, other), slope_);
        },
        raw);
  }
  FASTATTN_INLINE V<T> score_of(V<T> raw) const { return raw; }
  FASTATTN_INLINE V<T> derivative(V<T>) const { return V<T>{} + A<T>(1); }
  const Slots& slots() const { return slots_; }

  // What LeakyReLU is applied to, for slot s of the edge at a position.
  FASTATTN_INLINE V<T> add_up(int64_t at, int64_t s, V<T> other) const {
    V<T> sum = load(own_row_ + s * N<T>) + other;
    if (edge_.data)
      sum += load_part(row_of<T>(edge_, edge_number(graph_, at)) + slots_.offset(s), slots_.width(s));
    return sum;
  }
  FASTATTN_INLINE V<T> att(int64_t s) const { return load(att_ + s * N<T>); }
  FASTATTN_INLINE A<T> slope() const { return slope_; }

 private:
  const HeadLanes<T>& lanes_;
  const GraphView& graph_;
  const End<T>&own_, &other_;
  const FeatureRows& edge_;
  Slots slots_;
  A<T> slope_;
  A<T>*own_row_, *att_;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
