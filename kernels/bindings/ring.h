// A ring of io_uring.
#pragma once

#include <nanobind/nanobind.h>

namespace ratel {

void define_ring(nanobind::module_& module);

}  // namespace ratel
