// From an operator to its kernels: a header and a line per operator.
#include <initializer_list>
#include <string_view>
#include <vector>

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

// The variants up to the chosen instruction set, strongest first. They are listed weakest first; not every
// operator has one for each instruction set, but all have the weakest.
template <class Kernels>
std::vector<const Kernels*> supported(std::initializer_list<Variant<Kernels>> variants) {
  std::vector<const Kernels*> found;
  for (const Variant<Kernels>& variant : variants)
    for (size_t i = 0; i <= chosen_isa(); ++i)
      if (std::string_view(variant.isa) == isas().data[i].name) found.insert(found.begin(), &variant.kernels);
  return found;
}
template <class Kernels, class Call>
const Kernels& first_that_suits(const std::vector<const Kernels*>& kernels, const Call& call) {
  for (const Kernels* candidate : kernels)
    if (candidate->suits(call)) return *candidate;
  return *kernels.back();
}

}  // namespace

// Every variant defines its table in a namespace named after its instruction set; setup.py lists them.
#define FASTATTN_DECLARE(name, isa)                                            \
  namespace isa {                                                              \
  extern const decltype(kernels_of(&fastattn::name##_kernels)) name##_kernels; \
  }
#define FASTATTN_VARIANT(name, isa) Variant{#isa, isa::name##_kernels},
#define FASTATTN_SUPPORTED(name) supported({FASTATTN_VARIANTS_##name(FASTATTN_VARIANT)})
#define FASTATTN_OPERATOR(name)                                       \
  FASTATTN_VARIANTS_##name(FASTATTN_DECLARE);                         \
  auto name##_kernels() -> decltype(fastattn::name##_kernels()) {     \
    static const auto& strongest = *FASTATTN_SUPPORTED(name).front(); \
    return strongest;                                                 \
  }
// Where it depends on the call which variant is the best.
#define FASTATTN_OPERATOR_OF(name, Call)                                       \
  FASTATTN_VARIANTS_##name(FASTATTN_DECLARE);                                  \
  auto name##_kernels(Call call) -> decltype(fastattn::name##_kernels(call)) { \
    static const auto kernels = FASTATTN_SUPPORTED(name);                      \
    return first_that_suits(kernels, call);                                    \
  }

FASTATTN_OPERATOR(aggregation)
FASTATTN_OPERATOR_OF(attention, const AttentionParams&)
FASTATTN_OPERATOR(graph)
FASTATTN_OPERATOR(graph_attention)
FASTATTN_OPERATOR_OF(linear_attention, DType)
FASTATTN_OPERATOR(roof)

}  // namespace fastattn
