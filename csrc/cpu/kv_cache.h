// Appending to a cache of keys or values. A contiguous cache is one of pages as long as a sequence, each
// sequence having the page of its own number.
#pragma once
#include <algorithm>
#include <cstring>

#include "view.h"

namespace fastattn {

struct Appended {
  View cache;   // (pages, Hkv, page_size, X)
  View tokens;  // (B, Hkv, T, X)
  int64_t T, X, page_size;
};

template <class Word>
static inline void append_as(const Appended& a, int64_t b, int64_t h, int64_t length, const int64_t* pages) {
  const int64_t from_step = a.tokens.stride[3], to_step = a.cache.stride[3];
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t at = length + t, page = pages ? pages[at / a.page_size] : b;
    const Word* from = static_cast<const Word*>(a.tokens.data) + offset(a.tokens, b, h, t);
    Word* to = static_cast<Word*>(a.cache.data) + offset(a.cache, page, h, at % a.page_size);
    if (from_step == 1 && to_step == 1)
      std::memcpy(to, from, size_t(a.X) * sizeof(Word));
    else
      for (int64_t d = 0; d < a.X; ++d) to[d * to_step] = from[d * from_step];
  }
}
// Head h of the new tokens of sequence b, behind its first `length`; null pages: a contiguous cache.
static inline void append(const Appended& a, int64_t b, int64_t h, int64_t length, const int64_t* pages) {
  switch (a.cache.dtype) {
    case DType::f64:
      return append_as<uint64_t>(a, b, h, length, pages);
    case DType::f32:
      return append_as<uint32_t>(a, b, h, length, pages);
    default:
      return append_as<uint16_t>(a, b, h, length, pages);
  }
}

}  // namespace fastattn
