// Streams and events of the simulated GPU: copies that happen as late as allowed, and what the host may rely on.
//
// Everything that is queued or computed has a number, over all streams. Computing happens at once, but the host may rely
// only on what it knows: on what it has waited for, and on what that had waited for. When the host learns that an upload
// is over, the uploaded bytes are compared with host memory, which must not have changed until then. An example:
//
//     1 an operator computes; 2 an event after it; 3 the stream `up` waits for the event (`behind` is 2); 4 an upload is
//     queued; 5 an event after it. Then computing waits for event 5: the copy happens, and `computed_with` of copy and
//     event is 6. When the host waits for event 5, or for a later one of computing, say 8, it learns that the upload is
//     over.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "clock.h"
#include "memory.h"

namespace simulated {

constexpr int64_t kComputes = 0, kNever = INT64_MAX;

struct Event {
    int64_t stream, number;
    int64_t behind;  // number of the last computing that the stream had waited for
    int64_t computed_with = kNever;  // number at which the computing stream waited for it
    bool is_over = false;
    double seconds = 0;  // by the steady clock; in a timed test known from the beginning (clock.h)

    void happen() {
        is_over = true;
        if (!is_timed) seconds = seconds_now();
    }
};
using EventPointer = std::shared_ptr<Event>;

// A copy; without bytes, an event; with `waits`, a wait for another stream's event.
struct Task {
    int64_t number = 0;
    void* to = nullptr;
    const void* from = nullptr;
    size_t num_bytes = 0;
    bool goes_up = false;
    EventPointer event;
    bool waits = false;
};

struct Stream {
    std::deque<Task> queue;
    int64_t behind = 0;  // number of the last computing that the stream has waited for
    int64_t known = 0;  // number up to which the host knows that all is over
    double free_at = 0;  // in a timed test: when all that was queued is done

    double ready() const { return std::max(seconds_now(), free_at); }
};

// An upload, or a read of host memory in place, that the host does not know to be over.
struct Sent {
    int64_t stream, number;
    int64_t computed_with;
    const void* from;
    std::vector<char> bytes;
};

inline std::map<int64_t, Stream> streams;
inline std::list<Sent> sent;
inline int64_t num_streams = 1, last_number = 0;
inline thread_local int64_t current_stream = kComputes;
inline thread_local int64_t last_computed_here = 0;  // number of the last computing by this thread
inline std::minstd_rand draws;
inline double eagerness = 0;

// From here to `is_known` the caller holds the lock; later functions take it themselves.

inline bool is_drawn() { return std::uniform_real_distribution<>{}(draws) < eagerness; }

// Run what is queued on a stream, up to the event, or all of it.
inline void advance(int64_t number, const Event* until = nullptr) {
    auto& queue = streams[number].queue;
    while (!queue.empty() && !(until != nullptr && until->is_over)) {
        const Task task = queue.front();
        queue.pop_front();
        if (task.num_bytes > 0) {
            std::memcpy(task.to, task.from, task.num_bytes);
            if (task.goes_up) {
                const auto* bytes = static_cast<const char*>(task.from);
                sent.push_back({number, task.number, kNever, task.from, {bytes, bytes + task.num_bytes}});
            }
        } else if (!task.waits) {
            task.event->happen();
        } else if (!task.event->is_over) {
            advance(task.event->stream, task.event.get());
        }
    }
}

// The host learns that an event is over.
inline void learn(Event& event) {
    const auto raise = [](int64_t& known, int64_t number) { known = std::max(known, number); };
    raise(streams[event.stream].known, event.number);
    raise(streams[kComputes].known, event.behind);
    bool is_unchanged = true;
    sent.remove_if([&](const Sent& copy) {
        const bool is_over = copy.number <= streams[copy.stream].known || copy.computed_with <= streams[kComputes].known;
        if (!is_over) return false;
        is_unchanged = is_unchanged && std::memcmp(copy.from, copy.bytes.data(), copy.bytes.size()) == 0;
        return true;
    });
    TORCH_CHECK(is_unchanged, "host memory changed before its upload, or what read it in place, was over");
}

inline bool is_known(const Event& event) {
    return event.number <= streams[event.stream].known || event.computed_with <= streams[kComputes].known;
}

inline int64_t make_stream() {
    std::lock_guard guard(mutex);
    return num_streams++;
}

inline EventPointer record(int64_t stream) {
    check_current_device();
    std::lock_guard guard(mutex);
    const auto event = std::make_shared<Event>(Event{stream, ++last_number, streams[stream].behind});
    if (is_timed) event->seconds = streams[stream].ready();
    if (stream == kComputes) {
        event->happen();
    } else {
        streams[stream].queue.push_back({.number = event->number, .event = event});
        if (is_drawn()) advance(stream);
    }
    return event;
}

inline void wait(const EventPointer& event, int64_t stream) {
    std::lock_guard guard(mutex);
    if (is_timed) streams[stream].free_at = std::max(streams[stream].free_at, event->seconds);
    if (stream != kComputes) {
        const int64_t computed = event->stream == kComputes ? event->number : event->behind;
        streams[stream].behind = std::max(streams[stream].behind, computed);
        if (!event->is_over) streams[stream].queue.push_back({.number = ++last_number, .event = event, .waits = true});
        return;
    }
    if (!event->is_over) advance(event->stream, event.get());
    const int64_t now = ++last_number;
    event->computed_with = std::min(event->computed_with, now);
    for (Sent& copy : sent) {
        if (copy.stream == event->stream && copy.number < event->number) {
            copy.computed_with = std::min(copy.computed_with, now);
        }
    }
}

inline bool query(const EventPointer& event) {
    check_current_device();
    std::lock_guard guard(mutex);
    if (is_timed ? seconds_now() < event->seconds : !is_known(*event) && !is_drawn()) return false;
    advance(event->stream, event.get());
    learn(*event);
    return true;
}

inline void synchronize(const EventPointer& event) {
    check_current_device();
    if (is_timed) sleep_until(event->seconds);
    std::lock_guard guard(mutex);
    if (!event->is_over) advance(event->stream, event.get());
    learn(*event);
}

inline void synchronize_device() {
    for (int64_t stream = 0; stream < num_streams; ++stream) synchronize(record(stream));
}

inline int64_t num_stops = 0;

inline thread_local bool is_computing = false;

// The host needs a computed value, or torch waits for a copy: the host waits until everything is computed.
inline void stop_for_result() {
    if (is_computing) return;  // the device itself asks
    ++num_stops;
    synchronize(record(kComputes));
}

inline double seconds_of(const EventPointer& event) {
    std::lock_guard guard(mutex);
    return event->seconds;
}

// Uploads from this memory are over, or nothing depends on them.
inline int unpin(uintptr_t address) {
    check_current_device();
    std::lock_guard guard(mutex);
    const auto range = pinned.find(address);
    if (range == pinned.end()) return kNotRegistered;
    sent.remove_if([&](const Sent& copy) {
        const auto from = reinterpret_cast<uintptr_t>(copy.from);
        return from >= address && from < address + range->second;
    });
    pinned.erase(range);
    return 0;
}

inline bool is_queued(const Block& block) {
    for (const auto& [number, stream] : streams) {
        for (const Task& task : stream.queue) {
            if (task.num_bytes > 0 && (block.holds(task.to) || block.holds(task.from))) return true;
        }
    }
    return false;
}

// The computing stream is never behind here, but on a GPU it is, and a copy must wait for it: a download, for all work
// of this thread, which may have written the bytes; an upload, for all work that may have used the memory before it was
// allocated.
inline void check_order(const void* pointer, bool goes_up) {
    const auto block = std::prev(blocks.upper_bound(pointer));
    const int64_t wanted = goes_up ? block->second.allocated_after : last_computed_here;
    TORCH_CHECK(streams[current_stream].behind >= wanted, "a copy does not wait for what was computed before it");
}

// Note that something is computed. Returns when it can begin.
inline double begin_computing() {
    std::lock_guard guard(mutex);
    last_computed = last_computed_here = ++last_number;
    return streams[kComputes].ready();
}

// Note that the work reads this memory; if it is the host's, it is read in place, and must not change until then.
inline void note_read(int64_t stream, const void* pointer, size_t num_bytes) {
    if (num_bytes == 0 || !is_pinned(pointer)) return;
    TORCH_CHECK(pinned_bytes_from(pointer) >= num_bytes, "host memory is read in place beyond what was registered");
    std::lock_guard guard(mutex);
    const auto* bytes = static_cast<const char*>(pointer);
    sent.push_back({stream, ++last_number, kNever, pointer, {bytes, bytes + num_bytes}});
}

// Note how much that was.
inline void end_computing(double start, double flops, double bytes) {
    std::lock_guard guard(mutex);
    const double seconds = computed_in(flops, bytes);
    Stream& stream = streams[kComputes];
    if (seconds > 0) stream.free_at = std::max(start, stream.free_at) + seconds;
}

// Note that computing copies something, and waits for it.
inline void compute_copy(size_t num_bytes, bool goes_up) {
    std::lock_guard guard(mutex);
    streams[kComputes].free_at = copied_at(streams[kComputes].ready(), num_bytes, goes_up);
}

// Let work last from now on. All that was queued before must be over.
inline void set_rates(double flops, double memory_bytes, double up_bytes, double down_bytes, double launch_seconds) {
    std::lock_guard guard(mutex);
    is_timed = true;
    rates = {flops, memory_bytes, up_bytes, down_bytes, launch_seconds};
}

inline void forget_rates() {
    std::lock_guard guard(mutex);
    is_timed = false;
}

// Share of the calls that run everything queued on their stream at once.
inline void set_eagerness(double share) {
    std::lock_guard guard(mutex);
    eagerness = share;
    draws.seed(1);
}

// A copy of pageable memory makes the host wait, as with CUDA.
inline void copy_on_stream(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.dtype() == from.dtype() && to.sizes() == from.sizes(),
                "the simulated GPU's other streams only copy between tensors of one layout");
    const size_t pinned_bytes = pinned_bytes_from((to.is_cpu() ? to : from).data_ptr());
    TORCH_CHECK(pinned_bytes == 0 || pinned_bytes >= to.nbytes(), "a copy goes beyond the memory that was registered");
    const bool returns_at_once = non_blocking && pinned_bytes > 0;
    {
        std::lock_guard guard(mutex);
        check_order(from.is_cpu() ? to.data_ptr() : from.data_ptr(), from.is_cpu());
        Stream& stream = streams[current_stream];
        stream.free_at = copied_at(stream.ready(), to.nbytes(), from.is_cpu());
        stream.queue.push_back({.number = ++last_number,
                                .to = to.data_ptr(),
                                .from = from.data_ptr(),
                                .num_bytes = to.nbytes(),
                                .goes_up = from.is_cpu()});
        if (returns_at_once && is_drawn()) advance(current_stream);
    }
    if (!returns_at_once) synchronize(record(current_stream));
}

}  // namespace simulated
