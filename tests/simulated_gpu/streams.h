// Streams and events of the simulated GPU: copies that happen as late as they may, and what the host may rely on.
//
// All that is queued or computed is numbered, over all streams. Computing happens at once; but the host may only rely on
// what it knows: what it has waited for, and what that had waited for. So what went up is compared with what lies in host
// memory when the host gets to know that the copy is over: until then it may not have changed. An example, with numbers:
//
//     1 an operator computes; 2 an event of that; 3 the stream `up` waits for it (`behind` is 2); 4 a copy up is queued,
//     5 an event of it. Then computing waits for 5: the copy happens, and `computed_with` of copy and event is 6. When
//     the host waits for event 5, or for a later one of computing, say 8, it knows that the copy is over.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "memory.h"

namespace simulated {

constexpr int64_t kComputes = 0, kNever = INT64_MAX;

struct Event {
    int64_t stream, number;
    int64_t behind;  // what had been computed
    int64_t computed_with = kNever;  // when the stream that computes waited for it
    bool is_over = false;
    double seconds = 0;  // of a steady clock

    void happen() {
        is_over = true;
        seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
};
using EventPointer = std::shared_ptr<Event>;

// A copy; or, without bytes, the moment of an event; or, `waits`, until another stream has come to one.
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
    int64_t behind = 0;  // what had been computed
    int64_t known = 0;  // to the host, to be over
};

// A copy up of which the host does not know yet that it is over.
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
inline std::minstd_rand draws;
inline double eagerness = 0;

// From here to `is_known`, the lock is held by who calls; the functions behind that take it.

inline bool is_drawn() { return std::uniform_real_distribution<>{}(draws) < eagerness; }

// What is queued on a stream happens, up to this event or all of it.
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

// The host gets to know that an event is over.
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
    TORCH_CHECK(is_unchanged, "host memory changed before its copy up was over");
}

inline bool is_known(const Event& event) {
    return event.number <= streams[event.stream].known || event.computed_with <= streams[kComputes].known;
}

inline EventPointer record(int64_t stream) {
    std::lock_guard guard(mutex);
    const auto event = std::make_shared<Event>(Event{stream, ++last_number, streams[stream].behind});
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
    std::lock_guard guard(mutex);
    if (!is_known(*event) && !is_drawn()) return false;
    advance(event->stream, event.get());
    learn(*event);
    return true;
}

inline void synchronize(const EventPointer& event) {
    std::lock_guard guard(mutex);
    if (!event->is_over) advance(event->stream, event.get());
    learn(*event);
}

inline void synchronize_device() {
    for (int64_t stream = 0; stream < num_streams; ++stream) synchronize(record(stream));
}

inline int64_t num_stops = 0;

inline thread_local bool is_computing = false;

// The host needs what is computed, or torch waits for a copy: the host stands still until everything is computed.
inline void stop_for_result() {
    if (is_computing) return;  // it is the device that asks
    ++num_stops;
    synchronize(record(kComputes));
}

inline double seconds_of(const EventPointer& event) {
    std::lock_guard guard(mutex);
    TORCH_CHECK(is_known(*event), "CUDA error: device not ready");
    return event->seconds;
}

// What was sent from there is over, or nobody cares.
inline int unpin(uintptr_t address) {
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

// The stream that computes is never behind here. On a GPU it is, and a copy has to wait for it: down, for all that may
// have made these bytes; up, for all that may have used the memory before it was given out for them.
inline void check_order(const void* pointer, bool goes_up) {
    const auto block = std::prev(blocks.upper_bound(pointer));
    const int64_t wanted = goes_up ? block->second.given_out : last_computed;
    TORCH_CHECK(streams[current_stream].behind >= wanted, "a copy does not wait for what was computed before it");
}

// Something is computed.
inline void compute() {
    std::lock_guard guard(mutex);
    last_computed = ++last_number;
}

// Whoever copies pageable memory stands still for it, as with CUDA.
inline void copy_on_stream(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.dtype() == from.dtype() && to.sizes() == from.sizes(),
                "the simulated GPU's other streams only copy what lies alike on both sides");
    const bool returns_at_once = non_blocking && is_pinned((to.is_cpu() ? to : from).data_ptr());
    {
        std::lock_guard guard(mutex);
        check_order(from.is_cpu() ? to.data_ptr() : from.data_ptr(), from.is_cpu());
        streams[current_stream].queue.push_back({.number = ++last_number,
                                                 .to = to.data_ptr(),
                                                 .from = from.data_ptr(),
                                                 .num_bytes = to.nbytes(),
                                                 .goes_up = from.is_cpu()});
        if (returns_at_once && is_drawn()) advance(current_stream);
    }
    if (!returns_at_once) synchronize(record(current_stream));
}

}  // namespace simulated
