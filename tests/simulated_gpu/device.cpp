// A device for torch that needs no GPU: memory of its own (memory.h), streams and events (streams.h) and operators. It is
// a PrivateUse1 device, which every build of torch has room for.
//
// Operators compute on the CPU, at once, on copies of the device's memory. So the computing stream is never behind. All
// other streams are as far behind as allowed: what is queued on one happens when something waits for it, or, for a
// random share of the calls (`set_eagerness`), at once. Code that relies on more than streams and events promise
// computes with wrong bytes, or gets an error. New and freed memory is filled with garbage.
//
// Invariants: no function here holds the lock while it needs the GIL; addresses are those of host memory, but torch
// takes them for a GPU's and rejects operators that mix the two.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "memory.h"
#include "streams.h"

namespace {

using namespace simulated;

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

// --- Random numbers ------------------------------------------------------------------------------------------------

// The device's own: whoever seeds only the CPU's does not seed this one.
const at::Generator& default_generator() {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
}

// Operators compute on the CPU, and draw from its default generator unless they are given another one. While one
// computes, that generator draws as the device's.
void exchange_generators() {
    const auto implementation = [](const at::Generator& generator) {
        return at::check_generator<at::CPUGeneratorImpl>(generator);
    };
    auto *host = implementation(at::detail::getDefaultCPUGenerator()), *device = implementation(default_generator());
    const at::mt19937 engine = host->engine();
    const auto single = host->next_float_normal_sample();
    const auto twice = host->next_double_normal_sample();
    host->set_engine(device->engine());
    host->set_next_float_normal_sample(device->next_float_normal_sample());
    host->set_next_double_normal_sample(device->next_double_normal_sample());
    device->set_engine(engine);
    device->set_next_float_normal_sample(single);
    device->set_next_double_normal_sample(twice);
}

// --- What torch needs of a device ----------------------------------------------------------------------------------

c10::Stream torch_stream(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }

// What torch stores for an event: a place in a stream, which recording the event again replaces.
EventPointer& recorded(void* event) { return *static_cast<EventPointer*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice.type(); }
    c10::Device exchangeDevice(c10::Device device) const override {
        return {kDevice.type(), std::exchange(current_device, device.index())};
    }
    c10::Device getDevice() const override { return {kDevice.type(), current_device}; }
    void setDevice(c10::Device device) const override { current_device = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
    void synchronizeDevice(c10::DeviceIndex) const override { synchronize_device(); }

    c10::Stream getStream(c10::Device) const override { return torch_stream(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return torch_stream(kComputes); }
    c10::Stream getNewStream(c10::Device, int) const override { return torch_stream(make_stream()); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return torch_stream(std::exchange(current_stream, stream.id()));
    }
    bool queryStream(const c10::Stream& stream) const override { return query(simulated::record(stream.id())); }
    void synchronizeStream(const c10::Stream& stream) const override { synchronize(simulated::record(stream.id())); }

    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) *event = new EventPointer;
        recorded(*event) = simulated::record(stream.id());
    }
    void block(void* event, const c10::Stream& stream) const override { wait(recorded(event), stream.id()); }
    bool queryEvent(void* event) const override { return query(recorded(event)); }
    void synchronizeEvent(void* event) const override { synchronize(recorded(event)); }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        delete static_cast<EventPointer*>(event);
    }
    double elapsedTime(void* earlier, void* later, c10::DeviceIndex) const override {
        return 1e3 * (seconds_of(recorded(later)) - seconds_of(recorded(earlier)));
    }
};
const c10::impl::DeviceGuardImplRegistrar guard_registrar(kDevice.type(), new Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kNumDevices; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// --- Operators -----------------------------------------------------------------------------------------------------

// A view of the same bytes as host memory.
at::Tensor on_host(const at::Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Where no number is named, memory is that of the thread's current device.
void check_named(std::optional<at::Device> device) {
    if (!device || !device->has_index()) check_current_device();
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    check_named(device);
    return at::detail::empty_generic(size, &allocator, kKeys, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    check_named(device);
    return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, dtype.value_or(at::kFloat));
}

// A tensor of the device may be memory of the host, which work reads in place.
void note_read_of(const at::Tensor& tensor) {
    if (is_computing || tensor.device() != kDevice || tensor.numel() == 0) return;
    const auto* start = static_cast<const char*>(tensor.data_ptr());
    const auto* stop = static_cast<const char*>(tensor.storage().data()) + tensor.storage().nbytes();
    note_read(current_stream, start, std::min(tensor.nbytes(), size_t(stop - start)));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (to.numel() == 0) return to;
    note_read_of(from);
    if (current_stream != kComputes) {
        copy_on_stream(to, from, non_blocking);
    } else {
        if (!is_computing) {
            const double start = begin_computing();
            if (to.is_cpu() != from.is_cpu()) {
                compute_copy(to.nbytes(), from.is_cpu());
            } else {
                end_computing(start, 0, double(from.nbytes() + to.nbytes()));
            }
        }
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

// A GPU's kernels take scalars and indices from the host, and nothing else.
void reject_other_devices(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    if (schema.name().find("index") != std::string::npos) return;
    const auto check = [&](const at::Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || tensor.device() == kDevice || tensor.dim() == 0,
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

// Whether the operator makes the host wait on CUDA: how large its result is depends on values, or its kernel asks for
// some. To read by a mask, torch takes its positions first (`nonzero`); to write by one, the kernel does.
bool stops_for_values(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    static const std::set<std::string> always{
        "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
        "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::equal",
        "aten::bincount",
    };
    // Sorted with the ends of their indices, so that they add in a fixed order.
    static const std::set<std::string> deterministic{
        "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::index_copy", "aten::index_copy_",
        "aten::index_add", "aten::index_add_",
    };
    const std::string& name = schema.name();
    if (always.count(name) > 0) return true;
    if (deterministic.count(name) > 0 && at::globalContext().deterministicAlgorithms()) return true;
    if (name.find("index_put") == std::string::npos) return false;
    bool has_mask = false;
    for (const c10::IValue& index : torch::jit::peek(stack, 1, schema.arguments().size()).toListRef()) {
        if (index.isTensor() && index.toTensor().defined()) {
            const at::ScalarType type = index.toTensor().scalar_type();
            has_mask = has_mask || type == at::kBool || type == at::kByte;
        }
    }
    return has_mask;
}

// torch's own `mm` of such a device makes a result and calls `mm.out`.
bool is_product_in_16_bit(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    static const std::set<std::string> products{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
    if (products.count(schema.name()) == 0 || schema.overload_name() != "out") return false;
    return torch::jit::peek(stack, 0, schema.arguments().size()).toTensor().element_size() == 2;
}

// A GPU adds up products of numbers of 16 bits in fp32 and rounds the sum once. The host does the same: its own kernels
// for such numbers take sixty times as long on a processor without instructions for them.
void multiply_in_fp32(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    const at::Tensor result = stack->back().toTensor();
    const auto end = stack->end();
    for (auto value = end - int64_t(operation.schema().arguments().size()); value != end; ++value) {
        if (value->isTensor()) *value = on_host(value->toTensor()).to(at::kFloat);
    }
    operation.callBoxed(stack);
    on_host(result).copy_(stack->back().toTensor());
    stack->back() = result;
}

// Operators without a kernel above compute on the host, on copies.
void compute_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = operation.schema();
    reject_other_devices(schema, *stack);
    if (stops_for_values(schema, *stack)) stop_for_result();
    const double start = begin_computing();
    const double flops = flops_of(schema, *stack);
    double bytes = 0;
    std::set<const void*> arguments;  // a result that is one of them is counted there
    each_tensor(*stack, schema.arguments().size(), [&](const at::Tensor& tensor) {
        arguments.insert(tensor.unsafeGetTensorImpl());
        bytes += double(tensor.nbytes());
    });
    const auto& arguments_of = schema.arguments();
    for (size_t i = 0; i < arguments_of.size(); ++i) {  // what the operator itself writes changes before it is over
        const c10::IValue& value = torch::jit::peek(*stack, i, arguments_of.size());
        const bool is_written = arguments_of[i].alias_info() != nullptr && arguments_of[i].alias_info()->isWrite();
        if (!is_written && value.isTensor() && value.toTensor().defined()) note_read_of(value.toTensor());
        if (!is_written && value.isTensorList()) {
            for (const at::Tensor& tensor : value.toTensorList()) note_read_of(tensor);
        }
    }
    const bool draws = operation.hasTag(at::Tag::nondeterministic_seeded);
    const auto before = std::pair(std::exchange(current_stream, kComputes), std::exchange(is_computing, true));
    if (draws) exchange_generators();
    const auto restore = [&] {
        std::tie(current_stream, is_computing) = before;
        if (draws) exchange_generators();
    };
    try {
        if (is_product_in_16_bit(schema, *stack)) {
            multiply_in_fp32(operation, stack);
        } else {
            at::native::cpu_fallback(operation, stack);
        }
    } catch (...) {
        restore();
        throw;
    }
    restore();
    each_tensor(*stack, schema.returns().size(), [&](const at::Tensor& tensor) {
        if (arguments.count(tensor.unsafeGetTensorImpl()) == 0) bytes += double(tensor.nbytes());
    });
    end_computing(start, flops, bytes);
}

// The CPU has no such kernel for integers.
at::Tensor histc(const at::Tensor& values, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
    TORCH_CHECK(!(values.is_floating_point() && at::globalContext().deterministicAlgorithms()),
                "_histc_cuda with floating point input does not have a deterministic implementation");
    return at::histc(on_host(values).to(at::kDouble), bins, low, high).to(values.scalar_type()).to(kDevice);
}

// What torch calls for a convolution on a device that it does not know has no kernel anywhere.
c10::OperatorHandle operation_named(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    compute_on_host(operation_named("aten::convolution"), stack);
}

void convolve_backward(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    const auto first = stack->end() - int64_t(operation.schema().arguments().size());
    const std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
    stack->insert(first + 3, c10::IValue(bias_sizes));
    compute_on_host(operation_named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar_dense);
    library.impl("histc", histc);
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
    library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
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
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    c10::SetAllocator(kDevice.type(), &allocator);
    at::globalContext().lazyInitDevice(kDevice.type());
    module.def("num_stops", [] { return num_stops; });
    module.def("set_rates", set_rates, Released());
    module.def("forget_rates", forget_rates, Released());
    module.def("counts", [] {
        std::lock_guard guard(mutex);
        return std::tuple(counts.flops, counts.memory_bytes, counts.up_bytes, counts.down_bytes,
                          counts.computing_seconds);
    });
    module.def("set_eagerness", set_eagerness, Released());
    module.def("default_generator", default_generator);
    module.def("current_device", [] { return int(current_device); });
    module.def("pin", pin, Released());
    module.def("unpin", unpin, Released());
    module.def("set_pinning", set_pinning, Released());
    module.def("set_limit", set_limit, Released());
}
