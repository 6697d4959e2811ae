// Norms and rotary embeddings: what there is of a decoder layer between its matmuls and its attention.

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "memory.h"
#include "ops.h"

namespace aioengine {

namespace {

// Calls `work(first, last)` for parts of `count` rows of `width` numbers, on torch's threads.
template <class Work>
void by_rows(int64_t count, int64_t width, const Work& work) {
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width));
    torch::stable::parallel_for(0, count, grain, work);
}

// x [rows, dim] or [rows, heads, dim], for a kernel that has yet to be told of weights.
Norm describe(const Tensor& x, const Tensor* residual) {
    check_close(x, x.dim() == 3 ? 3 : 2, "x");
    Norm a{};
    a.dtype = dtype_of(x, *dispatch_table().attention);
    a.x = x.const_data_ptr();
    a.strides[0] = x.stride(0);
    a.heads = x.dim() == 3 ? x.size(1) : 1;
    a.strides[1] = x.dim() == 3 ? x.stride(1) : 0;
    a.dim = x.size(x.dim() - 1);
    if (!residual) return a;
    check_close(*residual, 2, "residual");
    STD_TORCH_CHECK(
        residual->scalar_type() == x.scalar_type() && residual->size(0) == x.size(0) &&
            residual->size(1) == a.heads * a.dim,
        "residual must be of the shape and dtype of x");
    a.residual = residual->const_data_ptr();
    a.residual_stride = residual->stride(0);
    return a;
}

// Of the shape of x, by what `a` says.
Tensor run(Norm a, const Tensor& x) {
    Tensor out = x.dim() == 3 ? new_output(x, {x.size(0), a.heads, a.dim})
                              : new_output(x, {x.size(0), a.dim});
    a.out = out.mutable_data_ptr();
    by_rows(x.size(0), a.heads * a.dim, [&](int64_t first, int64_t last) {
        (*dispatch_table().norm)(a, first, last);
    });
    return out;
}

Tensor rms_norm_of_torch(const Tensor& x, const Tensor& weight, double epsilon) {
    using torch::stable::detail::from;
    std::array<StableIValue, 4> stack{
        from(x), from(std::vector<int64_t>{weight.size(0)}), from(std::optional<Tensor>(weight)),
        from(std::optional<double>(epsilon))};
    TORCH_ERROR_CODE_CHECK(  // that of torch/csrc/stable came after 2.11
        torch_call_dispatcher("aten::rms_norm", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    return normalize(x, weight, epsilon, nullptr);
}

Tensor normalize(const Tensor& x, const Tensor& weight, double epsilon, const Tensor* residual) {
    Norm a = describe(x, residual);
    check_close(weight, 1, "weight");
    const bool is_float = weight.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(
        weight.size(0) == a.dim && (is_float || weight.scalar_type() == x.scalar_type()),
        "weight must be of the width of x, and of its dtype or float32");
    a.weight = weight.const_data_ptr();
    a.has_float_weight = is_float;
    a.epsilon = static_cast<float>(epsilon);
    return run(a, x);
}

Tensor normalize_for_layer(
    const Tensor& x, const Tensor& weight, double epsilon, const Tensor* residual) {
    if (x.scalar_type() != ScalarType::Float) return normalize(x, weight, epsilon, residual);
    const Tensor normed = rms_norm_of_torch(x, weight, epsilon);
    return residual ? add_rows(normed, *residual) : normed;
}

Tensor add_rows(const Tensor& x, const Tensor& residual) {
    return run(describe(x, &residual), x);
}

Tensor take_rows(const Tensor& x, const Tensor& rows) {
    check_close(x, 2, "x");
    const int64_t* places = read_rows(rows, x.size(0));
    const int64_t count = rows.numel(), bytes = x.size(1) * x.element_size();
    Tensor out = new_output(x, {count, x.size(1)});
    char* to = static_cast<char*>(out.mutable_data_ptr());
    const char* from = static_cast<const char*>(x.const_data_ptr());
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * bytes, from + places[i] * x.stride(0) * x.element_size(), bytes);
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

std::tuple<Tensor, Tensor> rotate(
    const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
    const DispatchTable& table = dispatch_table();
    check_close(cos, 2, "cos");
    check_close(sin, 2, "sin");
    const int64_t tokens = cos.size(0), dim = cos.size(1);
    const auto describe = [&](const Tensor& x, const char* name) {
        check_close(x, 3, name);
        STD_TORCH_CHECK(
            x.size(0) == tokens && x.size(2) == dim && x.scalar_type() == cos.scalar_type(),
            name,
            " must be of the dtype, the tokens and the width of cos");
        Rotary a{};
        a.dtype = dtype_of(x, *table.attention);
        a.x = x.const_data_ptr();
        copy_strides(x, 2, a.strides);
        a.heads = x.size(1);
        a.dim = dim;
        a.cos = cos.const_data_ptr();
        a.sin = sin.const_data_ptr();
        a.cos_stride = cos.stride(0);
        a.sin_stride = sin.stride(0);
        return a;
    };
    STD_TORCH_CHECK(dim % 2 == 0, "cos must have an even width");
    STD_TORCH_CHECK(
        sin.size(0) == tokens && sin.size(1) == dim && sin.scalar_type() == cos.scalar_type(),
        "sin must be of the dtype and shape of cos");
    Rotary queries = describe(query, "query"), keys = describe(key, "key");
    Tensor rotated_query = new_output(query, {tokens, queries.heads, dim});
    Tensor rotated_key = new_output(key, {tokens, keys.heads, dim});
    queries.out = rotated_query.mutable_data_ptr();
    keys.out = rotated_key.mutable_data_ptr();
    by_rows(tokens, (queries.heads + keys.heads) * dim, [&](int64_t first, int64_t last) {
        (*table.rotary)(queries, first, last);
        (*table.rotary)(keys, first, last);
    });
    return {rotated_query, rotated_key};
}

}  // namespace aioengine
