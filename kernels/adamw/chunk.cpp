// AdamW on a chunk, tile by tile; see ratel/chunk.h.

#include "ratel/chunk.h"

#include <algorithm>

#include "ratel/checksum.h"
#include "ratel/dispatch.h"

namespace ratel {

namespace {

// Two tiles with all fields and the gradient fit into the first-level cache: one is updated while the next is fetched.
constexpr size_t kTileElements = 1024;

static_assert(kTileElements % kChunkGrain == 0 && kChunkGrain * 2 % kBlockBytes == 0, "tiles are whole blocks");

Bfloat16State from(const Bfloat16State& state, size_t at) {
  return {state.hi16 + at, state.lo16 + at, state.m32 + at, state.v32 + at};
}

Float32State from(const Float32State& state, size_t at) { return {state.w32 + at, state.m32 + at, state.v32 + at}; }

Float16State from(const Float16State& state, size_t at) {
  return {state.w16 + at, state.w32 + at, state.m32 + at, state.v32 + at};
}

Gradient from(const Gradient& gradient, size_t at) {
  const size_t element_bytes = gradient.element == Element::float32 ? 4 : 2;
  return {static_cast<const uint8_t*>(gradient.data) + at * element_bytes, gradient.element};
}

// One checksum of one field, if it is wanted.
class Running {
 public:
  Running(const ChunkField& field, const std::optional<uint64_t>& seed) : field_(field), is_wanted_(seed.has_value()) {
    if (is_wanted_) {
      begin(&checksum_, *seed);
    }
  }

  // Add elements [first, last) of the arrays. `is_end`: they are the last of the chunk.
  void take(const Kernels& kernels, size_t first, size_t last, bool is_end) {
    if (!is_wanted_) {
      return;
    }
    const uint8_t* data = static_cast<const uint8_t*>(field_.data) + first * field_.element_bytes;
    const size_t num_blocks = (last - first) * field_.element_bytes / kBlockBytes - (is_end ? 1 : 0);
    kernels.absorb(&checksum_, data, num_blocks);
    num_bytes_ += (last - first) * field_.element_bytes;
    if (is_end) {
      result_ = finish(checksum_, data + num_blocks * kBlockBytes, num_bytes_);
    }
  }

  std::optional<uint64_t> result() const { return result_; }

 private:
  const ChunkField& field_;
  bool is_wanted_;
  Checksum checksum_;
  size_t num_bytes_ = 0;
  std::optional<uint64_t> result_;
};

}  // namespace

template <class State>
void update_chunk(const Kernels& kernels, State state, Gradient gradient, const AdamWScalars& scalars,
                  const std::vector<Segment>& segments, std::vector<ChunkField>* fields, size_t start, size_t stop) {
  AdamWScalars without_decay = scalars;
  without_decay.decay_factor = 1.0f;
  std::vector<Running> before;
  std::vector<Running> after;
  before.reserve(fields->size());
  after.reserve(fields->size());
  for (const ChunkField& field : *fields) {
    before.emplace_back(field, field.seed_before);
    after.emplace_back(field, field.seed_after);
  }
  auto segment = std::find_if(segments.begin(), segments.end(), [=](const Segment& each) { return each.last > start; });
  for (size_t first = start; first < stop; first += kTileElements) {
    const size_t last = std::min(stop, first + kTileElements);
    for (Running& running : before) {
      running.take(kernels, first, last, last == stop);
    }
    for (; segment != segments.end() && segment->first < last; ++segment) {
      const size_t begins = std::max(first, segment->first);
      const size_t ends = std::min(last, segment->last);
      layout_of(kernels, state)
          .adamw(from(state, begins), from(gradient, begins), segment->decays ? scalars : without_decay, ends - begins);
      if (segment->last > last) {
        break;  // the next tile has the rest
      }
    }
    for (Running& running : after) {
      running.take(kernels, first, last, last == stop);
    }
  }
  for (size_t number = 0; number < fields->size(); ++number) {
    (*fields)[number].before = before[number].result();
    (*fields)[number].after = after[number].result();
  }
}

template void update_chunk(const Kernels&, Bfloat16State, Gradient, const AdamWScalars&, const std::vector<Segment>&,
                           std::vector<ChunkField>*, size_t, size_t);
template void update_chunk(const Kernels&, Float32State, Gradient, const AdamWScalars&, const std::vector<Segment>&,
                           std::vector<ChunkField>*, size_t, size_t);
template void update_chunk(const Kernels&, Float16State, Gradient, const AdamWScalars&, const std::vector<Segment>&,
                           std::vector<ChunkField>*, size_t, size_t);

}  // namespace ratel
