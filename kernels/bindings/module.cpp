// The Python module ratel_cli._native. ratel_cli/_native.pyi is its reference.
//
// For: engine, model.import_weights/export (split, join), hardware; updates.cpp has what training calls, and benchmarks and tests
// hold that against the plain kernels here. Invariant: arguments are checked whole before the first byte changes, and
// kernels run without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "arrays.h"
#include "ratel/dispatch.h"
#include "ratel/kernels.h"
#include "updates.h"

namespace nb = nanobind;

namespace ratel {

namespace {

void adamw_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32, nb::handle gradient,
                    double decay_factor, double one_minus_beta1, double beta2, double one_minus_beta2,
                    double step_size, double bias_correction2_sqrt, double epsilon, double gradient_scale,
                    const Name& square_root, const Name& isa) {
  Arrays arrays;
  const Bfloat16State state = bfloat16_state(arrays, hi16, lo16, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const AdamWScalars scalars =
      adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                    epsilon, gradient_scale, square_root);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.adamw_bfloat16(state, typed, scalars, arrays.count());
}

void adamw_float32(nb::handle w32, nb::handle m32, nb::handle v32, nb::handle gradient, double decay_factor,
                   double one_minus_beta1, double beta2, double one_minus_beta2, double step_size,
                   double bias_correction2_sqrt, double epsilon, double gradient_scale, const Name& square_root,
                   const Name& isa) {
  Arrays arrays;
  const Float32State state = float32_state(arrays, w32, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const AdamWScalars scalars =
      adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                    epsilon, gradient_scale, square_root);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.adamw_float32(state, typed, scalars, arrays.count());
}

void adamw_float16(nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32, nb::handle gradient,
                   double decay_factor, double one_minus_beta1, double beta2, double one_minus_beta2,
                   double step_size, double bias_correction2_sqrt, double epsilon, double gradient_scale,
                   const Name& square_root, const Name& isa) {
  Arrays arrays;
  const Float16State state = float16_state(arrays, w16, w32, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const AdamWScalars scalars =
      adamw_scalars(decay_factor, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt,
                    epsilon, gradient_scale, square_root);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.adamw_float16(state, typed, scalars, arrays.count());
}

void stream_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32, nb::handle gradient,
                     const Name& isa) {
  Arrays arrays;
  const Bfloat16State state = bfloat16_state(arrays, hi16, lo16, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.stream_bfloat16(state, typed, arrays.count());
}

void stream_float32(nb::handle w32, nb::handle m32, nb::handle v32, nb::handle gradient, const Name& isa) {
  Arrays arrays;
  const Float32State state = float32_state(arrays, w32, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.stream_float32(state, typed, arrays.count());
}

void stream_float16(nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32, nb::handle gradient,
                    const Name& isa) {
  Arrays arrays;
  const Float16State state = float16_state(arrays, w16, w32, m32, v32);
  const Gradient typed = arrays.gradient("gradient", gradient);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.stream_float16(state, typed, arrays.count());
}

void split_bfloat16(nb::handle w32, nb::handle hi16, nb::handle lo16, nb::handle v32, const Name& isa) {
  Arrays arrays;
  const float* master = arrays.read_only_float32("w32", w32);
  Bfloat16State state{};
  state.hi16 = arrays.bfloat16("hi16", hi16);
  state.lo16 = arrays.int16("lo16", lo16);
  state.v32 = arrays.float32("v32", v32);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.split_bfloat16(master, state, arrays.count());
}

void join_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle v32, nb::handle w32, const Name& isa) {
  Arrays arrays;
  Bfloat16State state{};
  state.hi16 = arrays.bfloat16("hi16", hi16);
  state.lo16 = arrays.int16("lo16", lo16);
  state.v32 = arrays.float32("v32", v32);
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

template <class Function, class... Extra>
void define_adamw(nb::module_& module, const char* name, Function function, const Extra&... arrays) {
  module.def(name, function, arrays..., nb::kw_only(), nb::arg("decay_factor"), nb::arg("one_minus_beta1"),
             nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("step_size"), nb::arg("bias_correction2_sqrt"),
             nb::arg("epsilon"), nb::arg("gradient_scale"), nb::arg("square_root") = nb::none(),
             nb::arg("isa") = nb::none());
}

template <class Function, class... Extra>
void define_in_place(nb::module_& module, const char* name, Function function, const Extra&... arrays) {
  module.def(name, function, arrays..., nb::kw_only(), nb::arg("isa") = nb::none());
}

}  // namespace

}  // namespace ratel

NB_MODULE(_native, module) {
  using namespace ratel;
  const nb::arg hi16("hi16"), lo16("lo16"), w16("w16"), w32("w32"), m32("m32"), v32("v32"), gradient("gradient");
  define_adamw(module, "adamw_bfloat16", adamw_bfloat16, hi16, lo16, m32, v32, gradient);
  define_adamw(module, "adamw_float32", adamw_float32, w32, m32, v32, gradient);
  define_adamw(module, "adamw_float16", adamw_float16, w16, w32, m32, v32, gradient);
  define_in_place(module, "stream_bfloat16", stream_bfloat16, hi16, lo16, m32, v32, gradient);
  define_in_place(module, "stream_float32", stream_float32, w32, m32, v32, gradient);
  define_in_place(module, "stream_float16", stream_float16, w16, w32, m32, v32, gradient);
  define_in_place(module, "split_bfloat16", split_bfloat16, w32, hi16, lo16, v32);
  define_in_place(module, "join_bfloat16", join_bfloat16, hi16, lo16, v32, w32);
  define_updates(module);
  module.def("square_root", square_root_in_place, nb::arg("values"), nb::kw_only(),
             nb::arg("square_root") = nb::none(), nb::arg("isa") = nb::none());
  module.def("native_square_root", [] { return square_root_name(native_square_root()); });
  module.def("supported_isas", supported_isas);
  module.def("active_isa", [] { return select_kernels(std::nullopt).isa; });
}
