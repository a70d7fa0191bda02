// Checks of the arrays that Python passes; see arrays.h.

#include "arrays.h"

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace ratel {

namespace {

using Code = nb::dlpack::dtype_code;

bool is_type(const nb::dlpack::dtype& type, Code code, unsigned bits) {
  return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

std::string type_name(const nb::dlpack::dtype& type) {
  const char* kind = "an unknown type of ";
  switch (static_cast<Code>(type.code)) {
    case Code::Int:
      kind = "int";
      break;
    case Code::UInt:
      kind = "uint";
      break;
    case Code::Float:
      kind = "float";
      break;
    case Code::Bfloat:
      kind = "bfloat";
      break;
    default:
      break;
  }
  return kind + std::to_string(type.bits);
}

[[noreturn]] void refuse_type(const char* name, const char* expected, const nb::dlpack::dtype& actual) {
  const std::string message = std::string(name) + ": must be " + expected + ", is " + type_name(actual);
  throw nb::type_error(message.c_str());
}

}  // namespace

template <class Array>
Array Arrays::take(const char* name, nb::handle object) {
  Array array;
  // nanobind would take a tensor that requires gradients, through the one exporter that does not look.
  const bool is_tracked = nb::cast<bool>(nb::getattr(object, "requires_grad", nb::bool_(false)));
  if (is_tracked || !nb::try_cast<Array>(object, array, false)) {
    const std::string message = std::string(name) +
                                ": not a usable array; needs a tensor on the CPU that is writable where the "
                                "kernel writes and, if it requires gradients, detached";
    throw nb::type_error(message.c_str());
  }
  if (array.device_type() != nb::device::cpu::value) {
    throw std::invalid_argument(std::string(name) + ": must be on the CPU");
  }
  if (array.ndim() != 1) {
    throw std::invalid_argument(std::string(name) + ": must have 1 dimension, has " + std::to_string(array.ndim()));
  }
  const size_t count = array.shape(0);
  if (count > 1 && array.stride(0) != 1) {
    throw std::invalid_argument(std::string(name) + ": must be contiguous, has stride " +
                                std::to_string(array.stride(0)));
  }
  if (!ranges_.empty() && count != count_) {
    throw std::invalid_argument(std::string(name) + ": has " + std::to_string(count) + " elements, " +
                                ranges_.front().name + " has " + std::to_string(count_));
  }
  const char* begin = static_cast<const char*>(static_cast<const void*>(array.data()));
  const Range range{name, begin, begin + count * array.itemsize()};
  for (const Range& other : ranges_) {
    if (range.begin < other.end && other.begin < range.end) {
      throw std::invalid_argument(std::string(name) + " and " + other.name + " overlap in memory");
    }
  }
  ranges_.push_back(range);
  count_ = count;
  return array;
}

void* Arrays::take_writable(const char* name, nb::handle object, Code code, unsigned bits, const char* expected) {
  writable_.push_back(take<nb::ndarray<>>(name, object));
  const nb::ndarray<>& array = writable_.back();
  if (!is_type(array.dtype(), code, bits)) {
    refuse_type(name, expected, array.dtype());
  }
  return array.data();
}

float* Arrays::float32(const char* name, nb::handle object) {
  return static_cast<float*>(take_writable(name, object, Code::Float, 32, "float32"));
}

uint16_t* Arrays::bfloat16(const char* name, nb::handle object) {
  return static_cast<uint16_t*>(take_writable(name, object, Code::Bfloat, 16, "bfloat16"));
}

uint16_t* Arrays::float16(const char* name, nb::handle object) {
  return static_cast<uint16_t*>(take_writable(name, object, Code::Float, 16, "float16"));
}

uint16_t* Arrays::int16(const char* name, nb::handle object) {
  writable_.push_back(take<nb::ndarray<>>(name, object));
  const nb::ndarray<>& array = writable_.back();
  if (!is_type(array.dtype(), Code::Int, 16) && !is_type(array.dtype(), Code::UInt, 16)) {
    refuse_type(name, "int16 or uint16", array.dtype());
  }
  return static_cast<uint16_t*>(array.data());
}

const float* Arrays::read_only_float32(const char* name, nb::handle object) {
  readable_.push_back(take<nb::ndarray<nb::ro>>(name, object));
  const nb::ndarray<nb::ro>& array = readable_.back();
  if (!is_type(array.dtype(), Code::Float, 32)) {
    refuse_type(name, "float32", array.dtype());
  }
  return static_cast<const float*>(array.data());
}

Gradient Arrays::gradient(const char* name, nb::handle object) {
  readable_.push_back(take<nb::ndarray<nb::ro>>(name, object));
  const nb::ndarray<nb::ro>& array = readable_.back();
  if (is_type(array.dtype(), Code::Bfloat, 16)) {
    return {array.data(), Element::bfloat16};
  }
  if (is_type(array.dtype(), Code::Float, 16)) {
    return {array.data(), Element::float16};
  }
  if (is_type(array.dtype(), Code::Float, 32)) {
    return {array.data(), Element::float32};
  }
  refuse_type(name, "bfloat16, float16 or float32", array.dtype());
}

}  // namespace ratel
