// Gradient descent: torch.optim.SGD (single-tensor, fp32, CPU), with momentum or without. body.h includes it.
//
// Invariant: each rounding is torch's, fused multiply-adds included.
#pragma once

#include "state.h"

namespace {

using ratel::SgdScalars;

// torch/optim/sgd.py, _single_tensor_sgd, operation by operation.
template <class Values_>
class SgdRule {
 public:
  using Scalars = SgdScalars;
  using Values = Values_;

  RATEL_INLINE explicit SgdRule(const Scalars& scalars) : scalars_(scalars) {}

  RATEL_INLINE Floats quickly(Floats weight, Values* moments, Floats raw_gradient) const {
    const Floats scaled = raw_gradient * scalars_.gradient_scale;
    const bool decays = scalars_.weight_decay != 0.0f;
    const Floats gradient = decays ? multiply_add(weight, all_lanes(scalars_.weight_decay), scaled) : scaled;
    return multiply_add(direction(gradient, moments), all_lanes(scalars_.negative_learning_rate), weight);
  }

  RATEL_INLINE Floats carefully(Floats weight, Values* moments, Floats raw_gradient) const {
    return quickly(weight, moments, raw_gradient);
  }

 private:
  RATEL_INLINE Floats direction(Floats gradient, NoValue*) const { return gradient; }

  RATEL_INLINE Floats direction(Floats gradient, OneValue* moments) const {
    moments->m = scalars_.is_first ? gradient : moments->m * scalars_.momentum + gradient;
    return scalars_.is_nesterov ? multiply_add(moments->m, all_lanes(scalars_.momentum), gradient) : moments->m;
  }

  const Scalars scalars_;
};

}  // namespace
