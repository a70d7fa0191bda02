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

// A cell is all numbers with the same exponent and first bits of the fraction. It is so narrow that it has one bound at
// most, so the place of a number, counted from 0 on, is that of its cell, or one more.
constexpr uint32_t kFirstBits = 104u << 23;  // 2^-23, below all bounds
constexpr uint32_t kLastBits = 127u << 23;   // 1, above them

constexpr uint32_t fraction_bits_of_cell(Map map) { return map == Map::of_signed ? 17 : 16; }

template <Map map>
struct Cells {
  static constexpr uint32_t kShift = fraction_bits_of_cell(map);
  static constexpr size_t kNumber = ((kLastBits - kFirstBits) >> kShift) + 1;
  uint32_t entries[kNumber];  // the place below the bound, and from bit 8 on the rest of the bound's fraction
  bool is_fine_enough;
};

constexpr uint32_t kNoBound = 1u << 18;  // above all rests

// Of a normal positive number.
constexpr uint32_t bits_of(float number) {
  uint32_t exponent = 127;
  for (; number < 1.0f; number *= 2.0f) {
    --exponent;
  }
  return exponent << 23 | static_cast<uint32_t>((number - 1.0f) * 0x1p23f);
}

template <Map map>
constexpr Cells<map> cells_of() {
  Cells<map> found{};
  found.is_fine_enough = true;
  const size_t zero = map == Map::of_signed ? 127 : 0;
  size_t code = zero;
  for (size_t cell = 0; cell < Cells<map>::kNumber; ++cell) {
    const uint32_t first = kFirstBits + (static_cast<uint32_t>(cell) << Cells<map>::kShift);
    const uint32_t end = first + (1u << Cells<map>::kShift);
    const uint32_t place = static_cast<uint32_t>(code - zero);
    const bool has_bound = code < 255 && bits_of(bound(map, code)) < end;
    found.entries[cell] = place | (has_bound ? bits_of(bound(map, code)) - first : kNoBound) << 8;
    code += has_bound;
    found.is_fine_enough = found.is_fine_enough && (code == 255 || bits_of(bound(map, code)) >= end);
  }
  return found;
}

template <Map map>
constexpr Cells<map> kCells = cells_of<map>();

static_assert(kCells<Map::of_signed>.is_fine_enough && kCells<Map::of_unsigned>.is_fine_enough, "one bound in a cell");

// NaN has the last code.
template <Map map>
RATEL_INLINE Words codes_of(Floats scaled) {
  const Words word = as_words(scaled);
  const Integers magnitude = (Integers)(word & 0x7fffffffu);
  const Integers least = magnitude > (Integers)(Words{} + kFirstBits) ? magnitude : (Integers)(Words{} + kFirstBits);
  const Words bits = (Words)(least < (Integers)(Words{} + kLastBits) ? least : (Integers)(Words{} + kLastBits));
  const Words entry = table_entries(kCells<map>.entries, (bits - kFirstBits) >> Cells<map>::kShift);
  const Words rest = bits & ((1u << Cells<map>::kShift) - 1u);
  if (map == Map::of_unsigned) {
    return (entry & 0xffu) - (Words)((Integers)rest > (Integers)(entry >> 8));
  }
  const Words is_negative = (word >> 31) & (Words)(scaled == scaled);
  const Words place = (entry & 0xffu) - (Words)((Integers)(rest + is_negative) > (Integers)(entry >> 8));
  const Words most = place - (place >> 7 & is_negative);  // ties go to the lower code; there is no -1
  return 127u + ((most ^ (Words{} - is_negative)) + is_negative);
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
    store(codes + at, narrow_to_bytes(codes_of<map>(load_near(values + at, length) * inverse)), length);
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

RATEL_INLINE StochasticWeights from(const StochasticWeights& weights, size_t at) {
  return {weights.p16 + at, weights.key, weights.first + at};
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
