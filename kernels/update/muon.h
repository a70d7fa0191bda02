// Muon: torch.optim.Muon (fp32, CPU) once the direction is known, operation by operation. body.h includes it.
//
// The direction is made of a whole matrix, by matrix products (ratel_cli/schedule/muon.py). Invariant: each
// rounding is torch's, fused multiply-adds included.
#pragma once

#include "state.h"

namespace {

using ratel::MuonScalars;

class MuonRule {
 public:
  using Scalars = MuonScalars;
  using Values = DirectedValue;

  RATEL_INLINE explicit MuonRule(const Scalars& scalars) : scalars_(scalars) {}

  RATEL_INLINE Floats quickly(Floats weight, Values* moments, Floats raw_gradient) const {
    moments->m = lerp(moments->m, raw_gradient * scalars_.gradient_scale, scalars_.one_minus_momentum);
    return multiply_add(moments->direction, all_lanes(scalars_.negative_step_size), weight * scalars_.decay_factor);
  }

  RATEL_INLINE Floats carefully(Floats weight, Values* moments, Floats raw_gradient) const {
    return quickly(weight, moments, raw_gradient);
  }

 private:
  const Scalars scalars_;
};

}  // namespace
