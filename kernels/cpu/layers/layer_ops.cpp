// Norms and rotary embeddings: what there is of a decoder layer between its matmuls and its attention.

#include <cstring>
#include <tuple>

#include "draw.h"
#include "memory.h"
#include "ops.h"

namespace aioengine {

namespace {

// x [rows, dim] or [rows, heads, dim], for a kernel that has yet to be told of weights.
Norm describe(const Tensor& x) {
    check_close(x, x.dim() == 3 ? 3 : 2, "x");
    Norm a{};
    a.dtype = dtype_of(x, *dispatch_table().attention);
    a.x = x.const_data_ptr();
    a.strides[0] = x.stride(0);
    a.heads = x.dim() == 3 ? x.size(1) : 1;
    a.strides[1] = x.dim() == 3 ? x.stride(1) : 0;
    a.dim = x.size(x.dim() - 1);
    return a;
}

}  // namespace

void check_norm(const Tensor& weight, const std::optional<Tensor>& bias, int64_t dim, DType dtype) {
    check_close(weight, 1, "weight");
    const bool is_float = weight.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(
        weight.size(0) == dim && (is_float || dtype_of(weight, *dispatch_table().attention) == dtype),
        "weight must be of the width of x, and of its dtype or float32");
    if (!bias) return;
    check_close(*bias, 1, "bias");
    STD_TORCH_CHECK(
        bias->size(0) == dim && bias->scalar_type() == weight.scalar_type(),
        "bias must be of the width and dtype of weight");
}

void set_weight(Norm& a, const Tensor& weight, const std::optional<Tensor>& bias, double epsilon) {
    a.weight = weight.const_data_ptr();
    a.bias = bias ? bias->const_data_ptr() : nullptr;
    a.has_float_weight = weight.scalar_type() == ScalarType::Float;
    a.epsilon = static_cast<float>(epsilon);
}

namespace {

Tensor normalized(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double epsilon) {
    Norm a = describe(x);
    check_norm(weight, bias, a.dim, a.dtype);
    set_weight(a, weight, bias, epsilon);
    Tensor out = x.dim() == 3 ? new_output(x, {x.size(0), a.heads, a.dim})
                              : new_output(x, {x.size(0), a.dim});
    a.out = out.mutable_data_ptr();
    run_between(x.size(0), [&](Program& program) {
        keep(program, {x, weight, bias.value_or(weight)});
        add_norm(program, a, x.size(0));
    });
    return out;
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    return normalized(x, weight, std::nullopt, epsilon);
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
    return normalized(x, weight, bias, epsilon);
}

Tensor argmax(const Tensor& x) {
    check_close(x, 2, "x");
    STD_TORCH_CHECK(x.size(1) > 0, "x must have a width");
    const DType dtype = dtype_of(x, *dispatch_table().attention);
    const ArgmaxKernel kernel = *dispatch_table().argmax;
    Tensor out = torch::stable::new_empty(x, {x.size(0)}, ScalarType::Long);
    int64_t* to = static_cast<int64_t*>(out.mutable_data_ptr());
    const char* from = static_cast<const char*>(x.const_data_ptr());
    const int64_t width = x.size(1), bytes = x.stride(0) * size_of(dtype);
    share_out(x.size(0), x.size(0), 1, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) to[r] = kernel(dtype, from + r * bytes, width);
    });
    return out;
}

Tensor cap(const Tensor& x, double cap) {
    check_close(x, 2, "x");
    STD_TORCH_CHECK(cap > 0, "cap must be larger than 0");
    const DType dtype = dtype_of(x, *dispatch_table().attention);
    const int64_t size = size_of(dtype);
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    run_between(x.size(0), [&](Program& program) {
        keep(program, {x, out});
        add_cap(
            program, dtype, x.const_data_ptr(), x.stride(0) * size, x.size(0), x.size(1),
            static_cast<float>(cap), out.mutable_data_ptr(), x.size(1) * size);
    });
    return out;
}

Tensor draw(
    Tensor& logits, const Tensor& choices, const std::optional<Tensor>& banned,
    const std::optional<Tensor>& num_banned) {
    check_close(logits, 2, "logits");
    check_close(choices, 2, "choices");
    constexpr int64_t NUMBERS = sizeof(Choice) / sizeof(double);
    STD_TORCH_CHECK(
        logits.size(1) > 0 && choices.scalar_type() == ScalarType::Double && choices.is_contiguous() &&
            choices.size(0) == logits.size(0) && choices.size(1) == NUMBERS,
        "choices must be float64, 5 for each row of logits, which must have a width");
    const DType dtype = dtype_of(logits, *dispatch_table().attention);
    Tensor out = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Long);
    const int64_t rows = logits.size(0);
    STD_TORCH_CHECK(banned.has_value() == num_banned.has_value(), "banned and num_banned go together");
    run_between(rows, [&](Program& program) {
        keep(program, {logits, choices, out});
        Choices a{
            dtype, static_cast<char*>(logits.mutable_data_ptr()), rows, logits.size(1),
            logits.stride(0) * size_of(dtype), static_cast<const Choice*>(choices.const_data_ptr()), nullptr,
            nullptr, static_cast<int64_t*>(out.mutable_data_ptr())};
        if (banned) {
            const int32_t* tokens = read_ints(*banned, "banned");
            const int32_t* counts = read_ints(*num_banned, "num_banned");
            STD_TORCH_CHECK(num_banned->numel() == rows, "num_banned must have an entry for each row");
            auto** firsts = static_cast<const int32_t**>(program.take(rows * sizeof(int32_t*)));
            auto* numbers = static_cast<int64_t*>(program.take(rows * sizeof(int64_t)));
            const int32_t* all = program.copy(tokens, banned->numel());
            int64_t first = 0;
            for (int64_t i = 0; i < rows; ++i) {
                STD_TORCH_CHECK(
                    counts[i] >= 0 && first + counts[i] <= banned->numel(), "num_banned counts too many");
                firsts[i] = all + first;
                numbers[i] = counts[i];
                first += counts[i];
            }
            for (int64_t i = 0; i < first; ++i)
                STD_TORCH_CHECK(0 <= all[i] && all[i] < a.width, "there is no such token to be banned");
            a.banned = firsts;
            a.num_banned = numbers;
        }
        add_choices(program, a);
    });
    return out;
}

Tensor widen(const Tensor& x) {
    check_close(x, 2, "x");
    const LinearKernels& kernels = *dispatch_table().linear;
    Linear a{};
    a.dtype = dtype_of(x, *dispatch_table().attention);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    a.depth = x.size(1);
    Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
    float* to = static_cast<float*>(out.mutable_data_ptr());
    share_out(x.size(0), x.size(0), 1, [&](int64_t first, int64_t last) { kernels.widen(a, first, last, to); });
    return out;
}

Tensor put_rows(const Tensor& x, const Tensor& rows, int64_t count) {
    const int64_t* places = read_rows(rows, count);
    STD_TORCH_CHECK(x.is_contiguous() && rows.numel() == x.size(0), "there must be a place for each row");
    Tensor out = new_output(x, {count, x.size(1)});
    const int64_t bytes = x.size(1) * x.element_size();
    char* to = static_cast<char*>(out.mutable_data_ptr());
    std::memset(to, 0, count * bytes);
    const char* from = static_cast<const char*>(x.const_data_ptr());
    for (int64_t i = 0; i < rows.numel(); ++i) std::memcpy(to + places[i] * bytes, from + i * bytes, bytes);
    return out;
}

Rotary angles_of(const Tensor& cos, const Tensor& sin, int64_t tokens, int64_t dim, DType dtype) {
    check_close(cos, 2, "cos");
    check_close(sin, 2, "sin");
    STD_TORCH_CHECK(dim % 2 == 0, "cos must have an even width");
    const bool is_wide = cos.scalar_type() == ScalarType::Float, is_halved = 2 * cos.size(1) == dim;
    STD_TORCH_CHECK(is_halved || cos.size(1) == dim, "cos must have the width of what it rotates, or half of it");
    for (const Tensor* each : {&cos, &sin})
        STD_TORCH_CHECK(
            each->size(0) == tokens && each->size(1) == cos.size(1) && each->scalar_type() == cos.scalar_type() &&
                (is_wide || dtype_of(*each, *dispatch_table().attention) == dtype),
            "cos and sin must be float32 or of the dtype, the tokens and the width of what they rotate");
    Rotary a{};
    a.has_wide_angles = is_wide;
    a.is_halved = is_halved;
    a.cos = cos.const_data_ptr();
    a.sin = sin.const_data_ptr();
    a.cos_stride = cos.stride(0);
    a.sin_stride = sin.stride(0);
    return a;
}

std::tuple<Tensor, Tensor> rotate(
    const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin, bool in_pairs) {
    check_close(query, 3, "query");
    check_close(key, 3, "key");
    STD_TORCH_CHECK(
        key.size(0) == query.size(0) && key.size(2) == query.size(2) &&
            key.scalar_type() == query.scalar_type(),
        "key must be of the dtype, the tokens and the width of query");
    Heads heads{};
    heads.dtype = dtype_of(query, *dispatch_table().attention);
    heads.x[0] = query.const_data_ptr();
    heads.x[1] = key.const_data_ptr();
    copy_strides(query, 2, heads.strides[0]);
    copy_strides(key, 2, heads.strides[1]);
    heads.tokens = query.size(0);
    heads.heads = query.size(1);
    heads.kv_heads = key.size(1);
    heads.key_dim = query.size(2);
    heads.angles = angles_of(cos, sin, heads.tokens, heads.key_dim, heads.dtype);
    heads.angles->in_pairs = in_pairs;
    Tensor rotated_query = new_output(query, {heads.tokens, heads.heads, heads.key_dim});
    Tensor rotated_key = new_output(key, {heads.tokens, heads.kv_heads, heads.key_dim});
    heads.query = rotated_query.mutable_data_ptr();
    heads.key = rotated_key.mutable_data_ptr();
    run_between(heads.tokens, [&](Program& program) {
        keep(program, {query, key, cos, sin});
        add_heads(program, heads);
    });
    return {rotated_query, rotated_key};
}

}  // namespace aioengine
