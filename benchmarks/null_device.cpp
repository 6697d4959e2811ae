// A CUDA device of which every operator does nothing, for builds of PyTorch without CUDA: what is left is
// the time that the host takes to launch. Tensors have no memory, and what is read from the device is 0.
//
// The shapes of an operator's outputs are found by its kernel for meta tensors, and remembered by those of
// its inputs: many of these kernels are written in Python and slow.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "../tests/simulated/guard.cpp"

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// Bytes that tensors of the device would have, in blocks of 512, and the most there have been.
std::atomic<int64_t> live_bytes{0}, peak_bytes{0};

void note_freed(void* bytes) { live_bytes -= reinterpret_cast<int64_t>(bytes); }

c10::DataPtr take(size_t bytes, Device device) {
    const int64_t block = static_cast<int64_t>((bytes + 511) / 512 * 512);
    peak_bytes = std::max<int64_t>(peak_bytes, live_bytes += block);
    return c10::DataPtr(nullptr, reinterpret_cast<void*>(block), &note_freed, device);
}

// A tensor of the shape of another, on another device, without memory.
Tensor like(const Tensor& tensor, DeviceType type, DispatchKey key) {
    const Device device = type == DeviceType::CUDA ? Device(type, 0) : Device(type);
    const size_t bytes = tensor.storage().nbytes();
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), bytes,
        type == DeviceType::CUDA ? take(bytes, device) : c10::DataPtr(nullptr, device),
        c10::GetAllocator(DeviceType::Meta), true);
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
}

Tensor to_null(const Tensor& tensor) { return like(tensor, DeviceType::CUDA, DispatchKey::CUDA); }

template <class Change>
IValue mapped(const IValue& value, Change change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
            list.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
        return list;
    }
    return value;
}

// What a call's outputs depend on: the operator, its tensors' shapes, and everything else it was given.
struct Key {
    std::vector<int64_t> words;
    bool is_known = true;

    void add(c10::ArrayRef<int64_t> values) {
        words.push_back(static_cast<int64_t>(values.size()));
        words.insert(words.end(), values.begin(), values.end());
    }
    void add(const Tensor& tensor) {
        if (!tensor.defined()) return words.push_back(-1);
        words.push_back(static_cast<int64_t>(tensor.scalar_type()) * 64 + tensor.is_cuda());
        add(tensor.sizes());
        add(tensor.strides());
    }
    void add(double value) {
        int64_t word;
        std::memcpy(&word, &value, sizeof word);
        words.push_back(word);
    }
    void add(const IValue& value) {
        if (value.isTensor()) return add(value.toTensor());
        if (value.isNone()) return words.push_back(-2);
        if (value.isInt()) return words.push_back(value.toInt());
        if (value.isBool()) return words.push_back(value.toBool());
        if (value.isDouble()) return add(value.toDouble());
        if (value.isString()) {
            for (const char letter : value.toStringRef()) words.push_back(letter);
            return;
        }
        if (value.isDevice()) return words.push_back(static_cast<int64_t>(value.toDevice().type()));
        if (value.isIntList()) return add(c10::ArrayRef<int64_t>(value.toIntVector()));
        if (value.isTensorList())
            for (const Tensor& each : value.toTensorVector()) add(each);
        else if (value.isOptionalTensorList())
            for (const auto& each : value.toOptionalTensorVector()) add(each.value_or(Tensor()));
        else
            is_known = false;
    }
    bool operator==(const Key& other) const { return words == other.words; }
};

struct Hash {
    size_t operator()(const Key& key) const {
        size_t found = 0;
        for (const int64_t word : key.words) found = (found ^ static_cast<size_t>(word)) * 0x9E3779B97F4A7C15;
        return found;
    }
};

// An output: the argument that it is, or a new tensor of this one's shape.
struct Output {
    int argument = -1;
    Tensor shape;
};

// Tensors of one call on the device, in order, and what stands for each on the meta device.
struct Call {
    std::vector<std::pair<Tensor, Tensor>> pairs;

    Tensor replaced(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        pairs.emplace_back(tensor, like(tensor, DeviceType::Meta, DispatchKey::Meta));
        return pairs.back().second;
    }
    Output found(const Tensor& tensor) const {
        for (size_t i = 0; i < pairs.size(); ++i)
            if (pairs[i].second.is_same(tensor)) return {static_cast<int>(i), tensor};
        return {-1, tensor};
    }
};

// A view of the first argument is as that is: made inside inference mode or outside it.
Tensor view_of(const Tensor& base, const Tensor& shape) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        shape.sizes(), shape.strides(), shape.storage_offset());
    return made;
}

Tensor output_of(const Output& output, const std::vector<Tensor>& arguments, bool is_view) {
    if (!output.shape.defined()) return output.shape;
    if (output.argument < 0 && is_view) return view_of(arguments[0], output.shape);
    if (output.argument < 0) return to_null(output.shape);
    const Tensor& known = arguments[output.argument];
    if (known.sizes() != output.shape.sizes()) {
        known.storage().set_nbytes(output.shape.storage().nbytes());
        known.unsafeGetTensorImpl()->set_sizes_and_strides(
            output.shape.sizes(), output.shape.strides(), output.shape.storage_offset());
    }
    return known;
}

std::vector<Output> run_on_meta(const c10::OperatorHandle& op, Stack& stack, size_t count) {
    Call call;
    Stack meta(stack.end() - static_cast<int64_t>(count), stack.end());
    for (IValue& value : meta) {
        if (value.isDevice() && value.toDevice().is_cuda())
            value = IValue(Device(DeviceType::Meta));
        else
            value = mapped(value, [&](const Tensor& each) { return call.replaced(each); });
    }
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &meta);
    std::vector<Output> outputs;
    for (const IValue& value : meta) {
        if (value.isTensorList())
            for (const Tensor& each : value.toTensorVector()) outputs.push_back(call.found(each));
        else
            outputs.push_back(call.found(value.toTensor()));
    }
    return outputs;
}

void launch_nothing(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    thread_local std::unordered_map<Key, std::vector<Output>, Hash> known;
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size();
    if (schema.name() == "aten::_local_scalar_dense") {
        torch::jit::drop(*stack, count);
        torch::jit::push(*stack, IValue(0));
        return;
    }
    Key key;
    key.words.push_back(reinterpret_cast<int64_t>(&schema));
    std::vector<Tensor> arguments;
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
        const IValue& value = (*stack)[i];
        key.add(value);
        mapped(value, [&](const Tensor& each) {
            if (each.defined() && each.is_cuda()) arguments.push_back(each);
            return each;
        });
    }
    const auto place = key.is_known ? known.find(key) : known.end();
    std::vector<Output> outputs =
        place == known.end() ? run_on_meta(op, *stack, count) : place->second;
    torch::jit::drop(*stack, count);
    const auto& returns = schema.returns();
    const auto* alias = returns.empty() ? nullptr : returns[0].alias_info();
    const bool is_view = alias && !alias->isWrite() && !arguments.empty();
    if (returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType) {
        c10::List<Tensor> list;
        for (const Output& each : outputs) list.push_back(output_of(each, arguments, is_view));
        torch::jit::push(*stack, IValue(list));
    } else {
        for (const Output& each : outputs) torch::jit::push(*stack, IValue(output_of(each, arguments, is_view)));
    }
    if (place == known.end() && key.is_known) known.emplace(std::move(key), std::move(outputs));
}

// CUDA's build of PyTorch has a kernel for it; without, it is a formula of six operators.
std::tuple<Tensor, Tensor> launch_norm(
    const Tensor& input, c10::IntArrayRef, const std::optional<Tensor>&, std::optional<double>) {
    return {to_null(input), to_null(input)};
}

Tensor& copy_nothing(Tensor& target, const Tensor&, bool) { return target; }

}  // namespace

int64_t count_live() { return live_bytes; }

// The most since the last time it was asked for.
int64_t count_peak() { return peak_bytes.exchange(live_bytes); }

TORCH_LIBRARY(null_device, library) {
    library.def("live_bytes", &count_live);
    library.def("peak_bytes", &count_peak);
}

// Views launch nothing on any device: they are PyTorch's own.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("view", at::native::view);
    library.impl("_fused_rms_norm", launch_norm);
    library.impl("copy_", copy_nothing);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch_nothing>());
}
