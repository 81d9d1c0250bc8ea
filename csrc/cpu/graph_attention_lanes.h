// Scores of a block of edges as vectors: lanes are (edge, head) pairs, edge by edge, the heads of an edge
// side by side. Where the heads are fewer than the lanes their number is rounded up to a power of two, so
// that every vector holds the same heads in the same lanes and per-head values are vectors, too.
#pragma once
#include "graph_attention.h"
#include "memory.h"
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// The alphabet of these kernels. T, float or double, is what scores and sums are formed in; features of
// whichever dtype become it as they are read, and that is all that is compiled once per dtype.
template <class T>
using V = Vec<T>;
template <class T>
constexpr int N = kLanes<T>;
template <class T>
constexpr T kInf = T(__builtin_inf());

constexpr int64_t kBlock = 64;  // edges: their rows of 128 fp32 channels fill half of a small L1 cache

// The other ends or the numbers of the edges of a block, as rows of a table.
struct TableRows {
  const void* indices;  // null: the positions themselves
  bool wide;
  int64_t begin;
  FASTATTN_INLINE int64_t operator[](int64_t e) const {
    return indices ? index_at(indices, wide, begin + e) : begin + e;
  }
};
inline TableRows other_ends(const GraphView& graph, int64_t begin) { return {graph.col, graph.wide, begin}; }
inline TableRows edge_numbers(const GraphView& graph, int64_t begin) {
  return {graph.perm, graph.wide, begin};
}

template <class V, int... I>
FASTATTN_INLINE V swap_lanes_(V v, int step, std::integer_sequence<int, I...>) {
  constexpr int kCount = sizeof...(I);
  switch (step) {
    case 1:
      return __builtin_shufflevector(v, v, (I ^ 1)...);
    case 2:
      return __builtin_shufflevector(v, v, ((I ^ 2) % kCount)...);
    case 4:
      return __builtin_shufflevector(v, v, ((I ^ 4) % kCount)...);
    default:
      return __builtin_shufflevector(v, v, ((I ^ 8) % kCount)...);
  }
}

// The heads of a problem as lanes.
template <class T>
struct HeadLanes {
  int64_t H, padded;   // `padded` is a power of two, or a multiple of the lanes
  int64_t groups;      // vectors that hold all heads once
  int64_t size;        // elements of them
  int64_t per_vector;  // edges in a vector
  Vec<Int<T>> edge_of_lane, lane;

  explicit HeadLanes(int64_t heads) : H(heads) {
    padded = 1;
    while (padded < H && padded < N<T>) padded *= 2;
    if (padded < H) padded = round_up(H, N<T>);
    groups = max(padded / N<T>, 1);
    size = groups * N<T>;
    per_vector = max(N<T> / padded, 1);
    for (int i = 0; i < N<T>; ++i) {
      lane[i] = i;
      edge_of_lane[i] = Int<T>(i / padded);
    }
  }
  int64_t vectors(int64_t edges) const { return round_up(edges * padded, N<T>) / N<T>; }
  // Elements of a buffer with a value per head for each edge of a block.
  int64_t block_size() const { return round_up(kBlock * padded, N<T>); }
  // Lanes of vector i that belong to one of `edges` edges and to a head.
  FASTATTN_INLINE Vec<Int<T>> real(int64_t i, int64_t edges) const {
    if (groups > 1) return lane + Int<T>(i % groups * N<T>) < Int<T>(H) + decltype(lane){};
    const auto head = lane & Int<T>(padded - 1);
    return (head < Int<T>(H)) & (edge_of_lane < Int<T>(min(edges - i * per_vector, N<T>)));
  }
  bool all_real(int64_t i, int64_t edges) const { return H == padded && (i + 1) * N<T> <= edges * padded; }

  // Combines the lanes of each head; all of them then hold the result.
  template <class Op>
  FASTATTN_INLINE V<T> fold(V<T> v, Op op) const {
    constexpr auto lanes = std::make_integer_sequence<int, N<T>>{};
#pragma GCC unroll 4
    for (int step = N<T> / 2; step > 0; step /= 2)
      if (padded <= step) v = op(v, swap_lanes_(v, step, lanes));
    return v;
  }
  FASTATTN_INLINE V<T> fold_max(V<T> v) const {
    return fold(v, [](V<T> a, V<T> b) { return maximum(a, b); });
  }
  FASTATTN_INLINE V<T> fold_sum(V<T> v) const {
    return fold(v, [](V<T> a, V<T> b) { return a + b; });
  }

  // The H values of one node, repeated over the lanes: `size` elements.
  FASTATTN_INLINE void spread(const T* values, T* to) const {
    for (int64_t h = 0; h < padded; ++h) to[h] = h < H ? values[h] : T(0);
    for (int64_t at = padded; at < size; ++at) to[at] = to[at - padded];
  }

  // to[e] = the H values of row rows[e] of a table, for `edges` edges. Padding lanes are left alone.
  __attribute__((noinline)) void gather(const T* table, int64_t stride, int64_t edges, TableRows rows,
                                        T* to) const {
    with_heads([&](auto heads) {
      for (int64_t e = 0; e < edges; ++e) copy<heads()>(table + rows[e] * stride, to + e * padded);
    });
  }
  __attribute__((noinline)) void scatter(const T* from, int64_t edges, TableRows rows, T* table) const {
    with_heads([&](auto heads) {
      for (int64_t e = 0; e < edges; ++e) copy<heads()>(from + e * padded, table + rows[e] * H);
    });
  }

 private:
  // Copies of a constant size are one instruction.
  template <class F>
  FASTATTN_INLINE void with_heads(F&& f) const {
    switch (H) {
      case 1:
        return f(std::integral_constant<int, 1>{});
      case 2:
        return f(std::integral_constant<int, 2>{});
      case 4:
        return f(std::integral_constant<int, 4>{});
      case 8:
        return f(std::integral_constant<int, 8>{});
      default:
        return f(std::integral_constant<int, 0>{});
    }
  }
  template <int kHeads>
  FASTATTN_INLINE void copy(const T* from, T* to) const {
    if constexpr (kHeads > 0)
      __builtin_memcpy(to, from, kHeads * sizeof(T));
    else
      for (int64_t h = 0; h < H; ++h) to[h] = from[h];
  }
};

// Dropout: a pure function of seed, head and the caller's number of the edge, like the one of softmax
// attention with edges as keys.
template <class T>
class EdgeDropout {
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

 public:
  EdgeDropout(const GraphAttentionParams& p, const HeadLanes<T>& lanes, Arena& arena) : p_(p.dropout_p) {
    if (!on()) return;
    key1_ = arena.take<Word>(lanes.size);
    key2_ = arena.take<Word>(lanes.size);
    numbers_ = arena.take<Word>(lanes.block_size());
    for (int64_t i = 0; i < lanes.size; ++i) {
      uint64_t z = p.seed + uint64_t(i % lanes.padded + 1) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      z ^= z >> 31;
      key1_[i] = Word(uint32_t(z));
      key2_[i] = Word(uint32_t(z >> 32));
    }
    const double limit = p_ * 4294967296.0 + 0.5;
    threshold_ = limit >= 4294967295.0 ? Word(4294967295u) : Word(limit);
    keep_scale_ = p_ < 1 ? T(1 / (1 - p_)) : T(0);
  }
  bool on() const { return p_ > 0; }
  void begin_block(const GraphView& graph, const HeadLanes<T>& lanes, int64_t begin, int64_t edges) {
    if (!on()) return;
    for (int64_t e = 0; e < edges; ++e) {
      const Word number = Word(uint32_t(edge_number(graph, begin + e)) * 0x9E3779B9u);
      for (int64_t h = 0; h < lanes.padded; ++h) numbers_[e * lanes.padded + h] = number;
    }
  }
  // 1 / (1 - p) in the lanes of vector i that dropout keeps, else 0.
  FASTATTN_INLINE V<T> keep(int64_t i, int64_t group) const {
    constexpr Word kWord = Word(0xffffffffu);
    Vec<Word> x = (load(numbers_ + i * N<T>) + load(key1_ + group * N<T>)) & kWord;
    x ^= x >> 16;
    x = (x * Word(0x85EBCA6Bu)) & kWord;
    x ^= load(key2_ + group * N<T>);
    x ^= x >> 13;
    x = (x * Word(0xC2B2AE35u)) & kWord;
    x ^= x >> 16;
    return x >= Vec<Word>{} + threshold_ ? V<T>{} + keep_scale_ : V<T>{};
  }

 private:
  double p_;
  Word *key1_ = nullptr, *key2_ = nullptr, *numbers_ = nullptr, threshold_ = 0;
  T keep_scale_ = 1;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
