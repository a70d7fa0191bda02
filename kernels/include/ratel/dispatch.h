// Which instruction set's kernels run.
//
// For: bindings/. Invariant: a choice that cannot be honoured is an error, never a silent fallback.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ratel/kernels.h"

namespace ratel {

// Narrowest first.
std::vector<const Kernels*> supported_kernels();

// The kernels of that name; without a name RATEL_FORCE_ISA's if set, else the widest that this processor runs.
// Throws std::invalid_argument for an unknown or unsupported name.
const Kernels& select_kernels(const std::optional<std::string>& isa);

// The square root that torch's MKL is expected to use on this processor.
SquareRoot native_square_root();

}  // namespace ratel
