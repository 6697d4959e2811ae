// Norms, rotary embeddings, and the parts of a decoder layer that are made of them and of matmuls.

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "memory.h"
#include "ops.h"
#include "parallel.h"

namespace aioengine {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
    const DispatchTable& table = dispatch_table();
    check_close(x, 2, "x");
    check_close(weight, 1, "weight");
    STD_TORCH_CHECK(
        weight.size(0) == x.size(1) && weight.scalar_type() == x.scalar_type(),
        "weight must be of the dtype and width of x");
    Norm a{};
    a.dtype = dtype_of(x, *table.attention);
    a.x = x.const_data_ptr();
    a.stride = x.stride(0);
    a.weight = weight.const_data_ptr();
    a.dim = x.size(1);
    a.epsilon = static_cast<float>(epsilon);
    Tensor out = new_output(x, {x.size(0), a.dim});
    a.out = out.mutable_data_ptr();
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, a.dim));
    torch::stable::parallel_for(0, x.size(0), grain, [&](int64_t first, int64_t last) {
        (*table.norm)(a, first, last);
    });
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
    const int64_t width = std::max<int64_t>(1, (queries.heads + keys.heads) * dim);
    const int64_t grain = std::max<int64_t>(1, 32768 / width);
    torch::stable::parallel_for(0, tokens, grain, [&](int64_t first, int64_t last) {
        (*table.rotary)(queries, first, last);
        (*table.rotary)(keys, first, last);
    });
    return {rotated_query, rotated_key};
}

std::tuple<Tensor, Tensor, Tensor> project(
    const Tensor& x, const Tensor& norm, double epsilon, const Tensor& packed,
    const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t heads,
    int64_t kv_heads, const Tensor& cos, const Tensor& sin) {
    check_close(cos, 2, "cos");
    const int64_t tokens = x.size(0), dim = cos.size(1);
    const Weight weight{packed, scales, bias, (heads + 2 * kv_heads) * dim};
    const Tensor all = multiply(rms_norm(x, norm, epsilon), weight, 0, false, nullptr);
    const auto part = [&](int64_t first, int64_t count) {
        Tensor whole = all;
        return torch::stable::view(
            torch::stable::narrow(whole, 1, first * dim, count * dim), {tokens, count, dim});
    };
    auto [query, key] = rotate(part(0, heads), part(heads, kv_heads), cos, sin);
    return {query, key, part(heads + kv_heads, kv_heads)};
}

Tensor feed(
    const Tensor& x, const Tensor& attended, const Tensor& out,
    const std::optional<Tensor>& out_scales, const std::optional<Tensor>& out_bias,
    const Tensor& norm, double epsilon, const Tensor& up, const std::optional<Tensor>& up_scales,
    const std::optional<Tensor>& up_bias, int64_t up_outputs, int64_t activation, bool is_gated,
    const Tensor& down, const std::optional<Tensor>& down_scales,
    const std::optional<Tensor>& down_bias) {
    const int64_t hidden = x.size(1);
    const Tensor sum = multiply(attended, {out, out_scales, out_bias, hidden}, 0, false, &x);
    const Tensor inner = multiply(
        rms_norm(sum, norm, epsilon), {up, up_scales, up_bias, up_outputs}, activation, is_gated,
        nullptr);
    return multiply(inner, {down, down_scales, down_bias, hidden}, 0, false, &sum);
}

// What `run_layers` takes of each layer: see `UsualLayer` in kernels/cpu/fused_layer.py.
constexpr int64_t LAYER_TENSORS = 14, LAYER_SIZES = 6, LAYER_NUMBERS = 4;

Tensor run_layers(
    const Tensor& x, const Tensor& cos, const Tensor& sin, std::vector<Tensor> tensors,
    std::vector<int64_t> sizes, std::vector<double> numbers, std::vector<Tensor> caches,
    const Tensor& slot_blocks, const Tensor& slot_offsets, const Tensor& query_start,
    const Tensor& seq_lens, const Tensor& block_table, const std::optional<Tensor>& block_ids,
    bool blocks_in_window) {
    const size_t count = caches.size() / 2, layers = numbers.size() / LAYER_NUMBERS;
    STD_TORCH_CHECK(
        caches.size() == 2 * count && count <= layers && numbers.size() == LAYER_NUMBERS * layers &&
            tensors.size() == LAYER_TENSORS * layers && sizes.size() == LAYER_SIZES * layers,
        "lists must have the same number of layers, one for each pair of caches at least");
    Tensor found = x;
    for (size_t i = 0; i < count; ++i) {
        Tensor* t = tensors.data() + LAYER_TENSORS * i;
        const int64_t* n = sizes.data() + LAYER_SIZES * i;
        const double* f = numbers.data() + LAYER_NUMBERS * i;
        const auto maybe = [&](int64_t at) {
            return t[at].numel() ? std::optional<Tensor>(t[at]) : std::nullopt;
        };
        const auto [query, key, value] =
            project(found, t[0], f[0], t[1], maybe(2), maybe(3), n[0], n[1], cos, sin);
        Tensor attended = attend(
            query, key, value, caches[2 * i], caches[2 * i + 1], slot_blocks, slot_offsets,
            query_start, seq_lens, block_table, block_ids, std::nullopt, std::nullopt, f[2], f[3],
            n[5], true, blocks_in_window);
        attended = torch::stable::view(attended, {attended.size(0), attended.size(1) * attended.size(2)});
        found = feed(
            found, attended, t[4], maybe(5), maybe(6), t[7], f[1], t[8], maybe(9), maybe(10), n[2],
            n[3], n[4] != 0, t[11], maybe(12), maybe(13));
    }
    return found;
}

}  // namespace aioengine
