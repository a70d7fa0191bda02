// Which instruction set's kernels run.
//
// Invariant: a choice that cannot be honoured is an error, never a silent fallback.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ratel/kernels.h"

namespace ratel {

// All that this processor runs, narrowest first.
std::vector<const Kernels*> supported_kernels();

// The kernels of the instruction set `isa`; without a name, of RATEL_FORCE_ISA if that is set, else of the widest that
// this processor runs.
// Throws std::invalid_argument for an unknown or unsupported name.
const Kernels& select_kernels(const std::optional<std::string>& isa);

// The square root that torch's MKL is expected to use on this processor.
SquareRoot native_square_root();

// The kernels for a state's layout.
inline const LayoutKernels<Bfloat16State>& layout_of(const Kernels& kernels, const Bfloat16State&) {
  return kernels.bfloat16;
}

inline const LayoutKernels<Float32State>& layout_of(const Kernels& kernels, const Float32State&) {
  return kernels.float32;
}

inline const LayoutKernels<Float16State>& layout_of(const Kernels& kernels, const Float16State&) {
  return kernels.float16;
}

}  // namespace ratel
