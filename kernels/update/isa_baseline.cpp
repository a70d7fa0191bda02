// The baseline: SSE2 on x86-64, NEON on aarch64 (which has the fused multiply-add).

#define RATEL_LANES 4
#include "lanes.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <emmintrin.h>
#endif

namespace {

#if defined(__aarch64__)

RATEL_INLINE Words widen(Halves halves) { return (Words)vmovl_u16((uint16x4_t)halves); }

RATEL_INLINE Halves narrow(Words words) { return (Halves)vmovn_u32((uint32x4_t)words); }

RATEL_INLINE bool has_nan(Floats floats) {
  return vminvq_u32(vceqq_f32((float32x4_t)floats, (float32x4_t)floats)) == 0;
}

RATEL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

RATEL_INLINE Floats correct_square_root(Floats value) { return (Floats)vsqrtq_f32((float32x4_t)value); }

RATEL_INLINE Longs multiply_low_words(Longs a, Longs b) {
  return (Longs)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
}

RATEL_INLINE Longs swap_neighbours(Longs longs) { return (Longs)vextq_u64((uint64x2_t)longs, (uint64x2_t)longs, 1); }

RATEL_INLINE Words widen_bytes(Bytes bytes) { return __builtin_convertvector(bytes, Words); }

RATEL_INLINE Bytes narrow_to_bytes(Words words) { return __builtin_convertvector(words, Bytes); }

RATEL_INLINE uint32_t sign_bits(Words words) {
  const Words weights = {1, 2, 4, 8};
  return vaddvq_u32((uint32x4_t)((words >> 31) * weights));
}

// Never called: mkl_sse roots are rejected on this processor.
RATEL_INLINE Floats coarse_reciprocal_root_estimate(Floats value) { return (Floats)vrsqrteq_f32((float32x4_t)value); }

#else

RATEL_INLINE Words widen(Halves halves) {
  const __m128i low = _mm_cvtsi64_si128((long long)halves);
  return (Words)_mm_unpacklo_epi16(low, _mm_setzero_si128());
}

// SSE2 packs signed numbers only, so the low half is sign-extended first; it fits then.
RATEL_INLINE Halves narrow(Words words) {
  const __m128i extended = _mm_srai_epi32(_mm_slli_epi32((__m128i)words, 16), 16);
  return (Halves)_mm_cvtsi128_si64(_mm_packs_epi32(extended, extended));
}

RATEL_INLINE bool has_nan(Floats floats) {
  return _mm_movemask_ps(_mm_cmpunord_ps((__m128)floats, (__m128)floats)) != 0;
}

RATEL_INLINE Words widen_bytes(Bytes bytes) {
  int packed;
  __builtin_memcpy(&packed, &bytes, sizeof packed);
  const __m128i halves = _mm_unpacklo_epi8(_mm_cvtsi32_si128(packed), _mm_setzero_si128());
  return (Words)_mm_unpacklo_epi16(halves, _mm_setzero_si128());
}

RATEL_INLINE Bytes narrow_to_bytes(Words words) {
  const __m128i halves = _mm_packs_epi32((__m128i)words, (__m128i)words);
  const int packed = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
  Bytes bytes;
  __builtin_memcpy(&bytes, &packed, sizeof packed);
  return bytes;
}

RATEL_INLINE uint32_t sign_bits(Words words) { return (uint32_t)_mm_movemask_ps((__m128)words); }

typedef double Doubles __attribute__((vector_size(8 * RATEL_LANES)));
typedef uint64_t LongWords __attribute__((vector_size(8 * RATEL_LANES)));

// a * b + c with one rounding. The product is exact in double. The sum is rounded to odd there (Knuth's two-sum gives
// its error), so that the rounding to float is the only one that matters.
RATEL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles addend = __builtin_convertvector(c, Doubles);
  const Doubles sum = product + addend;
  const Doubles addend_part = sum - product;
  const Doubles error = (product - (sum - addend_part)) + (addend - addend_part);
  const LongWords bits = (LongWords)sum;
  const LongWords is_inexact = (LongWords)(error > 0.0) | (LongWords)(error < 0.0);  // neither for NaN
  const LongWords is_even = (bits & 1u) - 1u;
  const LongWords toward_error = 1u - ((((LongWords)error ^ bits) >> 63) << 1);  // +1 or -1
  return __builtin_convertvector((Doubles)(bits + (is_inexact & is_even & toward_error)), Floats);
}

RATEL_INLINE Longs multiply_low_words(Longs a, Longs b) { return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b); }

RATEL_INLINE Longs swap_neighbours(Longs longs) { return (Longs)_mm_shuffle_epi32((__m128i)longs, 0x4e); }

RATEL_INLINE Floats correct_square_root(Floats value) { return (Floats)_mm_sqrt_ps((__m128)value); }

RATEL_INLINE Floats coarse_reciprocal_root_estimate(Floats value) { return (Floats)_mm_rsqrt_ps((__m128)value); }

#endif

RATEL_INLINE Floats reciprocal_root_estimate(Floats value) { return reciprocal_root_estimate_in_software(value); }

RATEL_INLINE Floats from_float16(Halves halves) { return from_float16_in_software(halves); }

RATEL_INLINE Halves to_float16(Floats floats) { return to_float16_in_software(floats); }

RATEL_INLINE Floats table_entries(const float* table, Words places) {
  Floats found;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    found[lane] = table[places[lane]];
  }
  return found;
}

RATEL_INLINE Words table_entries(const uint32_t* table, Words places) {
  Words found;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    found[lane] = table[places[lane]];
  }
  return found;
}

class Divisor {
 public:
  explicit Divisor(float divisor) : divisor_(divisor) {}

  RATEL_INLINE Floats divide(Floats dividend) const { return dividend / divisor_; }

 private:
  float divisor_;
};

}  // namespace

#include "body.h"

const ratel::Kernels ratel::kBaselineKernels = RATEL_KERNELS("baseline");
