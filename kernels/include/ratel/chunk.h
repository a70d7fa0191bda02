// AdamW on a chunk of a block, its checksums taken in the same pass.
//
// For: bindings/updates.cpp. A chunk goes through the caches once, tile by tile: what was read is summed up, the tile
// is updated, what is to be written is summed up. Invariant: the bits are those of the kernels on each segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ratel/kernels.h"

namespace ratel {

// Elements [first, last) of the arrays, of one parameter.
struct Segment {
  size_t first;
  size_t last;
  bool decays;
};

// One field of the record. A seed asks for the chunk's checksum, before the update or after it.
struct ChunkField {
  const void* data;
  size_t element_bytes;
  std::optional<uint64_t> seed_before = std::nullopt;
  std::optional<uint64_t> seed_after = std::nullopt;
  std::optional<uint64_t> before = std::nullopt;
  std::optional<uint64_t> after = std::nullopt;
};

// Of a chunk with checksums: its elements are a multiple of this.
constexpr size_t kChunkGrain = 512;

// Elements [start, stop) of the arrays. Segments are in order and do not overlap; `scalars` are for those that decay.
template <class State>
void update_chunk(const Kernels& kernels, State state, Gradient gradient, const AdamWScalars& scalars,
                  const std::vector<Segment>& segments, std::vector<ChunkField>* fields, size_t start, size_t stop);

}  // namespace ratel
