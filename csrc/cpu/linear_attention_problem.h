// What one call of linear attention asks for: its types, its sizes as padded for products, and the segments
// of its sequences.
#pragma once
#include <vector>

#include "dtype.h"
#include "linear_attention.h"
#include "memory.h"
#include "panels.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
struct FormatOf {
  using type = PlainPanels<float>;
};
template <>
struct FormatOf<double> {
  using type = PlainPanels<double>;
};
#if defined(__AMX_BF16__)
template <>
struct FormatOf<bf16> {
  using type = PairPanels;
};
#endif

// The alphabet of these kernels. T is what products are made of: float, double, or bf16 where there are
// products of its pairs. S is the dtype of a tensor: half precision that has no products becomes float as it
// is read, and functions `_of` a dtype are all that is compiled for it: not inline, or all of them together
// would be too large for what they call.
template <class T>
using Format = typename FormatOf<T>::type;  // how its products are formed
template <class T>
using E = typename Format<T>::Element;  // what products read
template <class T>
using A = typename Format<T>::Accumulator;  // what products are summed in; states, denominators
template <class T>
using V = Vec<A<T>>;  // N<T> of them
template <class T>
constexpr int N = kLanes<A<T>>;
template <class T>
constexpr int64_t kPanel = Format<T>::kPanel;
template <class T>
constexpr int64_t kUnit = Format<T>::kUnit;  // rows and columns of operands are multiples of it
template <class T>
constexpr bool kPairs = !kSame<E<T>, A<T>>;

// f(S{}) for decay: of the query's dtype, or A.
template <class T, class F>
FASTATTN_INLINE void with_dtype_of_decay(DType dtype, F&& f) {
  if constexpr (kPairs<T>)
    if (dtype == DType::f32) return f(float{});
  with_dtype_beside<T>(dtype, f);
}

template <class T>
FASTATTN_INLINE Vec<Int<A<T>>> lane_index() {
  Vec<Int<A<T>>> index;
  for (int i = 0; i < N<T>; ++i) index[i] = i;
  return index;
}

// Tokens [begin, end) of batch entry b, a piece of sequence n.
struct Segment {
  int64_t n, b, begin, end;
  int64_t seen_from;   // queries before this token see neither a key nor an initial state
  bool first, last;    // of its sequence
  bool alone = false;  // its sequence is in one piece, keys and queries: one walk does all of it
};
// Tokens as keys, and as queries: the same where order matters.
struct Segments {
  std::vector<Segment> keys, queries;
};

// A state phi(k) v^T [rows, columns], as padded and as used, and z behind it.
template <class T>
struct StateShape {
  int64_t rows, columns, used_rows, used_columns, z_columns;
  int64_t size() const { return rows * round_up(columns, kPanel<T>) + z_columns; }
};

template <class T>
struct Problem {
  // A shorter chunk needs fewer products within it, and all it touches stays in the first-level cache; the
  // state is read and written more often, which costs multiply-adds of vectors little: D = 64 takes 0.93 of
  // the time with 16 instead of 32, D = 128 the same (AVX-512). Matrix tiles need longer products.
  static constexpr int64_t kChunk = kPairs<T> ? 64 : 16;
  static constexpr int64_t kAlone = kPairs<T> ? 64 : 32;  // a sequence of up to so many is one chunk
  static constexpr int64_t kSpan = 64;  // tokens of one head, before those of the next one are walked

  const LinearAttentionParams& p;
  int64_t group;  // query heads per key/value head
  int64_t d, dv;  // D and Dv as padded
  bool alone;     // every sequence is one chunk
  int64_t chunk;  // tokens whose products with each other are formed, instead of through the state

  explicit Problem(const LinearAttentionParams& params) : p(params) {
    group = p.H / p.Hkv;
    d = round_up(p.D, kUnit<T>);
    dv = round_up(p.Dv, kUnit<T>);
    alone = max(longest(p.L), longest(p.S)) <= kAlone;
    chunk = alone ? kAlone : kChunk;
  }
  // States of one key/value head: one per query head of its group, or one for all of them where neither decay
  // nor an initial state tells them apart.
  int64_t kinds() const { return p.decay.data || p.initial_z.data ? group : 1; }
  StateShape<T> state_shape(bool transposed) const {
    return transposed ? StateShape<T>{dv, d, p.Dv, p.D, d} : StateShape<T>{d, dv, p.D, p.Dv, d};
  }
  // How many neighbouring heads a task of the forward walks in turn, a span each. Results lie token by token:
  // alone, each head would touch all of their pages for a few lines in each.
  int64_t heads_together(int64_t segments, int threads) const {
    constexpr int64_t kStates = 320 << 10;  // bytes: with their spans they stay in the second-level cache
    // Sequences of unequal lengths balance better one by one, and pairs would be formed again for each span.
    if (alone || p.cu_seqlens || (kPairs<T> && !p.causal)) return 1;
    const int64_t copies = kPairs<T> ? 2 : 1;  // a state as summed, and as operand
    const int64_t size = copies * kinds() * state_shape(false).size() * int64_t(sizeof(A<T>));
    for (int64_t heads = 4; heads > 1; --heads)
      if (p.Hkv % heads == 0 && segments * p.Hkv / heads % threads == 0 && heads * size <= kStates)
        return heads;
    return 1;
  }
  // The tokens of all sequences, cut into segments for as many threads as there are. One segment takes the
  // state of the one before, which costs as much again as its share of the state: sequences are cut only
  // where they are too few to occupy the threads.
  Segments segments(int threads) const {
    Segments all;
    all.keys = cut(p.S, threads);
    // Packed sequences have the same bounds on both sides, others are all of one length.
    const bool same = p.causal || p.cu_seqlens;
    all.queries = same ? all.keys : cut(p.L, threads);
    const bool whole = int64_t(all.keys.size()) == p.N && int64_t(all.queries.size()) == p.N;
    for (auto* side : {&all.keys, &all.queries})
      for (Segment& s : *side) s.alone = same ? s.first && s.last : whole;
    return all;
  }

 private:
  // Tokens of the longest sequence, where those that are not packed have `length`.
  int64_t longest(int64_t length) const {
    if (!p.cu_seqlens) return length;
    int64_t most = 0;
    for (int64_t n = 0; n < p.N; ++n) most = max(most, p.cu_seqlens[n + 1] - p.cu_seqlens[n]);
    return most;
  }
  std::vector<Segment> cut(int64_t length, int threads) const {
    const int64_t longest = this->longest(length), all = p.cu_seqlens ? p.cu_seqlens[p.N] : p.N * length;
    const double ideal = double(all) * double(p.Hkv) / threads;  // tokens per thread
    const int64_t units = p.N * p.Hkv, rounds = (units + threads - 1) / threads;
    const bool even = double(longest) * double(rounds) <= 1.3 * ideal || double(longest) * 4 <= ideal;
    const int64_t span = even ? max(longest, 1) : max(round_up(int64_t(ideal / 4), chunk), 4 * chunk);
    std::vector<Segment> all_segments;
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t begin = p.cu_seqlens ? p.cu_seqlens[n] : 0;
      const int64_t end = p.cu_seqlens ? p.cu_seqlens[n + 1] : length;
      const int64_t b = p.cu_seqlens ? 0 : n, seen_from = first_seeing(b, begin, end);
      const int64_t count = max(1, (end - begin + span - 1) / span);
      for (int64_t s = 0; s < count; ++s)
        all_segments.push_back(
            {n, b, begin + s * span, min(begin + (s + 1) * span, end), seen_from, s == 0, s == count - 1});
    }
    return all_segments;
  }
  // The first query of a sequence, tokens [begin, end) of batch entry b, that sees anything: by the masks
  // alone.
  int64_t first_seeing(int64_t b, int64_t begin, int64_t end) const {
    if (p.initial_z.data) return begin;
    const int64_t keys_begin = p.cu_seqlens ? begin : 0, keys_end = p.cu_seqlens ? end : p.S;
    int64_t key = keys_begin;
    if (p.key_padding.data)
      while (key < keys_end &&
             !static_cast<const uint8_t*>(p.key_padding.data)[offset(p.key_padding, b, key)])
        ++key;
    return p.causal ? key : key < keys_end ? begin : end;
  }
};

// Asks for what lies `distance` elements from p, which the next chunk will read or write: the products of
// this one hide the way from memory. Only a hint, wherever that may be: behind a head lies the next one, or
// nothing.
template <int kLocality = 2, class T>
FASTATTN_INLINE void prefetch(const T* p, int64_t distance) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p) + uintptr_t(distance) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, kLocality);  // 2: to the second-level cache
}

// The rows of one head of a (B, H, L, X) tensor.
template <class T>
struct Rows {
  const void* data;
  DType dtype;
  int64_t start, row, column;  // where they begin, and strides
  int64_t step;                // tokens from this chunk to the next one
  int64_t count, columns;
  int64_t blind = 0;               // rows before this one read as zero
  const uint8_t* shown = nullptr;  // and so do rows where this is 0, and those where factor is 0
  int64_t shown_step = 0;
  const A<T>* factor = nullptr;
  Upcoming* upcoming = nullptr;  // brings what comes next, where it is not fetched as this is read

  Rows(const View& view, int64_t b, int64_t h, int64_t begin, int64_t count, int64_t columns, int64_t step)
      : data(view.data),
        dtype(view.dtype),
        start(offset(view, b, h, begin)),
        row(view.stride[2]),
        column(view.stride[3]),
        step(step),
        count(count),
        columns(columns) {}
  Rows& bring_next(Upcoming* by) {
    upcoming = by;
    return *this;
  }
  Rows& hide(const View& padding, int64_t b, int64_t begin) {
    if (padding.data) {
      shown = static_cast<const uint8_t*>(padding.data) + offset(padding, b, begin);
      shown_step = padding.stride[1];
    }
    return *this;
  }
  // Queries of a segment, or what belongs to them: those that see nothing may hold anything.
  Rows& hide_blind(const Segment& s, int64_t begin) {
    blind = s.seen_from - begin;
    return *this;
  }
  template <class S>
  const S* at(int64_t r) const {
    return static_cast<const S*>(data) + start + r * row;
  }
  bool is_shown(int64_t r) const {
    return r >= blind && r < count && (!shown || shown[r * shown_step]) && (!factor || factor[r] != A<T>(0));
  }
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
