// XXH3-64 with a seed, of memory that comes in blocks: the checksums of the xxhash library (`xxh3_64`).
//
// The published algorithm for inputs of more than 240 bytes; here they are whole blocks. `seed_of` is the one for 33 to 64
// bytes. Invariant: plain structs and
// no STL, as in kernels.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace ratel {

constexpr size_t kStripeBytes = 64;
constexpr size_t kBlockBytes = 1024;
constexpr size_t kSecretBytes = 192;

// The checksum of one input: `begin`, then `Kernels::absorb` for all blocks but the last, then `finish`.
struct Checksum {
  alignas(64) uint64_t sums[8];
  alignas(64) uint8_t secret[kSecretBytes];
};

void begin(Checksum* checksum, uint64_t seed);

// XXH3-64, without a seed, of the `kPlaceBytes` bytes that say which chunk a checksum is for: the seed of that checksum.
constexpr size_t kPlaceBytes = 36;

uint64_t seed_of(const uint8_t* place);

uint64_t finish(const Checksum& checksum, const uint8_t* last_block, size_t total_bytes);

}  // namespace ratel
