// AdamW on a chunk of a block, with its checksums taken in the same pass.
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

// Elements [first, last) of the arrays: one parameter, or a part of it.
struct Segment {
  size_t first;
  size_t last;
  bool decays;
};

// One field of the record. A seed asks for the chunk's checksum before or after the update.
struct ChunkField {
  const void* data;
  size_t element_bytes;
  std::optional<uint64_t> seed_before = std::nullopt;
  std::optional<uint64_t> seed_after = std::nullopt;
  std::optional<uint64_t> before = std::nullopt;
  std::optional<uint64_t> after = std::nullopt;
};

// The number of elements of a chunk with checksums is a multiple of this.
constexpr size_t kChunkGrain = 512;

// Update elements [start, stop) of the arrays. Segments are in order and do not overlap; `scalars` are for those that
// decay.
template <class State>
void update_chunk(const Kernels& kernels, State state, Gradient gradient, const AdamWScalars& scalars,
                  const std::vector<Segment>& segments, std::vector<ChunkField>* fields, size_t start, size_t stop);

}  // namespace ratel
