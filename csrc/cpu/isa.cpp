#include "isa.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "build_config.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace fastattn {
namespace {

#if defined(__x86_64__)

// Every level includes the ones before it. A name stays valid as a cap where the compiler could not build its
// level.
constexpr const char* known_isas[] = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};

// cpuid is asked directly: __builtin_cpu_supports knows AVX512-BF16 and AMX only in recent compilers.
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Registers(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

constexpr bool all_set(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

// Which register files the operating system saves on a context switch (XCR0).
uint64_t saved_state() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux grants the 8 KiB of tile state to a process only when asked.
bool request_amx() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

int processor_level() {
  constexpr unsigned OSXSAVE = 1u << 27, AVX = 1u << 28, FMA = 1u << 12, F16C = 1u << 29;
  constexpr unsigned AVX2 = 1u << 5;
  constexpr unsigned AVX512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  constexpr unsigned AVX512_BF16 = 1u << 5, AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  constexpr uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;

  if (!all_set(Registers(1, 0).ecx, OSXSAVE | AVX | FMA | F16C)) return 0;
  const Registers features(7, 0), more_features(7, 1);
  const uint64_t saved = saved_state();
  if (!all_set(saved, YMM) || !all_set(features.ebx, AVX2)) return 0;
  if (!all_set(saved, ZMM) || !all_set(features.ebx, AVX512)) return 1;
  if (features.eax < 1 || !all_set(more_features.eax, AVX512_BF16)) return 2;
  if (!all_set(saved, TILES) || !all_set(features.edx, AMX_BF16 | AMX_TILE) || !request_amx()) return 3;
  return 4;
}

#elif defined(__aarch64__)

constexpr const char* known_isas[] = {"neon"};
int processor_level() { return 0; }  // NEON is part of the architecture

#else

constexpr const char* known_isas[] = {"baseline"};
int processor_level() { return 0; }

#endif

constexpr int known_count = sizeof(known_isas) / sizeof(known_isas[0]);

int level_of(const char* name) {
  for (int level = 0; level < known_count; ++level)
    if (std::strcmp(name, known_isas[level]) == 0) return level;
  return -1;
}

int cap() {
  const char* name = std::getenv("FASTATTN_CPU_ISA");
  if (!name || !*name) return known_count - 1;
  const int level = level_of(name);
  if (level < 0) {
    std::string message = std::string("FASTATTN_CPU_ISA=") + name + " names no instruction set; valid are";
    for (int i = 0; i < known_count; ++i) message += (i ? ", " : " ") + std::string(known_isas[i]);
    throw std::invalid_argument(message);
  }
  return level;
}

size_t choose() {
  const IsaList list = isas();
  const int limit = cap();
  size_t best = 0;
  for (size_t i = 0; i < list.size; ++i)
    if (list.data[i].supported && level_of(list.data[i].name) <= limit) best = i;
  return best;
}

}  // namespace

IsaList isas() {
  static const int level = processor_level();
#define FASTATTN_ENTRY(name) {#name, level_of(#name) <= level},
  static const Isa list[] = {FASTATTN_ISAS(FASTATTN_ENTRY)};
#undef FASTATTN_ENTRY
  return {list, sizeof(list) / sizeof(list[0])};
}

size_t chosen_isa() {
  static const size_t chosen = choose();
  return chosen;
}

}  // namespace fastattn
