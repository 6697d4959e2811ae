// Decoder layers run from a plan: one by one, or all of a step in one call.

#include "layer_plan.h"

#include <array>
#include <memory>
#include <tuple>
#include <utility>

namespace aioengine {

namespace {

// What a layer takes of each list.
constexpr size_t LAYER_TENSORS = 19, LAYER_SIZES = 11, LAYER_NUMBERS = 8;
// What a KV group takes of the list of its step's metadata.
constexpr size_t GROUP_TENSORS = 6;

std::optional<Tensor> maybe(const Tensor& tensor) {
    return tensor.numel() ? std::optional<Tensor>(tensor) : std::nullopt;
}

std::optional<PlannedNorm> norm_of(const Tensor& weight, double epsilon) {
    if (!weight.numel()) return std::nullopt;
    return PlannedNorm{weight, epsilon};
}

PlannedMatmul matmul_of(const Tensor* t, int64_t outputs) {
    return {t[0], maybe(t[1]), maybe(t[2]), outputs};
}

PlannedLayer layer_of(const Tensor* t, const int64_t* n, const double* f) {
    PlannedLayer layer{};
    layer.norm = norm_of(t[0], f[0]);
    layer.query_norm = norm_of(t[1], f[1]);
    layer.key_norm = norm_of(t[2], f[2]);
    layer.out_norm = norm_of(t[3], f[3]);
    layer.feed_norm = norm_of(t[4], f[4]);
    layer.feed_out_norm = norm_of(t[5], f[5]);
    layer.scale = f[6];
    layer.softcap = f[7];
    layer.heads = n[0];
    layer.kv_heads = n[1];
    layer.head_dim = n[2];
    layer.angles = n[3];
    layer.window = n[4];
    layer.group = n[5];
    layer.stores = n[6] != 0;
    layer.activation = n[7];
    layer.is_gated = n[8] != 0;
    layer.qkv = matmul_of(t + 6, (n[0] + 2 * n[1]) * n[2]);
    layer.out = matmul_of(t + 9, n[9]);
    if (t[12].numel()) {
        layer.up = matmul_of(t + 12, n[10]);
        layer.down = matmul_of(t + 15, n[9]);
    }
    layer.sinks = maybe(t[18]);
    return layer;
}

const Plan& plan_of(const Tensor& packed) {
    const bool is_one = packed.is_cpu() && packed.scalar_type() == ScalarType::Byte &&
                        packed.numel() == static_cast<int64_t>(sizeof(Plan));
    const Plan* plan = is_one ? static_cast<const Plan*>(packed.const_data_ptr()) : nullptr;
    STD_TORCH_CHECK(plan && plan->self == plan, "plan must be what pack_plan has returned");
    return *plan;
}

const PlannedLayer& layer_of(const Plan& plan, int64_t index) {
    STD_TORCH_CHECK(
        0 <= index && index < static_cast<int64_t>(plan.layers.size()), "the plan has no such layer");
    return plan.layers[index];
}

Tensor normalized(const Tensor& x, const std::optional<PlannedNorm>& norm) {
    return norm ? normalize_for_layer(x, norm->weight, norm->epsilon, nullptr) : x;
}

// x [T, hidden] -> query [T, heads, dim], and key and value [T, kv_heads, dim].
std::tuple<Tensor, Tensor, Tensor> project(
    const PlannedLayer& layer, const Tensor& x, const std::vector<Tensor>& angles) {
    const int64_t tokens = x.size(0), dim = layer.head_dim;
    const Tensor all = multiply(normalized(x, layer.norm), layer.qkv.weight(), 0, false, nullptr);
    const auto part = [&](int64_t first, int64_t count) {
        Tensor whole = all;
        return torch::stable::view(
            torch::stable::narrow(whole, 1, first * dim, count * dim), {tokens, count, dim});
    };
    Tensor query = normalized(part(0, layer.heads), layer.query_norm);
    Tensor key = normalized(part(layer.heads, layer.kv_heads), layer.key_norm);
    const Tensor value = part(layer.heads + layer.kv_heads, layer.kv_heads);
    if (layer.angles < 0) return {query, key, value};
    const size_t cos = 2 * static_cast<size_t>(layer.angles);
    STD_TORCH_CHECK(cos + 1 < angles.size(), "the step has no such angles");
    std::tie(query, key) = rotate(query, key, angles[cos], angles[cos + 1]);
    return {query, key, value};
}

// x plus a matmul of `given`, which has a norm of its own or none.
Tensor add(
    const Tensor& x, const Tensor& given, const PlannedMatmul& matmul,
    const std::optional<PlannedNorm>& norm) {
    if (!norm) return multiply(given, matmul.weight(), 0, false, &x);
    const Tensor found = multiply(given, matmul.weight(), 0, false, nullptr);
    return normalize_for_layer(found, norm->weight, norm->epsilon, &x);
}

Tensor add_feed(const PlannedLayer& layer, const Tensor& x) {
    STD_TORCH_CHECK(layer.up, "a module computes this layer's feed-forward part");
    const Tensor inner = multiply(
        normalized(x, layer.feed_norm), layer.up->weight(), layer.activation, layer.is_gated, nullptr);
    return add(x, inner, *layer.down, layer.feed_out_norm);
}

}  // namespace

Tensor pack_plan(
    std::vector<Tensor> tensors, std::vector<int64_t> sizes, std::vector<double> numbers,
    const std::optional<Tensor>& norm, double epsilon) {
    const size_t count = tensors.size() / LAYER_TENSORS;
    STD_TORCH_CHECK(
        count > 0 && tensors.size() == LAYER_TENSORS * count && sizes.size() == LAYER_SIZES * count &&
            numbers.size() == LAYER_NUMBERS * count,
        "lists must have the same number of layers");
    auto plan = std::make_unique<Plan>();
    plan->self = plan.get();
    if (norm) plan->norm = PlannedNorm{*norm, epsilon};
    for (size_t i = 0; i < count; ++i)
        plan->layers.push_back(layer_of(
            &tensors[LAYER_TENSORS * i], &sizes[LAYER_SIZES * i], &numbers[LAYER_NUMBERS * i]));
    const std::array<int64_t, 1> bytes{sizeof(Plan)}, strides{1};
    return torch::stable::from_blob(
        plan.release(), bytes, strides, tensors[0].device(), ScalarType::Byte,
        [](void* memory) { delete static_cast<Plan*>(memory); });
}

std::tuple<Tensor, Tensor, Tensor> project(
    const Tensor& plan, int64_t index, const Tensor& x, std::vector<Tensor> angles) {
    return project(layer_of(plan_of(plan), index), x, angles);
}

Tensor add_attended(const Tensor& plan, int64_t index, const Tensor& x, const Tensor& attended) {
    const PlannedLayer& layer = layer_of(plan_of(plan), index);
    return add(x, attended, layer.out, layer.out_norm);
}

Tensor add_feed(const Tensor& plan, int64_t index, const Tensor& x) {
    return add_feed(layer_of(plan_of(plan), index), x);
}

Tensor finish(
    const Tensor& plan, const Tensor& x, const std::optional<Tensor>& wanted, int64_t tokens) {
    const Tensor normed = normalized(x, plan_of(plan).norm);
    return wanted ? put_rows(normed, *wanted, tokens) : normed;
}

Tensor run_plan(
    const Tensor& packed, int64_t first, const Tensor& x, std::vector<Tensor> angles,
    std::vector<Tensor> caches, std::vector<Tensor> places, std::vector<int64_t> blocks_in_window,
    std::vector<Tensor> rows, const std::optional<Tensor>& wanted) {
    const Plan& plan = plan_of(packed);
    const int64_t count = plan.layers.size(), groups = blocks_in_window.size();
    layer_of(plan, first);
    STD_TORCH_CHECK(
        caches.size() == 2 * static_cast<size_t>(count) &&
            places.size() == GROUP_TENSORS * static_cast<size_t>(groups),
        "there must be two caches for each layer, and all metadata for each group");
    Tensor found = x;
    for (int64_t i = first; i < count; ++i) {
        const PlannedLayer& layer = plan.layers[i];
        STD_TORCH_CHECK(layer.group >= 0 && layer.group < groups, "the step has no such KV group");
        const Tensor* t = &places[GROUP_TENSORS * layer.group];
        const auto [query, key, value] = project(layer, found, angles);
        const auto is_new = [&](const Tensor& part) {
            return layer.stores ? std::optional<Tensor>(part) : std::nullopt;
        };
        Tensor attended = attend(
            query, is_new(key), is_new(value), caches[2 * i], caches[2 * i + 1], t[0], t[1], t[2], t[3],
            t[4], maybe(t[5]), layer.sinks, std::nullopt, layer.scale, layer.softcap, layer.window, true,
            blocks_in_window[layer.group] != 0);
        attended = torch::stable::view(attended, {attended.size(0), attended.size(1) * attended.size(2)});
        const bool is_cut = wanted && i + 1 == count;
        if (is_cut) found = take_rows(found, *wanted);
        if (is_cut) attended = take_rows(attended, *wanted);
        found = add(found, attended, layer.out, layer.out_norm);
        if (!layer.up) return found;
        found = add_feed(layer, found);
        if (static_cast<size_t>(i) < rows.size())
            found = add_rows(found, is_cut ? take_rows(rows[i], *wanted) : rows[i]);
    }
    return finish(packed, found, wanted, x.size(0));
}

}  // namespace aioengine
