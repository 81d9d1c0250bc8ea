// From a dtype at run time to a type.
#pragma once
#include "simd.h"
#include "view.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// What elements of type T are summed in.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};

constexpr int64_t size_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : dtype == DType::boolean ? 1 : 2;
}

// f(S{}) for a tensor beside T, which products and sums are made of. Half precision has none of its own, but
// for bf16 where T is that: it becomes float as it is read.
template <class T, class F>
FASTATTN_INLINE void with_dtype_beside(DType dtype, F&& f) {
  if constexpr (!kSame<T, float>) {
    f(T{});
  } else {
    if (dtype == DType::f32) return f(float{});
    if (dtype == DType::bf16) return f(bf16{});
    f(f16{});
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
