// A layer of an encoder: all rows of a sequence attend to all of it, and nothing is kept.

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

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

// Rows that a layer computes at a time, or more where a sequence has more: few enough that what lies between its
// matmuls stays in a large cache, and that a program keeps the memory for it.
constexpr int64_t FEW_ROWS = 2048;

// Adds the operators of encoders' layers, where each row attends to all of its sequence.
class EncoderBuilder : public Builder {
public:
    using Builder::Builder;

    // All of a layer up to its output matmul, [T, heads * dim], for `count` sequences of these lengths that lie
    // one behind the other.
    Rows attend_to_all(
        const PlannedLayer& layer, const Rows& x, const std::vector<Angles>& angles, const int64_t* lengths,
        int64_t count) {
        const int64_t tokens = x.count, dim = layer.head_dim;
        const int64_t width = layer.heads * dim, kv_width = layer.kv_heads * dim;
        char* qkv = inner_.hold(program_, tokens * 3 * (width + kv_width) * size_);
        char *query = qkv + tokens * (width + 2 * kv_width) * size_, *key = query + tokens * width * size_;
        char* attended = key + tokens * kv_width * size_;
        add_qkv(layer, x, qkv);
        Heads heads = heads_of(layer, qkv, angles, tokens);
        if (heads.norms[0] || heads.angles) heads.query = query;
        if (heads.norms[1] || heads.angles) heads.key = key;
        add_heads_if_any(heads);
        Attention a{};
        a.dtype = dtype_;
        a.heads = layer.heads;
        a.kv_heads = layer.kv_heads;
        a.key_dim = a.value_dim = dim;
        a.scale = static_cast<float>(layer.scale);
        a.query_strides[0] = heads.query ? width : heads.strides[0][0];
        a.key_strides[1] = heads.key ? kv_width : heads.strides[1][0];
        a.value_strides[1] = heads.strides[2][0];
        a.key_strides[2] = a.value_strides[2] = dim;
        const auto at = [&](const void* made, const void* given, int64_t stride, int64_t row) {
            return static_cast<const char*>(made ? made : given) + row * stride * size_;
        };
        int64_t first = 0;
        for (int64_t i = 0; i < count;) {  // sequences of one length are computed together
            const int64_t length = lengths[i], begin = i;
            while (i < count && lengths[i] == length) ++i;
            a.query = at(heads.query, heads.x[0], a.query_strides[0], first);
            a.key_cache = at(heads.key, heads.x[1], a.key_strides[1], first);
            a.value_cache = at(nullptr, heads.x[2], a.value_strides[1], first);
            attend(a, whole_sequences(a, i - begin, length), tokens, attended + first * width * size_);
            first += (i - begin) * length;
        }
        return {attended, tokens, width, width};
    }

private:
    // Tells `a` of sequences of one length, of which each is a page.
    Places whole_sequences(Attention& a, int64_t count, int64_t length) {
        int32_t* starts = static_cast<int32_t*>(program_.take((3 * count + 1) * sizeof(int32_t)));
        int32_t *lengths = starts + count + 1, *table = lengths + count;
        for (int64_t i = 0; i <= count; ++i) starts[i] = static_cast<int32_t>(i * length);
        std::fill(lengths, lengths + count, static_cast<int32_t>(length));
        for (int64_t i = 0; i < count; ++i) table[i] = static_cast<int32_t>(i);
        a.num_sequences = count;
        a.query_start = starts;
        a.seq_lens = lengths;
        a.block_table = table;
        a.table_width = 1;
        a.block_size = length;
        a.key_strides[0] = length * a.key_strides[1];
        a.value_strides[0] = length * a.value_strides[1];
        Places places{};
        places.num_sequences = count;
        return places;
    }
};

// Angles of the rows from `first` on.
std::vector<Angles> angles_from(std::vector<Angles> angles, int64_t first, int64_t size) {
    for (Angles& each : angles) {
        const int64_t bytes = each.rotary.has_wide_angles ? sizeof(float) : size;
        each.rotary.cos = static_cast<const char*>(each.rotary.cos) + first * each.rotary.cos_stride * bytes;
        each.rotary.sin = static_cast<const char*>(each.rotary.sin) + first * each.rotary.sin_stride * bytes;
    }
    return angles;
}

Rows part_of(const Rows& rows, int64_t first, int64_t count, int64_t size) {
    return {rows.data + first * rows.stride * size, count, rows.width, rows.stride};
}

// PyTorch's attention of all sequences of a layer: [rows, heads * dim].
Tensor attended_by_torch(
    const Tensor& packed, const PlannedLayer& layer, const Tensor& x, std::vector<Tensor> angles,
    const std::vector<int64_t>& lengths) {
    const auto [query, key, value] = project(packed, 0, x, std::move(angles));
    Tensor attended = new_output(x, {x.size(0), layer.heads * layer.head_dim});
    int64_t first = 0;
    for (size_t i = 0; i < lengths.size();) {
        // Sequences of one length are computed together.
        const int64_t length = lengths[i];
        int64_t count = 0;
        for (; i < lengths.size() && lengths[i] == length; ++i) ++count;
        const auto turned = [&](const Tensor& all) {
            const Tensor part = torch::stable::view(
                torch::stable::narrow(const_cast<Tensor&>(all), 0, first, count * length),
                {count, length, all.size(1), all.size(2)});
            return torch::stable::transpose(part, 1, 2);
        };
        const Tensor found = torch::stable::transpose(
            attend_by_torch(turned(query), turned(key), turned(value), layer.scale), 1, 2);
        Tensor place = torch::stable::view(
            torch::stable::narrow(attended, 0, first, count * length),
            {count, length, layer.heads, layer.head_dim});
        torch::stable::copy_(place, found);
        first += count * length;
    }
    return attended;
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
    STD_TORCH_CHECK(
        layer.head_dim > 0 && layer.kv_heads > 0 && layer.heads > 0 && layer.heads % layer.kv_heads == 0,
        "the layer's heads have no width or do not fit each other");
    int64_t total = 0;
    for (const int64_t length : lengths) {
        STD_TORCH_CHECK(
            0 < length && length <= std::numeric_limits<int32_t>::max(), "sequences must have rows");
        total += length;
    }
    check_close(x, 2, "x");
    STD_TORCH_CHECK(total == x.size(0), "lengths must add up to the rows of x");
    Tensor out = new_output(x, {x.size(0), x.size(1)});
    const std::optional<Tensor> attended =
        by_pages ? std::nullopt
                 : std::optional<Tensor>(attended_by_torch(packed, layer, x, angles, lengths));
    std::vector<Tensor> kept{packed, x, attended.value_or(x)};
    kept.insert(kept.end(), angles.begin(), angles.end());
    Team& team = own_team();
    const auto run = [&](int64_t first, int64_t rows, const int64_t* lengths, int64_t count) {
        Program& program = team.begin();
        EncoderBuilder builder(team, program, x);
        const int64_t size = builder.size();
        const auto part = [&](const Tensor& all, const char* name) {
            return part_of(rows_of(all, builder.dtype(), name), first, rows, size);
        };
        const Rows taken = part(x, "x");
        const Rows found =
            attended ? part(*attended, "attended")
                     : builder.attend_to_all(
                           layer, taken, angles_from(angles_of(angles, total, builder.dtype()), first, size),
                           lengths, count);
        const Rows added = builder.add(taken, found, layer.out, layer.out_norm);
        char* to = static_cast<char*>(out.mutable_data_ptr()) + first * x.size(1) * size;
        for (int64_t row = 0; row < rows; row += FEW_ROWS) {
            const int64_t few = std::min(FEW_ROWS, rows - row);
            builder.add_feed(layer, part_of(added, row, few, size), to + row * x.size(1) * size);
        }
        keep(program, kept);
        run_between(team, program, rows);
    };
    if (attended) {
        for (int64_t first = 0; first < total; first += FEW_ROWS)
            run(first, std::min(FEW_ROWS, total - first), nullptr, 0);
    } else {
        int64_t first = 0;
        for (size_t i = 0; i < lengths.size();) {
            const size_t begin = i;
            int64_t rows = 0;
            while (i < lengths.size() && rows < FEW_ROWS) rows += lengths[i++];
            run(first, rows, &lengths[begin], i - begin);
            first += rows;
        }
    }
    return torch::stable::view(out, given.sizes());
}

}  // namespace aioengine
