// Quantisation to NF4 (QLoRA, arXiv:2305.14314, section 3).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ratel {

// Elements that share a magnitude.
constexpr size_t kNf4Group = 64;

// Codes of `count` elements, two in a byte, the first one in its upper half, and the largest magnitude of each group.
// Behind an odd number of elements there is the code of zero.
void quantise_nf4(const float* values, uint8_t* packed, float* magnitudes, size_t count);

}  // namespace ratel
