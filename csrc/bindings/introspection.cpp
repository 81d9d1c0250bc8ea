// fastattn._introspection: what was compiled and what is chosen. Links neither torch nor any kernel.
#include <pybind11/pybind11.h>

#include "build_config.h"
#include "isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_introspection, m) {
  m.doc() = "Instruction sets and build settings of the native CPU kernels.";
  m.def(
      "isa", [] { return fastattn::isas().data[fastattn::chosen_isa()].name; },
      "Name of the instruction set whose kernels run here: the strongest that is compiled and supported, "
      "capped by "
      "the environment variable FASTATTN_CPU_ISA (read once). Raises ValueError if that names none.");
  m.def(
      "isas",
      [] {
        py::dict result;
        const fastattn::IsaList list = fastattn::isas();
        for (size_t i = 0; i < list.size; ++i) result[list.data[i].name] = list.data[i].supported;
        return result;
      },
      "{name: whether this machine supports it} of every compiled instruction set, weakest first.");
  m.def(
      "build_info",
      [] {
        py::dict result;
        constexpr const char* entries[][2] = FASTATTN_BUILD_INFO;
        for (const auto& [name, value] : entries) result[name] = value;
        return result;
      },
      "How the native kernels were built: compiler, flags, torch headers, oldest torch they run under.");
}
