// Whether a mask says what is_causal says: then half of the work can be left out.
#pragma once
#include "attention.h"
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// U: an unsigned integer as wide as the mask's elements; `hidden` is the element that hides, `sign` the bits
// that do not keep an element from being zero.
template <class U>
inline int causality_of(const AttentionMask& m, U hidden, U sign) {
  const U* data = static_cast<const U*>(m.mask.data);
  const int64_t stride = m.mask.stride[3];
  U biased = 0;
  for (int64_t b = 0; b < m.B; ++b)
    for (int64_t h = 0; h < m.H; ++h)
      for (int64_t i = 0; i < m.L; ++i) {
        const U* row = data + offset(m.mask, b, h, i);
        const int64_t future = min(i + 1, m.S);
        U shown = 0;
        if (stride == 1) {
          for (int64_t j = future; j < m.S; ++j) shown |= U(row[j] ^ hidden);
          for (int64_t j = 0; j < future; ++j) biased |= row[j];
        } else {
          for (int64_t j = future; j < m.S; ++j) shown |= U(row[j * stride] ^ hidden);
          for (int64_t j = 0; j < future; ++j) biased |= row[j * stride];
        }
        if (shown) return 0;
      }
  return biased & U(~sign) ? 1 : 2;
}

inline int causality(const AttentionMask& m) {
  switch (m.mask.dtype) {
    case DType::boolean:
      return causality_of<uint8_t>(m, 1, 0);
    case DType::f64:
      return causality_of<uint64_t>(m, uint64_t(0xfff) << 52, uint64_t(1) << 63);
    case DType::f32:
      return causality_of<uint32_t>(m, 0xff800000u, 0x80000000u);
    case DType::bf16:
      return causality_of<uint16_t>(m, 0xff80u, 0x8000u);
    default:
      return causality_of<uint16_t>(m, 0xfc00u, 0x8000u);
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
