// Bounds of packed sequences, read once and checked: kernels go by these numbers and not by the tensor, which
// another thread may write to.
#pragma once
#include <vector>

#include "tensor.h"

namespace fastattn {

inline std::vector<int64_t> read_bounds(const char* name, const Tensor& tensor, int64_t total) {
  const int32_t code = dtype_code(tensor);
  STD_TORCH_CHECK(code == aoti_torch_dtype_int32() || code == aoti_torch_dtype_int64(), name,
                  " must be int32 or int64");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) >= 1, name,
                  " must have one dimension and at least one element");
  const int64_t count = tensor.size(0), step = tensor.stride(0);
  const void* data = data_of(name, tensor);
  std::vector<int64_t> bounds(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    bounds[size_t(i)] = code == aoti_torch_dtype_int32() ? static_cast<const int32_t*>(data)[i * step]
                                                         : static_cast<const int64_t*>(data)[i * step];
  STD_TORCH_CHECK(bounds.front() == 0, name, " must start at 0, got ", bounds.front());
  for (size_t i = 1; i < bounds.size(); ++i)
    STD_TORCH_CHECK(bounds[i] >= bounds[i - 1], name, " must not decrease, got ", bounds[i], " after ",
                    bounds[i - 1]);
  STD_TORCH_CHECK(bounds.back() == total, name, " must end at the number of tokens ", total, ", got ",
                  bounds.back());
  return bounds;
}

}  // namespace fastattn
