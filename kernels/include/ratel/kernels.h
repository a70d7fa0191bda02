// What the kernels compute on, and the table of one instruction set's kernels.
//
// Each adamw/isa_*.cpp fills one table. Invariant: plain structs without member functions, and no STL: a file compiled
// for AVX-512 must not emit a weak symbol that the linker could choose for code on an older processor.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ratel/checksum.h"

namespace ratel {

enum class Element { bfloat16, float16, float32 };

// How a square root is rounded. AdamW's bits depend on it (kernels/README.md).
enum class SquareRoot {
  correct,     // IEEE 754
  mkl_avx512,  // as torch's MKL on Intel's AVX-512 processors: 1 ulp low for 0.6 % of all values
  mkl_sse      // as torch's MKL on AMD's: 1 ulp off for 17 %, from the processor's own estimate; x86 only
};

struct Gradient {
  const void* data;
  Element element;
};

// The fp32 master in two halves: hi16 is the bf16 weight, lo16 the low half. v32's sign says how a tie was rounded.
struct Bfloat16State {
  uint16_t* hi16;
  uint16_t* lo16;
  float* m32;
  float* v32;
};

struct Float32State {
  float* w32;
  float* m32;
  float* v32;
};

struct Float16State {
  uint16_t* w16;
  float* w32;
  float* m32;
  float* v32;
};

struct AdamWScalars {
  float decay_factor;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float negative_step_size;
  float bias_correction2_sqrt;
  float epsilon;
  float gradient_scale;
  SquareRoot square_root;
};

// The kernels of one layout.
template <class State>
struct LayoutKernels {
  void (*adamw)(State state, Gradient gradient, const AdamWScalars& scalars, size_t count);

  // The loads and stores of `adamw` with almost no arithmetic: the limit that memory sets.
  void (*stream)(State state, Gradient gradient, size_t count);
};

struct Kernels {
  const char* isa;
  LayoutKernels<Bfloat16State> bfloat16;
  LayoutKernels<Float32State> float32;
  LayoutKernels<Float16State> float16;

  void (*split_bfloat16)(const float* w32, Bfloat16State state, size_t count);
  void (*join_bfloat16)(Bfloat16State state, float* w32, size_t count);
  void (*square_root)(float* values, SquareRoot square_root, size_t count);

  // Add whole blocks, none of them the last, to a checksum.
  void (*absorb)(Checksum* checksum, const uint8_t* data, size_t num_blocks);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace ratel
