// AdamW on chunks, with their checksums, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace ratel {

// Adds update_bfloat16, update_float32 and update_float16.
void define_updates(nanobind::module_& module);

}  // namespace ratel
