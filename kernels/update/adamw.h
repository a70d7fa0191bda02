// AdamW: torch.optim.AdamW (single-tensor, fp32, CPU), rounding by rounding. body.h includes it.
//
// Invariant: each rounding is torch's, fused multiply-adds included (kernels/README.md).
#pragma once

#include "state.h"

namespace {

using ratel::AdamWScalars;
using ratel::SquareRoot;

// One Newton step on the 14-bit estimate, as in MKL, for finite values from 0 on; NaN for infinity and NaN. Small
// values are scaled, or the residual would underflow. The estimate for 0 is finite, so its root is 0.
RATEL_INLINE Floats mkl_square_root(Floats value) {
  const auto is_small = value < all_lanes(0x1p-60f);
  const Floats scaled = is_small ? value * 0x1p64f : value;
  const Floats estimate = reciprocal_root_estimate(scaled);
  const Floats root = scaled * estimate;
  const Floats residual = multiply_add(-root, root, scaled);
  const Floats refined = multiply_add(residual, estimate * 0.5f, root);
  return is_small ? refined * 0x1p-32f : refined;
}

// Goldschmidt's iteration from the 12-bit estimate and a last correction, without fused multiply-adds, as in MKL's
// code for any x86. Roots of zero, subnormal and the largest values, which MKL treats apart, are correctly rounded.
RATEL_INLINE Floats mkl_sse_square_root(Floats value) {
  const Floats estimate = coarse_reciprocal_root_estimate(value);
  const Floats rough = value * estimate;
  const Floats half = estimate * 0.5f;
  const Floats error = 0.5f - rough * half;
  const Floats root = rough * error + rough;
  const Floats half_reciprocal = half * error + half;
  const Floats refined = (value - root * root) * half_reciprocal + root;
  const auto is_common = (value >= all_lanes(0x1p-126f)) & (value <= all_lanes(0x1.ffep+127f));
  if (__builtin_expect(sign_bits((Words)is_common) == (1u << kLanes) - 1u, 1)) {
    return refined;  // the processor's root takes as long as all of the above
  }
  return is_common ? refined : correct_square_root(value);
}

template <SquareRoot kind>
RATEL_INLINE Floats finite_square_root(Floats value) {
  switch (kind) {
    case SquareRoot::correct:
      return correct_square_root(value);
    case SquareRoot::mkl_avx512:
      return mkl_square_root(value);
    case SquareRoot::mkl_sse:
      return mkl_sse_square_root(value);
  }
}

// For every value. Roots of negative values, infinity and NaN are the processor's, which are the same in all kinds.
template <SquareRoot kind>
RATEL_INLINE Floats any_square_root(Floats value) {
  const auto is_ordinary = (value > all_lanes(0.0f)) & (value < all_lanes(__builtin_inff()));
  return is_ordinary ? finite_square_root<kind>(value) : correct_square_root(value);
}

// How the first moment is rounded: `lerp_` is torch's AdamW; `mul_` and `add_` are bitsandbytes' for 8 bit.
enum class Mean { lerp, mul_add };

// torch/optim/adam.py, _single_tensor_adam, operation by operation.
template <SquareRoot kind, Mean mean>
class AdamWRule {
 public:
  using Scalars = AdamWScalars;
  using Values = TwoValues;

  RATEL_INLINE explicit AdamWRule(const Scalars& scalars)
      : scalars_(scalars), bias_correction2_sqrt_(scalars.bias_correction2_sqrt) {}

  // The new weight, and the moments in place. For finite v. Any other v, and a NaN anywhere, gives a weight of NaN.
  RATEL_INLINE Floats quickly(Floats weight, Values* moments, Floats gradient) const {
    return updated(weight, moments, gradient, [this](Floats v) RATEL_LAMBDA {
      return bias_correction2_sqrt_.divide(finite_square_root<kind>(v)) + scalars_.epsilon;
    });
  }

  // For all values: an infinite v is legal (its weight does not move).
  RATEL_INLINE Floats carefully(Floats weight, Values* moments, Floats gradient) const {
    return updated(weight, moments, gradient, [this](Floats v) RATEL_LAMBDA {
      return any_square_root<kind>(v) / scalars_.bias_correction2_sqrt + scalars_.epsilon;
    });
  }

 private:
  template <class Denominator>
  RATEL_INLINE Floats updated(Floats weight, Values* moments, Floats raw_gradient, Denominator denominator) const {
    const Floats gradient = raw_gradient * scalars_.gradient_scale;
    const Floats decayed = weight * scalars_.decay_factor;
    moments->m = next_m(moments->m, gradient);
    // mul_, then addcmul_, which torch's build contracts.
    moments->v = multiply_add(gradient * scalars_.one_minus_beta2, gradient, moments->v * scalars_.beta2);
    return decayed + moments->m * scalars_.negative_step_size / denominator(moments->v);
  }

  RATEL_INLINE Floats next_m(Floats m, Floats gradient) const {
    if (mean == Mean::mul_add) {
      return multiply_add(gradient, all_lanes(scalars_.one_minus_beta1), m * scalars_.beta1);
    }
    return lerp(m, gradient, scalars_.one_minus_beta1);
  }

  const Scalars scalars_;
  const Divisor bias_correction2_sqrt_;
};

// Call `call` with a rule's type, a null pointer to it.
template <Mean mean, class Call>
RATEL_INLINE void with_adamw(const AdamWScalars& scalars, Call call) {
  switch (scalars.square_root) {
    case SquareRoot::correct:
      return call(static_cast<AdamWRule<SquareRoot::correct, mean>*>(nullptr));
    case SquareRoot::mkl_avx512:
      return call(static_cast<AdamWRule<SquareRoot::mkl_avx512, mean>*>(nullptr));
    case SquareRoot::mkl_sse:
      return call(static_cast<AdamWRule<SquareRoot::mkl_sse, mean>*>(nullptr));
  }
}

}  // namespace
