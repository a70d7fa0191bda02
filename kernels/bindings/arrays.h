// The arrays of one kernel call: 1-D, contiguous, on the CPU, of the expected element types and of one length. An array
// that the kernel writes, and a gradient, may come as its bytes: a buffer of unsigned 8-bit numbers.
//
// Invariant: a kernel gets pointers only after every check has passed. No two arrays of a call overlap, since kernels
// read and write whole vectors. An `Arrays` holds a reference to each array while it lives.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
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
  // One value for each `per` elements. The array may be longer, up to the end of its page.
  uint8_t* bytes(const char* name, nanobind::handle object, size_t per);
  float* float32(const char* name, nanobind::handle object, size_t per);
  const float* read_only_float32(const char* name, nanobind::handle object);
  // `dtype`: the element type of a gradient that comes as its bytes.
  Gradient gradient(const char* name, nanobind::handle object, const std::optional<std::string>& dtype = std::nullopt);

  // Elements of the first array, and of the others with one value for each element.
  size_t count() const { return count_; }

  // Size of the array that was taken as number `place`.
  size_t num_bytes(size_t place) const { return static_cast<size_t>(ranges_[place].end - ranges_[place].begin); }

 private:
  using Array = nanobind::ndarray<nanobind::ro>;
  using Type = nanobind::dlpack::dtype;

  struct Range {
    const char* name;
    const char* begin;
    const char* end;
  };

  const Array& take(const char* name, nanobind::handle object, bool is_writable, std::initializer_list<Type> types,
                    const char* expected, bool may_be_bytes = false, size_t per = 0);
  // `per` 0: of the same length as the first array.
  void* writable(const char* name, nanobind::handle object, std::initializer_list<Type> types, const char* expected,
                 size_t per = 0);

  std::vector<Array> arrays_;
  std::vector<Range> ranges_;
  size_t count_ = 0;
};

}  // namespace ratel
