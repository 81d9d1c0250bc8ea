// A wish for memory in pages of 2 MiB.
#pragma once
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastattn {

constexpr uint64_t kHugePage = uint64_t(2) << 20;
// From here on the C library's allocator maps memory anew for each tensor. What is smaller is mostly memory
// that was used before, without faults.
constexpr uint64_t kWorthHugePages = 16 * kHugePage;

// Each page of memory that was never touched costs a fault: in pages of 4 KiB that is a third of the time of
// a sum over 2 million edges or of attention with a learnable bias. Pages of 2 MiB, where the system grants
// them, save most of it; where not, nothing changes.
inline void wish_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] uint64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < kWorthHugePages) return;
  const uint64_t start = reinterpret_cast<uint64_t>(memory);
  const uint64_t from = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uint64_t to = (start + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

// Has the calling thread fetch those pages from the system. Threads that fetch them side by side get others
// than those freed last, and in a virtual machine whose host takes free memory back these cost many times as
// much.
inline void touch_huge_pages(void* memory, uint64_t bytes) {
  if (bytes < kWorthHugePages) return;
  for (uint64_t at = 0; at < bytes; at += kHugePage) static_cast<volatile char*>(memory)[at] = 0;
}

}  // namespace fastattn
