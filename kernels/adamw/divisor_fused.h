// Exact division by one number, without the divider: for instruction sets with a fused multiply-add.
//
// For: isa_*.cpp, after multiply_add. AdamW's other division and the memory traffic then fill the time that two
// divisions would take together (AVX-512: 16 cycles for each 16 elements).
#pragma once

namespace {

// The quotient is first found to half an ulp and a little, from a reciprocal in two parts; Markstein's step
// (its exact remainder times the correctly rounded reciprocal) then rounds it correctly. That holds while
// nothing underflows: dividends are square roots (0 or above 2^-75), and bindings/module.cpp keeps the divisor
// within 2^-30 and 2^30. An infinite dividend gives NaN.
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
