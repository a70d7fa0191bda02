// Time on the simulated GPU, for tests that ask for it: how long work on a stream lasts, by rates that the test gives.
//
// Work is done when the host asks for it, as always (streams.h), but it lasts: an event has the time at which its stream
// gets there, on the host's own clock. Work begins no earlier than it was queued, than what stands before it on its
// stream has ended, and than the events that its stream waits for have come. An event that the host asks about is over
// when its time has come; if the host waits, it sleeps until then. An operator lasts as its launch does, and then by its
// FLOPs or by the bytes of its tensors, whichever takes longer; only products of matrices count FLOPs. Copies of all
// streams share one line for each direction.
//
// Invariant: a time that was given out does not change.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <thread>

namespace simulated {

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void sleep_until(double time) {
    while (seconds_now() < time) std::this_thread::sleep_for(std::chrono::duration<double>(time - seconds_now()));
}

// One direction of the link, which moves one copy at a time. A copy begins when it is ready and the line is free, though
// a copy that was queued before will be ready later. If it is not over by then, the line owes the rest: the copy that was
// queued before keeps the time that it was given, and the next free time is taken instead.
class Line {
   public:
    // When a copy has ended that can begin at `ready` and takes `seconds`.
    double take(double ready, double seconds) {
        forget_until(seconds_now());
        double at = ready;
        auto next = taken_.upper_bound(at);
        if (next != taken_.begin()) at = std::max(at, std::prev(next)->second);
        for (; next != taken_.end() && next->first <= at; ++next) at = next->second;
        const double end = at + seconds;
        for (double left = seconds; left > 0; ++next) {
            const double piece = std::min(left, (next == taken_.end() ? INFINITY : next->first) - at);
            if (piece > 0) taken_[at] = at + piece;
            if (next == taken_.end()) break;
            left -= piece;
            at = next->second;
        }
        return end;
    }

   private:
    // Nothing begins before now.
    void forget_until(double time) {
        while (!taken_.empty() && taken_.begin()->second <= time) taken_.erase(taken_.begin());
    }

    std::map<double, double> taken_;  // ends by starts; they do not overlap
};

// The caller holds the lock for everything below.

inline bool is_timed = false;
struct Rates {
    double flops = 0, memory_bytes = 0, up_bytes = 0, down_bytes = 0;  // per second
    double launch_seconds = 0;
};
inline Rates rates;
inline Line up_line, down_line;

// Since the process began, timed or not; seconds of computing only while timed.
struct Counts {
    double flops = 0, up_bytes = 0, down_bytes = 0;
    double memory_bytes = 0;  // of operators without FLOPs
    double computing_seconds = 0;
};
inline Counts counts;

// When a copy has ended that can begin at `ready`.
inline double copied_at(double ready, size_t num_bytes, bool goes_up) {
    (goes_up ? counts.up_bytes : counts.down_bytes) += double(num_bytes);
    if (!is_timed) return ready;
    return goes_up ? up_line.take(ready, double(num_bytes) / rates.up_bytes)
                   : down_line.take(ready, double(num_bytes) / rates.down_bytes);
}

// FLOPs of a product of matrices; 0 for every other operator.
inline double flops_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    const std::string& name = schema.name();
    const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
    if (!adds && name != "aten::mm" && name != "aten::bmm") return 0;
    const auto arguments = torch::jit::last(stack, schema.arguments().size());
    const at::Tensor& left = arguments[adds ? 1 : 0].toTensor();
    const at::Tensor& right = arguments[adds ? 2 : 1].toTensor();
    return 2.0 * double(left.numel()) * double(right.size(-1));
}

// Calls `see` with each tensor among the last values of the stack.
template <typename See>
void each_tensor(const torch::jit::Stack& stack, size_t number, const See& see) {
    for (const auto& value : torch::jit::last(stack, number)) {
        if (value.isTensor() && value.toTensor().defined()) see(value.toTensor());
        if (value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorList()) see(tensor);
        }
    }
}

// How long an operator takes, which is counted.
inline double computed_in(double flops, double bytes) {
    counts.flops += flops;
    if (flops == 0) counts.memory_bytes += bytes;
    if (!is_timed) return 0;
    const double seconds = rates.launch_seconds + std::max(flops / rates.flops, bytes / rates.memory_bytes);
    counts.computing_seconds += seconds;
    return seconds;
}

}  // namespace simulated
