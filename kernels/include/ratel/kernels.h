// What the kernels compute on, and the table of one instruction set's kernels.
//
// Each update/isa_*.cpp fills one table. Invariant: plain structs without member functions, and no STL: a file compiled
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

// Weights: the fp32 master, and the weight that the model computes with.

// The master in two halves: hi16 is the bf16 weight, lo16 the low half. How a tie was rounded is among the moments.
struct HalvedWeights {
  uint16_t* hi16;
  uint16_t* lo16;
};

// The same, with one bit for each element that says how a tie was rounded.
struct TiedWeights {
  uint16_t* hi16;
  uint16_t* lo16;
  uint8_t* tie8;
};

// The bf16 weight alone, which an update rounds stochastically. The random bits follow from a parameter's key in this
// update and the element's number in it, which counts from `first` on.
struct StochasticWeights {
  uint16_t* p16;
  uint64_t key = 0;
  uint64_t first = 0;
};

struct Float32Weights {
  float* w32;
};

struct Float16Weights {
  uint16_t* w16;
  float* w32;
};

// Moments: what a rule keeps besides.

struct TwoMoments {
  float* m32;
  float* v32;
};

// The sign of v32, which is never negative, says how a tie of the weight was rounded.
struct SignedMoments {
  float* m32;
  float* v32;
};

// One byte for each element, and for each 256 elements of a parameter what the codes are multiplied with.
struct ByteMoments {
  uint8_t* m8;
  uint8_t* v8;
  float* m_scale;
  float* v_scale;
};

struct OneMoment {
  float* m32;
};

// A moment, and what the weights move along, which the update reads and does not write: bf16.
struct DirectedMoment {
  float* m32;
  const uint16_t* direction;
};

struct NoMoments {};

template <class Weights_, class Moments_>
struct State {
  using Weights = Weights_;
  using Moments = Moments_;
  Weights weights;
  Moments moments;
};

// The numbers of an update. Weight decay does not apply to some parameters: `without_decay` in chunk.h.

struct AdamWScalars {
  float decay_factor;
  float one_minus_beta1;
  float beta1;
  float beta2;
  float one_minus_beta2;
  float negative_step_size;
  float bias_correction2_sqrt;
  float epsilon;
  float gradient_scale;
  SquareRoot square_root;
};

struct LionScalars {
  float decay_factor;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float negative_learning_rate;
  float gradient_scale;
};

struct SgdScalars {
  float weight_decay;
  float momentum;
  float negative_learning_rate;
  float gradient_scale;
  bool is_first;  // the momentum begins as the gradient
  bool is_nesterov;
};

struct MuonScalars {
  float decay_factor;
  float one_minus_momentum;
  float negative_step_size;
  float gradient_scale;
};

// Update rules: the states of the four layouts, and the numbers. Elements that belong together are `kUnit`.

struct AdamW {
  static constexpr size_t kUnit = 1;
  using Scalars = AdamWScalars;
  using Bfloat16 = State<HalvedWeights, SignedMoments>;
  using Stochastic = State<StochasticWeights, TwoMoments>;
  using Float32 = State<Float32Weights, TwoMoments>;
  using Float16 = State<Float16Weights, TwoMoments>;
};

struct AdamW8Bit {
  static constexpr size_t kUnit = 256;
  using Scalars = AdamWScalars;
  using Bfloat16 = State<TiedWeights, ByteMoments>;
  using Stochastic = State<StochasticWeights, ByteMoments>;
  using Float32 = State<Float32Weights, ByteMoments>;
  using Float16 = State<Float16Weights, ByteMoments>;
};

struct Lion {
  static constexpr size_t kUnit = 1;
  using Scalars = LionScalars;
  using Bfloat16 = State<TiedWeights, OneMoment>;
  using Stochastic = State<StochasticWeights, OneMoment>;
  using Float32 = State<Float32Weights, OneMoment>;
  using Float16 = State<Float16Weights, OneMoment>;
};

struct Sgd {
  static constexpr size_t kUnit = 1;
  using Scalars = SgdScalars;
  using Bfloat16 = State<TiedWeights, NoMoments>;
  using Stochastic = State<StochasticWeights, NoMoments>;
  using Float32 = State<Float32Weights, NoMoments>;
  using Float16 = State<Float16Weights, NoMoments>;
};

struct SgdMomentum {
  static constexpr size_t kUnit = 1;
  using Scalars = SgdScalars;
  using Bfloat16 = State<TiedWeights, OneMoment>;
  using Stochastic = State<StochasticWeights, OneMoment>;
  using Float32 = State<Float32Weights, OneMoment>;
  using Float16 = State<Float16Weights, OneMoment>;
};

struct Muon {
  static constexpr size_t kUnit = 1;
  using Scalars = MuonScalars;
  using Bfloat16 = State<TiedWeights, DirectedMoment>;
  using Stochastic = State<StochasticWeights, DirectedMoment>;
  using Float32 = State<Float32Weights, DirectedMoment>;
  using Float16 = State<Float16Weights, DirectedMoment>;
};

// The kernels of one rule and layout. `count` elements from the first one of a unit on.
template <class State, class Scalars>
struct LayoutKernels {
  void (*update)(State state, Gradient gradient, const Scalars& scalars, size_t count);

  // The loads and stores of `update` with almost no arithmetic: the limit that memory sets.
  void (*stream)(State state, Gradient gradient, size_t count);
};

template <class Rule>
struct RuleKernels {
  LayoutKernels<typename Rule::Bfloat16, typename Rule::Scalars> bfloat16;
  LayoutKernels<typename Rule::Stochastic, typename Rule::Scalars> stochastic;
  LayoutKernels<typename Rule::Float32, typename Rule::Scalars> float32;
  LayoutKernels<typename Rule::Float16, typename Rule::Scalars> float16;
};

struct Kernels {
  const char* isa;
  RuleKernels<AdamW> adamw;
  RuleKernels<AdamW8Bit> adamw_8bit;
  RuleKernels<Lion> lion;
  RuleKernels<Sgd> sgd;
  RuleKernels<SgdMomentum> sgd_momentum;
  RuleKernels<Muon> muon;

  // v32: its sign says how ties were rounded. Its other bits stay.
  void (*split_signed)(const float* w32, HalvedWeights weights, float* v32, size_t count);
  void (*join_signed)(HalvedWeights weights, const float* v32, float* w32, size_t count);
  void (*split_tied)(const float* w32, TiedWeights weights, size_t count);
  void (*join_tied)(TiedWeights weights, float* w32, size_t count);
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
