// The loops over elements: whole vectors first, then the rest. body.h includes it.
//
// Invariant: a rule sees each element once, with what lies in memory before.
#pragma once

#include "state.h"

namespace {

// Call `step(at, count)` for every full vector, then for the rest.
template <class Step>
RATEL_INLINE void for_each_vector(size_t count, Step step) {
  size_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    step(at, kLanes);
  }
  if (at < count) {
    step(at, count - at);
  }
}

// For all values, slowly; NaN becomes canonical.
template <class Rule, class State, class TypedGradient>
__attribute__((noinline, cold)) void careful_step(const Rule& rule, const State& state, TypedGradient gradient,
                                                  size_t at, size_t count) {
  typename Rule::Values moments = load_moments(state.moments, at, count);
  const Floats weight = load_weight(state.weights, moments.carried, at, count);
  const Floats result = rule.carefully(weight, &moments, gradient.at(at, count));
  moments.carried = store_weight(state.weights, canonical(result), at, count);
  store_moments(state.moments, canonical(moments), at, count);
}

template <class Rule, class State, class TypedGradient>
RATEL_INLINE void update_loop(const Rule& borrowed, const State& state, TypedGradient gradient, size_t count) {
  const Rule rule = borrowed;  // a local copy cannot alias the stores
  for_each_vector(count, [=](size_t at, size_t length) RATEL_LAMBDA {
    typename Rule::Values moments = load_moments(state.moments, at, length);
    const Floats weight = load_weight(state.weights, moments.carried, at, length);
    const Floats result = rule.quickly(weight, &moments, gradient.at(at, length));
    if (__builtin_expect(has_nan(result), 0)) {
      careful_step(rule, state, gradient, at, length);
    } else {
      moments.carried = store_weight(state.weights, result, at, length);
      store_moments(state.moments, moments, at, length);
    }
  });
}

// The first argument is there for its type.
template <class Rule, class State>
RATEL_INLINE void update_all(Rule*, const State& state, Gradient gradient, const typename Rule::Scalars& scalars,
                             size_t count) {
  with_gradient(gradient, [&](auto typed) { update_loop(Rule(scalars), state, typed, count); });
}

}  // namespace
