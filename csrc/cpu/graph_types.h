// The dtypes of the graph kernels: T is that of features, A what sums are made in, N the lanes of a vector.
#pragma once
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using A = typename AccumulatorOf<T>::type;
template <class T>
constexpr int N = kLanes<A<T>>;

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

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
