// Lion (Chen et al., 2023, arXiv 2302.06675, algorithm 2), as its authors wrote it for torch. body.h includes it.
//
// Invariant: each rounding is that of torch's operations, on fp32 tensors on the CPU, fused multiply-adds included.
#pragma once

#include "state.h"

namespace {

using ratel::LionScalars;

class LionRule {
 public:
  using Scalars = LionScalars;
  using Values = OneValue;

  RATEL_INLINE explicit LionRule(const Scalars& scalars) : scalars_(scalars) {}

  RATEL_INLINE Floats quickly(Floats weight, Values* moments, Floats raw_gradient) const {
    const Floats gradient = raw_gradient * scalars_.gradient_scale;
    const Floats direction = moments->m * scalars_.beta1 + gradient * scalars_.one_minus_beta1;
    moments->m = multiply_add(gradient, all_lanes(scalars_.one_minus_beta2), moments->m * scalars_.beta2);
    return weight * scalars_.decay_factor + sign_of(direction) * scalars_.negative_learning_rate;
  }

  RATEL_INLINE Floats carefully(Floats weight, Values* moments, Floats raw_gradient) const {
    return quickly(weight, moments, raw_gradient);
  }

 private:
  // As torch's sign, which is 0 for 0, but NaN for NaN: torch's is 0, and hides what went wrong.
  static RATEL_INLINE Floats sign_of(Floats floats) {
    const Floats one = as_floats((as_words(floats) & 0x80000000u) | 0x3f800000u);
    const Floats nonzero = floats == floats ? one : floats;
    return floats == 0.0f ? Floats{} : nonzero;
  }

  const Scalars scalars_;
};

}  // namespace
