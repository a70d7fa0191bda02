// Exact division by one number without the divider, for instruction sets with a fused multiply-add.
//
// It is included after multiply_add. It leaves the divider free for AdamW's other division, which then, with the memory
// traffic, fills the time that two divisions would take (AVX-512: 16 cycles for each 16 elements).
#pragma once

namespace {

// A reciprocal in two parts gives the quotient to little more than half an ulp. Markstein's step (the exact remainder
// times the correctly rounded reciprocal) then rounds it correctly. That holds while nothing underflows: dividends are
// square roots (0 or above 2^-75), and bindings/module.cpp checks that the divisor is between 2^-30 and 2^30. An
// infinite dividend gives NaN.
class Divisor {
 public:
  explicit Divisor(float divisor) : divisor_(all_lanes(divisor)), reciprocal_(all_lanes(1.0f / divisor)) {
    rest_ = multiply_add(-reciprocal_, divisor_, all_lanes(1.0f)) * reciprocal_;
  }

  RATEL_INLINE Floats divide(Floats dividend) const {
    const Floats near = multiply_add(dividend, reciprocal_, dividend * rest_);
    const Floats remainder = multiply_add(-near, divisor_, dividend);
    return multiply_add(remainder, reciprocal_, near);
  }

 private:
  Floats divisor_;
  Floats reciprocal_;
  Floats rest_;
};

}  // namespace
