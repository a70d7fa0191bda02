// The arrays of one kernel call: 1-D, contiguous, on the CPU, of the expected element types and one length.
//
// For: the files beside it. Invariant: a kernel gets pointers only after every check has passed. No two arrays of
// a call overlap, since kernels read and write whole vectors. Holds a reference to each array while it lives.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ratel/kernels.h"

namespace ratel {

class Arrays {
 public:
  // Each throws TypeError (no array, wrong element type, read-only) or ValueError (device, shape, length,
  // overlap with an array taken before), naming the array.
  float* float32(const char* name, nanobind::handle object);
  uint16_t* bfloat16(const char* name, nanobind::handle object);
  uint16_t* float16(const char* name, nanobind::handle object);
  uint16_t* int16(const char* name, nanobind::handle object);
  const float* read_only_float32(const char* name, nanobind::handle object);
  Gradient gradient(const char* name, nanobind::handle object);

  size_t count() const { return count_; }

 private:
  struct Range {
    const char* name;
    const char* begin;
    const char* end;
  };

  template <class Array>
  Array take(const char* name, nanobind::handle object);
  void* take_writable(const char* name, nanobind::handle object, nanobind::dlpack::dtype_code code,
                      unsigned bits, const char* expected);

  std::vector<nanobind::ndarray<>> writable_;
  std::vector<nanobind::ndarray<nanobind::ro>> readable_;
  std::vector<Range> ranges_;
  size_t count_ = 0;
};

}  // namespace ratel
