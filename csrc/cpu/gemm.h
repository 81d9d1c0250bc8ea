// The register-blocked products of the CPU kernels. A tile is kColumns vectors wide (its lanes are query
// rows); "panel" is a packed operand with rows of that width. The products of tiles are three:
//
//   scores   C[M, tile]  = A[M, K] B[K, tile]    A: keys or values where they lie, rows `ld` apart
//   outputs  C[M, tile] += A[M, K] B[K, tile]    A: sideways, columns `ld` apart (Plain), or transposed
//   keys     C[M, N]    += A[M, tile] B[tile, N] A: weights [keys, tile], B: query rows, C: their gradient
//
// Where keys are few, all operands have rows that lie somewhere, any distance apart, and there are two:
//
//   rows     C[M, N]     = A[M, K] B[K, N]
//   sums     C[M, N]    += A^T B                 A: [K, M], B: [K, N]
//
// A is read one scalar (or bf16 pair) broadcast at a time, so that keys and values are never repacked in
// fp32.
//
// An operand format says how products are formed:
//   Plain<E>  E in {float, double}: one FMA per element
//   Pair      bf16 pairs along K, accumulated in fp32, B as [K/2][N][2]: vdpbf16ps or AMX tiles
//   Parts     (float_parts.h) fp32 as three bf16: AMX tiles
// The last argument of a product says whether all that its operands were packed from is finite.
#pragma once
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Accumulator rows per call: as many as the registers hold beside NV operand vectors and one broadcast.
constexpr int kMaxRows = kVectorRegisters == 32 ? 14 : 6;
constexpr int kColumns = 2;  // vectors per accumulator row

struct NoConfiguration {
  NoConfiguration() {}
};
#if defined(__AMX_BF16__)
// Matrix tiles are configured once per thread and task.
struct TileConfiguration {
  TileConfiguration() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    // Some compilers' intrinsic declares only the first 8 bytes as read, and the other stores are dropped.
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  ~TileConfiguration() { _tile_release(); }
};
// Tiles 0-3 accumulate a block of MT x NT tiles.
template <int MT, int NT>
FASTATTN_INLINE void begin_tiles(const float* c, int64_t ldc, bool accumulate) {
  asm volatile("" ::: "memory");  // the intrinsics do not say that they read and write it
  if (!accumulate) {
    _tile_zero(0);
    if constexpr (NT > 1) _tile_zero(1);
    if constexpr (MT > 1) _tile_zero(2);
    if constexpr (MT > 1 && NT > 1) _tile_zero(3);
    return;
  }
  _tile_loadd(0, c, ldc * 4);
  if constexpr (NT > 1) _tile_loadd(1, c + 16, ldc * 4);
  if constexpr (MT > 1) _tile_loadd(2, c + 16 * ldc, ldc * 4);
  if constexpr (MT > 1 && NT > 1) _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
}
template <int MT, int NT>
FASTATTN_INLINE void end_tiles(float* c, int64_t ldc) {
  _tile_stored(0, c, ldc * 4);
  if constexpr (NT > 1) _tile_stored(1, c + 16, ldc * 4);
  if constexpr (MT > 1) _tile_stored(2, c + 16 * ldc, ldc * 4);
  if constexpr (MT > 1 && NT > 1) _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
  asm volatile("" ::: "memory");
}
#endif

enum class Product { scores, outputs, keys, rows, sums };

// Rows of memory that are wanted soon. Products bring them into the second-level cache while they run, one
// line per step along K, down the rows: neither a block of keys that few query rows visit nor the place of a
// result would be there in time otherwise.
class Ahead {
 public:
  void add(const void* rows, int64_t stride_bytes, int64_t count, int64_t bytes) {
    if (count > 0)
      places_[number_++] = {static_cast<const char*>(rows), stride_bytes, count, (bytes + 63) / 64};
  }
  int64_t stride() const { return places_[place_].stride; }
  // Where the lines of so many steps, stride() apart, begin; null where nothing is left to be brought.
  const char* take(int64_t steps) {
    if (place_ < number_ && taken_ == places_[place_].count * places_[place_].lines) ++place_, taken_ = 0;
    if (place_ == number_) return nullptr;
    const Place& place = places_[place_];
    const int64_t row = taken_ % place.count, line = taken_ / place.count;
    taken_ += min(steps, place.count - row);
    return place.rows + row * place.stride + line * 64;
  }

 private:
  struct Place {
    const char* rows;
    int64_t stride, count, lines;
  };
  Place places_[5];
  int number_ = 0, place_ = 0;
  int64_t taken_ = 0;  // lines of the place
};

// Calls tiles[rows - 1](first row) for M rows in equal shares: 64 rows are
// 13+13+13+13+12, never 14+14+14+14+8.
template <class F>
FASTATTN_INLINE void for_row_shares(int64_t M, F&& f) {
  const int64_t calls = (M + kMaxRows - 1) / kMaxRows;
  for (int64_t call = 0, m = 0; call < calls; ++call) {
    const int64_t rows = (M - m + calls - call - 1) / (calls - call);
    f(m, rows);
    m += rows;
  }
}

template <class E>
struct Plain {
  using Element = E;
  using Accumulator = E;
  static constexpr int kStep = 1;         // elements along K that one multiplication takes
  static constexpr int kParts = 1;        // of a number
  static constexpr int kDepth = 1;        // K must be a multiple of this
  static constexpr int kRows = 1;         // M must be a multiple of this
  using Configuration = NoConfiguration;  // what a thread needs while it computes
  static constexpr int64_t kWide = kColumns * kLanes<E>;

  // Strides that are known keep their registers free: the loop holds MR row offsets otherwise.
  template <Product kProduct, int MR, int NV, bool kAhead>
  static void tile(int64_t K, const E* a, int64_t lda, const E* b, int64_t ldb, E* c, int64_t ldc,
                   const char* ahead, int64_t step) {
    constexpr int N = kLanes<E>;
    constexpr bool kSideways = kProduct == Product::outputs || kProduct == Product::sums;
    constexpr bool kApart = kProduct == Product::scores || kProduct == Product::rows;
    const int64_t rs = kSideways ? 1 : kProduct == Product::keys ? kWide : lda;
    const int64_t cs = kSideways ? lda : 1;
    if constexpr (kProduct == Product::scores || kProduct == Product::outputs) ldb = ldc = kWide;
    Vec<E> acc[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] = kApart ? Vec<E>{} : load(c + m * ldc + v * N);
    // Rows of A whose distance is not known are addressed from three of them: with an offset for each there
    // would be more than general registers, and one that waits in a vector costs the multiplier a step.
    const E *a5 = a + 5 * rs, *a10 = a + 10 * rs;
    if constexpr (kApart && MR > 5) asm("" : "+r"(a5));
    if constexpr (kApart && MR > 10) asm("" : "+r"(a10));
    auto element = [&](int m) {
      if constexpr (!kApart) return a[m * rs];
      return m < 5 ? a[m * rs] : m < 10 ? a5[(m - 5) * rs] : a10[(m - 10) * rs];
    };
    // The rows of C behind these: a block's gradients lie in the second-level cache.
    if constexpr (kProduct == Product::keys) ahead = reinterpret_cast<const char*>(c + MR * ldc);
    auto multiply_step = [&]() __attribute__((always_inline)) {
      Vec<E> bv[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) bv[v] = load(b + v * N);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[m][v] += element(m) * bv[v];
      if constexpr (kAhead) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += step;
      }
      if constexpr (kProduct == Product::keys) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) __builtin_prefetch(ahead + v * 64, 1);
        ahead += ldc * int64_t(sizeof(E));
      }
      a += cs, a5 += cs, a10 += cs;
      b += ldb;
    };
    // Were K not known to be positive, most accumulators would go through memory before and after the loop.
    int64_t k = K;
    do {
      multiply_step();
      if (!--k) break;
      multiply_step();
    } while (--k);
    // The addresses are formed again: those of the loads would be spilled across the loop.
    if constexpr (kProduct == Product::keys) asm("" : "+r"(c), "+r"(ldc));
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) store(c + m * ldc + v * N, acc[m][v]);
  }

  using Tile = void (*)(int64_t, const E*, int64_t, const E*, int64_t, E*, int64_t, const char*, int64_t);
  template <Product kProduct, int NV, bool kAhead>
  struct Table {
    Tile rows[kMaxRows];
    constexpr Table() : rows() { fill(std::make_integer_sequence<int, kMaxRows>{}); }
    template <int... M>
    constexpr void fill(std::integer_sequence<int, M...>) {
      ((rows[M] = tile<kProduct, M + 1, NV, kAhead>), ...);
    }
  };
  template <Product kProduct, int NV = kColumns, bool kAhead = false>
  static constexpr Table<kProduct, NV, kAhead> table{};

  // The rows of A in shares, of which one begins `distance` elements behind the one before.
  template <Product kProduct, int NV>
  static void in_shares(int64_t M, int64_t K, const E* a, int64_t ld, int64_t distance, const E* b, E* c,
                        Ahead* ahead) {
    for_row_shares(M, [&](int64_t m, int64_t rows) {
      Tile tile = table<kProduct, NV>.rows[rows - 1];
      const char* from = nullptr;
      if constexpr (kSame<E, float>) {  // float64 is not worth compiling all tiles twice
        from = ahead ? ahead->take(K) : nullptr;
        if (from) tile = table<kProduct, NV, true>.rows[rows - 1];
      }
      tile(K, a + m * distance, ld, b, 0, c + m * kWide, 0, from, from ? ahead->stride() : 0);
    });
  }

  // NV vectors of the tile, from wherever b and c point to.
  template <int NV = kColumns>
  static void scores(int64_t M, int64_t K, const E* a, int64_t ld, const E* b, E* c, Ahead* ahead,
                     bool /*finite*/) {
    if (K == 0) {
      for (int64_t m = 0; m < M; ++m)
        for (int v = 0; v < NV; ++v) store(c + m * kWide + v * kLanes<E>, Vec<E>{});
      return;
    }
    in_shares<Product::scores, NV>(M, K, a, ld, ld, b, c, ahead);
  }
  template <int NV = kColumns>
  static void outputs(int64_t M, int64_t K, const E* a, int64_t ld, const E* b, E* c, Ahead* ahead,
                      bool /*finite*/) {
    if (K == 0) return;
    in_shares<Product::outputs, NV>(M, K, a, ld, 1, b, c, ahead);
  }
  // N is a multiple of the vector length, and the distance of the rows of b and c. K > 0 counts the query
  // rows.
  static void keys(int64_t M, int64_t K, int64_t N, const E* a, const E* b, E* c, bool /*finite*/) {
    for (int64_t n = 0; n < N; n += kWide) {
      const Tile* tiles = N - n < kWide ? table<Product::keys, 1>.rows : table<Product::keys>.rows;
      for_row_shares(M, [&](int64_t m, int64_t rows) {
        tiles[rows - 1](K, a + m * kWide, 0, b + n, N, c + m * N + n, N, nullptr, 0);
      });
    }
  }
  // `rows` and `sums`: K > 0. N is a multiple of the vector length, or of `rows` not less than it.
  template <Product kProduct>
  static void product(int64_t M, int64_t K, int64_t N, const E* a, int64_t lda, const E* b, int64_t ldb, E* c,
                      int64_t ldc) {
    for_row_shares(M, [&](int64_t m, int64_t rows) {
      const E* from = a + m * (kProduct == Product::rows ? lda : 1);
      auto columns = [&](const Tile* tiles, int64_t n) {
        tiles[rows - 1](K, from, lda, b + n, ldb, c + m * ldc + n, ldc, nullptr, 0);
      };
      int64_t n = 0;
      for (; n + kWide <= N; n += kWide) columns(table<kProduct>.rows, n);
      for (; n + kLanes<E> <= N; n += kLanes<E>) columns(table<kProduct, 1>.rows, n);
      if (n < N) columns(table<kProduct, 1>.rows, N - kLanes<E>);  // some of them again
    });
  }
};

#if defined(__AVX512BF16__)
struct Pair {
  using Element = bf16;
  using Accumulator = float;
  static constexpr int kStep = 2;
  static constexpr int kParts = 1;
  static constexpr int64_t kWide = kColumns * kLanes<float>;
#if defined(__AMX_BF16__)
  static constexpr int kDepth = 32;
  static constexpr int kRows = 16;
  using Configuration = TileConfiguration;
#else
  static constexpr int kDepth = 2;
  static constexpr int kRows = 1;
  using Configuration = NoConfiguration;
#endif

#if defined(__AMX_BF16__)
  // Tiles 4-5 hold A (16 rows of 32 elements), 6-7 hold B (16 pairs of 16 columns).
  template <int MT, int NT>
  static FASTATTN_INLINE void tiles(int64_t K, const bf16* a, int64_t rs, const bf16* b, int64_t ldb,
                                    float* c, int64_t ldc, bool accumulate) {
    const int64_t sa = rs * 2, sb = ldb * 4;
    begin_tiles<MT, NT>(c, ldc, accumulate);
    for (int64_t k = 0; k < K; k += 32) {
      _tile_loadd(4, a + k, sa);
      _tile_loadd(6, b + k * ldb, sb);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (NT > 1) {
        _tile_loadd(7, b + k * ldb + 32, sb);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (MT > 1) {
        _tile_loadd(5, a + 16 * rs + k, sa);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (NT > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    end_tiles<MT, NT>(c, ldc);
  }
  static void gemm(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t rs, const bf16* b, int64_t ldb,
                   float* c, int64_t ldc, bool accumulate) {
    for (int64_t n = 0; n < N; n += 32)
      for (int64_t m = 0; m < M; m += 32) {
        const bf16* am = a + m * rs;
        const bf16* bn = b + n * 2;
        float* cmn = c + m * ldc + n;
        if (M - m > 16)
          N - n > 16 ? tiles<2, 2>(K, am, rs, bn, ldb, cmn, ldc, accumulate)
                     : tiles<2, 1>(K, am, rs, bn, ldb, cmn, ldc, accumulate);
        else
          N - n > 16 ? tiles<1, 2>(K, am, rs, bn, ldb, cmn, ldc, accumulate)
                     : tiles<1, 1>(K, am, rs, bn, ldb, cmn, ldc, accumulate);
      }
  }
#else
  template <int MR, int NV>
  static void tile(int64_t K, const bf16* a, int64_t rs, const bf16* b, int64_t ldb, float* c, int64_t ldc,
                   bool accumulate) {
    constexpr int N = kLanes<float>;
    __m512 acc[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
        acc[m][v] = accumulate ? _mm512_loadu_ps(c + m * ldc + v * N) : _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
      __m512bh bv[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) bv[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * N);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        int pair;
        __builtin_memcpy(&pair, a + m * rs, sizeof pair);
        __m512bh av = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], av, bv[v]);
      }
      a += 2;
      b += ldb * 2;
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) _mm512_storeu_ps(c + m * ldc + v * N, acc[m][v]);
  }
  using Tile = void (*)(int64_t, const bf16*, int64_t, const bf16*, int64_t, float*, int64_t, bool);
  template <int NV, int... MR>
  static constexpr void fill(Tile* table, std::integer_sequence<int, MR...>) {
    ((table[MR] = tile<MR + 1, NV>), ...);
  }
  struct Table {
    Tile at[2][kMaxRows];
    constexpr Table() : at() {
      fill<1>(at[0], std::make_integer_sequence<int, kMaxRows>{});
      fill<2>(at[1], std::make_integer_sequence<int, kMaxRows>{});
    }
  };
  static const Table& table() {
    static constexpr Table all;
    return all;
  }
  static void gemm(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t rs, const bf16* b, int64_t ldb,
                   float* c, int64_t ldc, bool accumulate) {
    for (int64_t n = 0; n < N; n += kWide) {
      const Tile* tiles = table().at[N - n >= kWide];
      for_row_shares(M, [&](int64_t m, int64_t rows) {
        tiles[rows - 1](K, a + m * rs, rs, b + n * 2, ldb, c + m * ldc + n, ldc, accumulate);
      });
    }
  }
#endif

  // The whole tile always: matrix tiles gain little from less.
  template <int NV = kColumns>
  static void scores(int64_t M, int64_t K, const bf16* a, int64_t ld, const bf16* b, float* c, Ahead*,
                     bool /*finite*/) {
    static_assert(NV == kColumns);
    gemm(M, kWide, K, a, ld, b, kWide, c, kWide, false);
  }
  // `scores` of up to 16 rows, with the panel in registers if `hold` could keep it there.
  static void scores_chunk([[maybe_unused]] bool held, int64_t M, int64_t K, const bf16* a, int64_t ld,
                           const bf16* b, float* c) {
#if defined(__AMX_BF16__)
    if (held) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(2, a, ld * 2);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 2, 5);
      if (K > 32) {
        _tile_loadd(3, a + 32, ld * 2);
        _tile_dpbf16ps(0, 3, 6);
        _tile_dpbf16ps(1, 3, 7);
      }
      _tile_stored(0, c, kWide * 4);
      _tile_stored(1, c + 16, kWide * 4);
      return;
    }
#endif
    scores(M, K, a, ld, b, c, nullptr, true);
  }
  static bool hold([[maybe_unused]] int64_t K, [[maybe_unused]] const bf16* b) {
#if defined(__AMX_BF16__)
    if (K <= 64) {
      _tile_loadd(4, b, kWide * 4);
      _tile_loadd(5, b + 32, kWide * 4);
      if (K > 32) {
        _tile_loadd(6, b + 32 * kWide, kWide * 4);
        _tile_loadd(7, b + 32 * kWide + 32, kWide * 4);
      }
      return true;
    }
#endif
    return false;
  }
  template <int NV = kColumns>
  static void outputs(int64_t M, int64_t K, const bf16* a, int64_t ld, const bf16* b, float* c, Ahead*,
                      bool /*finite*/) {
    static_assert(NV == kColumns);
    gemm(M, kWide, K, a, ld, b, kWide, c, kWide, true);
  }
  // Rows behind the last are zero, up to the whole tile.
  static void keys(int64_t M, int64_t, int64_t N, const bf16* a, const bf16* b, float* c, bool /*finite*/) {
    gemm(M, N, kWide, a, kWide, b, N, c, N, true);
  }
};
#endif

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
