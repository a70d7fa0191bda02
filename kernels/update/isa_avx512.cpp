// AVX-512 F, BW, DQ and VL: Skylake-SP, Zen 4 and later.

#define RATEL_LANES 16
#include "lanes.h"

#include <immintrin.h>

namespace {

RATEL_INLINE Words widen(Halves halves) { return (Words)_mm512_cvtepu16_epi32((__m256i)halves); }

RATEL_INLINE Halves narrow(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }

RATEL_INLINE Words widen_bytes(Bytes bytes) { return (Words)_mm512_cvtepu8_epi32((__m128i)bytes); }

RATEL_INLINE Bytes narrow_to_bytes(Words words) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)words); }

RATEL_INLINE uint32_t sign_bits(Words words) { return _mm512_movepi32_mask((__m512i)words); }

RATEL_INLINE Floats table_entries(const float* table, Words places) {
  return (Floats)_mm512_i32gather_ps((__m512i)places, table, 4);
}

RATEL_INLINE Words table_entries(const uint32_t* table, Words places) {
  return (Words)_mm512_i32gather_epi32((__m512i)places, table, 4);
}

RATEL_INLINE bool has_nan(Floats floats) {
  return _mm512_cmp_ps_mask((__m512)floats, (__m512)floats, _CMP_UNORD_Q) != 0;
}

RATEL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

RATEL_INLINE Floats correct_square_root(Floats value) { return (Floats)_mm512_sqrt_ps((__m512)value); }

RATEL_INLINE Floats reciprocal_root_estimate(Floats value) {
  return (Floats)_mm512_rsqrt14_ps(_mm512_max_ps((__m512)value, _mm512_set1_ps(0x1p-126f)));
}

RATEL_INLINE Floats coarse_reciprocal_root_estimate(Floats value) {
  const __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256((__m512)value));
  const __m256 high = _mm256_rsqrt_ps(_mm512_extractf32x8_ps((__m512)value, 1));
  return (Floats)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

RATEL_INLINE Floats from_float16(Halves halves) { return (Floats)_mm512_cvtph_ps((__m256i)halves); }

RATEL_INLINE Halves to_float16(Floats floats) {
  return (Halves)_mm512_cvtps_ph((__m512)floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

RATEL_INLINE Longs multiply_low_words(Longs a, Longs b) { return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b); }

RATEL_INLINE Longs swap_neighbours(Longs longs) {
  return (Longs)_mm512_shuffle_epi32((__m512i)longs, (_MM_PERM_ENUM)0x4e);
}

}  // namespace

#include "divisor_fused.h"

#include "body.h"

const ratel::Kernels ratel::kAvx512Kernels = RATEL_KERNELS("avx512");
