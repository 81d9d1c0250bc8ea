// Products of matrices kept in column panels: the columns of a matrix are cut into panels as wide as a
// register tile, and a panel holds its rows one after the other, so that every stride is known at compile
// time and no access is spread over memory. Element (r, c) of a matrix of R rows lies at
// ((c / kPanel) R + r) kPanel + c % kPanel.
//
// One matrix can be the left operand (one scalar at a time), the right operand (whole rows of a panel) and
// the result of products. Formats as in gemm.h:
//   PlainPanels<E>  E in {float, double}
//   PairPanels      bf16 into fp32 on AMX tiles. A right operand has its rows in pairs,
//                   element (r, c) at ((c / kPanel) R + r / 2 * 2) kPanel + 2 (c % kPanel) + r % 2.
#pragma once
#include "gemm.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// What of a square matrix is not zero: row r has the columns c <= r (lower) or c >= r (upper).
enum class Part { all, lower, upper };

template <class A>
FASTATTN_INLINE Vec<A> scaled(Vec<A> x, A factor) {
  const Vec<A> factors = broadcast(factor);
  return factors == A(0) ? Vec<A>{} : x * factors;
}

// Memory that will be read or written soon and may be far away. Products bring it between their blocks, so
// many lines at a time as a core can have on their way, and hide how long that takes. Dense rows come by
// whole pages, which are touched before: timing suggests that lines are lost which are asked for while the
// address of their page is looked up, and pages of which only some lines were asked for came later than
// others.
class Upcoming {
 public:
  void add(const void* rows, int64_t stride, int64_t count, int64_t bytes) {
    auto begin = int64_t(reinterpret_cast<uintptr_t>(rows));
    if (stride == bytes) {  // the lines of the pages that begin in these rows: every page once
      const int64_t end = round_up(begin + count * bytes, kPage);
      begin = round_up(begin, kPage);
      count = (end - begin) / kLine;
      stride = bytes = kLine;
    }
    if (bytes <= 0 || count <= 0) return;
    if (number_ == kPlaces) drop();  // too late for it
    __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(begin)), 0, 2);
    places_[(first_ + number_++) % kPlaces] = {begin, stride, count, (bytes + kLine - 1) / kLine};
  }
  // Lines down the rows of one place.
  FASTATTN_INLINE void bring() {
    if (number_ == 0) return;
    const Place& place = places_[first_];
    int64_t address = place.begin + row_ * place.stride + line_ * kLine;
    const int64_t lines = min(kLines, place.count - row_);
    for (int64_t i = 0; i < lines; ++i, address += place.stride)
      __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(address)), 0, 2);
    row_ += lines;
    if (row_ < place.count) return;
    row_ = 0;
    if (++line_ == place.lines) drop();
  }

 private:
  static constexpr int kPlaces = 8;
  static constexpr int64_t kLines = 16, kPage = 4096, kLine = 64;
  struct Place {
    int64_t begin, stride, count, lines;  // an address, rows, and lines of a row
  };
  void drop() {
    first_ = (first_ + 1) % kPlaces;
    --number_;
    row_ = line_ = 0;
  }
  Place places_[kPlaces];
  int first_ = 0, number_ = 0;
  int64_t row_ = 0, line_ = 0;  // of the first place
};

// One summand of a product: left [M, depth] times right [depth, N].
template <class E, class A>
struct Summand {
  const E* left;
  int64_t left_rows;  // the rows that the matrix has room for: R above
  const E* right;
  int64_t right_rows;
  int64_t depth;
  Part part = Part::all;         // of the left operand: the rest of it is not read
  const A* row_scale = nullptr;  // factors of the rows of the sum up to this term; 0 erases even NaN
};

template <class E>
struct PlainPanels {
  using Element = E;
  using Accumulator = E;
  using Configuration = NoConfiguration;
  using Term = Summand<E, E>;
  static constexpr int N = kLanes<E>;
  static constexpr int64_t kPanel = kColumns * N;
  // A block of 8 x 2 vectors loads 10 times for 16 multiply-adds, and cuts a triangle as finely as a vector.
  static constexpr int kRows = kVectorRegisters == 32 ? 8 : 4;
  static constexpr int64_t kUnit = kRows > N ? kRows : N;  // sizes are multiples of this

  template <int NV>
  static FASTATTN_INLINE void block(const Term* terms, int count, int64_t m, int64_t n, E carry, E* c) {
    Vec<E> acc[kRows][NV] = {};
    for (const Term *t = terms, *stop = terms + count; t < stop; ++t) {
      const int64_t begin = t->part == Part::upper ? m : 0;
      const int64_t end = t->part == Part::lower ? min(t->depth, m + kRows) : t->depth;
      const E* a = t->left + begin / kPanel * t->left_rows * kPanel + m * kPanel + begin % kPanel;
      const E* b = t->right + n * t->right_rows + begin * kPanel;
      int64_t left = end - begin, steps = min(left, kPanel - begin % kPanel);
      while (left > 0) {  // a panel of the left operand
        left -= steps;
        do {
          Vec<E> bv[NV];
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) bv[v] = load(b + v * N);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[r][v] += a[r * kPanel] * bv[v];
          ++a;
          b += kPanel;
        } while (--steps);
        a += (t->left_rows - 1) * kPanel;
        steps = min(left, kPanel);
      }
      if (t->row_scale)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] = scaled<E>(acc[r][v], t->row_scale[m + r]);
    }
    // The addresses of the result are formed here: kept across the loop they would push vectors out of it.
    asm("" : "+r"(c));
    if (carry != E(0))
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] += carry * load(c + r * kPanel + v * N);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store(c + r * kPanel + v * N, acc[r][v]);
  }

  // c [M, N] = carry c + sum of the terms; only `part` of it is wanted.
  static FASTATTN_INLINE void multiply(int64_t M, int64_t columns, const Term* terms, int count, Part part,
                                       E carry, E* c, int64_t c_rows, Upcoming* upcoming = nullptr) {
    for (int64_t n = 0; n < columns; n += kPanel)
      for (int64_t m = 0; m < M; m += kRows) {
        int64_t begin = 0, end = min(columns - n, kPanel);
        if (part == Part::lower) end = min(end, m + kRows - n);
        if (part == Part::upper) begin = round_down(max(m - n, 0), N);
        if (begin >= end) continue;
        if (upcoming) upcoming->bring();
        E* to = c + n * c_rows + m * kPanel;
        if (begin)
          shifted(terms, count, m, n, carry, to);
        else if (end > N)
          block<2>(terms, count, m, n, carry, to);
        else
          block<1>(terms, count, m, n, carry, to);
      }
  }

 private:
  // The second vector of a panel alone.
  static void shifted(const Term* terms, int count, int64_t m, int64_t n, E carry, E* c) {
    Term moved[3];
    for (int i = 0; i < count; ++i) {
      moved[i] = terms[i];
      moved[i].right += N;
    }
    block<1>(moved, count, m, n, carry, c + N);
  }
};

#if defined(__AMX_BF16__)
struct PairPanels {
  using Element = bf16;
  using Accumulator = float;
  using Configuration = TileConfiguration;
  using Term = Summand<bf16, float>;
  static constexpr int64_t kPanel = 32;
  static constexpr int64_t kUnit = 32;

  static FASTATTN_INLINE void load_tiles(const float* c) {
    _tile_loadd(0, c, kPanel * 4);
    _tile_loadd(1, c + 16, kPanel * 4);
    _tile_loadd(2, c + 16 * kPanel, kPanel * 4);
    _tile_loadd(3, c + 16 * kPanel + 16, kPanel * 4);
  }
  static FASTATTN_INLINE void store_tiles(float* c) {
    _tile_stored(0, c, kPanel * 4);
    _tile_stored(1, c + 16, kPanel * 4);
    _tile_stored(2, c + 16 * kPanel, kPanel * 4);
    _tile_stored(3, c + 16 * kPanel + 16, kPanel * 4);
  }
  static FASTATTN_INLINE void scale_rows(float* c, const float* scale) {
    for (int r = 0; r < kPanel; ++r)
      for (int v = 0; v < 2; ++v)
        store(c + r * kPanel + v * 16, scaled<float>(load(c + r * kPanel + v * 16), scale[r]));
  }
  // 32 x 32 of the result: tiles 0-3 accumulate, 4-5 hold the left operand, 6-7 the right.
  static void block(const Term* terms, int count, int64_t m, int64_t n, float carry, float* c) {
    alignas(64) float before[kPanel * kPanel];
    bool late = false;  // what is carried over is added after rows have been scaled
    if (carry != 0) {
      for (int i = 0; i < count; ++i) late |= terms[i].row_scale != nullptr;
      if (carry != 1 || late)
        for (int64_t x = 0; x < kPanel * kPanel; x += 16) store(before + x, load(c + x) * carry);
    }
    if (carry != 0 && !late) {
      load_tiles(carry == 1 ? c : before);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (const Term* t = terms; t < terms + count; ++t) {
      const int64_t end = t->part == Part::lower ? min(t->depth, m + kPanel) : t->depth;
      for (int64_t k = t->part == Part::upper ? m : 0; k < end; k += 32) {
        const bf16* a = t->left + k * t->left_rows + m * kPanel;
        const bf16* b = t->right + n * t->right_rows + k * kPanel;
        _tile_loadd(4, a, kPanel * 2);
        _tile_loadd(6, b, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, kPanel * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * kPanel, kPanel * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      if (t->row_scale) {
        store_tiles(c);
        scale_rows(c, t->row_scale + m);
        load_tiles(c);
      }
    }
    store_tiles(c);
    if (late)
      for (int64_t x = 0; x < kPanel * kPanel; x += 16) store(c + x, load(c + x) + load(before + x));
  }
  static void multiply(int64_t M, int64_t columns, const Term* terms, int count, Part part, float carry,
                       float* c, int64_t c_rows, Upcoming* = nullptr) {
    for (int64_t n = 0; n < columns; n += kPanel)
      for (int64_t m = 0; m < M; m += kPanel) {
        if ((part == Part::lower && n > m) || (part == Part::upper && n < m)) continue;
        block(terms, count, m, n, carry, c + n * c_rows + m * kPanel);
      }
  }
};
#endif

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
