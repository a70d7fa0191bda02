// Vectors of RATEL_LANES elements, and the conversions between the layouts' number formats.
//
// Each isa_*.cpp includes it once, after it has defined RATEL_LANES. Everything is arithmetic of the GNU vector
// extensions (gcc, clang), so it gives the same bits at every width. What those cannot express, or gcc 12 compiles
// badly, each isa_*.cpp defines before it includes body.h. Invariant: internal linkage throughout, so that no symbol
// leaves the object file.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "reciprocal_root_table.h"

#define RATEL_INLINE inline __attribute__((always_inline))
#define RATEL_LAMBDA __attribute__((always_inline))

namespace {

constexpr size_t kLanes = RATEL_LANES;

typedef float Floats __attribute__((vector_size(4 * RATEL_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * RATEL_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * RATEL_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(RATEL_LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * RATEL_LANES)));

// How far ahead of each load its stream is fetched: one tile of update/chunk.cpp, so that the next tile is in the
// caches. Without it the kernels are about a fifth slower; 1 to 4 KiB are equal within the noise (2-core Xeon with
// AVX-512, huge pages, 2026-11). A prefetch past the end does nothing.
constexpr size_t kPrefetchElements = 1024;

// `count` is the constant kLanes in the main loop (one vector move) and less in the tail.
template <class Vector, class Item>
RATEL_INLINE Vector load(const Item* from, size_t count) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetchElements * sizeof(Item));
  Vector vector{};
  __builtin_memcpy(&vector, from, count * sizeof(Item));
  return vector;
}

template <class Vector, class Item>
RATEL_INLINE void store(Item* to, Vector vector, size_t count) {
  __builtin_memcpy(to, &vector, count * sizeof(Item));
}

RATEL_INLINE Floats all_lanes(float value) { return value - Floats{}; }  // minus: keeps -0.0

Words widen(Halves halves);  // zero-extends; defined by isa_*.cpp

Halves narrow(Words words);  // keeps the low halves; defined by isa_*.cpp

Words widen_bytes(Bytes bytes);  // zero-extends; defined by isa_*.cpp

Bytes narrow_to_bytes(Words words);  // of numbers below 256; defined by isa_*.cpp

uint32_t sign_bits(Words words);  // bit n is the sign of lane n; defined by isa_*.cpp

RATEL_INLINE Floats as_floats(Words words) { return (Floats)words; }

RATEL_INLINE Words as_words(Floats floats) { return (Words)floats; }

// One NaN for all, since instruction sets differ in the payload that they pass on.
RATEL_INLINE Floats canonical(Floats floats) {
  return as_floats(floats == floats ? as_words(floats) : Words{} + 0x7fc00000u);
}

RATEL_INLINE Floats from_bfloat16(Halves halves) { return as_floats(widen(halves) << 16); }

RATEL_INLINE Floats from_float16_in_software(Halves halves) {
  const Words word = widen(halves);
  const Words magnitude = (word & 0x7fffu) << 13;
  const Words exponent = magnitude & (0x7c00u << 13);
  const Words normal = magnitude + (112u << 23);
  const Words special = magnitude + (224u << 23);  // infinity and NaN
  const Words tiny = as_words(as_floats(magnitude + (113u << 23)) - all_lanes(0x1p-14f));
  const Words finite = exponent == 0u ? tiny : normal;
  const Words bits = exponent == (0x7c00u << 13) ? special : finite;
  return as_floats(bits | (word & 0x8000u) << 16);
}

RATEL_INLINE Halves to_float16_in_software(Floats floats) {
  const Words word = as_words(floats);
  const Words magnitude = word & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const Words tiny = as_words(as_floats(magnitude) + all_lanes(0.5f)) - (126u << 23);  // the addition rounds
  const Words special = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  const Words finite = magnitude < (113u << 23) ? tiny : normal;
  const Words half = magnitude >= (143u << 23) ? special : finite;
  return narrow(half | (word >> 16 & 0x8000u));
}

// The fp32 master from its halves. The sign of `tie` is set if a low half of 0x8000 was rounded up.
RATEL_INLINE Floats join_master(Halves hi16, Halves lo16, Words tie) {
  const Words low = widen(lo16);
  const Words rounded_up = (low + (tie >> 31) + 0x7fffu) >> 16;
  return as_floats((widen(hi16) - rounded_up) << 16 | low);
}

struct SplitMaster {
  Halves hi16;
  Halves lo16;
  Words tie;  // the sign, other bits 0
};

RATEL_INLINE SplitMaster split_master(Floats master) {
  const Words word = as_words(master);
  const Words odd = word >> 16 & 1u;
  const Words tie = (word & 0x1ffffu) == 0x18000u ? Words{} + 0x80000000u : Words{};
  return {narrow((word + 0x7fffu + odd) >> 16), narrow(word), tie};
}

// Sixteen random bits for each of the elements from number `first` on: C. Wellons' hash triple32 of the element's number,
// the key's halves before it and within it (docs/store-format.md, "Stochastic rounding"). With two
// multiplications only, as in lowbias32, elements 4096 apart are correlated by 2 %.
RATEL_INLINE Words random_halves(uint64_t key, uint64_t first) {
  Words lane_numbers{};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lane_numbers[lane] = lane;
  }
  const Words low = (uint32_t)first + lane_numbers;
  const Words is_carried = (Words)(low < (uint32_t)first);  // minus 1 where it is
  const Words high = (uint32_t)(first >> 32) - is_carried;
  Words bits = low ^ (uint32_t)key;
  bits = (bits ^ bits >> 17) * 0xed5ad4bbu;
  bits = ((bits ^ bits >> 11) + (uint32_t)(key >> 32) + high) * 0xac4c1b51u;
  bits = (bits ^ bits >> 15) * 0x31848babu;
  return (bits ^ bits >> 14) >> 16;
}

// The bf16 below or above a number, the nearer one more often. NaN must be the canonical one.
RATEL_INLINE Halves round_stochastically(Floats floats, Words random) { return narrow((as_words(floats) + random) >> 16); }

// The bits of a field with one bit for each element, as signs. `at` is a multiple of kLanes.
RATEL_INLINE Words load_bits(const uint8_t* from, size_t at, size_t count) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, from + at / 8, (at % 8 + count + 7) / 8);
  bits >>= at % 8;
  Words of_lane{};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    of_lane[lane] = 1u << lane;
  }
  return ((Words{} + bits) & of_lane) != 0u ? Words{} + 0x80000000u : Words{};
}

// The bits of other elements stay.
RATEL_INLINE void store_bits(uint8_t* to, Words signs, size_t at, size_t count) {
  uint32_t bits = sign_bits(signs) << at % 8;
  const size_t num_bytes = (at % 8 + count + 7) / 8;
  if (kLanes < 8 || count < kLanes) {
    const uint32_t own = ((1u << count) - 1u) << at % 8;
    uint32_t old = 0;
    __builtin_memcpy(&old, to + at / 8, num_bytes);
    bits = (old & ~own) | (bits & own);
  }
  __builtin_memcpy(to + at / 8, &bits, num_bytes);
}

// vrsqrt14ps in integer arithmetic, for positive numbers; below 2^-126 it is that of 2^-126.
RATEL_INLINE Floats reciprocal_root_estimate_in_software(Floats floats) {
  const Words word = as_words(floats > all_lanes(0x1p-126f) ? floats : all_lanes(0x1p-126f));
  const Words exponent = (word >> 23) + 1u;  // even where the true exponent is even
  const Words row = (exponent & 1u) << 5 | (word >> 18 & 31u);
  Words intercept, slope;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    intercept[lane] = kReciprocalRootLines[row[lane]].intercept;
    slope[lane] = kReciprocalRootLines[row[lane]].slope;
  }
  const Words fraction = (intercept - slope * (word >> 8 & 1023u)) >> 9 << 7;
  const auto is_even_power = ((exponent & 1u) | (word & 0x7fffffu)) == 0u;
  const Words half_bits = is_even_power ? Words{} + 0x3f800000u : fraction + 0x3f000000u;
  return as_floats(half_bits - ((exponent >> 1) << 23) + (64u << 23));
}

}  // namespace
