// Weights and moments in registers and in memory. body.h includes it.
//
// Invariants: every layout keeps the master exactly; `from` is the same state from an element on.
#pragma once

#include "ratel/kernels.h"

namespace {

using ratel::ByteMoments;
using ratel::DirectedMoment;
using ratel::Float16Weights;
using ratel::Float32Weights;
using ratel::Gradient;
using ratel::HalvedWeights;
using ratel::NoMoments;
using ratel::OneMoment;
using ratel::StochasticWeights;
using ratel::SignedMoments;
using ratel::State;
using ratel::TiedWeights;
using ratel::TwoMoments;

// Weights. `carried` is what the moments carry of them: how ties were rounded, as signs.

RATEL_INLINE Floats load_weight(const HalvedWeights& weights, Words carried, size_t at, size_t count) {
  return join_master(load<Halves>(weights.hi16 + at, count), load<Halves>(weights.lo16 + at, count), carried);
}

RATEL_INLINE Words store_weight(const HalvedWeights& weights, Floats weight, size_t at, size_t count) {
  const SplitMaster split = split_master(weight);
  store(weights.hi16 + at, split.hi16, count);
  store(weights.lo16 + at, split.lo16, count);
  return split.tie;
}

RATEL_INLINE Floats load_weight(const TiedWeights& weights, Words, size_t at, size_t count) {
  return join_master(load<Halves>(weights.hi16 + at, count), load<Halves>(weights.lo16 + at, count),
                     load_bits(weights.tie8, at, count));
}

RATEL_INLINE Words store_weight(const TiedWeights& weights, Floats weight, size_t at, size_t count) {
  const SplitMaster split = split_master(weight);
  store(weights.hi16 + at, split.hi16, count);
  store(weights.lo16 + at, split.lo16, count);
  store_bits(weights.tie8, split.tie, at, count);
  return Words{};
}

RATEL_INLINE Floats load_weight(const StochasticWeights& weights, Words, size_t at, size_t count) {
  return from_bfloat16(load<Halves>(weights.p16 + at, count));
}

RATEL_INLINE Words store_weight(const StochasticWeights& weights, Floats weight, size_t at, size_t count) {
  const Words random = random_halves(weights.key, weights.first + at);
  store(weights.p16 + at, round_stochastically(weight, random), count);
  return Words{};
}

RATEL_INLINE Floats load_weight(const Float32Weights& weights, Words, size_t at, size_t count) {
  return load<Floats>(weights.w32 + at, count);
}

RATEL_INLINE Words store_weight(const Float32Weights& weights, Floats weight, size_t at, size_t count) {
  store(weights.w32 + at, weight, count);
  return Words{};
}

RATEL_INLINE Floats load_weight(const Float16Weights& weights, Words, size_t at, size_t count) {
  return load<Floats>(weights.w32 + at, count);
}

RATEL_INLINE Words store_weight(const Float16Weights& weights, Floats weight, size_t at, size_t count) {
  store(weights.w16 + at, to_float16(weight), count);
  store(weights.w32 + at, weight, count);
  return Words{};
}

// Moments, as values: what a rule reads and gives.

struct TwoValues {
  Floats m;
  Floats v;
  Words carried;
};

struct OneValue {
  Floats m;
  Words carried;
};

struct DirectedValue {
  Floats m;
  Floats direction;
  Words carried;
};

struct NoValue {
  Words carried;
};

RATEL_INLINE TwoValues load_moments(const SignedMoments& moments, size_t at, size_t count) {
  const Words v = load<Words>(moments.v32 + at, count);
  return {load<Floats>(moments.m32 + at, count), as_floats(v & 0x7fffffffu), v};
}

RATEL_INLINE void store_moments(const SignedMoments& moments, const TwoValues& values, size_t at, size_t count) {
  store(moments.m32 + at, values.m, count);
  store(moments.v32 + at, (as_words(values.v) & 0x7fffffffu) | values.carried, count);
}

RATEL_INLINE TwoValues load_moments(const TwoMoments& moments, size_t at, size_t count) {
  return {load<Floats>(moments.m32 + at, count), load<Floats>(moments.v32 + at, count), Words{}};
}

RATEL_INLINE void store_moments(const TwoMoments& moments, const TwoValues& values, size_t at, size_t count) {
  store(moments.m32 + at, values.m, count);
  store(moments.v32 + at, values.v, count);
}

RATEL_INLINE OneValue load_moments(const OneMoment& moments, size_t at, size_t count) {
  return {load<Floats>(moments.m32 + at, count), Words{}};
}

RATEL_INLINE void store_moments(const OneMoment& moments, const OneValue& values, size_t at, size_t count) {
  store(moments.m32 + at, values.m, count);
}

RATEL_INLINE DirectedValue load_moments(const DirectedMoment& moments, size_t at, size_t count) {
  const Floats direction = from_bfloat16(load<Halves>(moments.direction + at, count));
  return {load<Floats>(moments.m32 + at, count), direction, Words{}};
}

RATEL_INLINE void store_moments(const DirectedMoment& moments, const DirectedValue& values, size_t at, size_t count) {
  store(moments.m32 + at, values.m, count);
}

RATEL_INLINE NoValue load_moments(const NoMoments&, size_t, size_t) { return {Words{}}; }

RATEL_INLINE void store_moments(const NoMoments&, const NoValue&, size_t, size_t) {}

RATEL_INLINE TwoValues canonical(const TwoValues& values) {
  return {canonical(values.m), canonical(values.v), values.carried};
}

RATEL_INLINE OneValue canonical(const OneValue& values) { return {canonical(values.m), values.carried}; }

RATEL_INLINE DirectedValue canonical(const DirectedValue& values) {
  return {canonical(values.m), values.direction, values.carried};
}

// torch's lerp_: the weight decides from which end the fused multiply-add starts.
RATEL_INLINE Floats lerp(Floats from, Floats to, float weight) {
  const bool near_start = __builtin_fabsf(weight) < 0.5f;
  return multiply_add(all_lanes(weight - (near_start ? 0.0f : 1.0f)), to - from, near_start ? from : to);
}

RATEL_INLINE NoValue canonical(const NoValue& values) { return values; }

// Gradients.

struct Bfloat16Gradient {
  const uint16_t* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return from_bfloat16(load<Halves>(data + at, count)); }
  RATEL_INLINE Bfloat16Gradient from(size_t at) const { return {data + at}; }
};

struct Float16Gradient {
  const uint16_t* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return from_float16(load<Halves>(data + at, count)); }
  RATEL_INLINE Float16Gradient from(size_t at) const { return {data + at}; }
};

struct Float32Gradient {
  const float* data;
  RATEL_INLINE Floats at(size_t at, size_t count) const { return load<Floats>(data + at, count); }
  RATEL_INLINE Float32Gradient from(size_t at) const { return {data + at}; }
};

template <class Call>
RATEL_INLINE void with_gradient(Gradient gradient, Call call) {
  switch (gradient.element) {
    case ratel::Element::bfloat16:
      return call(Bfloat16Gradient{static_cast<const uint16_t*>(gradient.data)});
    case ratel::Element::float16:
      return call(Float16Gradient{static_cast<const uint16_t*>(gradient.data)});
    case ratel::Element::float32:
      return call(Float32Gradient{static_cast<const float*>(gradient.data)});
  }
}

// Bits are flipped only, so that two runs restore the memory. All loads come before the stores, as in an update.

RATEL_INLINE void flip(const TwoMoments& moments, Words key, size_t at, size_t count) {
  const Words m = load<Words>(moments.m32 + at, count) ^ key;
  const Words v = load<Words>(moments.v32 + at, count) ^ key;
  store(moments.m32 + at, m, count);
  store(moments.v32 + at, v, count);
}

RATEL_INLINE void flip(const SignedMoments& moments, Words key, size_t at, size_t count) {
  flip(TwoMoments{moments.m32, moments.v32}, key, at, count);
}

RATEL_INLINE void flip(const ByteMoments& moments, Words key, size_t at, size_t count) {
  const Bytes key8 = narrow_to_bytes(key & 0xffu);
  const Bytes m = load<Bytes>(moments.m8 + at, count) ^ key8;
  const Bytes v = load<Bytes>(moments.v8 + at, count) ^ key8;
  store(moments.m8 + at, m, count);
  store(moments.v8 + at, v, count);
  if (at % ratel::AdamW8Bit::kUnit == 0) {
    const size_t place = at / ratel::AdamW8Bit::kUnit;
    store(moments.m_scale + place, load<Words>(moments.m_scale + place, 1) ^ key, 1);
    store(moments.v_scale + place, load<Words>(moments.v_scale + place, 1) ^ key, 1);
  }
}

RATEL_INLINE void flip(const OneMoment& moments, Words key, size_t at, size_t count) {
  store(moments.m32 + at, load<Words>(moments.m32 + at, count) ^ key, count);
}

RATEL_INLINE void flip(const DirectedMoment& moments, Words key, size_t at, size_t count) {
  const Words direction = widen(load<Halves>(moments.direction + at, count)) << 16;
  store(moments.m32 + at, load<Words>(moments.m32 + at, count) ^ key ^ direction, count);
}

RATEL_INLINE void flip(const NoMoments&, Words, size_t, size_t) {}

template <class Weights, class Moments>
RATEL_INLINE void flip_halves(const Weights& weights, const Moments& moments, Words key, size_t at, size_t count) {
  const Halves key16 = narrow(key);
  const Halves hi16 = load<Halves>(weights.hi16 + at, count) ^ key16;
  const Halves lo16 = load<Halves>(weights.lo16 + at, count) ^ key16;
  flip(moments, key, at, count);
  store(weights.hi16 + at, hi16, count);
  store(weights.lo16 + at, lo16, count);
}

template <class Moments>
RATEL_INLINE void flip(const State<HalvedWeights, Moments>& state, Words key, size_t at, size_t count) {
  flip_halves(state.weights, state.moments, key, at, count);
}

template <class Moments>
RATEL_INLINE void flip(const State<TiedWeights, Moments>& state, Words key, size_t at, size_t count) {
  const Words bits = load_bits(state.weights.tie8, at, count);
  flip_halves(state.weights, state.moments, key, at, count);
  store_bits(state.weights.tie8, bits ^ key, at, count);
}

template <class Moments>
RATEL_INLINE void flip(const State<StochasticWeights, Moments>& state, Words key, size_t at, size_t count) {
  const Halves weight = load<Halves>(state.weights.p16 + at, count) ^ narrow(key);
  flip(state.moments, key, at, count);
  store(state.weights.p16 + at, weight, count);
}

template <class Moments>
RATEL_INLINE void flip(const State<Float32Weights, Moments>& state, Words key, size_t at, size_t count) {
  const Words weight = load<Words>(state.weights.w32 + at, count) ^ key;
  flip(state.moments, key, at, count);
  store(state.weights.w32 + at, weight, count);
}

template <class Moments>
RATEL_INLINE void flip(const State<Float16Weights, Moments>& state, Words key, size_t at, size_t count) {
  store(state.weights.w16 + at, narrow(key), count);  // an update never reads w16, and stores it first
  flip(State<Float32Weights, Moments>{{state.weights.w32}, state.moments}, key, at, count);
}

}  // namespace
