// NF4 codes of floats, as bitsandbytes' kernel for the CPU makes them; see ratel/nf4.h.
//
// A plain loop: the compiler makes vectors of it, and what quantises also reads the weights from a drive.

#include "ratel/nf4.h"

#include <algorithm>
#include <cmath>

namespace ratel {

namespace {

constexpr float kValues[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
constexpr float kLeastMagnitude = 1e-38f;  // a group of zeros is divided by it

float largest_magnitude(const float* values, size_t count) {
  float largest = 0.0f;
  for (size_t at = 0; at < count; ++at) {
    largest = std::max(largest, std::fabs(values[at]));
  }
  return largest;
}

// The number of middles between two values that lie below it.
void nearest_codes(const float* scaled, size_t count, uint8_t* codes) {
  int found[kNf4Group] = {};
  for (size_t value = 0; value + 1 < 16; ++value) {
    const float middle = (kValues[value] + kValues[value + 1]) / 2.0f;
    for (size_t at = 0; at < count; ++at) {
      found[at] += scaled[at] > middle;
    }
  }
  for (size_t at = 0; at < count; ++at) {
    codes[at] = static_cast<uint8_t>(found[at]);
  }
}

}  // namespace

void quantise_nf4(const float* values, uint8_t* packed, float* magnitudes, size_t count) {
  for (size_t first = 0; first < count; first += kNf4Group) {
    const size_t size = std::min(kNf4Group, count - first);
    float scaled[kNf4Group] = {};
    uint8_t codes[kNf4Group];
    float largest = largest_magnitude(values + first, size);
    if (size == kNf4Group) {
      const float factor = 1.0f / std::max(largest, kLeastMagnitude);
      for (size_t at = 0; at < kNf4Group; ++at) {
        scaled[at] = values[first + at] * factor;
      }
    } else {  // a last group that is not whole is divided, and its magnitude is not zero
      largest = std::max(largest, kLeastMagnitude);
      for (size_t at = 0; at < size; ++at) {
        scaled[at] = values[first + at] / largest;
      }
    }
    magnitudes[first / kNf4Group] = largest;
    nearest_codes(scaled, kNf4Group, codes);
    for (size_t at = 0; at < size; at += 2) {
      packed[(first + at) / 2] = static_cast<uint8_t>(codes[at] << 4 | codes[at + 1]);
    }
  }
}

}  // namespace ratel
