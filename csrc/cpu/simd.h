// Width-agnostic vectors for the CPU kernels: compiler vector extensions as wide as the instruction set that
// this translation unit is compiled for. Everything sits in an anonymous namespace inside the variant's own,
// so that no function compiled for AVX-512 can be taken by the linker for the baseline.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>  // a tenth of it
#endif

namespace fastattn::FASTATTN_ISA {
namespace {

#define FASTATTN_INLINE __attribute__((always_inline)) inline

FASTATTN_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
FASTATTN_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
FASTATTN_INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
FASTATTN_INLINE int64_t round_down(int64_t a, int64_t b) { return a / b * b; }

template <class X, class Y>
constexpr bool kSame = false;
template <class X>
constexpr bool kSame<X, X> = true;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#else
constexpr int kVectorBytes = 16;
#if defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif
#endif

template <class E>
struct VecOf {
  typedef E type __attribute__((vector_size(kVectorBytes)));
};
template <class E>
using Vec = typename VecOf<E>::type;
template <class E>
constexpr int kLanes = kVectorBytes / int(sizeof(E));

// The integer of the same width, as comparisons yield it.
template <class E>
struct IntOf {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class E>
using Int = typename IntOf<E>::type;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class E>
FASTATTN_INLINE Vec<E> load(const E* p) {
  Vec<E> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class E>
FASTATTN_INLINE void store(E* p, Vec<E> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class E>
FASTATTN_INLINE Vec<E> broadcast(E x) {
  return x - Vec<E>{};  // subtracting zero folds away: one broadcast instruction
}
template <class To, class From>
FASTATTN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// maximum(a, b): b where either is NaN, so that a NaN score replaces the running maximum (its row is NaN).
FASTATTN_INLINE Vec<float> maximum(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
FASTATTN_INLINE Vec<double> maximum(Vec<double> a, Vec<double> b) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX__)
  return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}

// minimum(a, b): b where either is NaN.
FASTATTN_INLINE Vec<float> minimum(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
FASTATTN_INLINE Vec<double> minimum(Vec<double> a, Vec<double> b) { return a < b ? a : b; }

template <class A>
FASTATTN_INLINE A reduce_add(Vec<A> v) {
  A sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += v[i];
  return sum;
}

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// 2^r. Weighted least-squares (Lawson) fits of relative error: degree 6 on [-1/2, 1/2] and on [0, 1)
// to 1.9e-9, below fp32 rounding; degree 3 on [0, 1) to 7.5e-5, far below the rounding of a bf16 weight,
// 2^-9.
FASTATTN_INLINE Vec<float> exp2_polynomial(Vec<float> r) {
  Vec<float> p = 0.00015345808218565288f * r + 0.001339993193959634f;
  p = p * r + 0.009618488977721641f;
  p = p * r + 0.05550328775211117f;
  p = p * r + 0.24022646890382265f;
  p = p * r + 0.6931472057380539f;
  return p * r + 1.0f;
}
template <int kDegree>
FASTATTN_INLINE Vec<float> exp2_fraction(Vec<float> r) {
  if constexpr (kDegree == 3) {
    Vec<float> p = 0.07802451946873212f * r + 0.22606717843490542f;
    p = p * r + 0.695833522059214f;
    return p * r + 0.999925221367028f;
  } else {
    Vec<float> p = 0.00021702255184757183f * r + 0.0012439688198246925f;
    p = p * r + 0.009678840917270714f;
    p = p * r + 0.05548334204932394f;
    p = p * r + 0.24022983625074645f;
    p = p * r + 0.6931469838439399f;
    return p * r + 1.0000000018556738f;
  }
}
// Taylor series of 2^r to the 13th power: the remainder on [-1/2, 1/2] is 4e-18.
FASTATTN_INLINE Vec<double> exp2_polynomial(Vec<double> r) {
  constexpr int kDegree = 13;
  double coefficient[kDegree + 1] = {1};
  for (int i = 1; i <= kDegree; ++i) coefficient[i] = coefficient[i - 1] * kLn2 / i;
  Vec<double> p = coefficient[kDegree] + Vec<double>{};
  for (int i = kDegree - 1; i >= 0; --i) p = p * r + coefficient[i];
  return p;
}

// 2^x for x <= 0 (and slightly above): exactly 0 below the smallest normal number and at -inf, so that no
// denormal enters the products that follow (they cost a microcode assist each); NaN stays NaN.
template <int kDegree = 6>
FASTATTN_INLINE Vec<float> exp2(Vec<float> x) {
#if defined(__AVX512F__)
  // scalef takes the floor of its exponent and reduce what is above it, so that no rounded exponent is
  // formed.
  Vec<float> p = exp2_fraction<kDegree>((Vec<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF));
  if constexpr (kDegree < 6) return (Vec<float>)_mm512_scalef_ps((__m512)p, (__m512)x);
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
  return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  Vec<float> t = x + kMagic;
  Vec<float> p = exp2_polynomial(x - (t - kMagic));
  Vec<int32_t> bits = bit_cast<Vec<int32_t>>(p) + (bit_cast<Vec<int32_t>>(t) << 23);
  Vec<float> y = bit_cast<Vec<float>>(bits);
  y = x < -126.f ? Vec<float>{} : y;
  return x == x ? y : x;
#endif
}
template <int kDegree = 13>
FASTATTN_INLINE Vec<double> exp2(Vec<double> x) {
  constexpr double kMagic = 6755399441055744.;  // 1.5 * 2^52
  Vec<double> t = x + kMagic;
  Vec<double> p = exp2_polynomial(x - (t - kMagic));
  Vec<int64_t> bits = bit_cast<Vec<int64_t>>(p) + (bit_cast<Vec<int64_t>>(t) << 52);
  Vec<double> y = bit_cast<Vec<double>>(bits);
  y = x < -1022. ? Vec<double>{} : y;
  return x == x ? y : x;
}

// e^x for any x: below the smallest normal number exactly 0 (see exp2), inf above the largest; NaN stays NaN.
// n ln(2) is subtracted in two parts, the first exact: no rounding of x log2(e) enters the result.
constexpr float kSmallestExp = -87.33654f;
FASTATTN_INLINE Vec<float> exp_remainder(Vec<float> x, Vec<float> n) {
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr double kCoefficients[] = {0.00015345808218565288, 0.001339993193959634, 0.009618488977721641,
                                      0.05550328775211117,    0.24022646890382265,  0.6931472057380539};
  auto coefficient = [&](int i) {  // of the polynomial of exp2 in x instead of x log2(e)
    double c = kCoefficients[i];
    for (int k = 6 - i; k > 0; --k) c *= kLog2e;
    return float(c);
  };
  const Vec<float> r = x - n * kLn2High - n * kLn2Low;
  Vec<float> p = coefficient(0) * r + coefficient(1);
#pragma GCC unroll 4
  for (int i = 2; i < 6; ++i) p = p * r + coefficient(i);
  return p * r + 1.f;
}
FASTATTN_INLINE Vec<float> exp(Vec<float> x) {
  constexpr float kLargest = 89.f;
  x = x > kLargest ? broadcast(kLargest) : x;
#if defined(__AVX512F__)
  const Vec<float> n =
      (Vec<float>)_mm512_roundscale_ps((__m512)(x * float(kLog2e)), _MM_FROUND_TO_NEAREST_INT);
  const Vec<float> p = exp_remainder(x, n);
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(kSmallestExp), _CMP_NLT_UQ);
  return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  constexpr float kMagic = 12582912.f;  // 1.5 * 2^23
  const Vec<float> t = maximum(Vec<float>{} - 200.f, x * float(kLog2e)) + kMagic;
  const Vec<float> p = exp_remainder(x, t - kMagic);
  // In two steps: 2^128 has no float of its own.
  const Vec<int32_t> exponent = bit_cast<Vec<int32_t>>(t) - bit_cast<int32_t>(kMagic), half = exponent >> 1;
  Vec<float> y = p * bit_cast<Vec<float>>((half + 127) << 23);
  y *= bit_cast<Vec<float>>((exponent - half + 127) << 23);
  y = x < kSmallestExp ? Vec<float>{} : y;
  return x == x ? y : x;
#endif
}
// The same for x <= 0, with fewer steps where they count; other x give anything.
FASTATTN_INLINE Vec<float> exp_nonpositive(Vec<float> x) {
#if defined(__AVX512F__)
  return exp(x);
#else
  constexpr float kMagic = 12582912.f;
  const Vec<float> t = x * float(kLog2e) + kMagic, p = exp_remainder(x, t - kMagic);
  Vec<float> y = bit_cast<Vec<float>>(bit_cast<Vec<int32_t>>(p) + (bit_cast<Vec<int32_t>>(t) << 23));
  y = x < kSmallestExp ? Vec<float>{} : y;
  return x == x ? y : x;
#endif
}
FASTATTN_INLINE Vec<double> exp(Vec<double> x) {
  constexpr double kSmallest = -708.396, kLargest = 710., kMagic = 6755399441055744.;  // 1.5 * 2^52
  constexpr double kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  x = x > kLargest ? broadcast(kLargest) : x;
  const Vec<double> t = maximum(Vec<double>{} - 1100., x * kLog2e) + kMagic, n = t - kMagic;
  const Vec<double> r = x - n * kLn2High - n * kLn2Low;
  Vec<double> p = exp2_polynomial(r * kLog2e);
  const Vec<int64_t> exponent = bit_cast<Vec<int64_t>>(t) - bit_cast<int64_t>(kMagic), half = exponent >> 1;
  Vec<double> y = p * bit_cast<Vec<double>>((half + 1023) << 52);
  y *= bit_cast<Vec<double>>((exponent - half + 1023) << 52);
  y = x < kSmallest ? Vec<double>{} : y;
  return x == x ? y : x;
}
FASTATTN_INLINE Vec<double> exp_nonpositive(Vec<double> x) { return exp(x); }

// log2 of a positive normal number; inf and NaN stay. With f in [1/sqrt(2), sqrt(2)) and s = (f - 1) / (f +
// 1), log2(f) = 2 / ln(2) * (s + s^3 / 3 + s^5 / 5 + ...), where s^2 < 0.03.
template <class A>
FASTATTN_INLINE Vec<A> log2(Vec<A> x) {
  using I = Int<A>;
  constexpr int kMantissa = sizeof(A) == 8 ? 52 : 23;
  constexpr int kTerms = sizeof(A) == 8 ? 12 : 6;
  const A kRoot = A(0.70710678118654752440);
  Vec<I> bits = bit_cast<Vec<I>>(x) - bit_cast<I>(kRoot);
  Vec<A> exponent = __builtin_convertvector(bits >> kMantissa, Vec<A>);
  Vec<A> f = bit_cast<Vec<A>>((bits & ((I(1) << kMantissa) - 1)) + bit_cast<I>(kRoot));
  Vec<A> s = (f - A(1)) / (f + A(1)), z = s * s;
  Vec<A> series{};
  for (int i = kTerms - 1; i >= 0; --i) series = series * z + A(2 * kLog2e / (2 * i + 1));
  Vec<A> result = exponent + s * series;
  return x * A(0) == A(0) ? result : x;
}

FASTATTN_INLINE Vec<float> ceil(Vec<float> x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX__)
  return (Vec<float>)_mm256_ceil_ps((__m256)x);
#else
  for (int i = 0; i < kLanes<float>; ++i) x[i] = __builtin_ceilf(x[i]);
  return x;
#endif
}
FASTATTN_INLINE Vec<double> ceil(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_ceil(x[i]);
  return x;
}
// Whether a comparison holds in any lane.
template <class M>
FASTATTN_INLINE bool any(M mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  uint64_t halves[sizeof(M) / 8];
  __builtin_memcpy(halves, &mask, sizeof mask);
  uint64_t bits = 0;
  for (uint64_t half : halves) bits |= half;
  return bits != 0;
#endif
}

// tanh, relative error 1e-7: an odd polynomial (fit of (tanh(x)/x - 1)/x^2, error 7e-10) where
// 1 - 2/(e^2x + 1) would cancel.
FASTATTN_INLINE Vec<float> tanh(Vec<float> x) {
  Vec<float> magnitude = bit_cast<Vec<float>>(bit_cast<Vec<int32_t>>(x) & 0x7fffffff);
  Vec<float> z = x * x;
  Vec<float> q = 0.0018790355586528946f * z - 0.007861858925479569f;
  q = q * z + 0.02156094766871614f;
  q = q * z - 0.05391884071349218f;
  q = q * z + 0.13332964779365764f;
  q = q * z - 0.3333332412527541f;
  Vec<float> small = x + x * z * q;
  Vec<float> e = exp2<6>(magnitude * float(-2 * kLog2e));
  Vec<float> large = (1.f - e) / (1.f + e);
  large = x < 0.f ? -large : large;
  return magnitude < 0.7f ? small : large;
}
FASTATTN_INLINE Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

// --- half precision ---------------------------------------------------------------------------------------

FASTATTN_INLINE float to_float(float x) { return x; }
FASTATTN_INLINE double to_float(double x) { return x; }
FASTATTN_INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
// From a float16 and to it by integers, one number or a vector of them: F is float or Vec<float>.
template <class F, class Bits>
FASTATTN_INLINE F f16_widen(Bits half) {
  // Shift exponent and mantissa into place; the multiplication by 2^112 rebiases and makes subnormals normal.
  const Bits magnitude = (half & 0x7fffu) << 13;
  const Bits finite = bit_cast<Bits>(F(bit_cast<F>(magnitude) * 0x1p112f));
  const Bits wide = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : finite;
  return bit_cast<F>(Bits(wide | (half & 0x8000u) << 16));
}
template <class Bits, class F>
FASTATTN_INLINE Bits f16_narrow(F x) {
  const Bits u = bit_cast<Bits>(x) & 0x7fffffffu, sign = (bit_cast<Bits>(x) >> 16) & 0x8000u;
  const Bits normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  // The FPU aligns subnormals and rounds them where 1/2 is added (ulp 2^-24).
  const Bits subnormal = bit_cast<Bits>(F(bit_cast<F>(u) + 0.5f)) - 0x3f000000u;
  Bits half = u < 0x38800000u ? subnormal : normal;
  half = u >= 0x477ff000u ? Bits{} + 0x7c00u : half;  // 65520 and above round to infinity
  half = u > 0x7f800000u ? Bits{} + 0x7e00u : half;
  return half | sign;
}
FASTATTN_INLINE float to_float(f16 x) { return f16_widen<float>(uint32_t(x.bits)); }
FASTATTN_INLINE uint16_t f16_round(float x) { return uint16_t(f16_narrow<uint32_t>(x)); }

FASTATTN_INLINE Vec<uint32_t> bf16_bits(
    Vec<float> x) {  // round to nearest even; the result sits in the low halves
  Vec<uint32_t> u = bit_cast<Vec<uint32_t>>(x);
  Vec<uint32_t> rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (x != x) ? Vec<uint32_t>{} + 0x7fc0u : rounded;
}

FASTATTN_INLINE void round_store(float* p, Vec<float> v) { store(p, v); }
FASTATTN_INLINE void round_store(double* p, Vec<double> v) { store(p, v); }
typedef uint16_t Half16 __attribute__((vector_size(kVectorBytes / 2)));
FASTATTN_INLINE void round_store(bf16* p, Vec<float> v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  __builtin_memcpy(p, &h, sizeof h);
#else
  Half16 h = __builtin_convertvector(bf16_bits(v), Half16);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}
#if defined(__AVX512BF16__)
// Two vectors as pairs of bf16: (p0[0], p1[0]), (p0[1], p1[1]), ...
FASTATTN_INLINE Vec<uint32_t> pack_pair(Vec<float> p0, Vec<float> p1) {
  // Rounding half up by integers and merging words takes half the time of vcvtne2ps2bf16 and a permutation.
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i b0 = _mm512_add_epi32((__m512i)p0, half), b1 = _mm512_add_epi32((__m512i)p1, half);
  return (Vec<uint32_t>)_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(b0, 16), b1);
}
FASTATTN_INLINE void store_pair(bf16* to, Vec<float> p0, Vec<float> p1) {
  _mm512_storeu_si512(to, (__m512i)pack_pair(p0, p1));
}
#endif
FASTATTN_INLINE void round_store(f16* p, Vec<float> v) {
#if defined(__AVX512F__)
  __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &h, sizeof h);
#elif defined(__F16C__)
  __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(p, &h, sizeof h);
#else
  Half16 h = __builtin_convertvector(f16_narrow<Vec<uint32_t>>(v), Half16);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}

FASTATTN_INLINE Vec<float> load_wide(const float* p) { return load(p); }
FASTATTN_INLINE Vec<double> load_wide(const double* p) { return load(p); }
FASTATTN_INLINE Vec<float> load_wide(const bf16* p) {
#if defined(__AVX512F__)
  __m256i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#elif defined(__AVX2__)
  __m128i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#else
  Half16 h;
  __builtin_memcpy(&h, p, sizeof h);
  return bit_cast<Vec<float>>(__builtin_convertvector(h, Vec<uint32_t>) << 16);
#endif
}
FASTATTN_INLINE Vec<float> load_wide(const f16* p) {
#if defined(__AVX512F__)
  __m256i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec<float>)_mm512_cvtph_ps(h);
#elif defined(__F16C__)
  __m128i h;
  __builtin_memcpy(&h, p, sizeof h);
  return (Vec<float>)_mm256_cvtph_ps(h);
#else
  Half16 h;
  __builtin_memcpy(&h, p, sizeof h);
  return f16_widen<Vec<float>>(__builtin_convertvector(h, Vec<uint32_t>));
#endif
}

#if defined(__AVX512F__)
// The first `count` elements of a vector, fewer than it has; the others are 0, or not written.
FASTATTN_INLINE Vec<float> load_part(const float* p, int64_t count) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
FASTATTN_INLINE Vec<double> load_part(const double* p, int64_t count) {
  return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
}
FASTATTN_INLINE Vec<float> load_part(const bf16* p, int64_t count) {
  const __m256i h = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
  return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
FASTATTN_INLINE Vec<float> load_part(const f16* p, int64_t count) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p));
}
FASTATTN_INLINE void store_part(float* p, int64_t count, Vec<float> v) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
}
FASTATTN_INLINE void store_part(double* p, int64_t count, Vec<double> v) {
  _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), (__m512d)v);
}
template <class T>
FASTATTN_INLINE void store_part(T* p, int64_t count, Vec<float> v) {
  T buffer[kLanes<float>];
  round_store(buffer, v);
  __m256i h;
  __builtin_memcpy(&h, buffer, sizeof h);
  _mm256_mask_storeu_epi16(p, __mmask16((1u << count) - 1), h);
}
#elif defined(__AVX2__)
FASTATTN_INLINE Vec<float> load_part(const float* p, int64_t count) {
  const Vec<int32_t> lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (Vec<float>)_mm256_maskload_ps(p, (__m256i)(lane < int32_t(count)));
}
FASTATTN_INLINE Vec<double> load_part(const double* p, int64_t count) {
  const Vec<int64_t> lane = {0, 1, 2, 3};
  return (Vec<double>)_mm256_maskload_pd(p, (__m256i)(lane < count));
}
#endif
#if defined(__AVX512F__)
template <class T>
constexpr bool kLoadsParts = true;
#elif defined(__AVX2__)
template <class T>
constexpr bool kLoadsParts = sizeof(T) >= 4;
#else
template <class T>
constexpr bool kLoadsParts = false;
#endif

// One vector of a row of `count` elements that may be strided or end inside the vector; missing
// elements are 0.
template <class A, class T>
FASTATTN_INLINE Vec<A> load_row(const T* p, int64_t stride, int64_t count) {
  constexpr int N = kLanes<A>;
  if (stride == 1 && count >= N) return load_wide(p);
  if constexpr (kLoadsParts<T>)
    if (stride == 1) return load_part(p, max(count, 0));
  T buffer[N];
  std::memset(buffer, 0, sizeof buffer);
  int64_t n = count < N ? count : N;
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
  return load_wide(buffer);
}
template <class A, class T>
FASTATTN_INLINE void store_row(T* p, int64_t stride, int64_t count, Vec<A> v) {
  constexpr int N = kLanes<A>;
  if (stride == 1 && count >= N) return round_store(p, v);
#if defined(__AVX512F__)
  if (stride == 1) return store_part(p, max(count, 0), v);
#endif
  T buffer[N];
  round_store(buffer, v);
  int64_t n = count < N ? count : N;
  for (int64_t i = 0; i < n; ++i) p[i * stride] = buffer[i];
}

// Bit i says whether m[i * stride] is other than 0, for `count` bytes of at most 32; the other bits are 0.
FASTATTN_INLINE uint32_t nonzero_bits(const uint8_t* m, int64_t stride, int64_t count) {
#if defined(__AVX512BW__)
  if (stride == 1) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << count) - 1), m);
    return _mm256_test_epi8_mask(bytes, bytes);
  }
#endif
  uint8_t buffer[32];
  if (stride != 1 || count < 32) {
    std::memset(buffer, 0, sizeof buffer);
    for (int64_t i = 0; i < count; ++i) buffer[i] = m[i * stride];
    m = buffer;
  }
#if defined(__SSE2__)
  auto zeros = [m](int at) {
    __m128i bytes;
    __builtin_memcpy(&bytes, m + at, sizeof bytes);
    return uint32_t(_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128())));
  };
  return ~(zeros(0) | zeros(16) << 16);
#else
  uint32_t bits = 0;
  for (int i = 0; i < 32; i += 8) {
    constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
    uint64_t bytes;
    __builtin_memcpy(&bytes, m + i, sizeof bytes);
    bytes = ((((bytes & kLow) + kLow) | bytes) & ~kLow) >> 7;   // 1 for each that is not 0
    bits |= uint32_t((bytes * 0x0102040810204080) >> 56) << i;  // gathers them in the top byte
  }
  return bits;
#endif
}

// --- transposition ----------------------------------------------------------------------------------------

// One butterfly: exchanges the off-diagonal blocks of size kStep of rows i and i + kStep.
template <int kStep, class V, int... I>
FASTATTN_INLINE void exchange(V& low, V& high, std::integer_sequence<int, I...>) {
  constexpr int N = sizeof...(I);
  V a = __builtin_shufflevector(low, high, ((I & kStep) ? N + I - kStep : I)...);
  V b = __builtin_shufflevector(low, high, ((I & kStep) ? N + I : I + kStep)...);
  low = a;
  high = b;
}
template <int kStep, class E>
FASTATTN_INLINE void transpose_steps(Vec<E> (&rows)[kLanes<E>]) {
  constexpr int N = kLanes<E>;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    if (!(i & kStep)) exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, N>{});
  if constexpr (kStep > 1) transpose_steps<kStep / 2, E>(rows);
}
// rows[i][j] <-> rows[j][i]
template <class E>
FASTATTN_INLINE void transpose(Vec<E> (&rows)[kLanes<E>]) {
  transpose_steps<kLanes<E> / 2, E>(rows);
}
template <int kStep, class E, class F>
FASTATTN_INLINE Vec<E> reduce_steps(Vec<E> (&rows)[kLanes<E>], F&& join) {
#pragma GCC unroll 16
  for (int i = 0; i < kStep; ++i) {
    exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kLanes<E>>{});
    rows[i] = join(rows[i], rows[i + kStep]);
  }
  if constexpr (kStep > 1)
    return reduce_steps<kStep / 2, E>(rows, join);
  else
    return rows[0];
}
// Lane i of the result is the sum of the lanes of rows[i], or what else `join` makes of two vectors of them.
template <class E, class F>
FASTATTN_INLINE Vec<E> reduce_rows(Vec<E> (&rows)[kLanes<E>], F&& join) {
  return reduce_steps<kLanes<E> / 2, E>(rows, join);
}
template <class E>
FASTATTN_INLINE Vec<E> reduce_rows(Vec<E> (&rows)[kLanes<E>]) {
  return reduce_rows<E>(rows, [](Vec<E> a, Vec<E> b) __attribute__((always_inline)) { return a + b; });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
