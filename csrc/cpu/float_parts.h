// Products of fp32 on tiles of bf16. A float is the exact sum of three bf16, each of which has eight of its
// 24 bits, and a product of two floats is that of their parts but for what lies beyond the 24th bit:
//
//   a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0) + less than 2^-23 |a b|
//
// Six multiplications of tiles take a third of the time of one by vectors, and sums are in fp32 either way.
// Parts below the smallest normal number count as zero, so that floats and products below 2^-110 lose bits.
//
// Operands hold pairs along K as in the format Pair, and pair i of 32 elements is (i, i + 16):
//   A  [M][3][K]         rows `ld` apart
//   B  [K/2][3][N][2]
// The other parts of an infinity or NaN are zero. On tiles an infinity meets the zeros of other numbers, so
// that sums with one are formed without them.
#pragma once
#include "gemm.h"

namespace fastattn::FASTATTN_ISA {
namespace {

#if defined(__AMX_BF16__)
// Pairs (a[i], b[i]) of each part.
struct PartsOfPairs {
  Vec<uint32_t> part[3];
};
// Clears `finite` where a number is not.
FASTATTN_INLINE PartsOfPairs split(Vec<float> a, Vec<float> b, bool& finite) {
  using Bits = Vec<uint32_t>;
  constexpr uint32_t kHigh = 0xffff0000u;
  PartsOfPairs pairs;
  auto pair = [](Bits x, Bits y) { return (x >> 16) | (y & kHigh); };
  Vec<float> a0 = bit_cast<Vec<float>>(bit_cast<Bits>(a) & kHigh);
  Vec<float> b0 = bit_cast<Vec<float>>(bit_cast<Bits>(b) & kHigh);
  Vec<float> a1 = a - a0, b1 = b - b0;
  pairs.part[0] = pair(bit_cast<Bits>(a), bit_cast<Bits>(b));
  if (__builtin_expect(_mm512_cmp_ps_mask((__m512)a1, (__m512)b1, _CMP_UNORD_Q), 0)) {
    finite = false;
    const Vec<float> quiet_a = a == a ? a0 : a + a, quiet_b = b == b ? b0 : b + b;  // or NaN may become inf
    pairs.part[0] = pair(bit_cast<Bits>(quiet_a), bit_cast<Bits>(quiet_b));
    a1 = a1 == a1 ? a1 : Vec<float>{}, b1 = b1 == b1 ? b1 : Vec<float>{};
  }
  pairs.part[1] = pair(bit_cast<Bits>(a1), bit_cast<Bits>(b1));
  const Vec<float> a2 = a1 - bit_cast<Vec<float>>(bit_cast<Bits>(a1) & kHigh);
  const Vec<float> b2 = b1 - bit_cast<Vec<float>>(bit_cast<Bits>(b1) & kHigh);
  pairs.part[2] = pair(bit_cast<Bits>(a2), bit_cast<Bits>(b2));
  return pairs;
}
// The parts `distance` elements apart.
FASTATTN_INLINE void store_parts(bf16* to, int64_t distance, const PartsOfPairs& pairs) {
#pragma GCC unroll 3
  for (int part = 0; part < 3; ++part)
    store(reinterpret_cast<uint32_t*>(to + part * distance), pairs.part[part]);
}

struct Parts {
  using Element = bf16;
  using Accumulator = float;
  static constexpr int kStep = 2;
  static constexpr int kParts = 3;
  static constexpr int kDepth = 32;
  static constexpr int kRows = 16;
  using Configuration = TileConfiguration;
  static constexpr int64_t kWide = kColumns * kLanes<float>;

  // Tiles 4-5 hold a part of A, 6-7 of B.
  // between() is called after every multiplication of parts, of which there are six for 32 elements of K.
  template <int MT, int NT, class F>
  static FASTATTN_INLINE void tiles(int64_t K, const bf16* a, int64_t ld, const bf16* b, int64_t columns,
                                    float* c, int64_t ldc, bool accumulate, F&& between) {
    const int64_t sa = ld * 2, sb = columns * kParts * 4;
    const int64_t next_a = ld / kParts, next_b = columns * 2;
    begin_tiles<MT, NT>(c, ldc, accumulate);
    auto load_a = [&](int part) __attribute__((always_inline)) {
      _tile_loadd(4, a + part * next_a, sa);
      if constexpr (MT > 1) _tile_loadd(5, a + 16 * ld + part * next_a, sa);
    };
    auto load_b = [&](int part) __attribute__((always_inline)) {
      _tile_loadd(6, b + part * next_b, sb);
      if constexpr (NT > 1) _tile_loadd(7, b + part * next_b + 32, sb);
    };
    auto multiply = [&]() __attribute__((always_inline)) {
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (NT > 1) _tile_dpbf16ps(1, 4, 7);
      if constexpr (MT > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (MT > 1 && NT > 1) _tile_dpbf16ps(3, 5, 7);
      between();
    };
    for (int64_t k = 0; k < K; k += 32, a += 32, b += 16 * kParts * next_b) {
      load_a(0);
      load_b(2);
      multiply();
      load_b(1);
      multiply();
      load_a(1);
      multiply();
      load_b(0);
      multiply();
      load_a(2);
      multiply();
      load_a(0);
      multiply();
    }
    end_tiles<MT, NT>(c, ldc);
  }
  // A block of up to 32 x 32.
  template <class F>
  static FASTATTN_INLINE void block(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t ld, const bf16* b,
                                    int64_t columns, float* c, int64_t ldc, bool accumulate, F&& between) {
    auto nothing = [] {};
    if (M > 16)
      N > 16 ? tiles<2, 2>(K, a, ld, b, columns, c, ldc, accumulate, between)
             : tiles<2, 1>(K, a, ld, b, columns, c, ldc, accumulate, nothing);
    else
      N > 16 ? tiles<1, 2>(K, a, ld, b, columns, c, ldc, accumulate, nothing)
             : tiles<1, 1>(K, a, ld, b, columns, c, ldc, accumulate, nothing);
  }
  // c + A B of one row of A and 16 columns, without tiles.
  static Vec<float> by_vectors(int64_t K, const bf16* a, int64_t ld, const bf16* b, int64_t columns,
                               Vec<float> c) {
    for (int64_t k = 0; k < K; k += 2) {
      float left[2] = {};
      Vec<float> right[2] = {};
      for (int part = 0; part < kParts; ++part) {
        const bf16* pair = a + part * (ld / kParts) + k;
        left[0] += to_float(pair[0]), left[1] += to_float(pair[1]);
        const auto words = load(reinterpret_cast<const uint32_t*>(b + (k / 2 * kParts + part) * 2 * columns));
        right[0] += bit_cast<Vec<float>>(words << 16);
        right[1] += bit_cast<Vec<float>>(words & 0xffff0000u);
      }
      c += left[0] * right[0];
      c += left[1] * right[1];
    }
    return c;
  }
  // `block` where operands hold infinities or NaN: what becomes NaN is formed again.
  __attribute__((noinline)) static void block_of_any(int64_t M, int64_t N, int64_t K, const bf16* a,
                                                     int64_t ld, const bf16* b, int64_t columns, float* c,
                                                     int64_t ldc, bool accumulate) {
    Vec<float> before[32][2] = {};
    for (int64_t m = 0; accumulate && m < min(M, 32); ++m)
      for (int64_t n = 0; n < min(N, 32); n += 16) before[m][n / 16] = load(c + m * ldc + n);
    block(M, N, K, a, ld, b, columns, c, ldc, accumulate, [] {});
    for (int64_t m = 0; m < min(M, 32); ++m)
      for (int64_t n = 0; n < min(N, 32); n += 16) {
        const Vec<float> sum = load(c + m * ldc + n);
        if (!any(sum != sum)) continue;
        const Vec<float> again = by_vectors(K, a + m * ld, ld, b + n * 2, columns, before[m][n / 16]);
        store(c + m * ldc + n, sum == sum ? sum : again);
      }
  }
  static void gemm(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t ld, const bf16* b, float* c,
                   int64_t ldc, bool accumulate, bool finite) {
    for (int64_t n = 0; n < N; n += 32)
      for (int64_t m = 0; m < M; m += 32) {
        float* to = c + m * ldc + n;
        if (finite)
          block(M - m, N - n, K, a + m * ld, ld, b + n * 2, N, to, ldc, accumulate, [] {});
        else
          block_of_any(M - m, N - n, K, a + m * ld, ld, b + n * 2, N, to, ldc, accumulate);
      }
  }

  template <int NV = kColumns>
  static void scores(int64_t M, int64_t K, const bf16* a, int64_t ld, const bf16* b, float* c, Ahead*,
                     bool finite) {
    static_assert(NV == kColumns);
    gemm(M, kWide, K, a, ld, b, c, kWide, false, finite);
  }
  template <int NV = kColumns>
  static void outputs(int64_t M, int64_t K, const bf16* a, int64_t ld, const bf16* b, float* c, Ahead*,
                      bool finite) {
    static_assert(NV == kColumns);
    gemm(M, kWide, K, a, ld, b, c, kWide, true, finite);
  }
  // The same, and what vectors have to do meanwhile: unit(0) to unit(units - 1), begun between
  // multiplications. Behind all of those the reorder buffer would not reach them.
  template <class F>
  static FASTATTN_INLINE void outputs_beside(int64_t M, int64_t K, const bf16* a, int64_t ld, const bf16* b,
                                             float* c, bool finite, int64_t units, F&& unit) {
    const int64_t turns = (M + 15) / 32 * (K / 32) * 6;
    int64_t done = 0, due = 0;
    if (finite)
      for (int64_t m = 0; m < M; m += 32)
        block(M - m, kWide, K, a + m * ld, ld, b, kWide, c + m * kWide, kWide, true,
              [&]() __attribute__((always_inline)) {
                for (due += units; due >= turns; due -= turns) unit(done++);
              });
    else
      gemm(M, kWide, K, a, ld, b, c, kWide, true, false);
    for (; done < units; ++done) unit(done);
  }
  static void keys(int64_t M, int64_t, int64_t N, const bf16* a, const bf16* b, float* c, bool finite) {
    gemm(M, N, kWide, a, kWide * kParts, b, c, N, true, finite);
  }
};
#endif

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
