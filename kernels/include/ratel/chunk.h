// An update of a chunk of a block, with its checksums taken in the same pass.
//
// A chunk passes through the caches once, tile by tile: add what was read to the checksums, update the tile, add what
// will be written to the checksums. Invariant: the bits are those of the kernels on each segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ratel/kernels.h"

namespace ratel {

// What the random bits of a parameter's elements follow from (StochasticWeights).
struct Rounding {
  uint64_t key = 0;
  uint64_t first = 0;
};

// Elements [first, last) of the arrays: one parameter, or a part of it. `first` is the first element of a unit.
struct Segment {
  size_t first;
  size_t last;
  bool decays;
  Rounding rounding = {};
};

// One field of the record: a value for each `per` elements. A seed asks for the chunk's checksum before or after the
// update.
struct ChunkField {
  const void* data;
  size_t value_bytes;
  size_t per = 1;
  std::optional<uint64_t> seed_before = std::nullopt;
  std::optional<uint64_t> seed_after = std::nullopt;
  std::optional<uint64_t> before = std::nullopt;
  std::optional<uint64_t> after = std::nullopt;
};

// The number of elements of a chunk with checksums is a multiple of this.
constexpr size_t kChunkGrain = 512;

// Fields with less than two bytes for an element end on a page, and so do the bytes that their last checksum covers.
constexpr size_t kPageBytes = 4096;

constexpr bool is_dense(const ChunkField& field) { return field.per == 1 && field.value_bytes > 1; }

// The bytes of the first `count` elements, up to the end of a page where the field ends on one.
constexpr size_t field_bytes(const ChunkField& field, size_t count) {
  const size_t num_bytes = (count + field.per - 1) / field.per * field.value_bytes;
  return is_dense(field) ? num_bytes : (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Only the stochastic layout takes it.
inline void set_rounding(StochasticWeights* weights, const Rounding& rounding) {
  weights->key = rounding.key;
  weights->first = rounding.first;
}

template <class Weights>
void set_rounding(Weights*, const Rounding&) {}

// Update elements [start, stop) of the arrays. Segments are in order and do not overlap; `scalars` are for those that
// decay.
template <class Rule, class State>
void update_chunk(const Kernels& kernels, State state, Gradient gradient, const typename Rule::Scalars& scalars,
                  const std::vector<Segment>& segments, std::vector<ChunkField>* fields, size_t start, size_t stop);

}  // namespace ratel
