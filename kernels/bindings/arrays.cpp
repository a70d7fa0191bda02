// Checks of the arrays that Python passes; see arrays.h.

#include "arrays.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace ratel {

namespace {

using Code = nb::dlpack::dtype_code;

constexpr nb::dlpack::dtype type_of(Code code, uint8_t bits) { return {static_cast<uint8_t>(code), bits, 1}; }

constexpr nb::dlpack::dtype kByte = type_of(Code::UInt, 8);
constexpr nb::dlpack::dtype kFloat32 = type_of(Code::Float, 32);
constexpr nb::dlpack::dtype kFloat16 = type_of(Code::Float, 16);
constexpr nb::dlpack::dtype kBfloat16 = type_of(Code::Bfloat, 16);

std::string name_of(const nb::dlpack::dtype& type) {
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

Element element_of(const nb::dlpack::dtype& type) {
  return type == kBfloat16 ? Element::bfloat16 : type == kFloat16 ? Element::float16 : Element::float32;
}

}  // namespace

const Arrays::Array& Arrays::take(const char* name, nb::handle object, bool is_writable,
                                  std::initializer_list<Type> types, const char* expected, bool may_be_bytes,
                                  size_t per) {
  const std::string label(name);
  Array array;
  nb::ndarray<> writable;
  // nanobind would accept a tensor that requires gradients, through the one exporter that does not check.
  const bool is_tracked = nb::cast<bool>(nb::getattr(object, "requires_grad", nb::bool_(false)));
  if (is_tracked || !(is_writable ? nb::try_cast(object, writable, false) : nb::try_cast(object, array, false))) {
    const std::string message = label +
                                ": not a usable array; needs a tensor on the CPU that is writable where the "
                                "kernel writes and, if it requires gradients, detached";
    throw nb::type_error(message.c_str());
  }
  if (is_writable) {
    array = Array(writable);
  }
  if (array.device_type() != nb::device::cpu::value) {
    throw std::invalid_argument(label + ": must be on the CPU");
  }
  if (array.ndim() != 1) {
    throw std::invalid_argument(label + ": must have 1 dimension, has " + std::to_string(array.ndim()));
  }
  size_t count = array.shape(0);
  if (count > 1 && array.stride(0) != 1) {
    throw std::invalid_argument(label + ": must be contiguous, has stride " + std::to_string(array.stride(0)));
  }
  const char* begin = static_cast<const char*>(array.data());
  const char* end = begin + count * array.itemsize();
  const size_t element_bytes = types.begin()->bits / 8;
  const bool is_bytes = may_be_bytes && array.dtype() == kByte;
  if (is_bytes) {
    if (count % element_bytes != 0 || reinterpret_cast<uintptr_t>(begin) % element_bytes != 0) {
      throw std::invalid_argument(label + ": its bytes must be whole and aligned elements of " +
                                  std::to_string(element_bytes) + " bytes, are " + std::to_string(count));
    }
    count /= element_bytes;
  }
  if (per == 0 && !ranges_.empty() && count != count_) {
    throw std::invalid_argument(label + ": has " + std::to_string(count) + " elements, " + ranges_.front().name +
                                " has " + std::to_string(count_));
  }
  if (per > 0 && count < (count_ + per - 1) / per) {
    throw std::invalid_argument(label + ": has " + std::to_string(count) + " values, needs " +
                                std::to_string((count_ + per - 1) / per) + " for " + std::to_string(count_) +
                                " elements");
  }
  const Range range{name, begin, end};
  for (const Range& other : ranges_) {
    if (range.begin < other.end && other.begin < range.end) {
      throw std::invalid_argument(label + " and " + other.name + " overlap in memory");
    }
  }
  if (!is_bytes && std::find(types.begin(), types.end(), array.dtype()) == types.end()) {
    const std::string message = label + ": must be " + expected + ", is " + name_of(array.dtype());
    throw nb::type_error(message.c_str());
  }
  ranges_.push_back(range);
  count_ = per == 0 ? count : count_;
  arrays_.push_back(std::move(array));
  return arrays_.back();
}

void* Arrays::writable(const char* name, nb::handle object, std::initializer_list<Type> types, const char* expected,
                       size_t per) {
  const Array& array = take(name, object, true, types, expected, true, per);
  return const_cast<void*>(array.data());  // nanobind has checked that it may
}

float* Arrays::float32(const char* name, nb::handle object) {
  return static_cast<float*>(writable(name, object, {kFloat32}, "float32"));
}

uint8_t* Arrays::bytes(const char* name, nb::handle object, size_t per) {
  return static_cast<uint8_t*>(writable(name, object, {kByte}, "uint8", per));
}

float* Arrays::float32(const char* name, nb::handle object, size_t per) {
  return static_cast<float*>(writable(name, object, {kFloat32}, "float32", per));
}

uint16_t* Arrays::bfloat16(const char* name, nb::handle object) {
  return static_cast<uint16_t*>(writable(name, object, {kBfloat16}, "bfloat16"));
}

uint16_t* Arrays::float16(const char* name, nb::handle object) {
  return static_cast<uint16_t*>(writable(name, object, {kFloat16}, "float16"));
}

uint16_t* Arrays::int16(const char* name, nb::handle object) {
  const std::initializer_list<Type> types = {type_of(Code::Int, 16), type_of(Code::UInt, 16)};
  return static_cast<uint16_t*>(writable(name, object, types, "int16 or uint16"));
}

const float* Arrays::read_only_float32(const char* name, nb::handle object) {
  return static_cast<const float*>(take(name, object, false, {kFloat32}, "float32").data());
}

Gradient Arrays::gradient(const char* name, nb::handle object, const std::optional<std::string>& dtype) {
  if (!dtype) {
    const Type type =
        take(name, object, false, {kBfloat16, kFloat16, kFloat32}, "bfloat16, float16 or float32").dtype();
    return {arrays_.back().data(), element_of(type)};
  }
  for (const Type& type : {kBfloat16, kFloat16, kFloat32}) {
    if (*dtype == name_of(type)) {
      return {take(name, object, false, {type}, dtype->c_str(), true).data(), element_of(type)};
    }
  }
  throw std::invalid_argument("gradient_dtype: must be 'bfloat16', 'float16' or 'float32', is '" + *dtype + "'");
}

}  // namespace ratel
