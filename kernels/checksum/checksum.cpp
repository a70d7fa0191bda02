// The beginning and the end of a checksum, in code that every processor runs; see ratel/checksum.h.

#include "ratel/checksum.h"

#include <string.h>

namespace ratel {

namespace {

constexpr uint64_t kPrimes32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrimes64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                  0x27D4EB2F165667C5};

// Constant bytes of the algorithm, without a meaning.
constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

uint64_t read(const uint8_t* from) {
  uint64_t value;
  memcpy(&value, from, sizeof value);
  return value;
}

void write(uint8_t* to, uint64_t value) { memcpy(to, &value, sizeof value); }

void add_stripe(uint64_t* sums, const uint8_t* data, const uint8_t* secret) {
  for (size_t lane = 0; lane < 8; ++lane) {
    const uint64_t value = read(data + 8 * lane);
    const uint64_t key = value ^ read(secret + 8 * lane);
    sums[lane ^ 1] += value;
    sums[lane] += (key & 0xffffffff) * (key >> 32);
  }
}

uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t mixed(const uint8_t* data, const uint8_t* secret) {
  return folded_product(read(data) ^ read(secret), read(data + 8) ^ read(secret + 8));
}

uint64_t scattered(uint64_t value) {
  value ^= value >> 37;
  value *= 0x165667919E3779F9;
  return value ^ (value >> 32);
}

}  // namespace

uint64_t seed_of(const uint8_t* place) {
  static_assert(kPlaceBytes > 32 && kPlaceBytes <= 64, "another length has another algorithm");
  return scattered(kPlaceBytes * kPrimes64[0] + mixed(place + 16, kSecret + 32) +
                   mixed(place + kPlaceBytes - 32, kSecret + 48) + mixed(place, kSecret) +
                   mixed(place + kPlaceBytes - 16, kSecret + 16));
}

void begin(Checksum* checksum, uint64_t seed) {
  const uint64_t sums[8] = {kPrimes32[2], kPrimes64[0], kPrimes64[1], kPrimes64[2],
                            kPrimes64[3], kPrimes32[1], kPrimes64[4], kPrimes32[0]};
  memcpy(checksum->sums, sums, sizeof sums);
  for (size_t at = 0; at < kSecretBytes; at += 16) {
    write(checksum->secret + at, read(kSecret + at) + seed);
    write(checksum->secret + at + 8, read(kSecret + at + 8) - seed);
  }
}

uint64_t finish(const Checksum& checksum, const uint8_t* last_block, size_t total_bytes) {
  uint64_t sums[8];
  memcpy(sums, checksum.sums, sizeof sums);
  constexpr size_t kStripes = kBlockBytes / kStripeBytes;
  for (size_t stripe = 0; stripe + 1 < kStripes; ++stripe) {
    add_stripe(sums, last_block + kStripeBytes * stripe, checksum.secret + 8 * stripe);
  }
  add_stripe(sums, last_block + kBlockBytes - kStripeBytes, checksum.secret + kSecretBytes - kStripeBytes - 7);
  uint64_t result = total_bytes * kPrimes64[0];
  for (size_t lane = 0; lane < 8; lane += 2) {
    const uint8_t* secret = checksum.secret + 11 + 8 * lane;
    result += folded_product(sums[lane] ^ read(secret), sums[lane + 1] ^ read(secret + 8));
  }
  return scattered(result);
}

}  // namespace ratel
