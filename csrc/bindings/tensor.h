// Between torch::stable::Tensor and the plain structs of csrc/cpu. An op call on small inputs costs a few
// microseconds, most of it in calls through the stable ABI: shapes are read once and outputs are allocated
// directly.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>

#include "huge_pages.h"
#include "parallel.h"
#include "view.h"

namespace fastattn {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

struct TorchDType {
  DType dtype;
  int32_t code;
};

inline const std::array<TorchDType, 5>& torch_dtypes() {
  static const std::array<TorchDType, 5> table{{{DType::f32, aoti_torch_dtype_float32()},
                                                {DType::f64, aoti_torch_dtype_float64()},
                                                {DType::bf16, aoti_torch_dtype_bfloat16()},
                                                {DType::f16, aoti_torch_dtype_float16()},
                                                {DType::boolean, aoti_torch_dtype_bool()}}};
  return table;
}

inline const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float32", "float64", "bfloat16", "float16", "bool"};
  return names[static_cast<int>(dtype)];
}

inline int32_t code_of(DType dtype) { return torch_dtypes()[static_cast<int>(dtype)].code; }

inline int32_t dtype_code(const Tensor& tensor) {
  int32_t code;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

inline DType dtype_of(const char* name, const Tensor& tensor) {
  const int32_t code = dtype_code(tensor);
  for (const TorchDType& known : torch_dtypes())
    if (known.code == code) return known.dtype;
  STD_TORCH_CHECK(false, name, " must be float32, float64, bfloat16, float16 or bool");
}

// The kernels read memory by strides. The dispatcher lets nothing but dense CPU tensors pass, but common
// calls go around it. Wrappers, tensors of zeros that are never written, and those whose storage was freed
// have no memory.
inline void* data_of(const char* name, const Tensor& tensor) {
  static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
  int32_t device, layout;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  STD_TORCH_CHECK(device == cpu && layout == strided, name, " must be a dense tensor on the CPU");
  void* data = tensor.data_ptr();
  STD_TORCH_CHECK(data || tensor.numel() == 0, name, " must be a plain tensor with memory of its own");
  return data;
}

// A tensor's metadata, read once; valid while the tensor lives.
struct Array {
  const char* name;
  int64_t dim = 0;
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
  DType dtype = DType::f32;
  void* data = nullptr;

  Array(const char* name, const Tensor& tensor) : name(name), data(data_of(name, tensor)) {
    const auto sizes = tensor.sizes();
    dim = int64_t(sizes.size());
    size = sizes.data();
    stride = tensor.strides().data();
    dtype = dtype_of(name, tensor);
  }

  std::string shape() const {
    std::string text = "(";
    for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(size[i]);
    return text + ")";
  }

  // Every dimension as expected.
  const Array& check_shape(std::initializer_list<int64_t> expected) const {
    if (dim != int64_t(expected.size()) || !std::equal(expected.begin(), expected.end(), size))
      refuse_shape(expected, "");
    return *this;
  }
  // The view that broadcasts to `expected`: a dimension may be 1, or missing in front.
  View broadcast(std::initializer_list<int64_t> expected) const {
    View v{data, dtype, {0, 0, 0, 0}};
    const int64_t missing = int64_t(expected.size()) - dim;
    bool ok = missing >= 0;
    for (int64_t i = 0; ok && i < dim; ++i) {
      ok = size[i] == 1 || size[i] == expected.begin()[missing + i];
      v.stride[missing + i] = size[i] == 1 ? 0 : stride[i];
    }
    if (!ok) refuse_shape(expected, " or 1 in any dimension");
    return v;
  }

  void refuse_shape(std::initializer_list<int64_t> expected, const char* also) const {
    std::string text;
    for (int64_t e : expected) text += (text.empty() ? "" : ", ") + std::to_string(e);
    STD_TORCH_CHECK(false, name, " must have shape (", text, ")", also, ", got ", shape());
  }

  const Array& check_dtype(std::initializer_list<DType> allowed) const {
    if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) {
      std::string text;
      for (DType d : allowed) text += (text.empty() ? "" : " or ") + std::string(name_of(d));
      STD_TORCH_CHECK(false, name, " must be ", text, ", got ", name_of(dtype));
    }
    return *this;
  }

  // Strides of dimensions of size 1 become 0, so that they broadcast. Dimension i is number place[i] of the
  // view.
  View view(const std::array<int, 4>& place = {0, 1, 2, 3}) const {
    View v{data, dtype, {0, 0, 0, 0}};
    for (int64_t i = 0; i < dim; ++i) v.stride[place[i]] = size[i] == 1 ? 0 : stride[i];
    return v;
  }
};

// Kernels ignore the stride of a dimension of size 1 in inputs, but rely on unit strides where they write.
inline View output_view(const Tensor& tensor) {
  View v{tensor.data_ptr(), dtype_of("output", tensor), {0, 0, 0, 0}};
  const auto strides = tensor.strides();
  std::copy(strides.begin(), strides.end(), v.stride);
  return v;
}

// A dense tensor that nothing has been written to.
inline Tensor in_huge_pages(Tensor tensor) {
  const int64_t elements = tensor.numel();
  if (uint64_t(elements) >= kWorthHugePages / 8)
    wish_for_huge_pages(tensor.data_ptr(),
                        uint64_t(elements) * aoti_torch_dtype_element_size(dtype_code(tensor)));
  return tensor;
}

inline Tensor allocate_strided(int64_t dim, const int64_t* size, const int64_t* stride, int32_t dtype) {
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(dim, size, stride, dtype, aoti_torch_device_type_cpu(), 0, &handle) !=
      AOTI_TORCH_SUCCESS) {
    std::string shape;
    for (int64_t i = 0; i < dim; ++i) shape += (i ? ", " : "") + std::to_string(size[i]);
    STD_TORCH_CHECK(false, "there is no memory for a tensor of shape (", shape, ")");
  }
  return in_huge_pages(Tensor(handle));
}

inline Tensor allocate(DType dtype, std::initializer_list<int64_t> size, const int64_t* stride) {
  return allocate_strided(int64_t(size.size()), size.begin(), stride, code_of(dtype));
}

inline Tensor allocate_contiguous(DType dtype, const int64_t* size, int64_t dim) {
  int64_t stride[4];
  for (int64_t i = dim - 1, next = 1; i >= 0; --i) {
    stride[i] = next;
    next *= std::max<int64_t>(size[i], 1);
  }
  return allocate_strided(dim, size, stride, code_of(dtype));
}

inline Tensor allocate_contiguous(DType dtype, std::initializer_list<int64_t> size) {
  return allocate_contiguous(dtype, size.begin(), int64_t(size.size()));
}

// As empty_like, but without a call through the dispatcher where that only copies a contiguous shape.
inline Tensor allocate_like(const Tensor& tensor) {
  if (!tensor.is_contiguous()) return in_huge_pages(torch::stable::empty_like(tensor));
  return allocate_strided(tensor.dim(), tensor.sizes().data(), tensor.strides().data(), dtype_code(tensor));
}

// Converts where needed; a tensor that already has the dtype is returned as it is.
inline Tensor to_dtype(const Tensor& tensor, DType dtype) {
  if (dtype_code(tensor) == code_of(dtype)) return tensor;
  constexpr torch::headeronly::ScalarType types[] = {
      torch::headeronly::ScalarType::Float, torch::headeronly::ScalarType::Double,
      torch::headeronly::ScalarType::BFloat16, torch::headeronly::ScalarType::Half,
      torch::headeronly::ScalarType::Bool};
  return torch::stable::to(tensor, types[static_cast<int>(dtype)]);
}

// What a call's dropout pattern is drawn from; 0 where nothing is dropped.
inline uint64_t read_seed(const MaybeTensor& dropout_seed, double dropout_p) {
  STD_TORCH_CHECK(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1], got ", dropout_p);
  if (dropout_p == 0) return 0;
  STD_TORCH_CHECK(
      dropout_seed && dropout_seed->numel() == 1 && dtype_code(*dropout_seed) == aoti_torch_dtype_int64(),
      "dropout_seed must be an int64 tensor with one element when dropout_p > 0");
  return uint64_t(*static_cast<const int64_t*>(data_of("dropout_seed", *dropout_seed)));
}

// Workers on torch's own threads. An exception is carried over the C boundary of the stable ABI, which would
// otherwise reduce it to an error code: std::bad_alloc stays a MemoryError in Python.
inline void run_workers(int workers, void (*body)(void* context, int worker), void* context) {
  struct Job {
    void (*body)(void*, int);
    void* context;
    std::atomic_flag failed;
    std::exception_ptr error;
  } job{body, context, {}, nullptr};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, workers, 1,
      [](int64_t begin, int64_t end, void* opaque) {
        Job& job = *static_cast<Job*>(opaque);
        try {
          for (int64_t worker = begin; worker < end; ++worker) job.body(job.context, int(worker));
        } catch (...) {
          if (!job.failed.test_and_set()) job.error = std::current_exception();
        }
      },
      &job));
  if (job.error) std::rethrow_exception(job.error);
}

inline Parallel torch_parallel() { return {int(torch::stable::get_num_threads()), run_workers}; }

}  // namespace fastattn
