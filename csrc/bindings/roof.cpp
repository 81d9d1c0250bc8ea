// fastattn::roof: the peak rate of the machine's multiply-add instructions, for benchmarks.
#include "roof.h"

#include <string>

#include "tensor.h"

namespace fastattn {
namespace {

// Operations done; the caller takes the time. "bf16" and "bf16_tile" give 0 where the instruction is missing.
double roof(std::string kind, int64_t iterations) {
  constexpr const char* kinds[] = {"fp32", "bf16", "bf16_tile"};
  STD_TORCH_CHECK(iterations >= 0, "iterations must be at least 0, got ", iterations);
  for (int i = 0; i < 3; ++i)
    if (kind == kinds[i]) return roof_kernels().run(static_cast<Roof>(i), iterations, torch_parallel());
  STD_TORCH_CHECK(false, "kind must be fp32, bf16 or bf16_tile, got ", kind);
}

}  // namespace
}  // namespace fastattn

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn, m) { m.def("roof(str kind, int iterations) -> float"); }

STABLE_TORCH_LIBRARY_IMPL(fastattn, CompositeExplicitAutograd, m) {
  m.impl("roof", TORCH_BOX(&fastattn::roof));
}
