// The kernels, written once and compiled for each instruction set.
//
// Each isa_*.cpp includes it after lanes.h and its own widen, narrow, widen_bytes, narrow_to_bytes, sign_bits,
// multiply_add, correct_square_root, reciprocal_root_estimate, coarse_reciprocal_root_estimate, Divisor, table_entries,
// has_nan, from_float16, to_float16, multiply_low_words and swap_neighbours. A rule is the only difference between
// kernels: adamw.h, eight_bit.h, lion.h, muon.h and sgd.h. Invariant: every instruction set computes the same bits, those
// of the rule's reference. So each rounding is the reference's, fused multiply-adds included, and -ffp-contract=off keeps
// the compiler from adding its own.
#pragma once

#include "../checksum/stripes.h"
#include "adamw.h"
#include "eight_bit.h"
#include "lion.h"
#include "loops.h"
#include "muon.h"
#include "sgd.h"
#include "state.h"

namespace {

template <class State>
void adamw(State state, Gradient gradient, const AdamWScalars& scalars, size_t count) {
  with_adamw<Mean::lerp>(scalars, [&](auto* rule) { update_all(rule, state, gradient, scalars, count); });
}

template <class State>
void adamw_8bit(State state, Gradient gradient, const AdamWScalars& scalars, size_t count) {
  with_adamw<Mean::mul_add>(scalars, [&](auto* rule) { update_by_units(rule, state, gradient, scalars, count); });
}

template <class State>
void lion(State state, Gradient gradient, const LionScalars& scalars, size_t count) {
  update_all(static_cast<LionRule*>(nullptr), state, gradient, scalars, count);
}

template <class State>
void muon(State state, Gradient gradient, const MuonScalars& scalars, size_t count) {
  update_all(static_cast<MuonRule*>(nullptr), state, gradient, scalars, count);
}

template <class Values, class State>
void sgd(State state, Gradient gradient, const SgdScalars& scalars, size_t count) {
  update_all(static_cast<SgdRule<Values>*>(nullptr), state, gradient, scalars, count);
}

template <class State>
void stream(State state, Gradient gradient, size_t count) {
  with_gradient(gradient, [&](auto typed) {
    for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
      flip(state, as_words(typed.at(at, length)), at, length);
    });
  });
}

void split_signed(const float* w32, HalvedWeights weights, float* v32, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const Words tie = store_weight(weights, load<Floats>(w32 + at, length), at, length);
    const Words v = load<Words>(v32 + at, length);
    store(v32 + at, (v & 0x7fffffffu) | tie, length);
  });
}

void join_signed(HalvedWeights weights, const float* v32, float* w32, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    store(w32 + at, load_weight(weights, load<Words>(v32 + at, length), at, length), length);
  });
}

void split_tied(const float* w32, TiedWeights weights, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    store_weight(weights, load<Floats>(w32 + at, length), at, length);
  });
}

void join_tied(TiedWeights weights, float* w32, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    store(w32 + at, load_weight(weights, Words{}, at, length), length);
  });
}

template <SquareRoot kind>
void square_roots(float* values, size_t count) {
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    const Floats value = load<Floats>(values + at, length);
    store(values + at, canonical(any_square_root<kind>(value)), length);
  });
}

void square_root(float* values, SquareRoot kind, size_t count) {
  switch (kind) {
    case SquareRoot::correct:
      return square_roots<SquareRoot::correct>(values, count);
    case SquareRoot::mkl_avx512:
      return square_roots<SquareRoot::mkl_avx512>(values, count);
    case SquareRoot::mkl_sse:
      return square_roots<SquareRoot::mkl_sse>(values, count);
  }
}

}  // namespace

// The kernels of a rule in four layouts.
#define RATEL_RULE(Rule, update)                                                                         \
  {                                                                                                      \
    {update<Rule::Bfloat16>, stream<Rule::Bfloat16>}, {update<Rule::Stochastic>, stream<Rule::Stochastic>}, \
        {update<Rule::Float32>, stream<Rule::Float32>}, {                                                \
      update<Rule::Float16>, stream<Rule::Float16>                                                       \
    }                                                                                                    \
  }

#define RATEL_SGD(Rule, Values)                                                                          \
  {                                                                                                      \
    {sgd<Values, Rule::Bfloat16>, stream<Rule::Bfloat16>},                                               \
        {sgd<Values, Rule::Stochastic>, stream<Rule::Stochastic>},                                       \
        {sgd<Values, Rule::Float32>, stream<Rule::Float32>}, {                                           \
      sgd<Values, Rule::Float16>, stream<Rule::Float16>                                                  \
    }                                                                                                    \
  }

#define RATEL_KERNELS(isa)                                                                               \
  {                                                                                                      \
    isa, RATEL_RULE(ratel::AdamW, adamw), RATEL_RULE(ratel::AdamW8Bit, adamw_8bit),                      \
        RATEL_RULE(ratel::Lion, lion), RATEL_SGD(ratel::Sgd, NoValue),                                   \
        RATEL_SGD(ratel::SgdMomentum, OneValue), RATEL_RULE(ratel::Muon, muon), split_signed,            \
        join_signed, split_tied, join_tied, square_root, absorb                                          \
  }
