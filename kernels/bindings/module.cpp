// The Python module ratel_cli._native. ratel_cli/_native.pyi is its reference.
//
// Invariant: arguments are checked whole before the first byte changes, and kernels run without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <new>
#include <utility>
#include <vector>

#include "arrays.h"
#include "ratel/checksum.h"
#include "ratel/chunk.h"
#include "ratel/dispatch.h"
#include "ratel/kernels.h"
#include "ring.h"
#include "transfers.h"

namespace nb = nanobind;

namespace ratel {

namespace {

using Name = std::optional<std::string>;
using Ranges = std::vector<std::tuple<size_t, size_t, bool>>;
// Chunks whose checksum is another one: number of the field in the record, number of the chunk in the arrays.
using Mismatches = std::vector<std::pair<size_t, size_t>>;

// Where the checksums of a block's chunks stand in a table, and what their seeds are made of.
class ChunkChecksums {
 public:
  using Table = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  // By entry of the table: 1 if it has a checksum.
  using IsSet = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  // By field of the record: the table's entry for the block's first chunk; none: no checksum is wanted.
  using Entries = std::vector<std::optional<size_t>>;

  static void make(ChunkChecksums* self, Table table, IsSet is_set, nb::bytes store_id, uint64_t step, uint32_t block,
                   Entries entries) {
    if (store_id.size() != kStoreIdBytes) {
      throw std::invalid_argument("store_id: must have 16 bytes, has " + std::to_string(store_id.size()));
    }
    if (is_set.size() != table.size()) {
      throw std::invalid_argument("is_set: must be as long as the table, " + std::to_string(table.size()) + ", has " +
                                  std::to_string(is_set.size()));
    }
    new (self) ChunkChecksums(std::move(table), std::move(is_set), std::move(entries));
    memcpy(self->place_, store_id.c_str(), kStoreIdBytes);
    memcpy(self->place_ + kStoreIdBytes, &step, sizeof step);
    memcpy(self->place_ + kStoreIdBytes + 8, &block, sizeof block);
  }

  // Throws unless `num_chunks` chunks from `first_chunk` on have entries.
  void check(const char* name, size_t num_fields, uint32_t first_chunk, size_t num_chunks, size_t count) const {
    if (entries_.size() != num_fields) {
      throw std::invalid_argument(std::string(name) + ": must have one entry for each field, " +
                                  std::to_string(num_fields) + ", has " + std::to_string(entries_.size()));
    }
    for (const auto& entry : entries_) {
      if (entry && (*entry > table_.size() || first_chunk + num_chunks > table_.size() - *entry)) {
        throw std::invalid_argument(std::string(name) + ": entries must lie in the table, which has " +
                                    std::to_string(table_.size()));
      }
    }
    if (count % kChunkGrain != 0) {
      throw std::invalid_argument(std::string(name) + ": arrays with checksums must have a multiple of " +
                                  std::to_string(kChunkGrain) + " elements, have " + std::to_string(count));
    }
  }

  // Throws unless these chunks have checksums already.
  void check_set(const char* name, uint32_t first_chunk, size_t num_chunks) const {
    for (const auto& entry : entries_) {
      if (entry && num_chunks > 0 && memchr(is_set_.data() + *entry + first_chunk, 0, num_chunks) != nullptr) {
        throw std::invalid_argument(std::string(name) + ": a chunk has no checksum yet");
      }
    }
  }

  // The seed of a field's chunk, by its number in the block; none if no checksum of that field is wanted.
  std::optional<uint64_t> seed(uint32_t field, uint32_t chunk) const {
    if (!entries_[field]) {
      return std::nullopt;
    }
    uint8_t place[kPlaceBytes];
    memcpy(place, place_, sizeof place_);
    memcpy(place + sizeof place_, &field, sizeof field);
    memcpy(place + sizeof place_ + 4, &chunk, sizeof chunk);
    return seed_of(place);
  }

  uint64_t at(size_t field, size_t chunk) const { return table_.data()[*entries_[field] + chunk]; }

  void enter(size_t field, size_t chunk, uint64_t checksum) const {
    table_.data()[*entries_[field] + chunk] = checksum;
    is_set_.data()[*entries_[field] + chunk] = 1;
  }

 private:
  static constexpr size_t kStoreIdBytes = 16;

  ChunkChecksums(Table table, IsSet is_set, Entries entries)
      : table_(std::move(table)), is_set_(std::move(is_set)), entries_(std::move(entries)) {}

  Table table_;
  IsSet is_set_;
  Entries entries_;
  uint8_t place_[kPlaceBytes - 8];  // store, step, block; field and chunk follow
};

constexpr std::pair<SquareRoot, const char*> kSquareRoots[] = {
    {SquareRoot::correct, "correct"},
    {SquareRoot::mkl_avx512, "mkl_avx512"},
#if defined(__x86_64__)
    {SquareRoot::mkl_sse, "mkl_sse"},
#endif
};

const char* square_root_name(SquareRoot square_root) {
  for (const auto& [kind, name] : kSquareRoots) {
    if (kind == square_root) {
      return name;
    }
  }
  throw std::logic_error("square_root: no such kind");
}

// Without a name the native one.
SquareRoot square_root_for(const Name& wanted) {
  if (!wanted) {
    return native_square_root();
  }
  for (const auto& [kind, name] : kSquareRoots) {
    if (*wanted == name) {
      return kind;
    }
  }
  throw std::invalid_argument("square_root: must be 'correct', 'mkl_avx512' or, on x86, 'mkl_sse', is '" + *wanted +
                              "'");
}

// Doubles become floats here, as torch rounds the scalars of its operations.
void make_scalars(AdamWScalars* scalars, double decay_factor, double one_minus_beta1, double beta2,
                  double one_minus_beta2, double step_size, double bias_correction2_sqrt, double epsilon,
                  double gradient_scale, const Name& square_root) {
  // Outside these bounds the division by it would not be exact (adamw/divisor_fused.h); a real one is 1e-8 to 1.
  if (!(bias_correction2_sqrt >= 0x1p-30 && bias_correction2_sqrt <= 0x1p30)) {
    throw std::invalid_argument("bias_correction2_sqrt: must lie between 2**-30 and 2**30, is " +
                                std::to_string(bias_correction2_sqrt));
  }
  const auto rounded = [](double value) { return static_cast<float>(value); };
  new (scalars) AdamWScalars{rounded(decay_factor),    rounded(one_minus_beta1), rounded(beta2),
                             rounded(one_minus_beta2), rounded(-step_size),      rounded(bias_correction2_sqrt),
                             rounded(epsilon),         rounded(gradient_scale),  square_root_for(square_root)};
}

// The three layouts: how Python passes their fields, and what checksums are taken of.

void take(Arrays& arrays, Bfloat16State* state, nb::handle hi16, nb::handle lo16, nb::handle m32, nb::handle v32) {
  *state = {arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), arrays.float32("m32", m32),
            arrays.float32("v32", v32)};
}

void take(Arrays& arrays, Float32State* state, nb::handle w32, nb::handle m32, nb::handle v32) {
  *state = {arrays.float32("w32", w32), arrays.float32("m32", m32), arrays.float32("v32", v32)};
}

void take(Arrays& arrays, Float16State* state, nb::handle w16, nb::handle w32, nb::handle m32, nb::handle v32) {
  *state = {arrays.float16("w16", w16), arrays.float32("w32", w32), arrays.float32("m32", m32),
            arrays.float32("v32", v32)};
}

std::vector<ChunkField> fields_of(const Bfloat16State& state) {
  return {{state.hi16, 2}, {state.lo16, 2}, {state.m32, 4}, {state.v32, 4}};
}

std::vector<ChunkField> fields_of(const Float32State& state) {
  return {{state.w32, 4}, {state.m32, 4}, {state.v32, 4}};
}

std::vector<ChunkField> fields_of(const Float16State& state) {
  return {{state.w16, 2}, {state.w32, 4}, {state.m32, 4}, {state.v32, 4}};
}

std::vector<Segment> segments_of(const Ranges& ranges, size_t count) {
  std::vector<Segment> segments;
  size_t end = 0;
  for (const auto& [first, last, decays] : ranges) {
    if (first < end || last < first || last > count) {
      throw std::invalid_argument("segments: must lie in order within the arrays, [" + std::to_string(first) + ", " +
                                  std::to_string(last) + ") does not");
    }
    segments.push_back({first, last, decays});
    end = last;
  }
  return segments;
}

// What Python calls for one layout. `Fields` is nb::handle for each field of the record.
template <class State, class... Fields>
struct Layout {
  static void adamw(Fields... fields, nb::handle gradient, const AdamWScalars& scalars, const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(kernels, state).adamw(state, typed, scalars, arrays.count());
  }

  static void stream(Fields... fields, nb::handle gradient, const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(kernels, state).stream(state, typed, arrays.count());
  }

  static Mismatches update(Fields... fields, nb::handle gradient, const AdamWScalars& scalars, const Ranges& ranges,
                           size_t chunk_elements, uint32_t first_chunk, const ChunkChecksums* before,
                           const ChunkChecksums* after, const Name& gradient_dtype, const Name& isa) {
    Arrays arrays;
    State state;
    take(arrays, &state, fields...);
    const Gradient typed = arrays.gradient("gradient", gradient, gradient_dtype);
    const size_t count = arrays.count();
    const std::vector<Segment> segments = segments_of(ranges, count);
    if (chunk_elements == 0 || chunk_elements % kChunkGrain != 0) {
      throw std::invalid_argument("chunk_elements: must be a multiple of " + std::to_string(kChunkGrain) + ", is " +
                                  std::to_string(chunk_elements));
    }
    std::vector<ChunkField> chunk = fields_of(state);
    const size_t num_chunks = count / chunk_elements + (count % chunk_elements != 0);
    if (before != nullptr) {
      before->check("before", chunk.size(), first_chunk, num_chunks, count);
      before->check_set("before", first_chunk, num_chunks);
    }
    if (after != nullptr) {
      after->check("after", chunk.size(), first_chunk, num_chunks, count);
    }
    const Kernels& kernels = select_kernels(isa);
    Mismatches mismatches;
    nb::gil_scoped_release unlocked;
    for (size_t number = 0; number < num_chunks; ++number) {
      for (size_t field = 0; field < chunk.size(); ++field) {
        chunk[field].seed_before = before == nullptr ? std::nullopt : before->seed(field, first_chunk + number);
        chunk[field].seed_after = after == nullptr ? std::nullopt : after->seed(field, first_chunk + number);
      }
      const size_t start = number * chunk_elements;
      update_chunk(kernels, state, typed, scalars, segments, &chunk, start, std::min(count, start + chunk_elements));
      for (size_t field = 0; field < chunk.size(); ++field) {
        if (chunk[field].before && *chunk[field].before != before->at(field, first_chunk + number)) {
          mismatches.emplace_back(field, number);
        }
        if (chunk[field].after) {
          after->enter(field, first_chunk + number, *chunk[field].after);
        }
      }
    }
    return mismatches;
  }
};

template <class>
using Handle = nb::handle;

template <class State, class... Fields>
void define_layout(nb::module_& module, const char* adamw, const char* stream, const char* update, Fields... fields) {
  using Functions = Layout<State, Handle<Fields>...>;
  const nb::arg gradient("gradient"), scalars("scalars");
  module.def(adamw, Functions::adamw, nb::arg(fields)..., gradient, nb::kw_only(), scalars,
             nb::arg("isa") = nb::none());
  module.def(stream, Functions::stream, nb::arg(fields)..., gradient, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def(update, Functions::update, nb::arg(fields)..., gradient, nb::kw_only(), scalars, nb::arg("segments"),
             nb::arg("chunk_elements"), nb::arg("first_chunk") = 0, nb::arg("before") = nb::none(),
             nb::arg("after") = nb::none(), nb::arg("gradient_dtype") = nb::none(), nb::arg("isa") = nb::none());
}

void split_bfloat16(nb::handle w32, nb::handle hi16, nb::handle lo16, nb::handle v32, const Name& isa) {
  Arrays arrays;
  const float* master = arrays.read_only_float32("w32", w32);
  const Bfloat16State state{arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), nullptr,
                            arrays.float32("v32", v32)};
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.split_bfloat16(master, state, arrays.count());
}

void join_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle v32, nb::handle w32, const Name& isa) {
  Arrays arrays;
  const Bfloat16State state{arrays.bfloat16("hi16", hi16), arrays.int16("lo16", lo16), nullptr,
                            arrays.float32("v32", v32)};
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

uintptr_t address_of(nb::handle memory) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(memory.ptr(), &buffer, PyBUF_WRITABLE) != 0) {
    throw nb::python_error();
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.buf);
  PyBuffer_Release(&buffer);
  return address;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) {
    names.emplace_back(kernels->isa);
  }
  return names;
}

}  // namespace

}  // namespace ratel

NB_MODULE(_native, module) {
  using namespace ratel;
  nb::set_leak_warnings(false);  // what Python still holds when it exits is no fault of a run
  const nb::arg isa("isa"), square_root("square_root"), hi16("hi16"), lo16("lo16"), v32("v32"), w32("w32");
  nb::class_<AdamWScalars>(module, "AdamWScalars", nb::is_final())
      .def("__init__", make_scalars, nb::kw_only(), nb::arg("decay_factor"), nb::arg("one_minus_beta1"),
           nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("step_size"), nb::arg("bias_correction2_sqrt"),
           nb::arg("epsilon"), nb::arg("gradient_scale"), nb::arg("square_root") = nb::none());
  nb::class_<ChunkChecksums>(module, "ChunkChecksums", nb::is_final())
      .def("__init__", ChunkChecksums::make, nb::kw_only(), nb::arg("table"), nb::arg("is_set"), nb::arg("store_id"),
           nb::arg("step"), nb::arg("block"), nb::arg("entries"));
  define_layout<Bfloat16State>(module, "adamw_bfloat16", "stream_bfloat16", "update_bfloat16", "hi16", "lo16", "m32",
                               "v32");
  define_layout<Float32State>(module, "adamw_float32", "stream_float32", "update_float32", "w32", "m32", "v32");
  define_layout<Float16State>(module, "adamw_float16", "stream_float16", "update_float16", "w16", "w32", "m32", "v32");
  module.def("split_bfloat16", split_bfloat16, w32, hi16, lo16, v32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("join_bfloat16", join_bfloat16, hi16, lo16, v32, w32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("square_root", square_root_in_place, nb::arg("values"), nb::kw_only(),
             nb::arg("square_root") = nb::none(), nb::arg("isa") = nb::none());
  define_transfers(module);
  define_ring(module);
  module.def("address_of", address_of, nb::arg("memory"));
  module.def("native_square_root", [] { return square_root_name(native_square_root()); });
  module.def("supported_isas", supported_isas);
  module.def("active_isa", [] { return select_kernels(std::nullopt).isa; });
}
