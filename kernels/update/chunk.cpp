// An update of a chunk, tile by tile; see ratel/chunk.h.

#include "ratel/chunk.h"

#include <algorithm>

#include "ratel/checksum.h"
#include "ratel/dispatch.h"

namespace ratel {

namespace {

// Two tiles with all fields and the gradient fit into the first-level cache: one is updated while the next is fetched.
constexpr size_t kTileElements = 1024;

static_assert(kTileElements % kChunkGrain == 0 && kChunkGrain * 2 % kBlockBytes == 0, "tiles are whole blocks");
static_assert(kTileElements % kBlockBytes == 0 && kPageBytes % kBlockBytes == 0, "so are those of single bytes");
static_assert(kTileElements % AdamW8Bit::kUnit == 0, "tiles are whole units");

HalvedWeights from(const HalvedWeights& weights, size_t at) { return {weights.hi16 + at, weights.lo16 + at}; }

TiedWeights from(const TiedWeights& weights, size_t at) {
  return {weights.hi16 + at, weights.lo16 + at, weights.tie8 + at / 8};
}

StochasticWeights from(const StochasticWeights& weights, size_t at) {
  return {weights.p16 + at, weights.key, weights.first + at};
}

Float32Weights from(const Float32Weights& weights, size_t at) { return {weights.w32 + at}; }

Float16Weights from(const Float16Weights& weights, size_t at) { return {weights.w16 + at, weights.w32 + at}; }

TwoMoments from(const TwoMoments& moments, size_t at) { return {moments.m32 + at, moments.v32 + at}; }

SignedMoments from(const SignedMoments& moments, size_t at) { return {moments.m32 + at, moments.v32 + at}; }

ByteMoments from(const ByteMoments& moments, size_t at) {
  const size_t unit = at / AdamW8Bit::kUnit;
  return {moments.m8 + at, moments.v8 + at, moments.m_scale + unit, moments.v_scale + unit};
}

OneMoment from(const OneMoment& moments, size_t at) { return {moments.m32 + at}; }

DirectedMoment from(const DirectedMoment& moments, size_t at) { return {moments.m32 + at, moments.direction + at}; }

NoMoments from(const NoMoments&, size_t) { return {}; }

template <class Weights, class Moments>
State<Weights, Moments> from(const State<Weights, Moments>& state, size_t at) {
  return {from(state.weights, at), from(state.moments, at)};
}

Gradient from(const Gradient& gradient, size_t at) {
  const size_t element_bytes = gradient.element == Element::float32 ? 4 : 2;
  return {static_cast<const uint8_t*>(gradient.data) + at * element_bytes, gradient.element};
}

template <class Scalars>
Scalars without_decay(Scalars scalars) {
  scalars.decay_factor = 1.0f;
  return scalars;
}

SgdScalars without_decay(SgdScalars scalars) {
  scalars.weight_decay = 0.0f;
  return scalars;
}

// One checksum of one field, if it is wanted.
class Running {
 public:
  Running(const ChunkField& field, const std::optional<uint64_t>& seed, size_t start, size_t stop)
      : data_(static_cast<const uint8_t*>(field.data) + start / field.per * field.value_bytes),
        num_bytes_(field_bytes(field, stop - start)),
        tile_bytes_(kTileElements * field.value_bytes),
        is_wanted_(seed.has_value()),
        is_small_(field.per > 1) {
    if (is_wanted_) {
      begin(&checksum_, *seed);
    }
  }

  // Add the next tile, and behind the last one what is left. Several elements with one value are too few for tiles: the
  // chunk is added when it is whole, which is at its begin if it `is_before` the update.
  void take(const Kernels& kernels, bool is_first, bool is_last, bool is_before) {
    if (!is_wanted_) {
      return;
    }
    if (is_small_ && !(is_before ? is_first : is_last)) {
      return;
    }
    const bool is_end = is_last || is_small_;
    const size_t bytes = is_end ? num_bytes_ - num_taken_ : tile_bytes_;
    const size_t num_blocks = bytes / kBlockBytes - (is_end ? 1 : 0);
    kernels.absorb(&checksum_, data_ + num_taken_, num_blocks);
    if (is_end) {
      result_ = finish(checksum_, data_ + num_taken_ + num_blocks * kBlockBytes, num_bytes_);
    }
    num_taken_ += bytes;
  }

  std::optional<uint64_t> result() const { return result_; }

 private:
  const uint8_t* data_;
  size_t num_bytes_;
  size_t tile_bytes_;
  bool is_wanted_;
  bool is_small_;
  Checksum checksum_;
  size_t num_taken_ = 0;
  std::optional<uint64_t> result_;
};

}  // namespace

template <class Rule, class State>
void update_chunk(const Kernels& kernels, State state, Gradient gradient, const typename Rule::Scalars& scalars,
                  const std::vector<Segment>& segments, std::vector<ChunkField>* fields, size_t start, size_t stop) {
  const typename Rule::Scalars others = without_decay(scalars);
  const auto& of_layout = layout_of(rule_of(kernels, Rule{}), state);
  std::vector<Running> before;
  std::vector<Running> after;
  before.reserve(fields->size());
  after.reserve(fields->size());
  for (const ChunkField& field : *fields) {
    before.emplace_back(field, field.seed_before, start, stop);
    after.emplace_back(field, field.seed_after, start, stop);
  }
  auto segment = std::find_if(segments.begin(), segments.end(), [=](const Segment& each) { return each.last > start; });
  for (size_t first = start; first < stop; first += kTileElements) {
    const size_t last = std::min(stop, first + kTileElements);
    for (Running& running : before) {
      running.take(kernels, first == start, last == stop, true);
    }
    for (; segment != segments.end() && segment->first < last; ++segment) {
      const size_t begins = std::max(first, segment->first);
      const size_t ends = std::min(last, segment->last);
      State part = from(state, begins);
      set_rounding(&part.weights, {segment->rounding.key, segment->rounding.first + (begins - segment->first)});
      of_layout.update(part, from(gradient, begins), segment->decays ? scalars : others, ends - begins);
      if (segment->last > last) {
        break;  // the next tile has the rest
      }
    }
    for (Running& running : after) {
      running.take(kernels, first == start, last == stop, false);
    }
  }
  for (size_t number = 0; number < fields->size(); ++number) {
    (*fields)[number].before = before[number].result();
    (*fields)[number].after = after[number].result();
  }
}

#define RATEL_CHUNK(Rule, Layout)                                                                               \
  template void update_chunk<Rule>(const Kernels&, Rule::Layout, Gradient, const Rule::Scalars&,                \
                                   const std::vector<Segment>&, std::vector<ChunkField>*, size_t, size_t);
#define RATEL_CHUNKS(Rule)      \
  RATEL_CHUNK(Rule, Bfloat16)   \
  RATEL_CHUNK(Rule, Stochastic) \
  RATEL_CHUNK(Rule, Float32)    \
  RATEL_CHUNK(Rule, Float16)

RATEL_CHUNKS(AdamW)
RATEL_CHUNKS(AdamW8Bit)
RATEL_CHUNKS(Lion)
RATEL_CHUNKS(Sgd)
RATEL_CHUNKS(SgdMomentum)
RATEL_CHUNKS(Muon)

}  // namespace ratel
