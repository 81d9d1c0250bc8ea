// States in the tensors of a call and between the segments of a sequence.
#pragma once
#include <algorithm>

#include "linear_attention_chunk.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Adds sequence n, head h of a (N, H, D, Dv) tensor and its z, or the transpose, to a state.
template <class T>
inline void add_state(const LinearAttentionParams& p, const View& kv, const View& z, int64_t n, int64_t h,
                      bool transposed, State<T>& state) {
  const Matrix<T>& m = state.kv;
  state.zero = false;
  if (kv.data)
    for (int64_t r = 0; r < (transposed ? p.Dv : p.D); ++r) {
      const A<T>* row =
          static_cast<const A<T>*>(kv.data) + offset(kv, n, h) + r * kv.stride[transposed ? 3 : 2];
      const int64_t step = kv.stride[transposed ? 2 : 3], columns = transposed ? p.D : p.Dv;
      for (int64_t c = 0; c < columns; c += N<T>) {
        A<T>* to = at<T>(m.natural, m.rows, r, c);
        store(to, load(to) + load_row<A<T>>(row + c * step, step, columns - c));
      }
    }
  if (z.data)
    for (int64_t d = 0; d < p.D; ++d) state.z[d] += static_cast<const A<T>*>(z.data)[offset(z, n, h, d)];
}
template <class T>
inline void write_state(const LinearAttentionParams& p, const State<T>& state, const View& kv, const View& z,
                        int64_t n, int64_t h) {
  for (int64_t d = 0; d < p.D; ++d) {
    A<T>* row = static_cast<A<T>*>(kv.data) + offset(kv, n, h, d);
    for (int64_t c = 0; c < p.Dv; c += N<T>)
      store_row<A<T>>(row + c, 1, p.Dv - c, load(at<T>(state.kv.natural, state.kv.rows, d, c)));
    static_cast<A<T>*>(z.data)[offset(z, n, h, d)] = state.z[d];
  }
}

// What every segment of every key/value head adds to its states, of which a head has `kinds`; then the state
// that a segment starts from, or where order does not matter the state of the whole sequence. Segments that
// are alone need none: of many short sequences only those cut for the sake of the threads take memory.
template <class T>
class SegmentStates {
 public:
  SegmentStates(const std::vector<Segment>& segments, int64_t heads, int64_t kinds,
                const StateShape<T>& shape)
      : segments_(segments),
        heads_(heads),
        kinds_(kinds),
        shape_(shape),
        size_(shape.size()),
        slots_(numbered(segments)),
        data_(slots_.back() * heads * kinds * (size_ + 1)) {}

  void put(int64_t segment, int64_t head, int64_t kind, const State<T>& state, A<T> decay) const {
    A<T>* to = at(segment, head, kind);
    std::memcpy(to, state.kv.natural, size_t(size_) * sizeof(A<T>));
    to[size_] = decay;
  }
  bool empty() const { return slots_.back() == 0; }
  int64_t first_of(int64_t n) const { return bound(n); }
  int64_t last_of(int64_t n) const { return bound(n + 1) - 1; }
  void get(int64_t segment, int64_t head, int64_t kind, State<T>& state) const {
    std::memcpy(state.kv.natural, at(segment, head, kind), size_t(size_) * sizeof(A<T>));
    state.zero = false;
  }
  // start(n, head, kind, state) adds what comes before the first segment, or behind the last one in reverse.
  // In order, what the last segment of a sequence adds is not read. Without order all of them together get
  // one state, that of the first.
  template <class Start>
  void carry(const Parallel& parallel, bool ordered, bool reverse, Start&& start) const {
    for_each_task(parallel, heads_ * kinds_, [&](int64_t task, int) {
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      State<T> running;
      running.take(arena, shape_, 0);
      const int64_t head = task / kinds_, kind = task % kinds_, count = int64_t(segments_.size());
      int64_t first = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t s = reverse ? count - 1 - i : i;
        if (segments_[s].alone) continue;
        const bool begins = reverse ? segments_[s].last : segments_[s].first;
        const bool ends = reverse ? segments_[s].first : segments_[s].last;
        if (begins) {
          first = s;
          running.clear();
          start(segments_[s].n, head, kind, running);
        }
        A<T>*local = at(s, head, kind), *sum = running.kv.natural;
        for (int64_t x = 0; x < size_; ++x) {
          const A<T> before = sum[x];
          if (!ordered || !ends)
            sum[x] = (local[size_] == A<T>(0) ? A<T>(0) : before * local[size_]) + local[x];
          if (ordered) local[x] = before;
        }
        if (!ordered && ends) put(first, head, kind, running, A<T>(1));
      }
    });
  }

 private:
  A<T>* at(int64_t segment, int64_t head, int64_t kind) const {
    return data_.data() + ((slots_[segment] * heads_ + head) * kinds_ + kind) * (size_ + 1);
  }
  // How many segments before each one, and in all, have a state.
  static std::vector<int64_t> numbered(const std::vector<Segment>& segments) {
    std::vector<int64_t> slots{0};
    for (const Segment& s : segments) slots.push_back(slots.back() + !s.alone);
    return slots;
  }
  // The first segment of sequence n or behind it: segments lie in the order of their sequences.
  int64_t bound(int64_t n) const {
    auto before = [](const Segment& s, int64_t sequence) { return s.n < sequence; };
    return std::lower_bound(segments_.begin(), segments_.end(), n, before) - segments_.begin();
  }
  const std::vector<Segment>& segments_;
  int64_t heads_, kinds_;
  StateShape<T> shape_;
  int64_t size_;
  std::vector<int64_t> slots_;
  Buffer<A<T>> data_;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
