// Operands of the products: feature maps applied as rows are read, and the forms of a matrix that products
// take.
#pragma once
#include "linear_attention_problem.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
FASTATTN_INLINE V<T> map_exp(V<T> x) {
  if constexpr (kPairs<T>)
    return exp2<3>(x * float(kLog2e));  // features are rounded to bf16
  else
    return exp(x);
}
template <class T>
FASTATTN_INLINE V<T> map_exp_nonpositive(V<T> x) {
  if constexpr (kPairs<T>)
    return map_exp<T>(x);
  else
    return exp_nonpositive(x);
}
template <class T, FeatureMap kMap>
FASTATTN_INLINE V<T> feature(V<T> x) {
  if constexpr (kMap == FeatureMap::elu)
    return x > A<T>(0) ? x + A<T>(1) : map_exp_nonpositive<T>(x);
  else if constexpr (kMap == FeatureMap::relu)
    return maximum(V<T>{}, x);
  else if constexpr (kMap == FeatureMap::exp)
    return map_exp<T>(x);
  else
    return x;
}
template <class T, FeatureMap kMap>
FASTATTN_INLINE V<T> feature_slope(V<T> x) {
  const V<T> one = broadcast(A<T>(1));
  if constexpr (kMap == FeatureMap::elu)
    return x > A<T>(0) ? one : map_exp_nonpositive<T>(x);
  else if constexpr (kMap == FeatureMap::relu)
    return x > A<T>(0) ? one : V<T>{};
  else if constexpr (kMap == FeatureMap::exp)
    return map_exp<T>(x);
  else
    return one;
}
// The same from y = feature(x), which is at most 1 where the slope is y itself.
template <class T, FeatureMap kMap>
FASTATTN_INLINE V<T> slope_of_feature(V<T> y) {
  const V<T> one = broadcast(A<T>(1));
  if constexpr (kMap == FeatureMap::elu)
    return y > one ? one : y;
  else if constexpr (kMap == FeatureMap::relu)
    return y > A<T>(0) ? one : V<T>{};
  else if constexpr (kMap == FeatureMap::exp)
    return y;
  else
    return one;
}
// f.template operator()<map>()
template <class F>
FASTATTN_INLINE void with_map(FeatureMap map, F&& f) {
  switch (map) {
    case FeatureMap::elu:
      return f.template operator()<FeatureMap::elu>();
    case FeatureMap::relu:
      return f.template operator()<FeatureMap::relu>();
    case FeatureMap::exp:
      return f.template operator()<FeatureMap::exp>();
    default:
      return f.template operator()<FeatureMap::identity>();
  }
}

// To the precision of operands, half up: what products will read.
template <class T>
FASTATTN_INLINE V<T> operand_precision(V<T> x) {
  if constexpr (kPairs<T>)
    return bit_cast<V<T>>((bit_cast<Vec<uint32_t>>(x) + 0x8000u) & 0xffff0000u);
  else
    return x;
}

// Where row r, columns [c, c + N) of a matrix in panels lies.
template <class T>
FASTATTN_INLINE A<T>* at(A<T>* matrix, int64_t capacity, int64_t r, int64_t c) {
  return matrix + (c / kPanel<T> * capacity + r) * kPanel<T> + c % kPanel<T>;
}

// f(c, x) for every vector of row r: its columns from c on lie at matrix + x.
template <class T, class F>
FASTATTN_INLINE void for_row(int64_t capacity, int64_t r, int64_t columns, F&& f) {
  static_assert(kPanel<T> == 2 * N<T>);
  int64_t x = r * kPanel<T>;
  for (int64_t c = 0; c < columns; c += kPanel<T>, x += capacity * kPanel<T>) {
    f(c, x);
    if (c + N<T> < columns) f(c + N<T>, x + N<T>);
  }
}

enum Forms { kLeft = 1, kRight = 2, kRightT = 4, kLeftT = 8 };

// A matrix [rows, columns] of tokens, or a state. `natural` holds it in A; the other members are operands, of
// itself or (with T) of its transpose. Where products read A itself they are `natural` or share a buffer.
template <class T>
struct Matrix {
  int64_t rows, columns;  // room
  A<T>* natural;
  E<T>*left, *right, *right_t, *left_t;
  E<T>*right_low, *right_t_low;  // of a state in pairs: what rounding has left of it
};

template <class T>
inline Matrix<T> take_matrix(Arena& arena, int64_t rows, int64_t columns, int forms, bool scaled = false,
                             bool state = false, int64_t behind = 0) {
  Matrix<T> m{};
  m.rows = rows;
  m.columns = columns;
  const int64_t size = rows * round_up(columns, kPanel<T>), size_t = columns * round_up(rows, kPanel<T>);
  m.natural = arena.take<A<T>>(size + behind);
  if constexpr (kPairs<T>) {
    if (forms & kLeft) m.left = arena.take<E<T>>(size);
    if (forms & kRight) m.right = arena.take<E<T>>(size);
    if (forms & kRightT) m.right_t = arena.take<E<T>>(size_t);
    if (forms & kLeftT) m.left_t = arena.take<E<T>>(size_t);
    if (state && (forms & kRight)) m.right_low = arena.take<E<T>>(size);
    if (state && (forms & kRightT)) m.right_t_low = arena.take<E<T>>(size_t);
  } else {
    m.left = m.right = m.natural;
    if (forms & (kRightT | kLeftT)) m.right_t = m.left_t = arena.take<E<T>>(size_t);
    if ((forms & kLeftT) && scaled) m.left_t = arena.take<E<T>>(size_t);
  }
  return m;
}

template <class S, FeatureMap kMap, class T>
__attribute__((noinline)) void fill_of(const Rows<T>& rows, int64_t count, const Matrix<T>& m) {
  const int64_t whole = rows.column == 1 ? round_down(rows.columns, N<T>) : 0;  // columns in plain vectors
  int64_t ahead = rows.step * rows.row;
  if (rows.upcoming) {
    rows.upcoming->add(rows.template at<S>(rows.step), rows.row * int64_t(sizeof(S)), rows.count,
                       rows.columns * int64_t(sizeof(S)));
    ahead = 0;
  }
  for (int64_t r = 0; r < count; ++r) {
    if (!rows.is_shown(r)) {
      for_row<T>(m.rows, r, m.columns, [&](int64_t, int64_t x) { store(m.natural + x, V<T>{}); });
      continue;
    }
    const S* row = rows.template at<S>(r);
    const V<T> factor = broadcast(rows.factor ? rows.factor[r] : A<T>(1));
    auto put = [&](int64_t x, V<T> y) {
      if constexpr (kMap == FeatureMap::identity) y *= factor;
      store(m.natural + x, operand_precision<T>(y));
    };
    if (whole == m.columns) {
      for_row<T>(m.rows, r, whole, [&](int64_t c, int64_t x) {
        if (ahead) prefetch(row + c, ahead);
        put(x, feature<T, kMap>(load_wide(row + c)));
      });
      continue;
    }
    for_row<T>(m.rows, r, m.columns, [&](int64_t c, int64_t x) {
      const int64_t left = rows.columns - c;
      if (ahead) prefetch(row + c * rows.column, ahead);
      V<T> y = c < whole ? load_wide(row + c) : load_row<A<T>>(row + c * rows.column, rows.column, left);
      y = feature<T, kMap>(y);
      if (kMap != FeatureMap::identity && left < N<T>)
        y = lane_index<T>() < Int<A<T>>(max(left, 0)) ? y : V<T>{};
      put(x, y);
    });
  }
}
// Rows as they are read, mapped, into `natural`; zero where there is none. Returns how many are in use.
template <class T>
inline int64_t fill(FeatureMap map, const Rows<T>& rows, const Matrix<T>& m) {
  const int64_t count = round_up(rows.count, kUnit<T>);
  with_dtype_beside<T>(rows.dtype, [&]<class S>(S) {
    with_map(map, [&]<FeatureMap kMap>() { fill_of<S, kMap>(rows, count, m); });
  });
  return count;
}

#if defined(__AMX_BF16__)
// What rounding to bf16 has left of x: nothing of an infinity.
FASTATTN_INLINE Vec<float> low_part(Vec<float> x) {
  const Vec<float> low = x - operand_precision<bf16>(x);
  return low == low ? low : Vec<float>{};
}

// Two consecutive vectors of a row as bf16.
FASTATTN_INLINE Vec<uint32_t> pack_row(Vec<float> a, Vec<float> b) {
  return bit_cast<Vec<uint32_t>>(_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
template <bool kLow>
FASTATTN_INLINE Vec<uint32_t> pack_row_at(const float* p) {
  Vec<float> a = load(p), b = load(p + 16);
  return kLow ? pack_row(low_part(a), low_part(b)) : pack_row(a, b);
}
inline void to_left(const Matrix<bf16>& m, int64_t rows) {
  for (int64_t c = 0; c < m.columns; c += 32)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t x = c * m.rows + r * 32;
      store(reinterpret_cast<uint32_t*>(m.left + x), pack_row_at<false>(m.natural + x));
    }
}
template <bool kLow>
inline void to_right(const Matrix<bf16>& m, int64_t rows, bf16* to) {
  for (int64_t c = 0; c < m.columns; c += 32)
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t v = 0; v < 32; v += 16) {
        const int64_t x = c * m.rows + r * 32;
        Vec<float> a = load(m.natural + x + v), b = load(m.natural + x + 32 + v);
        if (kLow) a = low_part(a), b = low_part(b);
        store_pair(to + x + 2 * v, a, b);
      }
}
template <bool kLow>
inline void to_right_t(const Matrix<bf16>& m, int64_t rows, bf16* to) {
  for (int64_t c = 0; c < m.columns; c += 32)
    for (int64_t r = 0; r < rows; r += 16) {
      Vec<uint32_t> words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) words[i] = pack_row_at<kLow>(m.natural + c * m.rows + (r + i) * 32);
      transpose<uint32_t>(words);
      uint32_t* panel = reinterpret_cast<uint32_t*>(to + r / 32 * 32 * m.columns + c * 32) + r % 32;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store(panel + i * 32, words[i]);
    }
}
inline void to_left_t(const Matrix<bf16>& m, int64_t rows, const float* scale) {
  for (int64_t c = 0; c < m.columns; c += 16)
    for (int64_t r = 0; r < rows; r += 32) {
      Vec<uint32_t> words[16];
      const float* from = m.natural + (c / 32 * m.rows + r) * 32 + c % 32;
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        Vec<float> a = load(from + 64 * i), b = load(from + 64 * i + 32);
        if (scale) a = scaled<float>(a, scale[r + 2 * i]), b = scaled<float>(b, scale[r + 2 * i + 1]);
        words[i] = pack_pair(a, b);
      }
      transpose<uint32_t>(words);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        store(reinterpret_cast<uint32_t*>(m.left_t + r * m.columns + (c + i) * 32), words[i]);
    }
}
#endif

// to [columns, rows] = natural^T
template <class E>
inline void transpose_panels(const E* from, int64_t from_rows, int64_t rows, int64_t columns, E* to,
                             int64_t to_rows) {
  constexpr int N = kLanes<E>;
  constexpr int64_t kWide = PlainPanels<E>::kPanel;
  for (int64_t c = 0; c < columns; c += N)
    for (int64_t r = 0; r < rows; r += N) {
      Vec<E> block[N];
      const E* source = from + (c / kWide * from_rows + r) * kWide + c % kWide;
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) block[i] = load(source + i * kWide);
      transpose<E>(block);
      E* target = to + (r / kWide * to_rows + c) * kWide + r % kWide;
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) store(target + i * kWide, block[i]);
    }
}

// The wanted forms but kLeftT of the first `rows` rows of `natural`.
template <class T>
inline void form(const Matrix<T>& m, int64_t rows, int forms) {
  if constexpr (kPairs<T>) {
    if (forms & kLeft) to_left(m, rows);
    if (forms & kRight) to_right<false>(m, rows, m.right);
    if (forms & kRightT) to_right_t<false>(m, rows, m.right_t);
    if ((forms & kRight) && m.right_low) to_right<true>(m, rows, m.right_low);
    if ((forms & kRightT) && m.right_t_low) to_right_t<true>(m, rows, m.right_t_low);
  } else {
    if (forms & kRightT) transpose_panels(m.natural, m.rows, rows, m.columns, m.right_t, m.columns);
  }
}
// The transpose as left operand, its columns (the rows of `natural`) scaled. Plain: kRightT comes first.
template <class T>
inline void form_left_t(const Matrix<T>& m, int64_t rows, const A<T>* scale) {
  if constexpr (kPairs<T>) {
    to_left_t(m, rows, scale);
  } else if (scale) {
    for (int64_t r = 0; r < rows; r += N<T>) {
      const V<T> factor = load(scale + r);
      for (int64_t c = 0; c < m.columns; ++c) {
        const V<T> x = load(at<T>(m.right_t, m.columns, c, r)) * factor;
        store(at<T>(m.left_t, m.columns, c, r), factor == A<T>(0) ? V<T>{} : x);
      }
    }
  }
}

// sum[c] = carry sum[c] + sum of scale[r] m[r, c]
template <class T>
inline void add_rows(const Matrix<T>& m, int64_t rows, const A<T>* scale, A<T> carry, A<T>* sum) {
  for (int64_t c = 0; c < m.columns; c += N<T>) {
    const A<T>* from = at<T>(m.natural, m.rows, 0, c);
    V<T> partial[4] = {};  // an addition takes four cycles
    for (int64_t r = 0; r < rows; r += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const V<T> x = load(from + (r + i) * kPanel<T>);
        partial[i] += scale ? scaled<A<T>>(x, scale[r + i]) : x;
      }
    const V<T> all = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    store(sum + c, carry == A<T>(0) ? all : all + load(sum + c) * carry);
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
