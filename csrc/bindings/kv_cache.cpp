// Attention over a cache of keys and values: the registered CPU op, whose schema is defined in
// fastattn/ops/kv_cache.py. Everything is checked before anything is written.
#include "kv_cache.h"

#include <limits>
#include <tuple>
#include <vector>

#include "attention.h"
#include "tensor.h"

namespace fastattn {
namespace {

// An int32 or int64 tensor of one or two dimensions.
struct Integers {
  const char* name;
  const void* data;
  bool wide;
  int64_t size[2] = {1, 1}, stride[2] = {0, 0};

  Integers(const char* name, const Tensor& tensor, int64_t dim) : name(name), data(data_of(name, tensor)) {
    const int32_t code = dtype_code(tensor);
    wide = code == aoti_torch_dtype_int64();
    STD_TORCH_CHECK(wide || code == aoti_torch_dtype_int32(), name, " must be int32 or int64");
    STD_TORCH_CHECK(tensor.dim() == dim, name, " must have ", dim, " dimensions, got ", tensor.dim());
    std::copy_n(tensor.sizes().data(), dim, size);
    std::copy_n(tensor.strides().data(), dim, stride);
  }
  int64_t operator()(int64_t i, int64_t j = 0) const {
    const int64_t at = i * stride[0] + j * stride[1];
    return wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }
};

int64_t bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Elements from the first to behind the last one, in memory.
int64_t extent(const Array& a) {
  int64_t last = 0;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.size[d] == 0) return 0;
    last += (a.size[d] - 1) * a.stride[d];
  }
  return last + 1;
}

// The dimensions in which a or b extends, widest stride first.
std::vector<int64_t> by_stride(const Array& a, const Array& b) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < a.dim; ++d)
    if (a.size[d] > 1 || b.size[d] > 1) dims.push_back(d);
  std::sort(dims.begin(), dims.end(), [&](int64_t x, int64_t y) { return a.stride[x] > a.stride[y]; });
  return dims;
}

// Whether two indices may lead to one element. Exact where each stride exceeds what all smaller ones reach.
bool overlaps_itself(const Array& a) {
  if (extent(a) == 0) return false;
  const std::vector<int64_t> dims = by_stride(a, a);
  int64_t reach = 0;
  for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
    if (a.stride[*d] <= reach) return true;
    reach += (a.size[*d] - 1) * a.stride[*d];
  }
  return false;
}

// Whether x = sum of (i - j) * stride over the dims left, for an index i of a and j of b.
bool is_distance(int64_t x, const Array& a, const Array& b, const int64_t* dim, const int64_t* end) {
  if (dim == end) return x == 0;
  const int64_t stride = a.stride[*dim], low = x >= 0 ? x / stride : -((-x + stride - 1) / stride);
  for (int64_t steps : {low, low + 1})
    if (steps > -b.size[*dim] && steps < a.size[*dim] && is_distance(x - steps * stride, a, b, dim + 1, end))
      return true;
  return false;
}

// Whether two tensors of one dtype may share an element; neither overlaps itself. Exact for equal strides, as
// of keys and values that alternate in one buffer, and otherwise as their ranges of memory are apart or not.
bool overlap(const Array& a, const Array& b) {
  const int64_t bytes = bytes_of(a.dtype), here = extent(a), there = extent(b);
  const char *x = static_cast<const char*>(a.data), *y = static_cast<const char*>(b.data);
  if (here == 0 || there == 0 || x + here * bytes <= y || y + there * bytes <= x) return false;
  const std::vector<int64_t> dims = by_stride(a, b);
  for (int64_t d : dims)
    if (a.stride[d] == 0 || a.stride[d] != b.stride[d]) return true;
  return (y - x) % bytes || is_distance((y - x) / bytes, a, b, dims.data(), dims.data() + dims.size());
}

void check_memory(const Array& key_cache, const Array& value_cache,
                  std::initializer_list<const Array*> read) {
  for (const Array* cache : {&key_cache, &value_cache})
    STD_TORCH_CHECK(!overlaps_itself(*cache), cache->name,
                    " must not overlap itself where new tokens are written to it");
  const auto check_apart = [](const Array& cache, const Array& other) {
    STD_TORCH_CHECK(!overlap(cache, other), other.name, " must not share memory with ", cache.name,
                    ", which is written to");
  };
  check_apart(key_cache, value_cache);
  for (const Array* cache : {&key_cache, &value_cache})
    for (const Array* other : read) check_apart(*cache, *other);
}

// Where the tokens of each sequence lie, after T new ones.
struct Places {
  std::vector<Sequence> sequences;
  std::vector<int64_t> pages;  // of all sequences, one behind the other

  Places(const Integers& lengths, const std::optional<Integers>& table, const Array& cache, int64_t L,
         int64_t T) {
    const int64_t B = lengths.size[0], pages_held = cache.size[0], page_size = cache.size[2];
    int64_t capacity;
    if (__builtin_mul_overflow(table ? table->size[1] : 1, page_size, &capacity))
      capacity = std::numeric_limits<int64_t>::max();
    STD_TORCH_CHECK(B == 0 || T <= capacity, table ? "block_table" : "key_cache", " has room for ", capacity,
                    " tokens of a sequence, key has ", T);
    const int64_t most = capacity - T;
    sequences.reserve(size_t(B));
    for (int64_t b = 0; b < B; ++b) {
      const int64_t length = lengths(b);
      STD_TORCH_CHECK(length >= 0 && length <= most, "cache_seqlens must be from 0 to ", most,
                      ", so that the cache holds it and ", T, " new tokens, got ", length, " at [", b, "]");
      sequences.push_back({0, 0, L, length + T});
    }
    if (!table) return;
    const auto used = [&](int64_t b) { return (sequences[size_t(b)].S + page_size - 1) / page_size; };
    int64_t all = 0;
    for (int64_t b = 0; page_size > 0 && b < B; ++b) all += used(b);
    pages.reserve(size_t(all) + 1);  // never null: that would be a contiguous cache
    for (int64_t b = 0; b < B; ++b) {
      sequences[size_t(b)].pages = pages.data() + pages.size();
      for (int64_t i = 0; page_size > 0 && i < used(b); ++i) {
        const int64_t page = (*table)(b, i);
        STD_TORCH_CHECK(page >= 0 && page < pages_held, "block_table must name pages from 0 to ",
                        pages_held - 1, " for the tokens in use, got ", page, " at [", b, ", ", i, "]");
        pages.push_back(page);
      }
    }
    if (T == 0) return;
    std::vector<bool> written(size_t(pages_held), false);
    for (const bool writing : {true, false})
      for (int64_t b = 0; b < B; ++b) {
        const Sequence& s = sequences[size_t(b)];
        const int64_t first = (s.S - T) / page_size;  // that is written to
        for (int64_t i = writing ? first : 0; i < (writing ? used(b) : first); ++i) {
          STD_TORCH_CHECK(!written[size_t(s.pages[i])],
                          "block_table must not repeat a page that new tokens are written to, got ",
                          s.pages[i], " at [", b, ", ", i, "]");
          if (writing) written[size_t(s.pages[i])] = true;
        }
      }
  }
};

std::tuple<Tensor, Tensor> attention_with_kv_cache(const Tensor& query_, const Tensor& key_cache_,
                                                   const Tensor& value_cache_, const MaybeTensor& key,
                                                   const MaybeTensor& value, const Tensor& cache_seqlens,
                                                   const MaybeTensor& block_table,
                                                   const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                                                   double scale, double softcap, int64_t window_left,
                                                   int64_t window_right, int64_t num_splits) {
  const Array query("query", query_), key_cache("key_cache", key_cache_),
      value_cache("value_cache", value_cache_);
  query.check_dtype({DType::f32, DType::f64, DType::bf16, DType::f16});
  for (const Array* array : {&query, &key_cache, &value_cache})
    STD_TORCH_CHECK(array->dim == 4, array->name, " must have 4 dimensions, got ", array->shape());
  AttentionParams p{};
  p.B = query.size[0], p.H = query.size[1], p.L = query.size[2], p.D = query.size[3];
  p.Hkv = key_cache.size[1], p.S = p.page_size = key_cache.size[2], p.Dv = value_cache.size[3];
  const int64_t held = key_cache.size[0];
  key_cache.check_dtype({query.dtype}).check_shape({block_table ? held : p.B, p.Hkv, p.S, p.D});
  value_cache.check_dtype({query.dtype}).check_shape({held, p.Hkv, p.S, p.Dv});
  STD_TORCH_CHECK(p.Hkv ? p.H % p.Hkv == 0 : p.H == 0,
                  "the caches' heads must divide the query's, got query ", query.shape(), " and key_cache ",
                  key_cache.shape());
  STD_TORCH_CHECK(bool(key) == bool(value), "key and value must be given together");
  const int64_t T = key && key->dim() == 4 ? key->size(2) : 0;

  p.query = query.view(), p.key = key_cache.view(), p.value = value_cache.view();
  if (alibi_slopes) {
    Array slopes("alibi_slopes", *alibi_slopes);
    slopes.check_dtype({query.dtype == DType::f64 ? DType::f64 : DType::f32});
    p.alibi = slopes.dim == 1
                  ? View{slopes.data, slopes.dtype, {0, slopes.check_shape({p.H}).stride[0], 0, 0}}
                  : slopes.check_shape({p.B, p.H}).view();
  }
  if (sinks)
    p.sinks = Array("sinks", *sinks).check_dtype({query.dtype, DType::f32}).check_shape({p.H}).view();
  STD_TORCH_CHECK(softcap >= 0, "softcap must not be negative, got ", softcap);
  STD_TORCH_CHECK(window_left >= -1 && window_right >= -1,
                  "window_left and window_right must be -1 or more, got ", window_left, " and ",
                  window_right);
  STD_TORCH_CHECK(num_splits >= 0, "num_splits must not be negative, got ", num_splits);
  p.scale = scale, p.softcap = softcap, p.window_left = window_left, p.window_right = window_right;
  p.lower_right = true;
  p.num_splits = num_splits;

  const Integers lengths("cache_seqlens", cache_seqlens, 1);
  std::optional<Integers> table;
  if (block_table) table.emplace("block_table", *block_table, 2);
  STD_TORCH_CHECK(lengths.size[0] == p.B && (!table || table->size[0] == p.B),
                  "cache_seqlens and block_table must have one row for each of the ", p.B, " sequences");
  Appended keys{p.key, {}, T, p.D, p.page_size}, values{p.value, {}, T, p.Dv, p.page_size};
  if (key) {
    const Array new_keys("key", *key), new_values("value", *value);
    keys.tokens = new_keys.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, T, p.D}).view();
    values.tokens = new_values.check_dtype({query.dtype}).check_shape({p.B, p.Hkv, T, p.Dv}).view();
    if (T > 0) check_memory(key_cache, value_cache, {&new_keys, &new_values, &query});
  }
  const Places places(lengths, table, key_cache, p.L, T);
  p.sequences = places.sequences.data();

  // (B, L, H, Dv) in memory: joining the heads afterwards is then a view.
  const int64_t row = std::max<int64_t>(p.Dv, 1), token = std::max<int64_t>(p.H, 1) * row;
  const int64_t stride[] = {std::max<int64_t>(p.L, 1) * token, row, token, 1};
  Tensor out = allocate(p.query.dtype, {p.B, p.H, p.L, p.Dv}, stride);
  Tensor lse = allocate_contiguous(query.dtype == DType::f64 ? DType::f64 : DType::f32, {p.B, p.H, p.L});
  p.out = output_view(out);
  p.lse = output_view(lse);
  const Parallel parallel = torch_parallel();
  if (T > 0)
    for_each_task(parallel.worth(double(p.B * p.Hkv * T) * double(p.D + p.Dv)), p.B * p.Hkv,
                  [&](int64_t task, int) {
                    const int64_t b = task / p.Hkv, h = task % p.Hkv;
                    const Sequence& s = places.sequences[size_t(b)];
                    append(keys, b, h, s.S - T, s.pages);
                    append(values, b, h, s.S - T, s.pages);
                  });
  attention_kernels(p).forward(p, parallel);
  return {out, lse};
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("attention_with_kv_cache", TORCH_BOX(&fastattn::attention_with_kv_cache));
}
