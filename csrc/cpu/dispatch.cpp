// From an operator to its kernels: a header and a line per operator.
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "aggregation.h"
#include "attention.h"
#include "build_config.h"
#include "graph.h"
#include "graph_attention.h"
#include "isa.h"
#include "linear_attention.h"
#include "roof.h"

namespace fastattn {
namespace {

template <class Kernels>
struct Variant {
  const char* isa;
  const Kernels& kernels;
};
template <class Kernels>
Variant(const char*, const Kernels&) -> Variant<Kernels>;  // older clang does not see it by itself

template <class Kernels, class... Arguments>
Kernels kernels_of(const Kernels& (*)(Arguments...));  // only its type

template <class Kernels>
bool bf16_only(const Kernels& kernels) {
  if constexpr (requires { kernels.bf16_only; }) return kernels.bf16_only;
  return false;
}

// The strongest variant up to the chosen instruction set. Both are listed weakest first; not every operator
// has a variant for each, but all have the weakest.
template <class Kernels>
const Kernels& strongest(std::initializer_list<Variant<Kernels>> variants, bool bf16) {
  const Variant<Kernels>* best = variants.begin();
  for (size_t i = 0; i <= chosen_isa(); ++i)
    for (const Variant<Kernels>& variant : variants)
      if (std::string_view(variant.isa) == isas().data[i].name && (bf16 || !bf16_only(variant.kernels)))
        best = &variant;
  return best->kernels;
}

}  // namespace

// Every variant defines its table in a namespace named after its instruction set; setup.py lists them.
#define FASTATTN_DECLARE(name, isa)                                            \
  namespace isa {                                                              \
  extern const decltype(kernels_of(&fastattn::name##_kernels)) name##_kernels; \
  }
#define FASTATTN_VARIANT(name, isa) Variant{#isa, isa::name##_kernels},
#define FASTATTN_STRONGEST(name, ...) strongest({FASTATTN_VARIANTS_##name(FASTATTN_VARIANT)}, __VA_ARGS__)
#define FASTATTN_OPERATOR(name)                                   \
  FASTATTN_VARIANTS_##name(FASTATTN_DECLARE);                     \
  auto name##_kernels() -> decltype(fastattn::name##_kernels()) { \
    static auto& chosen = FASTATTN_STRONGEST(name, false);        \
    return chosen;                                                \
  }
#define FASTATTN_OPERATOR_OF_DTYPE(name)                                                                 \
  FASTATTN_VARIANTS_##name(FASTATTN_DECLARE);                                                            \
  auto name##_kernels(DType dtype) -> decltype(fastattn::name##_kernels(dtype)) {                        \
    static auto &of_bf16 = FASTATTN_STRONGEST(name, true), &of_others = FASTATTN_STRONGEST(name, false); \
    return dtype == DType::bf16 ? of_bf16 : of_others;                                                   \
  }

FASTATTN_OPERATOR(aggregation)
FASTATTN_OPERATOR_OF_DTYPE(attention)
FASTATTN_OPERATOR(graph)
FASTATTN_OPERATOR(graph_attention)
FASTATTN_OPERATOR_OF_DTYPE(linear_attention)
FASTATTN_OPERATOR(roof)

}  // namespace fastattn
