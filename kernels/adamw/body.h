// The kernels, written once and compiled for each instruction set.
//
// Each isa_*.cpp includes it after lanes.h and its own widen, narrow, multiply_add, correct_square_root,
// reciprocal_root_estimate, coarse_reciprocal_root_estimate, Divisor, has_nan, from_float16, to_float16,
// multiply_low_words and swap_neighbours. Invariant: every instruction set computes the same bits, and they are those
// of torch.optim.AdamW (single-tensor, fp32, CPU). So each rounding below is torch's, fused multiply-adds included,
// and -ffp-contract=off keeps the compiler from adding its own.
#pragma once

#include "../checksum/stripes.h"
#include "ratel/kernels.h"

namespace {

using ratel::AdamWScalars;
using ratel::Bfloat16State;
using ratel::Element;
using ratel::Float16State;
using ratel::Float32State;
using ratel::Gradient;
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

struct Parameters {
  Floats weight;
  Floats m;
  Floats v;
};

// torch/optim/adam.py, _single_tensor_adam, operation by operation. The caller computes the denominator from v.
template <class Denominator>
RATEL_INLINE Parameters updated(const Parameters& old, Floats raw_gradient, const AdamWScalars& scalars,
                                Denominator denominator) {
  const Floats gradient = raw_gradient * scalars.gradient_scale;
  const Floats decayed = old.weight * scalars.decay_factor;
  // lerp_: the weight decides from which end the fused multiply-add starts.
  const bool near_start = __builtin_fabsf(scalars.one_minus_beta1) < 0.5f;
  const Floats share = all_lanes(scalars.one_minus_beta1 - (near_start ? 0.0f : 1.0f));
  const Floats m = multiply_add(share, gradient - old.m, near_start ? old.m : gradient);
  // mul_, then addcmul_, which torch's build contracts.
  const Floats v = multiply_add(gradient * scalars.one_minus_beta2, gradient, old.v * scalars.beta2);
  return {decayed + m * scalars.negative_step_size / denominator(v), m, v};
}

// For finite v. Any other v, and a NaN anywhere, gives a weight of NaN here.
template <SquareRoot kind>
RATEL_INLINE Parameters quickly_updated(const Parameters& old, Floats gradient, const AdamWScalars& scalars,
                                        const Divisor& bias_correction2_sqrt) {
  return updated(old, gradient, scalars, [&](Floats v) RATEL_LAMBDA {
    return bias_correction2_sqrt.divide(finite_square_root<kind>(v)) + scalars.epsilon;
  });
}

RATEL_INLINE Parameters load_parameters(const Bfloat16State& state, size_t at, size_t count) {
  const Words v = load<Words>(state.v32 + at, count);
  const Floats weight =
      join_master(load<Halves>(state.hi16 + at, count), load<Halves>(state.lo16 + at, count), v);
  return {weight, load<Floats>(state.m32 + at, count), as_floats(v & 0x7fffffffu)};
}

RATEL_INLINE void store_parameters(const Bfloat16State& state, const Parameters& parameters, size_t at, size_t count) {
  const SplitMaster split = split_master(parameters.weight);
  store(state.hi16 + at, split.hi16, count);
  store(state.lo16 + at, split.lo16, count);
  store(state.m32 + at, parameters.m, count);
  store(state.v32 + at, (as_words(parameters.v) & 0x7fffffffu) | split.tie, count);
}

RATEL_INLINE Parameters load_parameters(const Float32State& state, size_t at, size_t count) {
  return {load<Floats>(state.w32 + at, count), load<Floats>(state.m32 + at, count),
          load<Floats>(state.v32 + at, count)};
}

RATEL_INLINE void store_parameters(const Float32State& state, const Parameters& parameters, size_t at, size_t count) {
  store(state.w32 + at, parameters.weight, count);
  store(state.m32 + at, parameters.m, count);
  store(state.v32 + at, parameters.v, count);
}

RATEL_INLINE Parameters load_parameters(const Float16State& state, size_t at, size_t count) {
  return load_parameters(Float32State{state.w32, state.m32, state.v32}, at, count);
}

RATEL_INLINE void store_parameters(const Float16State& state, const Parameters& parameters, size_t at, size_t count) {
  store(state.w16 + at, to_float16(parameters.weight), count);
  store_parameters(Float32State{state.w32, state.m32, state.v32}, parameters, at, count);
}

struct Bfloat16Gradient {
  const uint16_t* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return from_bfloat16(load<Halves>(data + at, count)); }
};

struct Float16Gradient {
  const uint16_t* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return from_float16(load<Halves>(data + at, count)); }
};

struct Float32Gradient {
  const float* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return load<Floats>(data + at, count); }
};

// Call `step(at, count)` for every full vector, then for the rest.
template <class Step>
RATEL_INLINE void for_each_vector(size_t count, Step step) {
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    step(at, kLanes);
  }
  if (at < count) {
    step(at, count - at);
  }
}

template <class Call>
RATEL_INLINE void with_gradient(Gradient gradient, Call call) {
  switch (gradient.element) {
    case Element::bfloat16:
      return call(Bfloat16Gradient{static_cast<const uint16_t*>(gradient.data)});
    case Element::float16:
      return call(Float16Gradient{static_cast<const uint16_t*>(gradient.data)});
    case Element::float32:
      return call(Float32Gradient{static_cast<const float*>(gradient.data)});
  }
}

// For all values, slowly: an infinite v is legal (its weight does not move), and NaN becomes canonical.
template <SquareRoot kind, class State, class TypedGradient>
__attribute__((noinline, cold)) void careful_step(const State& state, TypedGradient gradient,
                                                  const AdamWScalars& scalars, size_t at, size_t count) {
  const Parameters old = load_parameters(state, at, count);
  const Parameters result = updated(old, gradient.at(at, count), scalars, [&](Floats v) RATEL_LAMBDA {
    return any_square_root<kind>(v) / scalars.bias_correction2_sqrt + scalars.epsilon;
  });
  store_parameters(state, {canonical(result.weight), canonical(result.m), canonical(result.v)}, at, count);
}

template <SquareRoot kind, class State, class TypedGradient>
void adamw_loop(const State& state, TypedGradient gradient, const AdamWScalars& borrowed, size_t count) {
  const AdamWScalars scalars = borrowed;  // a local copy cannot alias the stores
  const Divisor bias_correction2_sqrt(scalars.bias_correction2_sqrt);
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const Parameters old = load_parameters(state, at, length);
    const Parameters result = quickly_updated<kind>(old, gradient.at(at, length), scalars, bias_correction2_sqrt);
    if (__builtin_expect(has_nan(result.weight), 0)) {
      careful_step<kind>(state, gradient, scalars, at, length);
    } else {
      store_parameters(state, result, at, length);
    }
  });
}

template <class State>
void adamw(State state, Gradient gradient, const AdamWScalars& scalars, size_t count) {
  with_gradient(gradient, [&](auto typed) {
    switch (scalars.square_root) {
      case SquareRoot::correct:
        return adamw_loop<SquareRoot::correct>(state, typed, scalars, count);
      case SquareRoot::mkl_avx512:
        return adamw_loop<SquareRoot::mkl_avx512>(state, typed, scalars, count);
      case SquareRoot::mkl_sse:
        return adamw_loop<SquareRoot::mkl_sse>(state, typed, scalars, count);
    }
  });
}

// Flips bits only, so that two runs restore the memory. All loads come before the stores, as in AdamW.
RATEL_INLINE void flip(const Bfloat16State& state, Words key, size_t at, size_t count) {
  const Halves key16 = narrow(key);
  const Halves hi16 = load<Halves>(state.hi16 + at, count) ^ key16;
  const Halves lo16 = load<Halves>(state.lo16 + at, count) ^ key16;
  const Words m = load<Words>(state.m32 + at, count) ^ key;
  const Words v = load<Words>(state.v32 + at, count) ^ key;
  store(state.hi16 + at, hi16, count);
  store(state.lo16 + at, lo16, count);
  store(state.m32 + at, m, count);
  store(state.v32 + at, v, count);
}

RATEL_INLINE void flip(const Float32State& state, Words key, size_t at, size_t count) {
  const Words weight = load<Words>(state.w32 + at, count) ^ key;
  const Words m = load<Words>(state.m32 + at, count) ^ key;
  const Words v = load<Words>(state.v32 + at, count) ^ key;
  store(state.w32 + at, weight, count);
  store(state.m32 + at, m, count);
  store(state.v32 + at, v, count);
}

RATEL_INLINE void flip(const Float16State& state, Words key, size_t at, size_t count) {
  store(state.w16 + at, narrow(key), count);  // AdamW never reads w16, and stores it first
  flip(Float32State{state.w32, state.m32, state.v32}, key, at, count);
}

template <class State>
void stream(State state, Gradient gradient, size_t count) {
  with_gradient(gradient, [&](auto typed) {
    for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
      flip(state, as_words(typed.at(at, length)), at, length);
    });
  });
}

void split_bfloat16(const float* w32, Bfloat16State state, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const SplitMaster split = split_master(load<Floats>(w32 + at, length));
    store(state.hi16 + at, split.hi16, length);
    store(state.lo16 + at, split.lo16, length);
    const Words v = load<Words>(state.v32 + at, length);
    store(state.v32 + at, (v & 0x7fffffffu) | split.tie, length);
  });
}

void join_bfloat16(Bfloat16State state, float* w32, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const Words v = load<Words>(state.v32 + at, length);
    const Halves hi16 = load<Halves>(state.hi16 + at, length);
    const Halves lo16 = load<Halves>(state.lo16 + at, length);
    store(w32 + at, join_master(hi16, lo16, v), length);
  });
}

template <SquareRoot kind>
void square_roots(float* values, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const Floats value = load<Floats>(values + at, length);
    store(values + at, canonical(any_square_root<kind>(value)), length);
  });
}

void square_root(float* values, SquareRoot kind, size_t count) {
  switch (kind) {
    case SquareRoot::correct:
      return square_roots<SquareRoot::correct>(values, count);
    case SquareRoot::mkl_avx512:
      return square_roots<SquareRoot::mkl_avx512>(values, count);
    case SquareRoot::mkl_sse:
      return square_roots<SquareRoot::mkl_sse>(values, count);
  }
}

}  // namespace

#define RATEL_KERNELS(isa)                                                                                       \
  {                                                                                                              \
    isa, {adamw<Bfloat16State>, stream<Bfloat16State>}, {adamw<Float32State>, stream<Float32State>},             \
        {adamw<Float16State>, stream<Float16State>}, split_bfloat16, join_bfloat16, square_root, absorb          \
  }
