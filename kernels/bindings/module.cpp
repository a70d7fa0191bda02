// The Python module ratel_cli._native. ratel_cli/_native.pyi is its reference.
//
// Invariant: arguments are checked whole before the first byte changes, and kernels run without the GIL.

#include <nanobind/nanobind.h>
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
#include <new>
#include <utility>
#include <vector>

#include "arrays.h"
#include "ratel/chunk.h"
#include "ratel/dispatch.h"
#include "ratel/kernels.h"

namespace nb = nanobind;

namespace ratel {

namespace {

using Name = std::optional<std::string>;
using Ranges = std::vector<std::tuple<size_t, size_t, bool>>;
// Chunk by chunk, one for each field of the record in its order; empty: none at all.
using Checksums = std::vector<std::optional<uint64_t>>;

constexpr std::pair<SquareRoot, const char*> kSquareRoots[] = {
    {SquareRoot::correct, "correct"},
    {SquareRoot::mkl_avx512, "mkl_avx512"},
#if defined(__x86_64__)
    {SquareRoot::mkl_sse, "mkl_sse"},
#endif
};

const char* square_root_name(SquareRoot square_root) {
  for (const auto& [kind, name] : kSquareRoots) {
    if (kind == square_root) {
      return name;
    }
  }
  throw std::logic_error("square_root: no such kind");
}

// Without a name the native one.
SquareRoot square_root_for(const Name& wanted) {
  if (!wanted) {
    return native_square_root();
  }
  for (const auto& [kind, name] : kSquareRoots) {
    if (*wanted == name) {
      return kind;
    }
  }
  throw std::invalid_argument("square_root: must be 'correct', 'mkl_avx512' or, on x86, 'mkl_sse', is '" + *wanted +
                              "'");
}

// Doubles become floats here, as torch rounds the scalars of its operations.
void make_scalars(AdamWScalars* scalars, double decay_factor, double one_minus_beta1, double beta2,
                  double one_minus_beta2, double step_size, double bias_correction2_sqrt, double epsilon,
                  double gradient_scale, const Name& square_root) {
  // Outside these bounds the division by it would not be exact (adamw/divisor_fused.h); a real one is 1e-8 to 1.
  if (!(bias_correction2_sqrt >= 0x1p-30 && bias_correction2_sqrt <= 0x1p30)) {
    throw std::invalid_argument("bias_correction2_sqrt: must lie between 2**-30 and 2**30, is " +
                                std::to_string(bias_correction2_sqrt));
  }
  const auto rounded = [](double value) { return static_cast<float>(value); };
  new (scalars) AdamWScalars{rounded(decay_factor),    rounded(one_minus_beta1), rounded(beta2),
                             rounded(one_minus_beta2), rounded(-step_size),      rounded(bias_correction2_sqrt),
                             rounded(epsilon),         rounded(gradient_scale),  square_root_for(square_root)};
}

// The three layouts: how Python passes their fields, and what checksums are taken of.

void take(Arrays& arrays, Bfloat16State* state, nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32) {
  *state = {arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), arrays.float32("m32", m32),
            arrays.float32("v32", v32)};
}

void take(Arrays& arrays, Float32State* state, nb::handle w32, nb::handle m32, nb::handle v32) {
  *state = {arrays.float32("w32", w32), arrays.float32("m32", m32), arrays.float32("v32", v32)};
}

void take(Arrays& arrays, Float16State* state, nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32) {
  *state = {arrays.float16("w16", w16), arrays.float32("w32", w32), arrays.float32("m32", m32),
            arrays.float32("v32", v32)};
}

std::vector<ChunkField> fields_of(const Bfloat16State& state) {
  return {{state.hi16, 2}, {state.lo16, 2}, {state.m32, 4}, {state.v32, 4}};
}

std::vector<ChunkField> fields_of(const Float32State& state) {
  return {{state.w32, 4}, {state.m32, 4}, {state.v32, 4}};
}

std::vector<ChunkField> fields_of(const Float16State& state) {
  return {{state.w16, 2}, {state.w32, 4}, {state.m32, 4}, {state.v32, 4}};
}

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

void check_seeds(const char* name, const Checksums& seeds, size_t expected, size_t count) {
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

// What Python calls for one layout. `Fields` is nb::handle for each field of the record.
template <class State, class... Fields>
struct Layout {
  static void adamw(Fields... fields, nb::handle gradient, const AdamWScalars& scalars, const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(kernels, state).adamw(state, typed, scalars, arrays.count());
  }

  static void stream(Fields... fields, nb::handle gradient, const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(kernels, state).stream(state, typed, arrays.count());
  }

  static std::pair<Checksums, Checksums> update(Fields... fields, nb::handle gradient, const AdamWScalars& scalars,
                                                const Ranges& ranges, size_t chunk_elements,
                                                const Checksums& seeds_before, const Checksums& seeds_after,
                                                const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const size_t count = arrays.count();
    const std::vector<Segment> segments = segments_of(ranges, count);
    if (chunk_elements == 0 || chunk_elements % kChunkGrain != 0) {
      throw std::invalid_argument("chunk_elements: must be a multiple of " + std::to_string(kChunkGrain) + ", is " +
                                  std::to_string(chunk_elements));
    }
    std::vector<ChunkField> chunk = fields_of(state);
    const size_t num_chunks = count / chunk_elements + (count % chunk_elements != 0);
    check_seeds("seeds_before", seeds_before, num_chunks * chunk.size(), count);
    check_seeds("seeds_after", seeds_after, num_chunks * chunk.size(), count);
    const Kernels& kernels = select_kernels(isa);
    std::pair<Checksums, Checksums> found;
    nb::gil_scoped_release unlocked;
    for (size_t start = 0, place = 0; start < count; start += chunk_elements) {
      for (size_t number = 0; number < chunk.size(); ++number, ++place) {
        chunk[number].seed_before = seeds_before.empty() ? std::nullopt : seeds_before[place];
        chunk[number].seed_after = seeds_after.empty() ? std::nullopt : seeds_after[place];
      }
      update_chunk(kernels, state, typed, scalars, segments, &chunk, start, std::min(count, start + chunk_elements));
      for (const ChunkField& field : chunk) {
        found.first.push_back(field.before);
        found.second.push_back(field.after);
      }
    }
    return found;
  }
};

template <class>
using Handle = nb::handle;

template <class State, class... Fields>
void define_layout(nb::module_& module, const char* adamw, const char* stream, const char* update, Fields... fields) {
  using Functions = Layout<State, Handle<Fields>...>;
  const nb::arg gradient("gradient"), scalars("scalars");
  module.def(adamw, Functions::adamw, nb::arg(fields)..., gradient, nb::kw_only(), scalars,
             nb::arg("isa") = nb::none());
  module.def(stream, Functions::stream, nb::arg(fields)..., gradient, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def(update, Functions::update, nb::arg(fields)..., gradient, nb::kw_only(), scalars, nb::arg("segments"),
             nb::arg("chunk_elements"), nb::arg("seeds_before"), nb::arg("seeds_after"),
             nb::arg("isa") = nb::none());
}

void split_bfloat16(nb::handle w32, nb::handle hi16, nb::handle lo16, nb::handle v32, const Name& isa) {
  Arrays arrays;
  const float* master = arrays.read_only_float32("w32", w32);
  const Bfloat16State state{arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), nullptr,
                            arrays.float32("v32", v32)};
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.split_bfloat16(master, state, arrays.count());
}

void join_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle v32, nb::handle w32, const Name& isa) {
  Arrays arrays;
  const Bfloat16State state{arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), nullptr,
                            arrays.float32("v32", v32)};
  float* master = arrays.float32("w32", w32);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.join_bfloat16(state, master, arrays.count());
}

void square_root_in_place(nb::handle values, const Name& square_root, const Name& isa) {
  Arrays arrays;
  float* data = arrays.float32("values", values);
  const SquareRoot kind = square_root_for(square_root);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.square_root(data, kind, arrays.count());
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) {
    names.emplace_back(kernels->isa);
  }
  return names;
}

}  // namespace

}  // namespace ratel

NB_MODULE(_native, module) {
  using namespace ratel;
  nb::set_leak_warnings(false);  // what Python still holds when it exits is no fault of a run
  const nb::arg isa("isa"), square_root("square_root"), hi16("hi16"), lo16("lo16"), v32("v32"), w32("w32");
  nb::class_<AdamWScalars>(module, "AdamWScalars", nb::is_final())
      .def("__init__", make_scalars, nb::kw_only(), nb::arg("decay_factor"), nb::arg("one_minus_beta1"),
           nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("step_size"), nb::arg("bias_correction2_sqrt"),
           nb::arg("epsilon"), nb::arg("gradient_scale"), nb::arg("square_root") = nb::none());
  define_layout<Bfloat16State>(module, "adamw_bfloat16", "stream_bfloat16", "update_bfloat16", "hi16", "lo16", "m32",
                               "v32");
  define_layout<Float32State>(module, "adamw_float32", "stream_float32", "update_float32", "w32", "m32", "v32");
  define_layout<Float16State>(module, "adamw_float16", "stream_float16", "update_float16", "w16", "w32", "m32", "v32");
  module.def("split_bfloat16", split_bfloat16, w32, hi16, lo16, v32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("join_bfloat16", join_bfloat16, hi16, lo16, v32, w32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("square_root", square_root_in_place, nb::arg("values"), nb::kw_only(),
             nb::arg("square_root") = nb::none(), nb::arg("isa") = nb::none());
  module.def("native_square_root", [] { return square_root_name(native_square_root()); });
  module.def("supported_isas", supported_isas);
  module.def("active_isa", [] { return select_kernels(std::nullopt).isa; });
}
