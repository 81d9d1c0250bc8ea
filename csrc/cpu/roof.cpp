// Peak rates of the multiply-add instructions that the attention kernels are built from.
#include "roof.h"

#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// A fused multiply-add takes 4 cycles and two start per cycle, vdpbf16ps needs a little more: 12 accumulators
// hide that. More registers than that are taken where there are some, because real micro-kernels do the same.
constexpr int kAccumulators = kVectorRegisters * 3 / 4;

// The accumulators start out different, or the compiler would see that they stay equal and keep one. `step`
// depends on the accumulator, so nothing can leave the loop.
template <class Step>
FASTATTN_INLINE void spin(int64_t iterations, Step&& step) {
  Vec<float> accumulator[kAccumulators];
#pragma GCC unroll 32
  for (int i = 0; i < kAccumulators; ++i) accumulator[i] = broadcast(float(3 + i));
  for (int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) accumulator[i] = step(accumulator[i]);
  }
  Vec<float> sum{};
#pragma GCC unroll 32
  for (int i = 0; i < kAccumulators; ++i) sum += accumulator[i];
  [[maybe_unused]] volatile float used = reduce_add<float>(sum);
}

void spin_f32(int64_t iterations) {
  // Converges to 2 from above: neither overflow nor denormals, whatever the number of rounds.
  const Vec<float> half = broadcast(0.5f), one = broadcast(1.0f);
  spin(iterations, [&](Vec<float> x) { return x * half + one; });
}
constexpr double kF32Operations = 2.0 * kLanes<float> * kAccumulators;

#if defined(__AVX512BF16__)
void spin_bf16(int64_t iterations) {
  const __m512 one = _mm512_set1_ps(1.0f), small = _mm512_set1_ps(0.0078125f);
  const __m512bh a = _mm512_cvtne2ps_pbh(one, one), b = _mm512_cvtne2ps_pbh(small, small);
  spin(iterations, [&](Vec<float> x) { return (Vec<float>)_mm512_dpbf16_ps((__m512)x, a, b); });
}
constexpr double kBf16Operations = 2.0 * kF32Operations;
#endif

#if defined(__AMX_BF16__)
// A tile is 16 rows of 64 bytes. A product takes 52 cycles and one starts every 16: six accumulators hide it.
void spin_bf16_tile(int64_t iterations) {
  alignas(64) struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof config == 64);
  // The intrinsic of some compilers names only the first 8 bytes as operand: the other stores are dropped.
  asm volatile("ldtilecfg %0" : : "m"(config));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < iterations; ++round) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
}
constexpr double kTileOperations = 6 * 2.0 * 16 * 16 * 32;
#endif

struct Loop {
  void (*spin)(int64_t iterations);
  double operations;  // per thread and round
};

Loop loop_of(Roof kind) {
  switch (kind) {
    case Roof::f32:
      return {spin_f32, kF32Operations};
    case Roof::bf16:
#if defined(__AVX512BF16__)
      return {spin_bf16, kBf16Operations};
#endif
      break;
    case Roof::bf16_tile:
#if defined(__AMX_BF16__)
      return {spin_bf16_tile, kTileOperations};
#endif
      break;
  }
  return {nullptr, 0};
}

double run(Roof kind, int64_t iterations, const Parallel& parallel) {
  struct Context {
    Loop loop;
    int64_t iterations;
  } context{loop_of(kind), iterations};
  if (!context.loop.spin) return 0;
  parallel.run(
      parallel.threads,
      [](void* opaque, int) {
        const auto& c = *static_cast<Context*>(opaque);
        c.loop.spin(c.iterations);
      },
      &context);
  return context.loop.operations * double(iterations) * parallel.threads;
}

}  // namespace

extern const RoofKernels roof_kernels;
const RoofKernels roof_kernels{run};

}  // namespace fastattn::FASTATTN_ISA
