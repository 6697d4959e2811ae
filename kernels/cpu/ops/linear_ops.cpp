// Linear layers: weights packed into panels, and matmuls with them.

#include <algorithm>
#include <limits>

#include "experts.h"
#include "memory.h"
#include "ops.h"

namespace aioengine {

namespace {

Weights weights_of(const Tensor& packed, const AttentionKernels& kernels) {
    const DType dtype = dtype_of(packed, kernels);
    if (dtype == DType::Float32) return Weights::Float32;
    return dtype == DType::BFloat16 ? Weights::BFloat16 : Weights::Float16;
}

// Numbers of one size from rows [outputs, depth] to panels; what there is no row for becomes 0.
template <class T>
void copy_to_panels(const T* from, int64_t stride, int64_t outputs, int64_t depth, T* to) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    share_out(outputs, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t count = std::min<int64_t>(PANEL, outputs - panel * PANEL);
            const T* rows = from + panel * PANEL * stride;
            T* target = to + panel * depth * PANEL;
            if (count < PANEL) std::fill(target, target + depth * PANEL, T{});
            // A few columns at a time, row by row: rows are often a power of two apart, and a cache
            // would not hold a line of each.
            for (int64_t first = 0; first < depth; first += PANEL) {
                const int64_t last = std::min(first + PANEL, depth);
                for (int64_t row = 0; row < count; ++row)
                    for (int64_t k = first; k < last; ++k)
                        target[k * PANEL + row] = rows[row * stride + k];
            }
        }
    });
}

}  // namespace

Tensor pack_panels(const Tensor& weight) {
    check_close(weight, 2, "weight");
    const int64_t outputs = weight.size(0), depth = weight.size(1);
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    const bool is_even = depth % PAIRED_DEPTH == 0 && weight.stride(0) % 2 == 0;
    if (weight.scalar_type() == ScalarType::BFloat16 && is_even && dispatch_table().bf16_gemm) {
        struct Pair {
            uint16_t first, second;
        };
        Tensor pairs = new_weight(weight, {panels, depth / 2, PANEL, 2});
        copy_to_panels(
            static_cast<const Pair*>(weight.const_data_ptr()), weight.stride(0) / 2, outputs,
            depth / 2, static_cast<Pair*>(pairs.mutable_data_ptr()));
        return pairs;
    }
    Tensor packed = new_weight(weight, {panels, depth, PANEL});
    const void* from = weight.const_data_ptr();
    void* to = packed.mutable_data_ptr();
    const int64_t stride = weight.stride(0);
    switch (weight.element_size()) {
        case 2:
            copy_to_panels((const uint16_t*)from, stride, outputs, depth, (uint16_t*)to);
            break;
        case 4:
            copy_to_panels((const uint32_t*)from, stride, outputs, depth, (uint32_t*)to);
            break;
        default:
            STD_TORCH_CHECK(false, "a weight's numbers must take 2 or 4 bytes");
    }
    return packed;
}

namespace {

// Tells a matmul a weight in groups.
void set_groups(Linear& a, const Weight& weight, int64_t depth) {
    const auto [groups, head] = groups_of(weight.packed);
    STD_TORCH_CHECK(
        head.depth == depth && head.outputs == weight.outputs, "x and packed do not fit each other");
    a.weights = Weights::Grouped;
    a.groups = groups;
    a.packed = groups.first;
}

// Tells it one in panels.
void set_panels(Linear& a, const Weight& weight, int64_t depth) {
    const Tensor& packed = weight.packed;
    const DispatchTable& table = dispatch_table();
    const bool is_paired = packed.dim() == 4;
    check_close(packed, is_paired ? 4 : 3, "packed");
    STD_TORCH_CHECK(
        packed.is_contiguous() && packed.size(2) == PANEL && (!is_paired || packed.size(3) == 2),
        "packed is not packed");
    const int64_t panels = packed.size(0), outputs = weight.outputs;
    STD_TORCH_CHECK(
        packed.size(1) * (is_paired ? 2 : 1) == depth && outputs <= panels * PANEL &&
            outputs > (panels - 1) * PANEL,
        "x and packed do not fit each other");
    STD_TORCH_CHECK(
        !is_paired || (table.bf16_gemm && a.dtype == DType::BFloat16 &&
                       packed.scalar_type() == ScalarType::BFloat16),
        "weights in pairs are multiplied with bfloat16, where the CPU has instructions for them");
    a.weights = weights_of(packed, *table.attention);
    a.packed = packed.const_data_ptr();
    a.is_paired = is_paired;
}

}  // namespace

Linear linear_of(
    const Weight& weight, DType dtype, int64_t rows, int64_t depth, int64_t activation, bool is_gated) {
    const auto& [packed, scales, bias, outputs] = weight;
    STD_TORCH_CHECK(depth > 0, "rows must have numbers");
    Linear a{};
    a.dtype = dtype;
    if (packed.dim() == 1)
        set_groups(a, weight, depth);
    else
        set_panels(a, weight, depth);
    a.scales = read_floats(scales, 1, "scales");
    a.bias = read_floats(bias, 1, "bias");
    for (const auto* each : {&scales, &bias})
        STD_TORCH_CHECK(!*each || (*each)->numel() == outputs, "scales and bias are of outputs");
    a.rows = rows;
    a.stride = a.depth = depth;
    a.outputs = outputs;
    STD_TORCH_CHECK(
        0 <= activation && activation <= static_cast<int64_t>(Activation::Gelu),
        "unknown activation");
    a.activation = static_cast<Activation>(activation);
    STD_TORCH_CHECK(!is_gated || outputs % (2 * PANEL) == 0, "gates must fill whole panels");
    a.gate_panels = is_gated ? outputs / PANEL / 2 : 0;
    a.places_at_once = places_at_once();
    return a;
}

Linear linear_of_experts(
    const Weight& weight, int64_t experts, DType dtype, int64_t rows, int64_t depth, int64_t activation,
    bool is_gated) {
    const int64_t outputs = weight.outputs / experts;
    STD_TORCH_CHECK(
        outputs > 0 && outputs * experts == weight.outputs && outputs % (is_gated ? 2 * PANEL : PANEL) == 0,
        "an expert must fill whole panels");
    Linear a = linear_of(weight, dtype, rows, depth, activation, is_gated);
    a.outputs = outputs;
    a.gate_panels /= experts;
    return a;
}

void set_limits(Linear& a, double limit, double shift) {
    STD_TORCH_CHECK(
        limit >= 0 && (limit > 0 || shift == 0) && (limit == 0 || a.gate_panels),
        "a limit is positive and of gates, and a shift goes with it");
    a.limit = static_cast<float>(limit);
    a.shift = static_cast<float>(shift);
}

Tensor expert_linear(
    const Tensor& x, const Tensor& ends, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated, double limit,
    double shift) {
    check_close(x, 2, "x");
    check_close(ends, 1, "ends");
    const int64_t rows = x.size(0), experts = ends.numel();
    STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Long && ends.is_contiguous(), "ends must be int64");
    const int64_t* end = static_cast<const int64_t*>(ends.const_data_ptr());
    STD_TORCH_CHECK(
        experts > 0 && end[0] >= 0 && std::is_sorted(end, end + experts) && end[experts - 1] == rows,
        "ends must rise to the number of rows");
    STD_TORCH_CHECK(
        0 < outputs && outputs <= std::numeric_limits<int64_t>::max() / experts, "outputs are of one expert");
    const DType dtype = dtype_of(x, *dispatch_table().attention);
    Linear a = linear_of_experts(
        {packed, scales, bias, experts * outputs}, experts, dtype, rows, x.size(1), activation, is_gated);
    set_limits(a, limit, shift);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    Tensor out = new_output(x, {rows, is_gated ? outputs / 2 : outputs});
    a.out = out.mutable_data_ptr();
    run_between(rows, [&](Program& program) {
        keep(program, {x, ends, packed, scales.value_or(x), bias.value_or(x)});
        add_expert_linear(program, a, end, experts);
    });
    return out;
}

Tensor linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated) {
    check_close(x, 2, "x");
    const DType dtype = dtype_of(x, *dispatch_table().attention);
    Linear a =
        linear_of({packed, scales, bias, outputs}, dtype, x.size(0), x.size(1), activation, is_gated);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    Tensor out = new_output(x, {a.rows, is_gated ? outputs / 2 : outputs});
    a.out = out.mutable_data_ptr();
    run_between(a.rows, [&](Program& program) {
        keep(program, {x, packed, scales.value_or(x), bias.value_or(x)});
        add_linear(program, a);
    });
    return out;
}

}  // namespace aioengine
