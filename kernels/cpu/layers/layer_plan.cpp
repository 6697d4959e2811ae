// Decoder layers run from a plan: one by one, or all of a step in one call.

#include "layer_builder.h"

#include <array>
#include <memory>
#include <tuple>
#include <utility>

#include "memory.h"

namespace aioengine {

namespace {

// What a layer takes of each list.
constexpr size_t LAYER_TENSORS = 45, LAYER_SIZES = 21, LAYER_NUMBERS = 12;
// And of these a feed-forward layer, and a routed one.
constexpr size_t FEED_TENSORS = 6, FEED_SIZES = 3, ROUTED_TENSORS = 9, ROUTED_SIZES = 6, ROUTED_NUMBERS = 2;
// What a KV group takes of the list of its step's metadata.
constexpr size_t GROUP_TENSORS = 6;

std::optional<Tensor> maybe(const Tensor& tensor) {
    return tensor.numel() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// Of a weight and a bias.
std::optional<PlannedNorm> norm_of(const Tensor* t, double epsilon) {
    if (!t[0].numel()) return std::nullopt;
    return PlannedNorm{t[0], epsilon, maybe(t[1])};
}

PlannedMatmul matmul_of(const Tensor* t, int64_t outputs) {
    return {t[0], maybe(t[1]), maybe(t[2]), outputs};
}

// With so many outputs of the last matmul.
std::optional<PlannedFeed> feed_of(const Tensor* t, const int64_t* n, int64_t outputs) {
    if (!t[0].numel()) return std::nullopt;
    return PlannedFeed{matmul_of(t, n[2]), matmul_of(t + 3, outputs), n[0], n[1] != 0};
}

// Of experts.
PlannedFeed inner_of(const Tensor* t, const int64_t* n, const double* f, int64_t experts, int64_t outputs) {
    std::optional<PlannedFeed> feed = feed_of(t, n, experts * outputs);
    STD_TORCH_CHECK(feed, "there must be experts behind a router");
    feed->limit = f[0];
    feed->shift = f[1];
    return *feed;
}

std::optional<PlannedExperts> routed_of(
    const Tensor* t, const int64_t* n, const double* f, int64_t outputs) {
    if (!t[0].numel()) return std::nullopt;
    const int64_t experts = n[3], chosen = n[4];
    STD_TORCH_CHECK(0 < chosen && chosen <= experts, "a row must go to some of the experts");
    const PlannedFeed feed = inner_of(t + 3, n, f, experts, outputs);
    return PlannedExperts{matmul_of(t, experts), feed, experts, chosen, n[5] != 0};
}

PlannedLayer layer_of(const Tensor* t, const int64_t* n, const double* f) {
    PlannedLayer layer{};
    layer.norm = norm_of(t, f[0]);
    layer.query_norm = norm_of(t + 2, f[1]);
    layer.key_norm = norm_of(t + 4, f[2]);
    layer.out_norm = norm_of(t + 6, f[3]);
    layer.feed_norm = norm_of(t + 8, f[4]);
    layer.feed_out_norm = norm_of(t + 10, f[5]);
    layer.scale = f[6];
    layer.softcap = f[7];
    layer.heads = n[0];
    layer.kv_heads = n[1];
    layer.head_dim = n[2];
    layer.angles = n[3];
    layer.window = n[4];
    layer.group = n[5];
    layer.stores = n[6] != 0;
    const int64_t hidden = n[7];
    layer.qkv = matmul_of(t + 12, (n[0] + 2 * n[1]) * n[2]);
    layer.out = matmul_of(t + 15, hidden);
    layer.feed = feed_of(t + 18, n + 8, hidden);
    layer.sinks = maybe(t[24]);
    layer.routed = routed_of(t + 36, n + 15, f + 10, hidden);
    if (t[27].numel())
        layer.cross = PlannedCross{
            norm_of(t + 25, f[8]),
            matmul_of(t + 27, n[11] * n[13]),
            matmul_of(t + 30, 2 * n[12] * n[13]),
            matmul_of(t + 33, hidden),
            n[11],
            n[12],
            n[13],
            n[14],
            f[9]};
    return layer;
}

}  // namespace

const Plan& plan_of(const Tensor& packed) {
    const bool is_one = packed.is_cpu() && packed.scalar_type() == ScalarType::Byte &&
                        packed.numel() == static_cast<int64_t>(sizeof(Plan));
    const Plan* plan = is_one ? static_cast<const Plan*>(packed.const_data_ptr()) : nullptr;
    STD_TORCH_CHECK(plan && plan->self == plan, "plan must be what pack_plan has returned");
    return *plan;
}

namespace {

const PlannedLayer& layer_of(const Plan& plan, int64_t index) {
    STD_TORCH_CHECK(
        0 <= index && index < static_cast<int64_t>(plan.layers.size()), "the plan has no such layer");
    return plan.layers[index];
}

// Runs what `build` adds for rows like x, to `out`, which `kept` is read for.
template <class Build>
void run_built(const Tensor& x, std::vector<Tensor> kept, const Build& build) {
    Team& team = own_team();
    Program& program = team.begin();
    Builder builder(team, program, x);
    build(builder);
    keep(program, std::move(kept));
    run_between(team, program, x.size(0));
}

}  // namespace

Tensor pack_plan(
    std::vector<Tensor> tensors, std::vector<int64_t> sizes, std::vector<double> numbers,
    const std::optional<Tensor>& norm, const std::optional<Tensor>& bias, double epsilon) {
    const size_t count = tensors.size() / LAYER_TENSORS;
    STD_TORCH_CHECK(
        count > 0 && tensors.size() == LAYER_TENSORS * count && sizes.size() == LAYER_SIZES * count &&
            numbers.size() == LAYER_NUMBERS * count,
        "lists must have the same number of layers");
    auto plan = std::make_unique<Plan>();
    plan->self = plan.get();
    if (norm) plan->norm = PlannedNorm{*norm, epsilon, bias};
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
    const PlannedLayer& layer = layer_of(plan_of(plan), index);
    const int64_t tokens = x.size(0), dim = layer.head_dim;
    Tensor all = new_output(x, {tokens, (layer.heads + 2 * layer.kv_heads) * dim});
    Tensor parts[3];
    const int64_t first[3] = {0, layer.heads, layer.heads + layer.kv_heads};
    const int64_t counts[3] = {layer.heads, layer.kv_heads, layer.kv_heads};
    std::vector<Tensor> kept = angles;
    kept.insert(kept.end(), {plan, x, all});
    run_built(x, kept, [&](Builder& builder) {
        builder.add_qkv(layer, rows_of(x, builder.dtype(), "x"), all.mutable_data_ptr());
        Heads heads = builder.heads_of(layer, all.const_data_ptr(), angles_of(angles, tokens, builder.dtype()), tokens);
        for (int i = 0; i < 3; ++i) {
            const bool is_made = i < 2 && (heads.norms[i] || heads.angles);
            parts[i] = is_made ? new_output(x, {tokens, counts[i], dim})
                               : torch::stable::view(
                                     torch::stable::narrow(all, 1, first[i] * dim, counts[i] * dim),
                                     {tokens, counts[i], dim});
            if (is_made) (i ? heads.key : heads.query) = parts[i].mutable_data_ptr();
        }
        builder.add_heads_if_any(heads);
    });
    return {parts[0], parts[1], parts[2]};
}

namespace {

const PlannedCross& cross_of(const PlannedLayer& layer) {
    STD_TORCH_CHECK(layer.cross, "the layer has no cross-attention");
    return *layer.cross;
}

}  // namespace

Tensor project_cross(const Tensor& plan, int64_t index, const Tensor& x) {
    const PlannedCross& cross = cross_of(layer_of(plan_of(plan), index));
    Tensor query = new_output(x, {x.size(0), cross.heads, cross.head_dim});
    run_built(x, {plan, x}, [&](Builder& builder) {
        builder.add_cross_query(cross, rows_of(x, builder.dtype(), "x"), query.mutable_data_ptr());
    });
    return query;
}

std::tuple<Tensor, Tensor> project_memory(const Tensor& plan, int64_t index, const Tensor& memory) {
    const PlannedCross& cross = cross_of(layer_of(plan_of(plan), index));
    const int64_t rows = memory.size(0), width = cross.kv_heads * cross.head_dim;
    Tensor both = new_output(memory, {rows, 2 * width});
    run_built(memory, {plan, memory}, [&](Builder& builder) {
        builder.multiply(
            rows_of(memory, builder.dtype(), "memory"), cross.key_value, 0, false, nullptr,
            both.mutable_data_ptr());
    });
    const auto part = [&](int64_t first) {
        return torch::stable::view(
            torch::stable::narrow(both, 1, first, width), {rows, cross.kv_heads, cross.head_dim});
    };
    return {part(0), part(width)};
}

Tensor add_crossed(const Tensor& plan, int64_t index, const Tensor& x, const Tensor& attended) {
    const PlannedCross& cross = cross_of(layer_of(plan_of(plan), index));
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    run_built(x, {plan, x, attended}, [&](Builder& builder) {
        builder.add(
            rows_of(x, builder.dtype(), "x"), rows_of(attended, builder.dtype(), "attended"), cross.out,
            std::nullopt, out.mutable_data_ptr());
    });
    return out;
}

Tensor add_attended(const Tensor& plan, int64_t index, const Tensor& x, const Tensor& attended) {
    const PlannedLayer& layer = layer_of(plan_of(plan), index);
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    run_built(x, {plan, x, attended}, [&](Builder& builder) {
        builder.add(
            rows_of(x, builder.dtype(), "x"), rows_of(attended, builder.dtype(), "attended"), layer.out,
            layer.out_norm, out.mutable_data_ptr());
    });
    return out;
}

Tensor add_feed(const Tensor& plan, int64_t index, const Tensor& x) {
    const PlannedLayer& layer = layer_of(plan_of(plan), index);
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    run_built(x, {plan, x}, [&](Builder& builder) {
        builder.add_feed(layer, rows_of(x, builder.dtype(), "x"), out.mutable_data_ptr());
    });
    return out;
}

Tensor routed_feed(
    const Tensor& x, std::vector<Tensor> tensors, std::vector<int64_t> sizes, std::vector<double> numbers) {
    STD_TORCH_CHECK(
        tensors.size() == ROUTED_TENSORS + FEED_TENSORS && sizes.size() == ROUTED_SIZES + FEED_SIZES &&
            numbers.size() == ROUTED_NUMBERS,
        "lists must be of one routed layer");
    check_close(x, 2, "x");
    const auto routed = routed_of(&tensors[0], &sizes[0], &numbers[0], x.size(1));
    STD_TORCH_CHECK(routed, "there must be a router");
    const auto shared = feed_of(&tensors[ROUTED_TENSORS], &sizes[ROUTED_SIZES], x.size(1));
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    tensors.push_back(x);
    run_built(x, tensors, [&](Builder& builder) {
        builder.add_experts(*routed, shared, rows_of(x, builder.dtype(), "x"), out.mutable_data_ptr());
    });
    return out;
}

Tensor expert_feed(
    const Tensor& x, const Tensor& chosen, const Tensor& shares, std::vector<Tensor> tensors,
    std::vector<int64_t> sizes, std::vector<double> numbers) {
    STD_TORCH_CHECK(
        tensors.size() == FEED_TENSORS && sizes.size() == FEED_SIZES + 1 && numbers.size() == ROUTED_NUMBERS,
        "lists must be of the experts of one layer");
    check_close(x, 2, "x");
    check_close(chosen, 2, "chosen");
    check_close(shares, 2, "shares");
    const int64_t rows = x.size(0), count = chosen.size(1), experts = sizes[FEED_SIZES];
    STD_TORCH_CHECK(
        chosen.scalar_type() == ScalarType::Long && shares.scalar_type() == ScalarType::Float &&
            chosen.is_contiguous() && shares.is_contiguous(),
        "chosen must be int64 and shares float32, both contiguous");
    STD_TORCH_CHECK(
        chosen.size(0) == rows && shares.size(0) == rows && shares.size(1) == count,
        "each row must have experts and shares");
    const int64_t* which = static_cast<const int64_t*>(chosen.const_data_ptr());
    STD_TORCH_CHECK(
        experts > 0 && std::all_of(which, which + rows * count, [&](int64_t e) { return 0 <= e && e < experts; }),
        "there is no such expert");
    const PlannedFeed feed = inner_of(&tensors[0], &sizes[0], &numbers[0], experts, x.size(1));
    Tensor out = new_output(x, {rows, x.size(1)});
    tensors.push_back(x);
    run_built(x, tensors, [&](Builder& builder) {
        const float* parts = static_cast<const float*>(shares.const_data_ptr());
        const Routes routes = add_routes(builder.program(), which, parts, rows, experts, count);
        builder.add_pairs(feed, routes, rows_of(x, builder.dtype(), "x"), out.mutable_data_ptr());
    });
    return out;
}

Tensor finish(
    const Tensor& packed, const Tensor& x, const std::optional<Tensor>& wanted, int64_t tokens) {
    const Plan& plan = plan_of(packed);
    Tensor out = x;
    if (plan.norm) {
        out = new_output(x, {x.size(0), x.size(1)});
        run_built(x, {packed, x}, [&](Builder& builder) {
            builder.finish(rows_of(x, builder.dtype(), "x"), plan.norm, out.mutable_data_ptr());
        });
    }
    return wanted ? put_rows(out, *wanted, tokens) : out;
}

void check_step(const Plan& plan, size_t num_caches, size_t num_groups) {
    size_t count = 0;
    const auto check = [&](int64_t group) {
        STD_TORCH_CHECK(
            group >= 0 && static_cast<size_t>(group) < num_groups, "the step has no such KV group");
        count += 2;
    };
    for (const PlannedLayer& layer : plan.layers) {
        check(layer.group);
        if (layer.cross) check(layer.cross->group);
    }
    STD_TORCH_CHECK(num_caches == count, "there must be two caches for each layer's attention");
}

std::pair<Rows, bool> add_layers(
    Builder& builder, const Plan& plan, const LayerStep& step, int64_t first, Rows x) {
    const auto cut = [&](const Rows& all) { return builder.take_rows(all, step.wanted, step.num_wanted); };
    const size_t count = plan.layers.size();
    const Tensor* caches = step.caches.data();
    for (int64_t i = 0; i < first; ++i) caches += plan.layers[i].cross ? 4 : 2;
    for (size_t i = first; i < count; ++i) {
        const PlannedLayer& layer = plan.layers[i];
        Rows attended = builder.add_attention(
            layer, x, step.angles, caches[0], caches[1], step.places[layer.group],
            step.blocks_in_window[layer.group] != 0);
        caches += 2;
        const PlannedMatmul* out = &layer.out;
        const std::optional<PlannedNorm>* out_norm = &layer.out_norm;
        static const std::optional<PlannedNorm> none;
        if (layer.cross) {
            x = builder.add(x, attended, layer.out, layer.out_norm);
            attended = builder.add_cross_attention(
                *layer.cross, x, caches[0], caches[1], step.places[layer.cross->group], step.memory);
            out = &layer.cross->out;
            out_norm = &none;
            caches += 2;
        }
        const bool is_cut = step.wanted && i + 1 == count;
        if (is_cut) x = cut(x);
        if (is_cut) attended = cut(attended);
        x = builder.add(x, attended, *out, *out_norm);
        if (layer.has_module()) return {x, true};
        x = builder.add_feed(layer, x);
        if (i >= step.rows.size()) continue;
        const Rows more = rows_of(step.rows[i], builder.dtype(), "rows");
        x = builder.add_rows(x, is_cut ? cut(more) : more);
    }
    return {x, false};
}

Tensor run_plan(
    const Tensor& packed, int64_t first, const Tensor& x, std::vector<Tensor> angles,
    std::vector<Tensor> caches, std::vector<Tensor> places, std::vector<int64_t> blocks_in_window,
    std::vector<Tensor> rows, const std::optional<Tensor>& wanted, const std::optional<Tensor>& memory) {
    const Plan& plan = plan_of(packed);
    check_step(plan, caches.size(), blocks_in_window.size());
    STD_TORCH_CHECK(
        places.size() == GROUP_TENSORS * blocks_in_window.size(), "each group must have all metadata");
    layer_of(plan, first);
    Team& team = own_team();
    Program& program = team.begin();
    Builder builder(team, program, x);
    std::vector<Places> known;
    for (size_t i = 0; i < blocks_in_window.size(); ++i) {
        const Tensor* t = &places[GROUP_TENSORS * i];
        known.push_back(places_of(program, t[0], t[1], t[2], t[3], t[4], maybe(t[5])));
    }
    const int64_t num_wanted = wanted ? wanted->numel() : x.size(0);
    const int64_t* chosen =
        wanted ? program.copy(read_rows(*wanted, x.size(0)), num_wanted) : nullptr;
    const LayerStep step{
        angles_of(angles, x.size(0), builder.dtype()), caches, std::move(known), blocks_in_window, rows,
        chosen, num_wanted,
        memory ? std::optional<Rows>(rows_of(*memory, builder.dtype(), "memory")) : std::nullopt};
    const auto [found, is_ended] =
        add_layers(builder, plan, step, first, rows_of(x, builder.dtype(), "x"));
    Tensor out = new_output(x, {found.count, found.width});
    builder.finish(found, is_ended ? std::nullopt : plan.norm, out.mutable_data_ptr());
    std::vector<Tensor> kept{packed, x, memory.value_or(x)};
    for (std::vector<Tensor>* each : {&angles, &caches, &rows})
        kept.insert(kept.end(), each->begin(), each->end());
    keep(program, std::move(kept));
    team.run(program);
    return wanted && !is_ended ? put_rows(out, *wanted, x.size(0)) : out;
}

}  // namespace aioengine
