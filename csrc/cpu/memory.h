// Memory of the CPU kernels: scratch of one thread, and buffers that the tasks of one call share.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "huge_pages.h"
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// Scratch memory of one thread. What does not fit in the first block goes to further ones; the next scope
// then starts with one block for all. A small block stays with its thread between tasks and calls, a large
// one is returned.
class Arena {
 public:
  ~Arena() { release(); }
  template <class E>
  E* take(int64_t count) {
    size_t bytes = size_t(round_up(count * int64_t(sizeof(E)), 64));
    if (used_ + bytes > capacity_) grow(bytes);
    char* p = base_ + used_;
    used_ += bytes;
    total_ += bytes;
    return reinterpret_cast<E*>(p);
  }
  template <class E>
  E* take_zero(int64_t count) {
    E* p = take<E>(count);
    std::memset(static_cast<void*>(p), 0, size_t(count) * sizeof(E));
    return p;
  }
  // Everything taken since construction of the scope goes back when it ends.
  struct Scope {
    Arena& arena;
    explicit Scope(Arena& a) : arena(a) {}
    ~Scope() { arena.reset(); }
  };

 private:
  static constexpr size_t kKeep = size_t(4) << 20;
  struct Block {
    Block* previous;
  };
  struct alignas(64) Header : Block {};
  void grow(size_t bytes) {
    const size_t least = bytes + sizeof(Header);
    size_t capacity = last_ ? 2 * capacity_ : expected_;
    if (capacity > 2 * kKeep || capacity < least) capacity = least;
    void* memory = std::aligned_alloc(64, size_t(round_up(int64_t(capacity), 64)));
    if (!memory) throw std::bad_alloc();
    auto* block = static_cast<Block*>(memory);
    block->previous = last_;
    last_ = block;
    base_ = static_cast<char*>(memory);
    capacity_ = capacity;
    used_ = sizeof(Header);
  }
  void reset() {
    if (last_ && (last_->previous || capacity_ > kKeep)) {
      if (total_ <= kKeep) expected_ = total_ + sizeof(Header);
      release();
    }
    used_ = last_ ? sizeof(Header) : 0;
    total_ = 0;
  }
  void release() {
    while (last_) {
      Block* previous = last_->previous;
      std::free(last_);
      last_ = previous;
    }
    base_ = nullptr;
    capacity_ = used_ = 0;
  }
  Block* last_ = nullptr;
  char* base_ = nullptr;
  size_t capacity_ = 0, used_ = 0;     // of the last block
  size_t total_ = 0;                   // taken in this scope, from all blocks
  size_t expected_ = size_t(1) << 16;  // what a scope takes
};

inline Arena& thread_arena() {
  static thread_local Arena arena;
  return arena;
}

// Memory that the tasks of one call share.
template <class E>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(count ? static_cast<E*>(std::malloc(size_t(count) * sizeof(E))) : nullptr) {
    if (count && !data_) throw std::bad_alloc();
    wish_for_huge_pages(data_, uint64_t(count) * sizeof(E));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  E* data() const { return data_; }

 private:
  E* data_;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
