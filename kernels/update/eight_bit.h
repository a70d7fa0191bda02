// Moments in 8 bit, in blocks of 256 elements of a parameter: codes of a dynamic map, and a scale for each block.
//
// A unit is decoded, updated as 32-bit numbers, and encoded again (docs/store-format.md, "Moments in 8 bit"). Invariant:
// the code is that of the nearest value of the map; where two are as near, the lower code.
#pragma once

#include "dynamic_maps.h"
#include "loops.h"
#include "state.h"

namespace {

constexpr size_t kUnit = ratel::AdamW8Bit::kUnit;

typedef int32_t Integers __attribute__((vector_size(4 * RATEL_LANES)));

enum class Map { of_signed, of_unsigned };

constexpr const float* values_of(Map map) { return map == Map::of_signed ? kSignedMap : kUnsignedMap; }

// Half way from a code's value to that of the next one.
constexpr float bound(Map map, size_t code) { return (values_of(map)[code] + values_of(map)[code + 1]) / 2.0f; }

constexpr size_t kNumDecades = 7;

// The positive numbers of a map lie in decades, each cut into equal parts, whose middles are the values. `place` counts
// the values from 0 on; a number in a decade has the place scale * number + shift, rounded down.
struct Decades {
  float edges[kNumDecades + 1];  // the bound below each decade, and below 1
  float scale[8];                // from here on by 1 + number of the decade; the first is for all that is in none
  float shift[8];
  float most[8];                 // in the middle of the decade's last part
};

constexpr size_t first_place(Map map, size_t decade) {
  return map == Map::of_signed ? size_t{1} << decade : (size_t{2} << decade) - 1;
}

constexpr Decades decades_of(Map map) {
  Decades found{};
  const size_t zero = map == Map::of_signed ? 127 : 0;
  double top = 1e-6;
  for (size_t decade = 0; decade <= kNumDecades; ++decade, top *= 10) {
    found.edges[decade] = bound(map, zero + first_place(map, decade) - 1);
    if (decade < kNumDecades) {
      const double num_parts = static_cast<double>(first_place(map, decade + 1) - first_place(map, decade));
      found.scale[decade + 1] = static_cast<float>(num_parts / (0.9 * top));
      found.shift[decade + 1] = static_cast<float>(static_cast<double>(first_place(map, decade)) - num_parts / 9);
      found.most[decade + 1] = static_cast<float>(first_place(map, decade + 1)) - 0.5f;
    }
  }
  found.shift[0] = found.most[0] = 0.5f;
  return found;
}

template <Map map>
constexpr Decades kDecades = decades_of(map);

// Nearer than this to a bound, rounding may give the next place. It is wrong by less than 1e-4.
constexpr float kDoubtful = 2e-4f;

struct Codes {
  Words codes;
  Floats doubt;  // above 0.5 - kDoubtful, or NaN, where the code is not certain
};

template <Map map>
RATEL_INLINE Codes likely_codes(Floats scaled) {
  constexpr bool is_signed = map == Map::of_signed;
  const Words word = as_words(scaled);
  const Words magnitude = word & 0x7fffffffu;
  const Words is_negative = word >> 31;
  const Integers compared = (Integers)(is_signed ? magnitude + is_negative : magnitude);  // ties go to the lower code
  // The bits of a float are its logarithm, nearly: from 0 to 0.026 below that to base 10. Each edge is from 0 to 0.44
  // decades above a power of ten, or little below 1. So the decade is the rough one or the next, as the edge says.
  const Floats rough = __builtin_convertvector((Integers)magnitude, Floats) * 0x1.344136p-25f - (127 * 0.30103f - 7.05f);
  const Words lower = (Words)__builtin_convertvector(rough > 0.0f ? rough : Floats{}, Integers);
  const Integers edge = (Integers)as_words(entry_of_eight(kDecades<map>.edges, lower));
  const Words decade = lower - (Words)(compared > edge);
  const Floats free = as_floats(magnitude) * entry_of_eight(kDecades<map>.scale, decade) +
                      entry_of_eight(kDecades<map>.shift, decade);
  const Floats most_place = entry_of_eight(kDecades<map>.most, decade);
  const Floats exact = most_place < free ? most_place : free;
  const Integers whole = __builtin_convertvector(exact, Integers);
  const Floats doubt = exact - __builtin_convertvector(whole, Floats) - 0.5f;
  const Words place = (Words)whole;
  const Words one = decade >> 3;  // above the last bound
  if (!is_signed) {
    return {place | ((Words{} - one) & 0xffu), doubt};
  }
  const Words most = place + (one << 7) - (one & is_negative);  // there is no -1
  return {127u + ((most ^ (Words{} - is_negative)) + is_negative), doubt};
}

// By search, for all numbers. NaN has the last code.
template <Map map>
__attribute__((noinline, cold)) void store_certain_codes(uint8_t* codes, const float* values, float inverse,
                                                         size_t count) {
  for (size_t place = 0; place < count; ++place) {
    const float scaled = values[place] * inverse;
    size_t code = 0;
    for (size_t step = 128; step > 0; step /= 2) {
      code += code + step <= 255 && !(scaled <= bound(map, code + step - 1)) ? step : 0;
    }
    codes[place] = static_cast<uint8_t>(code);
  }
}

// Of the caches, where nothing need be fetched.
RATEL_INLINE Floats load_near(const float* from, size_t count) {
  Floats floats{};
  __builtin_memcpy(&floats, from, count * sizeof *from);
  return floats;
}

// The largest magnitude; NaN if there is one.
RATEL_INLINE float largest_magnitude(const float* values, size_t count) {
  Integers largest{};
  for_each_vector(count, [&](size_t at, size_t length) RATEL_LAMBDA {
    const Integers magnitude = (Integers)(as_words(load_near(values + at, length)) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  });
  int32_t bits = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    bits = largest[lane] > bits ? largest[lane] : bits;
  }
  bits = bits > 0x7f800000 ? 0x7fc00000 : bits;
  float found;
  __builtin_memcpy(&found, &bits, sizeof found);
  return found;
}

template <Map map>
RATEL_INLINE void encode(const float* values, uint8_t* codes, float* scale, size_t count) {
  const float largest = largest_magnitude(values, count);
  *scale = largest;
  const float inverse = 1.0f / (largest < 1e-38f ? 1e-38f : largest);
  for_each_vector(count, [&](size_t at, size_t length) RATEL_LAMBDA {
    const Codes found = likely_codes<map>(load_near(values + at, length) * inverse);
    const Floats distance = as_floats(as_words(found.doubt) & 0x7fffffffu);
    if (__builtin_expect(sign_bits((Words)(distance < 0.5f - kDoubtful)) == (1u << kLanes) - 1u, 1)) {
      store(codes + at, narrow_to_bytes(found.codes), length);
    } else {
      store_certain_codes<map>(codes + at, values + at, inverse, length);
    }
  });
}

// The moments of one unit: read from their codes, and written as numbers.
struct DecodedMoments {
  const uint8_t* m8;
  const uint8_t* v8;
  float m_scale;
  float v_scale;
  float* m;
  float* v;
};

RATEL_INLINE TwoValues load_moments(const DecodedMoments& moments, size_t at, size_t count) {
  const Floats m = table_entries(kSignedMap, widen_bytes(load<Bytes>(moments.m8 + at, count)));
  const Floats v = table_entries(kUnsignedMap, widen_bytes(load<Bytes>(moments.v8 + at, count)));
  return {m * moments.m_scale, v * moments.v_scale, Words{}};
}

RATEL_INLINE void store_moments(const DecodedMoments& moments, const TwoValues& values, size_t at, size_t count) {
  store(moments.m + at, values.m, count);
  store(moments.v + at, values.v, count);
}

RATEL_INLINE TiedWeights from(const TiedWeights& weights, size_t at) {
  return {weights.hi16 + at, weights.lo16 + at, weights.tie8 + at / 8};
}

RATEL_INLINE Float32Weights from(const Float32Weights& weights, size_t at) { return {weights.w32 + at}; }

RATEL_INLINE Float16Weights from(const Float16Weights& weights, size_t at) {
  return {weights.w16 + at, weights.w32 + at};
}

// The first argument is there for its type.
template <class Rule, class Weights>
RATEL_INLINE void update_by_units(Rule*, const State<Weights, ByteMoments>& state, Gradient gradient,
                                  const typename Rule::Scalars& scalars, size_t count) {
  with_gradient(gradient, [&](auto typed) {
    const Rule rule(scalars);
    const ByteMoments& moments = state.moments;
    alignas(64) float m[kUnit];
    alignas(64) float v[kUnit];
    for (size_t at = 0; at < count; at += kUnit) {
      const size_t length = count - at < kUnit ? count - at : kUnit;
      float* scales[] = {moments.m_scale + at / kUnit, moments.v_scale + at / kUnit};
      const State<Weights, DecodedMoments> unit{
          from(state.weights, at), {moments.m8 + at, moments.v8 + at, *scales[0], *scales[1], m, v}};
      update_loop(rule, unit, typed.from(at), length);
      encode<Map::of_signed>(m, moments.m8 + at, scales[0], length);
      encode<Map::of_unsigned>(v, moments.v8 + at, scales[1], length);
    }
  });
}

}  // namespace
