// The inner loop of a checksum, compiled for each instruction set.
//
// Each update/isa_*.cpp includes it after lanes.h and its own multiply_low_words and swap_neighbours.
#pragma once

#include "ratel/checksum.h"

namespace {

// `at` needs no alignment.
RATEL_INLINE Longs load_longs(const uint8_t* at) {
  Longs longs;
  __builtin_memcpy(&longs, at, sizeof longs);
  return longs;
}

// Add whole blocks, none of them the last.
void absorb(ratel::Checksum* checksum, const uint8_t* data, size_t num_blocks) {
  constexpr size_t kParts = ratel::kStripeBytes / sizeof(Longs);
  constexpr size_t kStripes = ratel::kBlockBytes / ratel::kStripeBytes;
  const uint8_t* secret = checksum->secret;
  const Longs prime = Longs{} + 0x9E3779B1u;
  Longs sums[kParts];
  __builtin_memcpy(sums, checksum->sums, sizeof sums);
  for (size_t block = 0; block < num_blocks; ++block, data += ratel::kBlockBytes) {
    for (size_t stripe = 0; stripe < kStripes; ++stripe) {
      for (size_t part = 0; part < kParts; ++part) {
        const size_t offset = part * sizeof(Longs);
        const Longs value = load_longs(data + ratel::kStripeBytes * stripe + offset);
        const Longs key = value ^ load_longs(secret + 8 * stripe + offset);
        sums[part] += swap_neighbours(value) + multiply_low_words(key, key >> 32);
      }
    }
    for (size_t part = 0; part < kParts; ++part) {
      const size_t offset = ratel::kSecretBytes - ratel::kStripeBytes + part * sizeof(Longs);
      const Longs mixed = sums[part] ^ (sums[part] >> 47) ^ load_longs(secret + offset);
      sums[part] = multiply_low_words(mixed, prime) + (multiply_low_words(mixed >> 32, prime) << 32);
    }
  }
  __builtin_memcpy(checksum->sums, sums, sizeof sums);
}

}  // namespace
