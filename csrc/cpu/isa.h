// The instruction-set variants of the CPU kernels and the choice between them at run time.
#pragma once
#include <cstddef>

namespace fastattn {

// One entry per compiled variant, weakest first; the order is that of the table in setup.py.
struct Isa {
  const char* name;
  bool supported;  // by this processor and this operating system
};

struct IsaList {
  const Isa* data;
  size_t size;
};

IsaList isas();

// Index into isas() of the variant that runs: the strongest supported one, capped by the environment variable
// FASTATTN_CPU_ISA, which is read once. An operator that would gain nothing from it has none of its own there
// and runs the one before. Throws std::invalid_argument if it names no instruction set.
size_t chosen_isa();

}  // namespace fastattn
