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
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "ratel/checksum.h"
#include "ratel/chunk.h"
#include "ratel/dispatch.h"
#include "ratel/kernels.h"
#include "ratel/nf4.h"
#include "../update/dynamic_maps.h"
#include "ring.h"
#include "transfers.h"

namespace nb = nanobind;

namespace ratel {

namespace {

using Name = std::optional<std::string>;
using Ranges = std::vector<std::tuple<size_t, size_t, bool>>;
// For each range its parameter's key in this update, and the number of the range's first element in the parameter.
using Roundings = std::vector<std::pair<uint64_t, uint64_t>>;
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
float rounded(double value) { return static_cast<float>(value); }

void make_adamw_scalars(AdamWScalars* scalars, double decay_factor, double beta1, double one_minus_beta1, double beta2,
                        double one_minus_beta2, double step_size, double bias_correction2_sqrt, double epsilon,
                        double gradient_scale, const Name& square_root) {
  // Outside these bounds the division by it would not be exact (update/divisor_fused.h); a real one is 1e-8 to 1.
  if (!(bias_correction2_sqrt >= 0x1p-30 && bias_correction2_sqrt <= 0x1p30)) {
    throw std::invalid_argument("bias_correction2_sqrt: must lie between 2**-30 and 2**30, is " +
                                std::to_string(bias_correction2_sqrt));
  }
  new (scalars) AdamWScalars{rounded(decay_factor),   rounded(one_minus_beta1),
                             rounded(beta1),          rounded(beta2),
                             rounded(one_minus_beta2), rounded(-step_size),
                             rounded(bias_correction2_sqrt), rounded(epsilon),
                             rounded(gradient_scale), square_root_for(square_root)};
}

void make_lion_scalars(LionScalars* scalars, double decay_factor, double beta1, double one_minus_beta1, double beta2,
                       double one_minus_beta2, double learning_rate, double gradient_scale) {
  new (scalars) LionScalars{rounded(decay_factor),    rounded(beta1),          rounded(one_minus_beta1), rounded(beta2),
                            rounded(one_minus_beta2), rounded(-learning_rate), rounded(gradient_scale)};
}

void make_sgd_scalars(SgdScalars* scalars, double weight_decay, double momentum, double learning_rate,
                      double gradient_scale, bool is_first, bool is_nesterov) {
  new (scalars) SgdScalars{rounded(weight_decay),   rounded(momentum), rounded(-learning_rate),
                           rounded(gradient_scale), is_first,          is_nesterov};
}

void make_muon_scalars(MuonScalars* scalars, double decay_factor, double one_minus_momentum, double step_size,
                       double gradient_scale) {
  new (scalars) MuonScalars{rounded(decay_factor), rounded(one_minus_momentum), rounded(-step_size),
                            rounded(gradient_scale)};
}

// Weights and moments: their fields in the order of the record, how Python passes them, and what checksums are taken of.

constexpr size_t kUnit = AdamW8Bit::kUnit;
using Names = std::vector<const char*>;
using Fields = const nb::handle*;

Names names_of(const HalvedWeights*) { return {"hi16", "lo16"}; }
Names names_of(const TiedWeights*) { return {"hi16", "lo16", "tie8"}; }
Names names_of(const StochasticWeights*) { return {"p16"}; }
Names names_of(const Float32Weights*) { return {"w32"}; }
Names names_of(const Float16Weights*) { return {"w16", "w32"}; }
Names names_of(const TwoMoments*) { return {"m32", "v32"}; }
Names names_of(const SignedMoments*) { return {"m32", "v32"}; }
Names names_of(const ByteMoments*) { return {"m8", "v8", "m_scale", "v_scale"}; }
Names names_of(const OneMoment*) { return {"m32"}; }
Names names_of(const DirectedMoment*) { return {"m32", "direction"}; }
Names names_of(const NoMoments*) { return {}; }

HalvedWeights taken(Arrays& arrays, Fields given, const HalvedWeights*) {
  auto* hi16 = arrays.bfloat16("hi16", given[0]);
  return {hi16, arrays.int16("lo16", given[1])};
}

TiedWeights taken(Arrays& arrays, Fields given, const TiedWeights*) {
  const HalvedWeights halves = taken(arrays, given, static_cast<const HalvedWeights*>(nullptr));
  return {halves.hi16, halves.lo16, arrays.bytes("tie8", given[2], 8)};
}

StochasticWeights taken(Arrays& arrays, Fields given, const StochasticWeights*) {
  return {arrays.bfloat16("p16", given[0])};
}

Float32Weights taken(Arrays& arrays, Fields given, const Float32Weights*) { return {arrays.float32("w32", given[0])}; }

Float16Weights taken(Arrays& arrays, Fields given, const Float16Weights*) {
  auto* w16 = arrays.float16("w16", given[0]);
  return {w16, arrays.float32("w32", given[1])};
}

TwoMoments taken(Arrays& arrays, Fields given, const TwoMoments*) {
  float* m32 = arrays.float32("m32", given[0]);
  return {m32, arrays.float32("v32", given[1])};
}

SignedMoments taken(Arrays& arrays, Fields given, const SignedMoments*) {
  const TwoMoments moments = taken(arrays, given, static_cast<const TwoMoments*>(nullptr));
  return {moments.m32, moments.v32};
}

ByteMoments taken(Arrays& arrays, Fields given, const ByteMoments*) {
  uint8_t* m8 = arrays.bytes("m8", given[0], 1);
  uint8_t* v8 = arrays.bytes("v8", given[1], 1);
  float* m_scale = arrays.float32("m_scale", given[2], kUnit);
  return {m8, v8, m_scale, arrays.float32("v_scale", given[3], kUnit)};
}

OneMoment taken(Arrays& arrays, Fields given, const OneMoment*) { return {arrays.float32("m32", given[0])}; }

DirectedMoment taken(Arrays& arrays, Fields given, const DirectedMoment*) {
  float* m32 = arrays.float32("m32", given[0]);
  return {m32, arrays.bfloat16("direction", given[1])};
}

NoMoments taken(Arrays&, Fields, const NoMoments*) { return {}; }

void add_fields(std::vector<ChunkField>* fields, const HalvedWeights& weights) {
  fields->insert(fields->end(), {{weights.hi16, 2}, {weights.lo16, 2}});
}

void add_fields(std::vector<ChunkField>* fields, const TiedWeights& weights) {
  fields->insert(fields->end(), {{weights.hi16, 2}, {weights.lo16, 2}, {weights.tie8, 1, 8}});
}

void add_fields(std::vector<ChunkField>* fields, const StochasticWeights& weights) {
  fields->push_back({weights.p16, 2});
}

void add_fields(std::vector<ChunkField>* fields, const Float32Weights& weights) {
  fields->push_back({weights.w32, 4});
}

void add_fields(std::vector<ChunkField>* fields, const Float16Weights& weights) {
  fields->insert(fields->end(), {{weights.w16, 2}, {weights.w32, 4}});
}

void add_fields(std::vector<ChunkField>* fields, const TwoMoments& moments) {
  fields->insert(fields->end(), {{moments.m32, 4}, {moments.v32, 4}});
}

void add_fields(std::vector<ChunkField>* fields, const SignedMoments& moments) {
  fields->insert(fields->end(), {{moments.m32, 4}, {moments.v32, 4}});
}

void add_fields(std::vector<ChunkField>* fields, const ByteMoments& moments) {
  fields->insert(fields->end(),
                 {{moments.m8, 1}, {moments.v8, 1}, {moments.m_scale, 4, kUnit}, {moments.v_scale, 4, kUnit}});
}

void add_fields(std::vector<ChunkField>* fields, const OneMoment& moments) { fields->push_back({moments.m32, 4}); }

// The direction is no field of the record.
void add_fields(std::vector<ChunkField>* fields, const DirectedMoment& moments) {
  fields->push_back({moments.m32, 4});
}

void add_fields(std::vector<ChunkField>*, const NoMoments&) {}

template <class State>
State state_of(Arrays& arrays, Fields given) {
  const typename State::Weights* weights = nullptr;
  const typename State::Moments* moments = nullptr;
  State state;
  state.weights = taken(arrays, given, weights);
  state.moments = taken(arrays, given + names_of(weights).size(), moments);
  return state;
}

template <class State>
std::vector<ChunkField> fields_of(const State& state) {
  std::vector<ChunkField> fields;
  add_fields(&fields, state.weights);
  add_fields(&fields, state.moments);
  return fields;
}

// Throws unless the last checksum of each field covers what the array has, and every other one whole pages.
void check_pages(const char* name, const Arrays& arrays, const std::vector<ChunkField>& fields, size_t chunk_elements,
                 size_t count) {
  for (size_t place = 0; place < fields.size(); ++place) {
    const ChunkField& field = fields[place];
    if (is_dense(field) || count == 0) {
      continue;
    }
    const size_t last = count % chunk_elements == 0 ? chunk_elements : count % chunk_elements;
    const size_t needed = (count - last) / field.per * field.value_bytes + field_bytes(field, last);
    if (arrays.num_bytes(place) < needed ||
        (count > chunk_elements && chunk_elements / field.per * field.value_bytes % kPageBytes != 0)) {
      throw std::invalid_argument(std::string(name) + ": chunks of field " + std::to_string(place) +
                                  " must be whole pages; the field has " + std::to_string(arrays.num_bytes(place)) +
                                  " bytes, needs " + std::to_string(needed));
    }
  }
}

template <class State>
constexpr bool kRoundsStochastically = std::is_same_v<typename State::Weights, StochasticWeights>;

// Throws unless there are as many as the layout needs: one for each of `wanted`, or none.
template <class State>
void check_roundings(const Roundings& roundings, size_t wanted) {
  const size_t number = kRoundsStochastically<State> ? wanted : 0;
  if (roundings.size() != number) {
    throw std::invalid_argument("roundings: needs " + std::to_string(number) + ", has " +
                                std::to_string(roundings.size()));
  }
}

// `unit`: how many elements belong together. `roundings`: one for each range, or none.
std::vector<Segment> segments_of(const Ranges& ranges, const Roundings& roundings, size_t count, size_t unit) {
  std::vector<Segment> segments;
  size_t end = 0;
  for (const auto& [first, last, decays] : ranges) {
    if (first < end || last < first || last > count) {
      throw std::invalid_argument("segments: must lie in order within the arrays, [" + std::to_string(first) + ", " +
                                  std::to_string(last) + ") does not");
    }
    if (first % unit != 0) {
      throw std::invalid_argument("segments: must begin at multiples of " + std::to_string(unit) + " elements, [" +
                                  std::to_string(first) + ", " + std::to_string(last) + ") does not");
    }
    segments.push_back({first, last, decays});
    if (!roundings.empty()) {
      const auto& [key, first_element] = roundings[segments.size() - 1];
      segments.back().rounding = {key, first_element};
    }
    end = last;
  }
  return segments;
}

// Elements that a segment must not cut: those of a unit, and those with one byte of bits.
template <class Rule, class State>
constexpr size_t kGrain = std::is_same_v<typename State::Weights, TiedWeights> && Rule::kUnit < 8 ? 8 : Rule::kUnit;

// What Python calls for one rule and layout. `Handles` is nb::handle for each field of the record.
template <class Rule, class State, class... Handles>
struct Layout {
  using Scalars = typename Rule::Scalars;

  static void update(Handles... fields, nb::handle gradient, const Scalars& scalars, const Roundings& roundings,
                     const Name& isa) {
    const nb::handle given[] = {fields...};
    Arrays arrays;
    State state = state_of<State>(arrays, given);
    check_roundings<State>(roundings, 1);
    if (!roundings.empty()) {
      set_rounding(&state.weights, {roundings[0].first, roundings[0].second});
    }
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(rule_of(kernels, Rule{}), state).update(state, typed, scalars, arrays.count());
  }

  static void stream(Handles... fields, nb::handle gradient, const Name& isa) {
    const nb::handle given[] = {fields...};
    Arrays arrays;
    const State state = state_of<State>(arrays, given);
    const Gradient typed = arrays.gradient("gradient", gradient);
    const Kernels& kernels = select_kernels(isa);
    nb::gil_scoped_release unlocked;
    layout_of(rule_of(kernels, Rule{}), state).stream(state, typed, arrays.count());
  }

  static Mismatches update_chunks(Handles... fields, nb::handle gradient, const Scalars& scalars, const Ranges& ranges,
                                  size_t chunk_elements, uint32_t first_chunk, const ChunkChecksums* before,
                                  const ChunkChecksums* after, const Roundings& roundings, const Name& gradient_dtype,
                                  const Name& isa) {
    const nb::handle given[] = {fields...};
    Arrays arrays;
    const State state = state_of<State>(arrays, given);
    const Gradient typed = arrays.gradient("gradient", gradient, gradient_dtype);
    const size_t count = arrays.count();
    check_roundings<State>(roundings, ranges.size());
    const std::vector<Segment> segments = segments_of(ranges, roundings, count, kGrain<Rule, State>);
    if (chunk_elements == 0 || chunk_elements % kChunkGrain != 0) {
      throw std::invalid_argument("chunk_elements: must be a multiple of " + std::to_string(kChunkGrain) + ", is " +
                                  std::to_string(chunk_elements));
    }
    std::vector<ChunkField> chunk = fields_of(state);
    const size_t num_chunks = count / chunk_elements + (count % chunk_elements != 0);
    if (before != nullptr) {
      before->check("before", chunk.size(), first_chunk, num_chunks, count);
      check_pages("before", arrays, chunk, chunk_elements, count);
      before->check_set("before", first_chunk, num_chunks);
    }
    if (after != nullptr) {
      after->check("after", chunk.size(), first_chunk, num_chunks, count);
      check_pages("after", arrays, chunk, chunk_elements, count);
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
      update_chunk<Rule>(kernels, state, typed, scalars, segments, &chunk, start,
                         std::min(count, start + chunk_elements));
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

template <size_t>
using Handle = nb::handle;

// `prefix`: of the name of the stream and the update with checksums.
template <class Rule, class State, size_t... places>
void define_layout(nb::module_& module, const std::string& name, std::index_sequence<places...>) {
  using Functions = Layout<Rule, State, Handle<places>...>;
  Names fields = names_of(static_cast<const typename State::Weights*>(nullptr));
  const Names moments = names_of(static_cast<const typename State::Moments*>(nullptr));
  fields.insert(fields.end(), moments.begin(), moments.end());
  if (fields.size() != sizeof...(places)) {
    throw std::logic_error(name + ": another number of fields");
  }
  const nb::arg gradient("gradient"), scalars("scalars");
  module.def(name.c_str(), Functions::update, nb::arg(fields[places])..., gradient, nb::kw_only(), scalars,
             nb::arg("roundings") = Roundings(), nb::arg("isa") = nb::none());
  module.def(("stream_" + name).c_str(), Functions::stream, nb::arg(fields[places])..., gradient, nb::kw_only(),
             nb::arg("isa") = nb::none());
  module.def(("update_" + name).c_str(), Functions::update_chunks, nb::arg(fields[places])..., gradient, nb::kw_only(),
             scalars, nb::arg("segments"), nb::arg("chunk_elements"), nb::arg("first_chunk") = 0,
             nb::arg("before") = nb::none(), nb::arg("after") = nb::none(), nb::arg("roundings") = Roundings(),
             nb::arg("gradient_dtype") = nb::none(),
             nb::arg("isa") = nb::none());
}

// `num_moments`: fields besides the weights.
template <class Rule, size_t num_moments>
void define_rule(nb::module_& module, const std::string& name) {
  constexpr bool is_tied = std::is_same_v<typename Rule::Bfloat16::Weights, TiedWeights>;
  define_layout<Rule, typename Rule::Bfloat16>(module, name + "_bfloat16",
                                               std::make_index_sequence<2 + is_tied + num_moments>{});
  define_layout<Rule, typename Rule::Stochastic>(module, name + "_stochastic",
                                                 std::make_index_sequence<1 + num_moments>{});
  define_layout<Rule, typename Rule::Float32>(module, name + "_float32", std::make_index_sequence<1 + num_moments>{});
  define_layout<Rule, typename Rule::Float16>(module, name + "_float16", std::make_index_sequence<2 + num_moments>{});
}

void split_bfloat16(nb::handle w32, nb::handle hi16, nb::handle lo16, nb::handle v32, const Name& isa) {
  Arrays arrays;
  const float* master = arrays.read_only_float32("w32", w32);
  const nb::handle given[] = {hi16, lo16};
  const HalvedWeights weights = taken(arrays, given, static_cast<const HalvedWeights*>(nullptr));
  float* signs = arrays.float32("v32", v32);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.split_signed(master, weights, signs, arrays.count());
}

void join_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle v32, nb::handle w32, const Name& isa) {
  Arrays arrays;
  const nb::handle given[] = {hi16, lo16};
  const HalvedWeights weights = taken(arrays, given, static_cast<const HalvedWeights*>(nullptr));
  const float* signs = arrays.float32("v32", v32);
  float* master = arrays.float32("w32", w32);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.join_signed(weights, signs, master, arrays.count());
}

void split_tied_bfloat16(nb::handle w32, nb::handle hi16, nb::handle lo16, nb::handle tie8, const Name& isa) {
  Arrays arrays;
  const float* master = arrays.read_only_float32("w32", w32);
  const nb::handle given[] = {hi16, lo16, tie8};
  const TiedWeights weights = taken(arrays, given, static_cast<const TiedWeights*>(nullptr));
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.split_tied(master, weights, arrays.count());
}

void join_tied_bfloat16(nb::handle hi16, nb::handle lo16, nb::handle tie8, nb::handle w32, const Name& isa) {
  Arrays arrays;
  const nb::handle given[] = {hi16, lo16, tie8};
  const TiedWeights weights = taken(arrays, given, static_cast<const TiedWeights*>(nullptr));
  float* master = arrays.float32("w32", w32);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.join_tied(weights, master, arrays.count());
}

void square_root_in_place(nb::handle values, const Name& square_root, const Name& isa) {
  Arrays arrays;
  float* data = arrays.float32("values", values);
  const SquareRoot kind = square_root_for(square_root);
  const Kernels& kernels = select_kernels(isa);
  nb::gil_scoped_release unlocked;
  kernels.square_root(data, kind, arrays.count());
}

void quantise_to_nf4(nb::handle values, nb::handle codes, nb::handle magnitudes) {
  Arrays arrays;
  const float* data = arrays.read_only_float32("values", values);
  uint8_t* packed = arrays.bytes("codes", codes, 2);
  float* largest = arrays.float32("magnitudes", magnitudes, kNf4Group);
  nb::gil_scoped_release unlocked;
  quantise_nf4(data, packed, largest, arrays.count());
}

std::vector<float> dynamic_map(bool is_signed) {
  const float* values = is_signed ? kSignedMap : kUnsignedMap;
  return {values, values + 256};
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
  const nb::arg isa("isa"), square_root("square_root"), hi16("hi16"), lo16("lo16"), tie8("tie8"), v32("v32"), w32("w32");
  nb::class_<AdamWScalars>(module, "AdamWScalars", nb::is_final())
      .def("__init__", make_adamw_scalars, nb::kw_only(), nb::arg("decay_factor"), nb::arg("beta1"),
           nb::arg("one_minus_beta1"), nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("step_size"),
           nb::arg("bias_correction2_sqrt"), nb::arg("epsilon"), nb::arg("gradient_scale"),
           nb::arg("square_root") = nb::none());
  nb::class_<LionScalars>(module, "LionScalars", nb::is_final())
      .def("__init__", make_lion_scalars, nb::kw_only(), nb::arg("decay_factor"), nb::arg("beta1"),
           nb::arg("one_minus_beta1"), nb::arg("beta2"), nb::arg("one_minus_beta2"), nb::arg("learning_rate"),
           nb::arg("gradient_scale"));
  nb::class_<SgdScalars>(module, "SgdScalars", nb::is_final())
      .def("__init__", make_sgd_scalars, nb::kw_only(), nb::arg("weight_decay"), nb::arg("momentum"),
           nb::arg("learning_rate"), nb::arg("gradient_scale"), nb::arg("is_first"), nb::arg("is_nesterov"));
  nb::class_<MuonScalars>(module, "MuonScalars", nb::is_final())
      .def("__init__", make_muon_scalars, nb::kw_only(), nb::arg("decay_factor"), nb::arg("one_minus_momentum"),
           nb::arg("step_size"), nb::arg("gradient_scale"));
  nb::class_<ChunkChecksums>(module, "ChunkChecksums", nb::is_final())
      .def("__init__", ChunkChecksums::make, nb::kw_only(), nb::arg("table"), nb::arg("is_set"), nb::arg("store_id"),
           nb::arg("step"), nb::arg("block"), nb::arg("entries"));
  define_rule<AdamW, 2>(module, "adamw");
  define_rule<AdamW8Bit, 4>(module, "adamw_8bit");
  define_rule<Lion, 1>(module, "lion");
  define_rule<Sgd, 0>(module, "sgd");
  define_rule<SgdMomentum, 1>(module, "sgd_momentum");
  define_rule<Muon, 2>(module, "muon");
  module.def("split_bfloat16", split_bfloat16, w32, hi16, lo16, v32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("join_bfloat16", join_bfloat16, hi16, lo16, v32, w32, nb::kw_only(), nb::arg("isa") = nb::none());
  module.def("split_tied_bfloat16", split_tied_bfloat16, w32, hi16, lo16, tie8, nb::kw_only(),
             nb::arg("isa") = nb::none());
  module.def("join_tied_bfloat16", join_tied_bfloat16, hi16, lo16, tie8, w32, nb::kw_only(),
             nb::arg("isa") = nb::none());
  module.def("square_root", square_root_in_place, nb::arg("values"), nb::kw_only(),
             nb::arg("square_root") = nb::none(), nb::arg("isa") = nb::none());
  module.def("quantise_nf4", quantise_to_nf4, nb::arg("values"), nb::arg("codes"), nb::arg("magnitudes"));
  module.def("dynamic_map", dynamic_map, nb::kw_only(), nb::arg("signed"));
  define_transfers(module);
  define_ring(module);
  module.def("address_of", address_of, nb::arg("memory"));
  module.def("native_square_root", [] { return square_root_name(native_square_root()); });
  module.def("supported_isas", supported_isas);
  module.def("active_isa", [] { return select_kernels(std::nullopt).isa; });
}
