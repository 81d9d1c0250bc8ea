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

// f(T{})
template <class F>
void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::bf16:
      return f(bf16{});
    default:
      return f(f16{});
  }
}
// The same for the dtypes whose elements are summed in A.
template <class A, class F>
FASTATTN_INLINE void with_dtype_of(DType dtype, F&& f) {
  if constexpr (kSame<A, double>) {
    f(double{});
  } else {
    switch (dtype) {
      case DType::f32:
        return f(float{});
      case DType::bf16:
        return f(bf16{});
      default:
        return f(f16{});
    }
  }
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
