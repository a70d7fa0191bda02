// AVX2 with FMA and F16C: Haswell, Zen and later.

#define RATEL_LANES 8
#include "lanes.h"

#include <immintrin.h>

namespace {

RATEL_INLINE Words widen(Halves halves) { return (Words)_mm256_cvtepu16_epi32((__m128i)halves); }

RATEL_INLINE Halves narrow(Words words) {
  const __m256i low = _mm256_and_si256((__m256i)words, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_packus_epi32(low, low);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

RATEL_INLINE Words widen_bytes(Bytes bytes) {
  long long packed;
  __builtin_memcpy(&packed, &bytes, sizeof packed);
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(packed));
}

RATEL_INLINE Bytes narrow_to_bytes(Words words) {
  const __m256i halves = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  const __m256i packed = _mm256_packus_epi16(halves, halves);
  const __m256i gathered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
  const long long low = _mm_cvtsi128_si64(_mm256_castsi256_si128(gathered));
  Bytes bytes;
  __builtin_memcpy(&bytes, &low, sizeof low);
  return bytes;
}

RATEL_INLINE uint32_t sign_bits(Words words) { return (uint32_t)_mm256_movemask_ps((__m256)words); }

RATEL_INLINE Floats table_entries(const float* table, Words places) {
  return (Floats)_mm256_i32gather_ps(table, (__m256i)places, 4);
}

RATEL_INLINE Words table_entries(const uint32_t* table, Words places) {
  return (Words)_mm256_i32gather_epi32((const int*)table, (__m256i)places, 4);
}

RATEL_INLINE bool has_nan(Floats floats) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)floats, (__m256)floats, _CMP_UNORD_Q)) != 0;
}

RATEL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

RATEL_INLINE Floats correct_square_root(Floats value) { return (Floats)_mm256_sqrt_ps((__m256)value); }

RATEL_INLINE Floats reciprocal_root_estimate(Floats value) { return reciprocal_root_estimate_in_software(value); }

RATEL_INLINE Floats coarse_reciprocal_root_estimate(Floats value) { return (Floats)_mm256_rsqrt_ps((__m256)value); }

RATEL_INLINE Floats from_float16(Halves halves) { return (Floats)_mm256_cvtph_ps((__m128i)halves); }

RATEL_INLINE Halves to_float16(Floats floats) {
  return (Halves)_mm256_cvtps_ph((__m256)floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

RATEL_INLINE Longs multiply_low_words(Longs a, Longs b) { return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }

RATEL_INLINE Longs swap_neighbours(Longs longs) { return (Longs)_mm256_shuffle_epi32((__m256i)longs, 0x4e); }

}  // namespace

#include "divisor_fused.h"

#include "body.h"

const ratel::Kernels ratel::kAvx2Kernels = RATEL_KERNELS("avx2");
