// Cuts transfers: logical addresses into ranges of striped files, and ranges of files into requests.
//
// A group of the optimizer is a hundred ranges each way. In Python each takes a few microseconds, with the GIL.
//
// Invariant: the parts of a memory are slices of the memoryview that was passed, so that they keep it alive.

#include "transfers.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace ratel {

namespace {

// A new reference from Python's C API, which is null after an exception.
nb::object checked(PyObject* object) {
  if (object == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(object);
}

// Puts an element into a new tuple that nothing else refers to.
void set_item(const nb::object& tuple, Py_ssize_t place, nb::object element) {
  if (PyTuple_SetItem(tuple.ptr(), place, element.release().ptr()) != 0) {
    throw nb::python_error();
  }
}

// A memoryview of bytes.
class Bytes {
 public:
  explicit Bytes(nb::handle memory) : memory_(memory) {
    if (!PyMemoryView_Check(memory.ptr())) {
      throw nb::type_error("a transfer needs a memoryview");
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(memory.ptr(), &buffer, PyBUF_FULL_RO) != 0) {
      throw nb::python_error();
    }
    const bool is_bytes = buffer.itemsize == 1 && PyBuffer_IsContiguous(&buffer, 'C');
    address_ = reinterpret_cast<uintptr_t>(buffer.buf);
    size_ = static_cast<uint64_t>(buffer.len);
    PyBuffer_Release(&buffer);  // the memoryview keeps its own hold of the memory
    if (!is_bytes) {
      throw std::invalid_argument("a transfer needs contiguous bytes");
    }
  }

  uintptr_t address() const { return address_; }
  uint64_t size() const { return size_; }

  nb::object slice(uint64_t start, uint64_t stop) const {
    const nb::object range = checked(PySlice_New(nb::int_(start).ptr(), nb::int_(stop).ptr(), nullptr));
    return checked(PyObject_GetItem(memory_.ptr(), range.ptr()));
  }

 private:
  nb::handle memory_;
  uintptr_t address_;
  uint64_t size_;
};

// Spreads logical addresses over files. ratel_cli/io/striping.py explains the turns.
class Stripes {
 public:
  using Turns = std::vector<std::pair<size_t, uint64_t>>;

  Stripes(Turns turns, std::vector<uint64_t> weights, uint64_t stripe_bytes, uint64_t header_bytes)
      : turns_(std::move(turns)), weights_(std::move(weights)), stripe_bytes_(stripe_bytes), header_bytes_(header_bytes) {
    if (turns_.empty() || stripe_bytes == 0) {
      throw std::invalid_argument("stripes: must be at least one in a cycle, and not empty");
    }
    for (const auto& [file, row] : turns_) {
      if (file >= weights_.size() || row >= weights_[file]) {
        throw std::invalid_argument("turns: must be of files that have weights, and less than these");
      }
    }
  }

  // (file, offset, bytes) of each range that holds logical bytes [address, address + num_bytes), in order.
  nb::list ranges(uint64_t address, uint64_t num_bytes) const {
    nb::list found;
    walk(address, num_bytes, [&](size_t file, uint64_t offset, uint64_t, uint64_t length) {
      found.append(nb::make_tuple(file, offset, length));
    });
    return found;
  }

  // (descriptor, offset, memory) of each range that holds the memories, each from its logical address on. `extent` is
  // the type of these tuples.
  nb::list extents(nb::sequence parts, nb::sequence fds, nb::type_object extent) const {
    const auto type = reinterpret_cast<PyTypeObject*>(extent.ptr());
    if (!PyType_IsSubtype(type, &PyTuple_Type)) {
      throw nb::type_error("extent: must be a type of tuples");
    }
    const auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    std::vector<nb::object> descriptors;
    for (nb::handle fd : fds) {
      descriptors.push_back(nb::borrow(fd));
    }
    if (descriptors.size() != weights_.size()) {
      throw std::invalid_argument("fds: must be one for each weight");
    }
    nb::list found;
    for (nb::handle part : parts) {
      const nb::object memory = part[1];
      const Bytes bytes(memory);
      walk(nb::cast<uint64_t>(part[0]), bytes.size(), [&](size_t file, uint64_t offset, uint64_t start, uint64_t length) {
        const nb::object each = checked(alloc(type, 3));
        set_item(each, 0, descriptors[file]);
        set_item(each, 1, nb::int_(offset));
        set_item(each, 2, bytes.slice(start, start + length));
        found.append(each);
      });
    }
    return found;
  }

 private:
  // Calls found(file, offset in it, first of the bytes, number of bytes) for each range.
  template <class Found>
  void walk(uint64_t address, uint64_t num_bytes, Found found) const {
    if (weights_.size() == 1 && num_bytes > 0) {  // the stripes of a single file are contiguous
      found(0, header_bytes_ + address, 0, num_bytes);
      return;
    }
    for (uint64_t start = 0; start < num_bytes;) {
      const uint64_t stripe = (address + start) / stripe_bytes_, inside = (address + start) % stripe_bytes_;
      const auto& [file, row] = turns_[stripe % turns_.size()];
      const uint64_t file_stripe = stripe / turns_.size() * weights_[file] + row;
      const uint64_t length = std::min(stripe_bytes_ - inside, num_bytes - start);
      found(file, header_bytes_ + file_stripe * stripe_bytes_ + inside, start, length);
      start += length;
    }
  }

  Turns turns_;
  std::vector<uint64_t> weights_;
  uint64_t stripe_bytes_;
  uint64_t header_bytes_;
};

// Extents (descriptor, offset, memory) of at most `most_bytes` each, none of them empty.
nb::list cut_extents(nb::sequence extents, uint64_t most_bytes, uint64_t page_bytes) {
  if (most_bytes == 0 || page_bytes == 0 || most_bytes % page_bytes != 0) {
    throw std::invalid_argument("most_bytes: must be whole pages");
  }
  nb::list pieces;
  for (nb::handle extent : extents) {
    const nb::object memory = extent[2];
    const Bytes bytes(memory);
    const int64_t offset = nb::cast<int64_t>(extent[1]);
    if (offset < 0 || offset % page_bytes != 0 || bytes.size() % page_bytes != 0) {
      throw std::invalid_argument("an extent must be whole pages of a file");
    }
    if (bytes.size() == 0) {
      continue;
    }
    if (bytes.address() % page_bytes != 0) {
      throw std::invalid_argument("an extent must be whole pages of memory");
    }
    if (bytes.size() <= most_bytes) {
      pieces.append(extent);
      continue;
    }
    for (uint64_t start = 0; start < bytes.size(); start += most_bytes) {
      const uint64_t stop = std::min(start + most_bytes, bytes.size());
      pieces.append(nb::make_tuple(extent[0], offset + static_cast<int64_t>(start), bytes.slice(start, stop)));
    }
  }
  return pieces;
}

}  // namespace

void define_transfers(nb::module_& module) {
  nb::class_<Stripes>(module, "Stripes", nb::is_final())
      .def(nb::init<Stripes::Turns, std::vector<uint64_t>, uint64_t, uint64_t>(), nb::kw_only(), nb::arg("turns"),
           nb::arg("weights"), nb::arg("stripe_bytes"), nb::arg("header_bytes"))
      .def("ranges", &Stripes::ranges, nb::arg("address"), nb::arg("num_bytes"))
      .def("extents", &Stripes::extents, nb::arg("parts"), nb::arg("fds"), nb::arg("extent"));
  module.def("cut_extents", cut_extents, nb::arg("extents"), nb::arg("most_bytes"), nb::arg("page_bytes"));
}

}  // namespace ratel
