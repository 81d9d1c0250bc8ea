// Tensors as the CPU kernels see them: raw pointers, sizes and element strides. Nothing here knows torch.
#pragma once
#include <cstdint>

namespace fastattn {

enum class DType : int32_t { f32, f64, bf16, f16, boolean };

// A tensor of up to four dimensions. Strides count elements and may be zero (broadcast) or negative-free
// arbitrary values; `data` is null where an optional tensor is absent.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[4] = {0, 0, 0, 0};
};

__attribute__((always_inline)) static inline int64_t offset(const View& v, int64_t i0, int64_t i1 = 0,
                                                            int64_t i2 = 0, int64_t i3 = 0) {
  return i0 * v.stride[0] + i1 * v.stride[1] + i2 * v.stride[2] + i3 * v.stride[3];
}

}  // namespace fastattn
