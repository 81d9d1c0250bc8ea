// The arithmetic roof of the machine: loops that multiply and add in registers and do nothing else.
// Benchmarks report the speed of a kernel as a fraction of it.
#pragma once
#include <cstdint>

#include "parallel.h"

namespace fastattn {

enum class Roof : int32_t {
  f32,        // fp32 multiply-add
  bf16,       // dot product of bf16 pairs into fp32 (vdpbf16ps)
  bf16_tile,  // product of bf16 matrix tiles into fp32 (tdpbf16ps)
};

struct RoofKernels {
  // Every thread runs `iterations` rounds of the loop; returns the operations done by all of them, a
  // multiply-add counting as two, or 0 where the instruction set lacks the instruction.
  double (*run)(Roof kind, int64_t iterations, const Parallel&);
};

// The variant for the best instruction set that this machine and FASTATTN_CPU_ISA allow (dispatch.cpp).
const RoofKernels& roof_kernels();

}  // namespace fastattn
