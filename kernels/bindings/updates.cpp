// update_*: AdamW on the parameters in a chunk, and checksums of its fields; see ratel/chunk.h.

#include "updates.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "arrays.h"
#include "ratel/chunk.h"
#include "ratel/dispatch.h"

namespace nb = nanobind;

namespace ratel {

namespace {

using Ranges = std::vector<std::tuple<size_t, size_t, bool>>;
// Chunk by chunk, one for each field of the record in its order; or none at all.
using Numbers = std::vector<std::optional<uint64_t>>;

std::vector<Segment> segments_of(const Ranges& ranges, size_t count) {
  std::vector<Segment> segments;
  size_t end = 0;
  for (const auto& [first, last, decays] : ranges) {
    if (first < end || last < first || last > count) {
      throw std::invalid_argument("segments: must lie in order within the arrays, [" + std::to_string(first) + ", " +
                                  std::to_string(last) + ") does not");
    }
    segments.push_back({first, last, decays});
    end = last;
  }
  return segments;
}

void check_seeds(const char* name, const Numbers& seeds, size_t expected, size_t count) {
  if (seeds.empty()) {
    return;
  }
  if (seeds.size() != expected) {
    throw std::invalid_argument(std::string(name) + ": must have one for each field of each chunk, " +
                                std::to_string(expected) + ", has " + std::to_string(seeds.size()));
  }
  if (count % kChunkGrain != 0) {
    throw std::invalid_argument(std::string(name) + ": arrays with checksums must have a multiple of " +
                                std::to_string(kChunkGrain) + " elements, have " + std::to_string(count));
  }
}

template <class State>
std::pair<Numbers, Numbers> update(Arrays& arrays, const State& state, std::vector<ChunkField> fields,
                                   nb::handle gradient, const Ranges& ranges, size_t chunk_elements,
                                   const Numbers& seeds_before, const Numbers& seeds_after,
                                   const AdamWScalars& scalars, const Name& isa) {
  const Gradient typed = arrays.gradient("gradient", gradient);
  const size_t count = arrays.count();
  const std::vector<Segment> segments = segments_of(ranges, count);
  if (chunk_elements == 0 || chunk_elements % kChunkGrain != 0) {
    throw std::invalid_argument("chunk_elements: must be a multiple of " + std::to_string(kChunkGrain) + ", is " +
                                std::to_string(chunk_elements));
  }
  const size_t num_chunks = count / chunk_elements + (count % chunk_elements != 0);
  check_seeds("seeds_before", seeds_before, num_chunks * fields.size(), count);
  check_seeds("seeds_after", seeds_after, num_chunks * fields.size(), count);
  const Kernels& kernels = select_kernels(isa);
  std::pair<Numbers, Numbers> found;
  nb::gil_scoped_release unlocked;
  for (size_t chunk = 0; chunk < num_chunks; ++chunk) {
    for (size_t number = 0; number < fields.size(); ++number) {
      const size_t place = chunk * fields.size() + number;
      fields[number].seed_before = seeds_before.empty() ? std::nullopt : seeds_before[place];
      fields[number].seed_after = seeds_after.empty() ? std::nullopt : seeds_after[place];
    }
    const size_t start = chunk * chunk_elements;
    update_chunk(kernels, state, typed, scalars, segments, &fields, start, std::min(count, start + chunk_elements));
    for (const ChunkField& field : fields) {
      found.first.push_back(field.before);
      found.second.push_back(field.after);
    }
  }
  return found;
}

std::pair<Numbers, Numbers> update_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32,
                                            nb::handle gradient, const Ranges& segments, size_t chunk_elements,
                                            const Numbers& seeds_before, const Numbers& seeds_after,
                                            double decay_factor, double one_minus_beta1, double beta2,
                                            double one_minus_beta2, double step_size, double bias_correction2_sqrt,
                                            double epsilon, double gradient_scale, const Name& square_root,
                                            const Name& isa) {
  Arrays arrays;
  const Bfloat16State state = bfloat16_state(arrays, hi16, lo16, m32, v32);
  return update(arrays, state, {{state.hi16, 2}, {state.lo16, 2}, {state.m32, 4}, {state.v32, 4}}, gradient, segments,
                chunk_elements, seeds_before, seeds_after,
                adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                              epsilon, gradient_scale, square_root),
                isa);
}

std::pair<Numbers, Numbers> update_float32(nb::handle w32, nb::handle m32, nb::handle v32, nb::handle gradient,
                                           const Ranges& segments, size_t chunk_elements, const Numbers& seeds_before,
                                           const Numbers& seeds_after, double decay_factor, double one_minus_beta1,
                                           double beta2, double one_minus_beta2, double step_size,
                                           double bias_correction2_sqrt, double epsilon, double gradient_scale,
                                           const Name& square_root, const Name& isa) {
  Arrays arrays;
  const Float32State state = float32_state(arrays, w32, m32, v32);
  return update(arrays, state, {{state.w32, 4}, {state.m32, 4}, {state.v32, 4}}, gradient, segments, chunk_elements,
                seeds_before, seeds_after,
                adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                              epsilon, gradient_scale, square_root),
                isa);
}

std::pair<Numbers, Numbers> update_float16(nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32,
                                           nb::handle gradient, const Ranges& segments, size_t chunk_elements,
                                           const Numbers& seeds_before, const Numbers& seeds_after,
                                           double decay_factor, double one_minus_beta1, double beta2,
                                           double one_minus_beta2, double step_size, double bias_correction2_sqrt,
                                           double epsilon, double gradient_scale, const Name& square_root,
                                           const Name& isa) {
  Arrays arrays;
  const Float16State state = float16_state(arrays, w16, w32, m32, v32);
  return update(arrays, state, {{state.w16, 2}, {state.w32, 4}, {state.m32, 4}, {state.v32, 4}}, gradient, segments,
                chunk_elements, seeds_before, seeds_after,
                adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                              epsilon, gradient_scale, square_root),
                isa);
}

template <class Function, class... Extra>
void define(nb::module_& module, const char* name, Function function, const Extra&... arrays) {
  module.def(name, function, arrays..., nb::kw_only(), nb::arg("segments"), nb::arg("chunk_elements"),
             nb::arg("seeds_before"), nb::arg("seeds_after"), nb::arg("decay_factor"), nb::arg("one_minus_beta1"),
             nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("step_size"), nb::arg("bias_correction2_sqrt"),
             nb::arg("epsilon"), nb::arg("gradient_scale"), nb::arg("square_root") = nb::none(),
             nb::arg("isa") = nb::none());
}

}  // namespace

void define_updates(nb::module_& module) {
  const nb::arg hi16("hi16"), lo16("lo16"), w16("w16"), w32("w32"), m32("m32"), v32("v32"), gradient("gradient");
  define(module, "update_bfloat16", update_bfloat16, hi16, lo16, m32, v32, gradient);
  define(module, "update_float32", update_float32, w32, m32, v32, gradient);
  define(module, "update_float16", update_float16, w16, w32, m32, v32, gradient);
}

}  // namespace ratel
