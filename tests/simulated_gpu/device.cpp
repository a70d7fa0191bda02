// A CUDA device for a torch that was built without CUDA: memory of its own, streams and events, and no GPU.
//
// Operators compute on the CPU, at once, on copies of what lies in the device's memory. The stream that computes is
// therefore never behind; all others are as far behind as they may be: what is queued on one happens when somebody
// waits for it, or, for a share of the calls that is drawn (`set_eagerness`), at once. So whoever relies on more than
// streams and events promise computes with the wrong bytes, or is told. Memory is garbage when it is given out and freed.
//
// Invariants: no function here holds the lock while it needs Python's; addresses are those of host memory, but torch
// takes them for a GPU's, and refuses to mix them.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iomanip>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>

namespace {

const c10::Device kDevice{c10::DeviceType::CUDA, 0};
const c10::Stream kStream{c10::Stream::DEFAULT, kDevice};
const c10::DispatchKeySet kKeys{c10::DispatchKey::CUDA};
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;  // cudaErrorHostMemory...

std::mutex mutex;

// --- Memory --------------------------------------------------------------------------------------------------------

constexpr size_t kGranularity = 512;
constexpr int kGivenOut = 0xA5, kFreed = 0xDD;

size_t allocated_bytes = 0, peak_bytes = 0, limit_bytes = SIZE_MAX;

struct Block {
    void* address;
    size_t num_bytes;
};

void free_block(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::memset(block->address, kFreed, block->num_bytes);
    std::free(block->address);
    std::lock_guard guard(mutex);
    allocated_bytes -= block->num_bytes;
}

// As torch words it.
std::string size_in_words(size_t num_bytes) {
    const bool is_large = num_bytes >= size_t{1} << 30;
    std::ostringstream words;
    words << std::fixed << std::setprecision(2) << double(num_bytes) / double(is_large ? 1 << 30 : 1 << 20)
          << (is_large ? " GiB" : " MiB");
    return words.str();
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        if (num_bytes == 0) return {nullptr, kDevice};
        num_bytes = (num_bytes + kGranularity - 1) / kGranularity * kGranularity;
        {
            std::lock_guard guard(mutex);
            TORCH_CHECK_WITH(OutOfMemoryError, allocated_bytes + num_bytes <= limit_bytes,
                             "CUDA out of memory. Tried to allocate ", size_in_words(num_bytes), ".");
            allocated_bytes += num_bytes;
            peak_bytes = std::max(peak_bytes, allocated_bytes);
        }
        void* address = std::aligned_alloc(kGranularity, num_bytes);
        TORCH_CHECK(address != nullptr, "no memory left for the simulated GPU's");
        std::memset(address, kGivenOut, num_bytes);
        return {address, new Block{address, num_bytes}, free_block, kDevice};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

Allocator allocator;

// --- Pinned host memory --------------------------------------------------------------------------------------------

std::map<uintptr_t, size_t> pinned;  // size by address

// With the lock held. The first range that ends behind the address.
auto first_behind(uintptr_t address) {
    auto range = pinned.upper_bound(address);
    if (range != pinned.begin() && address < std::prev(range)->first + std::prev(range)->second) --range;
    return range;
}

bool is_pinned(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard guard(mutex);
    const auto range = first_behind(address);
    return range != pinned.end() && range->first <= address;
}

int pin(uintptr_t address, size_t num_bytes) {
    std::lock_guard guard(mutex);
    const auto range = first_behind(address);
    if (range != pinned.end() && range->first < address + num_bytes) return kAlreadyRegistered;
    pinned[address] = num_bytes;
    return 0;
}

// --- Streams and events --------------------------------------------------------------------------------------------
//
// All that is queued is numbered, over all streams. The stream that computes is never behind; but the host may only rely
// on what it knows: what it has waited for, and what that was behind. So what went up is compared with what lies in
// host memory when the host gets to know that the copy is over: until then it may not have changed.

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

std::map<int64_t, Stream> streams;
std::list<Sent> sent;
int64_t num_streams = 1, last_number = 0;
thread_local int64_t current_stream = kComputes;
std::minstd_rand draws;
double eagerness = 0;

// All of these with the lock held.

bool is_drawn() { return std::uniform_real_distribution<>{}(draws) < eagerness; }

// What is queued on a stream happens, up to this event or all of it.
void advance(int64_t number, const Event* until = nullptr) {
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
void learn(Event& event) {
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

bool is_known(const Event& event) {
    return event.number <= streams[event.stream].known || event.computed_with <= streams[kComputes].known;
}

// And these take it.

EventPointer record(int64_t stream) {
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

void wait(const EventPointer& event, int64_t stream) {
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

bool query(const EventPointer& event) {
    std::lock_guard guard(mutex);
    if (!is_known(*event) && !is_drawn()) return false;
    advance(event->stream, event.get());
    learn(*event);
    return true;
}

void synchronize(const EventPointer& event) {
    std::lock_guard guard(mutex);
    if (!event->is_over) advance(event->stream, event.get());
    learn(*event);
}

void synchronize_device() {
    for (int64_t stream = 0; stream < num_streams; ++stream) synchronize(record(stream));
}

int64_t num_stops = 0;

thread_local bool is_computing = false;

// The host needs what is computed, or torch waits for a copy: the host stands still until everything is computed.
void stop_for_result() {
    if (is_computing) return;  // it is the device that asks
    ++num_stops;
    synchronize(record(kComputes));
}

double seconds_of(const EventPointer& event) {
    std::lock_guard guard(mutex);
    TORCH_CHECK(is_known(*event), "CUDA error: device not ready");
    return event->seconds;
}

// What was sent from there is over, or nobody cares.
int unpin(uintptr_t address) {
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

// Whoever copies pageable memory stands still for it, as with CUDA.
void copy_on_stream(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    TORCH_CHECK(to.is_contiguous() && from.is_contiguous() && to.dtype() == from.dtype() && to.sizes() == from.sizes(),
                "the simulated GPU's other streams only copy what lies alike on both sides");
    const bool returns_at_once = non_blocking && is_pinned((to.is_cpu() ? to : from).data_ptr());
    {
        std::lock_guard guard(mutex);
        streams[current_stream].queue.push_back({.number = ++last_number,
                                                 .to = to.data_ptr(),
                                                 .from = from.data_ptr(),
                                                 .num_bytes = to.nbytes(),
                                                 .goes_up = from.is_cpu()});
        if (returns_at_once && is_drawn()) advance(current_stream);
    }
    if (!returns_at_once) synchronize(record(current_stream));
}

// --- What torch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return kStream; }
    c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    // Operators are over when they return, and all of them are on one stream.
    void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
};
const c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, new Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex current_device() const override { return 0; }
    int getNumGPUs() const override { return 1; }
    bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// Torch asked for its hooks when it was imported, and keeps what it got: an object without members, like ours.
void replace_hooks() {
    static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) CUDAHooks;
}

// --- Operators -----------------------------------------------------------------------------------------------------

// The same bytes, seen as host memory.
at::Tensor on_host(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &allocator, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, dtype.value_or(at::kFloat));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (to.numel() == 0) return to;
    if (current_stream != kComputes) {
        copy_on_stream(to, from, non_blocking);
    } else {
        if (to.is_cpu() || (from.is_cpu() && !(non_blocking && is_pinned(from.data_ptr())))) stop_for_result();
        on_host(to).copy_(on_host(from));
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    on_host(to).copy_(on_host(from));
    return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
    stop_for_result();
    return on_host(tensor).item();
}

// CUDA's kernels take from the host what is a single number, or an index, and nothing else.
void refuse_other_devices(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    if (schema.name().find("index") != std::string::npos) return;
    const auto check = [&](const at::Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || tensor.dim() == 0,
                    "Expected all tensors to be on the same device, but ", schema.name(), " got one on ",
                    tensor.device());
    };
    for (const auto& argument : torch::jit::last(stack, schema.arguments().size())) {
        if (argument.isTensor()) check(argument.toTensor());
        if (argument.isTensorList()) {
            for (const at::Tensor& tensor : argument.toTensorList()) check(tensor);
        }
    }
}

// What has no kernel above computes on the host, on copies.
void compute_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    refuse_other_devices(operation.schema(), *stack);
    TORCH_CHECK(!(operation.schema().name() == "aten::kthvalue" && at::globalContext().deterministicAlgorithms()),
                "kthvalue CUDA does not have a deterministic implementation");  // one that CUDA refuses, for tests
    const auto before = std::pair(std::exchange(current_stream, kComputes), std::exchange(is_computing, true));
    const auto restore = [&] { std::tie(current_stream, is_computing) = before; };
    try {
        at::native::cpu_fallback(operation, stack);
    } catch (...) {
        restore();
        throw;
    }
    restore();
}

// There is no such kernel for integers on the CPU.
at::Tensor histc(const at::Tensor& values, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
    return at::histc(on_host(values).to(at::kDouble), bins, low, high).to(values.scalar_type()).to(kDevice);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar_dense);
    library.impl("histc", histc);
    library.impl("as_strided", [](const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                                  std::optional<c10::SymInt> offset) {
        return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                 offset ? std::optional(offset->expect_int()) : std::nullopt);
    });
    library.impl("view", [](const at::Tensor& tensor, c10::SymIntArrayRef size) {
        return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
    });
    library.impl("_reshape_alias", [](const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
        return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
    });
    library.impl("unfold", at::native::unfold);
    library.impl("set_.source_Tensor", at::native::set_tensor_);
    library.impl("set_.source_Storage", [](at::Tensor& tensor, at::Storage storage) -> at::Tensor& {
        const auto num_elements = int64_t(storage.nbytes() / tensor.itemsize());
        return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {num_elements}, {});
    });
    library.impl("set_.source_Storage_storage_offset",
                 [](at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) -> at::Tensor& {
                     return at::native::set_storage_cpu_(tensor, std::move(storage), offset.expect_int(),
                                                         C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
                 });
    library.impl("resize_", [](const at::Tensor& tensor, c10::SymIntArrayRef size,
                               std::optional<at::MemoryFormat> format) -> const at::Tensor& {
        return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
    });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using Released = py::call_guard<py::gil_scoped_release>;
    replace_hooks();
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    c10::SetAllocator(c10::DeviceType::CUDA, &allocator);
    py::class_<Event, EventPointer>(module, "Event");
    module.def("make_stream", [] { return num_streams++; });
    module.def("exchange_stream", [](int64_t stream) { return std::exchange(current_stream, stream); });
    module.def("current_stream", [] { return current_stream; });
    module.def("record", record, Released());
    module.def("wait", wait, Released());
    module.def("query", query, Released());
    module.def("synchronize", synchronize, Released());
    module.def("synchronize_device", synchronize_device, Released());
    module.def("seconds_of", seconds_of, Released());
    module.def("num_stops", [] { return num_stops; });
    module.def("set_eagerness", [](double share) { eagerness = share; });
    module.def("pin", pin, Released());
    module.def("unpin", unpin, Released());
    module.def("allocated_bytes", [] { return allocated_bytes; });
    module.def("peak_bytes", [] { return peak_bytes; });
    module.def("reset_peak", [] { peak_bytes = allocated_bytes; });
    module.def("set_limit", [](size_t num_bytes) { limit_bytes = num_bytes; });
}
