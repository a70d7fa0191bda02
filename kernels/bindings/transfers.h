// Memory and files as ranges of bytes: what a transfer is cut into.
#pragma once

#include <nanobind/nanobind.h>

namespace ratel {

void define_transfers(nanobind::module_& module);

}  // namespace ratel
