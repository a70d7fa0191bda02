// Arguments from Python; see arguments.h.

#include "arguments.h"

#include <stdexcept>

#include "ratel/dispatch.h"

namespace nb = nanobind;

namespace ratel {

namespace {

#if defined(__x86_64__)
constexpr SquareRoot kSquareRoots[] = {SquareRoot::correct, SquareRoot::mkl_avx512, SquareRoot::mkl_sse};
#else
constexpr SquareRoot kSquareRoots[] = {SquareRoot::correct, SquareRoot::mkl_avx512};
#endif

}  // namespace

const char* square_root_name(SquareRoot square_root) {
  switch (square_root) {
    case SquareRoot::correct:
      return "correct";
    case SquareRoot::mkl_avx512:
      return "mkl_avx512";
    case SquareRoot::mkl_sse:
      return "mkl_sse";
  }
  throw std::logic_error("square_root: no such kind");
}

SquareRoot square_root_for(const Name& name) {
  if (!name) {
    return native_square_root();
  }
  for (const SquareRoot square_root : kSquareRoots) {
    if (*name == square_root_name(square_root)) {
      return square_root;
    }
  }
  throw std::invalid_argument("square_root: must be 'correct', 'mkl_avx512' or, on x86, 'mkl_sse', is '" + *name + "'");
}

AdamWScalars adamw_scalars(double decay_factor, double one_minus_beta1, double beta2, double one_minus_beta2,
                           double step_size, double bias_correction2_sqrt, double epsilon, double gradient_scale,
                           const Name& square_root) {
  // Outside, the division by it would not be exact (adamw/divisor_fused.h); a real one lies in 1e-8 to 1.
  if (!(bias_correction2_sqrt >= 0x1p-30 && bias_correction2_sqrt <= 0x1p30)) {
    throw std::invalid_argument("bias_correction2_sqrt: must lie between 2**-30 and 2**30, is " +
                                std::to_string(bias_correction2_sqrt));
  }
  return {static_cast<float>(decay_factor), static_cast<float>(one_minus_beta1),
          static_cast<float>(beta2),        static_cast<float>(one_minus_beta2),
          static_cast<float>(-step_size),   static_cast<float>(bias_correction2_sqrt),
          static_cast<float>(epsilon),      static_cast<float>(gradient_scale),
          square_root_for(square_root)};
}

Bfloat16State bfloat16_state(Arrays& arrays, nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32) {
  Bfloat16State state{};
  state.hi16 = arrays.bfloat16("hi16", hi16);
  state.lo16 = arrays.int16("lo16", lo16);
  state.m32 = arrays.float32("m32", m32);
  state.v32 = arrays.float32("v32", v32);
  return state;
}

Float32State float32_state(Arrays& arrays, nb::handle w32, nb::handle m32, nb::handle v32) {
  Float32State state{};
  state.w32 = arrays.float32("w32", w32);
  state.m32 = arrays.float32("m32", m32);
  state.v32 = arrays.float32("v32", v32);
  return state;
}

Float16State float16_state(Arrays& arrays, nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32) {
  Float16State state{};
  state.w16 = arrays.float16("w16", w16);
  state.w32 = arrays.float32("w32", w32);
  state.m32 = arrays.float32("m32", m32);
  state.v32 = arrays.float32("v32", v32);
  return state;
}

}  // namespace ratel
