// What the kernels compute on, and the table of one instruction set's kernels.
//
// For: adamw/isa_*.cpp (fill one table each), adamw/dispatch.cpp (chooses a table), adamw/chunk.cpp and bindings/
// (check arrays, call). Plain C structs and no STL: files compiled for AVX-512 must not emit a weak
// symbol that the linker could hand to code running on an older processor.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ratel/checksum.h"

namespace ratel {

enum class Element { bfloat16, float16, float32 };

// How a square root is rounded. AdamW's bits depend on it, see kernels/README.md.
enum class SquareRoot {
  correct,     // IEEE 754
  mkl_avx512,  // what torch's MKL computes on Intel's AVX-512 processors: 1 ulp low for 0.6 % of all values
  mkl_sse      // what it computes on AMD's: 1 ulp off for 17 %, by the processor's own estimate; x86 only
};

struct Gradient {
  const void* data;
  Element element;
};

// fp32 master split in two: hi16 is the bf16 weight, lo16 the low half; v32's sign says how a tie was rounded.
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

struct Kernels {
  const char* isa;

  void (*adamw_bfloat16)(Bfloat16State state, Gradient gradient, const AdamWScalars& scalars, size_t count);
  void (*adamw_float32)(Float32State state, Gradient gradient, const AdamWScalars& scalars, size_t count);
  void (*adamw_float16)(Float16State state, Gradient gradient, const AdamWScalars& scalars, size_t count);

  // The same loads and stores as adamw_* and next to no arithmetic: what memory allows.
  void (*stream_bfloat16)(Bfloat16State state, Gradient gradient, size_t count);
  void (*stream_float32)(Float32State state, Gradient gradient, size_t count);
  void (*stream_float16)(Float16State state, Gradient gradient, size_t count);

  void (*split_bfloat16)(const float* w32, Bfloat16State state, size_t count);
  void (*join_bfloat16)(Bfloat16State state, float* w32, size_t count);
  void (*square_root)(float* values, SquareRoot square_root, size_t count);

  // Whole blocks into a checksum, none of them the last.
  void (*absorb)(Checksum* checksum, const uint8_t* data, size_t num_blocks);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace ratel
