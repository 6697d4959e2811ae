// A layer of an encoder: all rows of a sequence attend to all of it, and nothing is kept.

#include <algorithm>
#include <array>

#include "layer_builder.h"
#include "memory.h"

namespace aioengine {

namespace {

// PyTorch's attention of query, key and value, [n, heads, rows, dim] each.
Tensor attend_by_torch(const Tensor& query, const Tensor& key, const Tensor& value, double scale) {
    using torch::stable::detail::from;
    std::array<StableIValue, 8> stack{
        from(query), from(key),   from(value),
        from(std::optional<Tensor>()), from(0.0), from(false), from(std::optional<double>(scale)),
        from(query.size(1) != key.size(1))};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
        "aten::scaled_dot_product_attention", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// Ours, of sequences of one length; query, key and value [n, rows, heads, dim], to out [n * rows, heads * dim].
void attend_by_pages(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, char* out) {
    Team& team = own_team();
    Program& program = team.begin();
    const int64_t count = query.size(0), rows = query.size(1);
    int32_t* starts = static_cast<int32_t*>(program.take((3 * count + 1) * sizeof(int32_t)));
    int32_t *lengths = starts + count + 1, *table = lengths + count;
    for (int64_t i = 0; i <= count; ++i) starts[i] = static_cast<int32_t>(i * rows);
    std::fill(lengths, lengths + count, static_cast<int32_t>(rows));
    for (int64_t i = 0; i < count; ++i) table[i] = static_cast<int32_t>(i);
    Places places{};
    places.query_start = starts;
    places.seq_lens = lengths;
    places.block_table = table;
    places.num_sequences = count;
    places.table_width = 1;
    Attention a = attention_of(
        key, value, places, dtype_of(query, *dispatch_table().attention), count * rows, query.size(2),
        std::nullopt, 0, false);
    a.query = query.const_data_ptr();
    a.query_strides[0] = query.stride(1);
    a.query_strides[1] = query.stride(2);
    a.scale = static_cast<float>(scale);
    a.out = out;
    const AttentionWork work = cut_attention(program, a, count, team.num_threads());
    a.partial = static_cast<float*>(program.take(work.num_partial * sizeof(float)));
    keep(program, {query, key, value});
    add_attention(program, a, work);
    run_between(team, program, count * rows);
}

}  // namespace

Tensor encode_layer(
    const Tensor& packed, const Tensor& given, std::vector<Tensor> angles, std::vector<int64_t> lengths,
    bool by_pages) {
    STD_TORCH_CHECK(given.dim() > 1 && given.is_contiguous(), "x must be rows, one behind the other");
    const Tensor x = torch::stable::view(given, {-1, given.size(-1)});
    const Plan& plan = plan_of(packed);
    STD_TORCH_CHECK(plan.layers.size() == 1, "the plan must be of one layer");
    const PlannedLayer& layer = plan.layers[0];
    int64_t total = 0;
    for (const int64_t length : lengths) {
        STD_TORCH_CHECK(length > 0, "sequences must have rows");
        total += length;
    }
    check_close(x, 2, "x");
    STD_TORCH_CHECK(total == x.size(0), "lengths must add up to the rows of x");
    const auto [query, key, value] = project(packed, 0, x, std::move(angles));
    Tensor attended = new_output(x, {total, layer.heads * layer.head_dim});
    const int64_t row_bytes = attended.size(1) * attended.element_size();
    char* to = static_cast<char*>(attended.mutable_data_ptr());
    int64_t first = 0;
    for (size_t i = 0; i < lengths.size();) {
        // Sequences of one length are computed together.
        const int64_t length = lengths[i];
        int64_t count = 0;
        for (; i < lengths.size() && lengths[i] == length; ++i) ++count;
        const auto part = [&](const Tensor& all) {
            return torch::stable::view(
                torch::stable::narrow(const_cast<Tensor&>(all), 0, first, count * length),
                {count, length, all.size(1), all.size(2)});
        };
        if (by_pages) {
            attend_by_pages(part(query), part(key), part(value), layer.scale, to + first * row_bytes);
        } else {
            const auto turned = [&](const Tensor& all) { return torch::stable::transpose(part(all), 1, 2); };
            const Tensor found = torch::stable::transpose(
                attend_by_torch(turned(query), turned(key), turned(value), layer.scale), 1, 2);
            Tensor place = torch::stable::view(
                torch::stable::narrow(attended, 0, first, count * length),
                {count, length, layer.heads, layer.head_dim});
            torch::stable::copy_(place, found);
        }
        first += count * length;
    }
    return torch::stable::view(add_feed(packed, 0, add_attended(packed, 0, x, attended)), given.sizes());
}

}  // namespace aioengine
