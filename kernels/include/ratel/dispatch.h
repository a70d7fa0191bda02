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

// The kernels of a rule.
inline const RuleKernels<AdamW>& rule_of(const Kernels& kernels, AdamW) { return kernels.adamw; }

inline const RuleKernels<AdamW8Bit>& rule_of(const Kernels& kernels, AdamW8Bit) { return kernels.adamw_8bit; }

inline const RuleKernels<Lion>& rule_of(const Kernels& kernels, Lion) { return kernels.lion; }

inline const RuleKernels<Sgd>& rule_of(const Kernels& kernels, Sgd) { return kernels.sgd; }

inline const RuleKernels<SgdMomentum>& rule_of(const Kernels& kernels, SgdMomentum) { return kernels.sgd_momentum; }

inline const RuleKernels<Muon>& rule_of(const Kernels& kernels, Muon) { return kernels.muon; }

// Those of them for a state's layout.
template <class Rule>
const LayoutKernels<typename Rule::Bfloat16, typename Rule::Scalars>& layout_of(const RuleKernels<Rule>& kernels,
                                                                                const typename Rule::Bfloat16&) {
  return kernels.bfloat16;
}

template <class Rule>
const LayoutKernels<typename Rule::Stochastic, typename Rule::Scalars>& layout_of(const RuleKernels<Rule>& kernels,
                                                                                  const typename Rule::Stochastic&) {
  return kernels.stochastic;
}

template <class Rule>
const LayoutKernels<typename Rule::Float32, typename Rule::Scalars>& layout_of(const RuleKernels<Rule>& kernels,
                                                                               const typename Rule::Float32&) {
  return kernels.float32;
}

template <class Rule>
const LayoutKernels<typename Rule::Float16, typename Rule::Scalars>& layout_of(const RuleKernels<Rule>& kernels,
                                                                               const typename Rule::Float16&) {
  return kernels.float16;
}

}  // namespace ratel
