// Memory of the simulated GPU, and pinned host memory. New and freed memory is filled with garbage.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace simulated {

// There are two GPUs, and only this one is used. A thread's current device is the first one until it says otherwise.
inline const c10::Device kDevice{c10::DeviceType::PrivateUse1, 1};
constexpr c10::DeviceIndex kNumDevices = 2;
inline thread_local c10::DeviceIndex current_device = 0;

// CUDA's calls that name no device make a context on the thread's current one.
inline void check_current_device() {
    TORCH_CHECK(current_device == kDevice.index(), "the current device of this thread is another GPU");
}

constexpr int kNoMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713;  // cudaError...

inline std::mutex mutex;  // guards everything here and in streams.h; no holder needs the GIL

constexpr size_t kGranularity = 512;
constexpr int kNewByte = 0xA5, kFreedByte = 0xDD;

constexpr size_t kTotalBytes = size_t{64} << 30;

inline size_t allocated_bytes = 0, peak_bytes = 0, limit_bytes = kTotalBytes;

struct Block {
    void* address;
    size_t num_bytes;
    int64_t allocated_after;  // number of the last computing before the allocation

    bool holds(const void* pointer) const {
        return pointer >= address && pointer < static_cast<const char*>(address) + num_bytes;
    }
};

inline std::map<const void*, Block> blocks;  // by address
inline int64_t last_computed = 0;  // number of the last computing (streams.h)

bool is_queued(const Block& block);  // true if a queued copy uses the block (streams.h)

inline void free_block(void* address) {
    std::lock_guard guard(mutex);
    const auto found = blocks.find(address);
    const Block block = found->second;
    blocks.erase(found);
    std::memset(block.address, kFreedByte, block.num_bytes);
    allocated_bytes -= block.num_bytes;
    if (!is_queued(block)) std::free(block.address);  // otherwise the code under test is wrong, and it copies garbage
}

// In the format of torch's message, which Ratel parses.
inline std::string size_in_words(size_t num_bytes) {
    const bool is_large = num_bytes >= size_t{1} << 30;
    std::ostringstream words;
    words << std::fixed << std::setprecision(2) << double(num_bytes) / double(is_large ? 1 << 30 : 1 << 20)
          << (is_large ? " GiB" : " MiB");
    return words.str();
}

// Holds nothing in reserve, so what is reserved is what is allocated.
struct Allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        if (num_bytes == 0) return {nullptr, kDevice};
        num_bytes = (num_bytes + kGranularity - 1) / kGranularity * kGranularity;
        {
            std::lock_guard guard(mutex);
            TORCH_CHECK_WITH(OutOfMemoryError, allocated_bytes + num_bytes <= limit_bytes,
                             "The simulated GPU is out of memory. Tried to allocate ", size_in_words(num_bytes), ".");
            allocated_bytes += num_bytes;
            peak_bytes = std::max(peak_bytes, allocated_bytes);
        }
        void* address = std::aligned_alloc(kGranularity, num_bytes);
        TORCH_CHECK(address != nullptr, "the host has no memory left for the simulated GPU's");
        std::memset(address, kNewByte, num_bytes);
        std::lock_guard guard(mutex);
        blocks[address] = {address, num_bytes, last_computed};
        return {address, address, free_block, kDevice};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        std::lock_guard guard(mutex);
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
            auto& all = bytes->at(size_t(c10::CachingAllocator::StatType::AGGREGATE));
            all.current = int64_t(allocated_bytes);
            all.peak = int64_t(peak_bytes);
        }
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {
        std::lock_guard guard(mutex);
        peak_bytes = allocated_bytes;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
        std::lock_guard guard(mutex);
        return {kTotalBytes - allocated_bytes, kTotalBytes};
    }
};

inline Allocator allocator;

// As a share of the GPU's memory.
inline void set_limit(double share) {
    std::lock_guard guard(mutex);
    limit_bytes = size_t(share * double(kTotalBytes));
}

inline std::map<uintptr_t, size_t> pinned;  // size by address

// The first range that ends after the address. The caller holds the lock.
inline auto first_behind(uintptr_t address) {
    auto range = pinned.upper_bound(address);
    if (range != pinned.begin() && address < std::prev(range)->first + std::prev(range)->second) --range;
    return range;
}

// Bytes from the pointer to the end of its range; 0 if it is in none.
inline size_t pinned_bytes_from(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard guard(mutex);
    const auto range = first_behind(address);
    return range != pinned.end() && range->first <= address ? range->first + range->second - address : 0;
}

inline bool is_pinned(const void* pointer) { return pinned_bytes_from(pointer) > 0; }

// How memory is registered, for tests: a number of refusals, the longest range, and how long a byte takes.
inline int64_t pin_refusals = 0;
inline size_t most_pin_bytes = SIZE_MAX;
inline double pin_seconds_per_byte = 0;

inline void set_pinning(int64_t refusals, size_t most_bytes, double seconds_per_byte) {
    std::lock_guard guard(mutex);
    pin_refusals = refusals;
    most_pin_bytes = most_bytes;
    pin_seconds_per_byte = seconds_per_byte;
}

// Holds the lock while it takes its time: as with CUDA, every other call waits meanwhile.
inline int pin(uintptr_t address, size_t num_bytes) {
    check_current_device();
    std::lock_guard guard(mutex);
    if (pin_refusals > 0) return --pin_refusals, kNoMemory;
    if (num_bytes > most_pin_bytes) return kNoMemory;
    std::this_thread::sleep_for(std::chrono::duration<double>(pin_seconds_per_byte * double(num_bytes)));
    const auto range = first_behind(address);
    if (range != pinned.end() && range->first < address + num_bytes) return kAlreadyRegistered;
    pinned[address] = num_bytes;
    return 0;
}

}  // namespace simulated
