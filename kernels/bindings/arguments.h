// What several functions of the module take: the numbers of a step, the fields of a record.
//
// For: module.cpp, updates.cpp. Wrong values throw std::invalid_argument, wrong arrays what arrays.h says.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "arrays.h"
#include "ratel/kernels.h"

namespace ratel {

using Name = std::optional<std::string>;

const char* square_root_name(SquareRoot square_root);

// Without a name the native one.
SquareRoot square_root_for(const Name& name);

// Doubles become floats here, as torch rounds the scalars of its operations.
AdamWScalars adamw_scalars(double decay_factor, double one_minus_beta1, double beta2, double one_minus_beta2,
                           double step_size, double bias_correction2_sqrt, double epsilon, double gradient_scale,
                           const Name& square_root);

Bfloat16State bfloat16_state(Arrays& arrays, nanobind::handle hi16, nanobind::handle lo16, nanobind::handle m32,
                             nanobind::handle v32);

Float32State float32_state(Arrays& arrays, nanobind::handle w32, nanobind::handle m32, nanobind::handle v32);

Float16State float16_state(Arrays& arrays, nanobind::handle w16, nanobind::handle w32, nanobind::handle m32,
                           nanobind::handle v32);

}  // namespace ratel
