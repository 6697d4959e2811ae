// A decoder's layers as operators of a program.

#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "experts.h"
#include "layer_plan.h"
#include "ops.h"

namespace aioengine {

// Rows of a step's numbers, `stride` numbers apart.
struct Rows {
    const char* data;
    int64_t count, width, stride;
};

inline Rows rows_of(const Tensor& x, DType dtype, const char* name) {
    check_close(x, 2, name);
    STD_TORCH_CHECK(
        dtype_of(x, *dispatch_table().attention) == dtype, name, " must be of the dtype of the layers");
    const int64_t stride = x.size(0) == 1 ? x.size(1) : x.stride(0);  // one row is close, whatever it says
    return {static_cast<const char*>(x.const_data_ptr()), x.size(0), x.size(1), stride};
}

// Cosines and sines of one kind for a step's tokens.
struct Angles {
    Rotary rotary;  // what it says of them
    int64_t dim;
};

inline std::vector<Angles> angles_of(const std::vector<Tensor>& angles, int64_t tokens, DType dtype) {
    STD_TORCH_CHECK(angles.size() % 2 == 0, "angles are cosines and sines");
    std::vector<Angles> found;
    for (size_t i = 0; i < angles.size(); i += 2) {
        check_close(angles[i], 2, "cos");
        const int64_t dim = angles[i].size(1);
        found.push_back({angles_of(angles[i], angles[i + 1], tokens, dim, dtype), dim});
    }
    return found;
}

// Memory of a program that one operator after the other uses.
class Buffer {
public:
    char* hold(Program& program, size_t bytes) {
        if (bytes > bytes_) memory_ = static_cast<char*>(program.take(bytes));
        bytes_ = std::max(bytes_, bytes);
        return memory_;
    }

private:
    char* memory_ = nullptr;
    size_t bytes_ = 0;
};

// Adds the operators of layers to a program.
class Builder {
public:
    // For rows of the dtype of x.
    Builder(Team& team, Program& program, const Tensor& x)
        : program_(program), dtype_(dtype_of(x, *dispatch_table().attention)), size_(size_of(dtype_)),
          team_(team) {}

    DType dtype() const { return dtype_; }
    int64_t size() const { return size_; }
    Program& program() { return program_; }

    // What a layer's queries, keys and values are made of: qkv [T, (heads + 2 kv_heads) * dim].
    void add_qkv(const PlannedLayer& layer, const Rows& x, void* qkv) {
        multiply(normalized(x, layer.norm), layer.qkv, 0, false, nullptr, qkv);
    }

    // Of that, what is yet to be told where it goes.
    Heads heads_of(const PlannedLayer& layer, const void* qkv, const std::vector<Angles>& angles,
                   int64_t tokens) {
        Heads heads{};
        heads.dtype = dtype_;
        heads.tokens = tokens;
        heads.heads = layer.heads;
        heads.kv_heads = layer.kv_heads;
        heads.key_dim = heads.value_dim = layer.head_dim;
        const int64_t first[3] = {0, layer.heads, layer.heads + layer.kv_heads};
        for (int i = 0; i < 3; ++i) {
            heads.x[i] = static_cast<const char*>(qkv) + first[i] * layer.head_dim * size_;
            heads.strides[i][0] = (layer.heads + 2 * layer.kv_heads) * layer.head_dim;
            heads.strides[i][1] = layer.head_dim;
        }
        const auto set_norm = [&](const std::optional<PlannedNorm>& norm, std::optional<Norm>& to) {
            if (norm) to = norm_of(*norm, layer.head_dim);
        };
        set_norm(layer.query_norm, heads.norms[0]);
        set_norm(layer.key_norm, heads.norms[1]);
        if (layer.angles < 0) return heads;
        const size_t kind = static_cast<size_t>(layer.angles);
        STD_TORCH_CHECK(kind < angles.size(), "the step has no such angles");
        const bool is_halved = 2 * angles[kind].dim == layer.head_dim;
        STD_TORCH_CHECK(
            is_halved || angles[kind].dim == layer.head_dim, "angles must be as wide as heads, or half of it");
        heads.angles = angles[kind].rotary;
        heads.angles->is_halved = is_halved;
        return heads;
    }

    void add_heads_if_any(const Heads& heads) {
        if (heads.query || heads.key || heads.pages) add_heads(program_, heads);
    }

    // All of a layer up to its output matmul: [T, heads * dim], until the next layer.
    Rows add_attention(
        const PlannedLayer& layer, const Rows& x, const std::vector<Angles>& angles,
        const Tensor& key_cache, const Tensor& value_cache, const Places& places, bool blocks_in_window) {
        const int64_t tokens = x.count, width = layer.heads * layer.head_dim;
        const int64_t all = width + 2 * layer.kv_heads * layer.head_dim;
        char* qkv = inner_.hold(program_, tokens * (all + 2 * width) * size_);
        char *query = qkv + tokens * all * size_, *attended = query + tokens * width * size_;
        add_qkv(layer, x, qkv);
        Heads heads = heads_of(layer, qkv, angles, tokens);
        const bool is_made = heads.norms[0] || heads.angles;
        heads.query = is_made ? query : nullptr;
        if (layer.stores) {
            STD_TORCH_CHECK(places.num_slots == tokens, "there must be a slot for each row");
            heads.pages = pages_of(key_cache, value_cache);
            heads.pages->blocks = places.slot_blocks;
            heads.pages->offsets = places.slot_offsets;
        }
        add_heads_if_any(heads);
        Attention a = attention_of(
            key_cache, value_cache, places, dtype_, tokens, layer.heads, layer.sinks, layer.window, true);
        STD_TORCH_CHECK(
            a.kv_heads == layer.kv_heads && a.key_dim == layer.head_dim && a.value_dim == layer.head_dim,
            "the caches do not fit the layer");
        a.query = is_made ? query : heads.x[0];
        a.query_strides[0] = is_made ? width : heads.strides[0][0];
        a.scale = static_cast<float>(layer.scale);
        a.softcap = static_cast<float>(layer.softcap);
        a.blocks_in_window = blocks_in_window;
        return attend(a, places, tokens, attended);
    }

    // A layer's queries of what an encoder has made: x [T, hidden] -> [T, heads * dim].
    void add_cross_query(const PlannedCross& cross, const Rows& x, void* query) {
        multiply(normalized(x, cross.norm), cross.query, 0, false, nullptr, query);
    }

    // And their attention, over pages; where there are slots for rows of the encoder's, `memory`, the keys and
    // values of these go there first.
    Rows add_cross_attention(
        const PlannedCross& cross, const Rows& x, const Tensor& key_cache, const Tensor& value_cache,
        const Places& places, const std::optional<Rows>& memory) {
        if (places.num_slots) {
            STD_TORCH_CHECK(
                memory && memory->count == places.num_slots, "there must be a slot for each row of memory");
            write_memory(cross, *memory, key_cache, value_cache, places);
        }
        const int64_t tokens = x.count, width = cross.heads * cross.head_dim;
        char* query = inner_.hold(program_, 2 * tokens * width * size_);
        add_cross_query(cross, x, query);
        Attention a = attention_of(
            key_cache, value_cache, places, dtype_, tokens, cross.heads, std::nullopt, 0, false);
        STD_TORCH_CHECK(
            a.kv_heads == cross.kv_heads && a.key_dim == cross.head_dim && a.value_dim == cross.head_dim,
            "the caches do not fit the layer's cross-attention");
        a.query = query;
        a.query_strides[0] = width;
        a.scale = static_cast<float>(cross.scale);
        return attend(a, places, tokens, query + tokens * width * size_);
    }

    // x plus a matmul of `given`, which has a norm of its own or none; to `out`, or where it fits.
    Rows add(
        const Rows& x, const Rows& given, const PlannedMatmul& matmul,
        const std::optional<PlannedNorm>& norm, void* out = nullptr) {
        const Rows to = stream(x, out);
        if (!norm) {
            multiply(given, matmul, 0, false, &x, const_cast<char*>(to.data));
            return to;
        }
        char* found = found_.hold(program_, x.count * x.width * size_);
        multiply(given, matmul, 0, false, nullptr, found);
        normalize({found, x.count, x.width, x.width}, &*norm, &x, const_cast<char*>(to.data));
        return to;
    }

    Rows add_feed(const PlannedLayer& layer, const Rows& x, void* out = nullptr) {
        STD_TORCH_CHECK(!layer.has_module(), "a module computes this layer's feed-forward part");
        const Rows normed = normalized(x, layer.feed_norm);
        if (!layer.routed)
            return add(x, add_inner(*layer.feed, normed), layer.feed->down, layer.feed_out_norm, out);
        char* found = found_.hold(program_, x.count * x.width * size_);
        add_experts(*layer.routed, layer.feed, normed, found);
        const Rows to = stream(x, out);
        const PlannedNorm* norm = layer.feed_out_norm ? &*layer.feed_out_norm : nullptr;
        normalize({found, x.count, x.width, x.width}, norm, &x, const_cast<char*>(to.data));
        return to;
    }

    // What routed experts, and shared ones if there are any, make of x, to `out` [T, hidden].
    void add_experts(
        const PlannedExperts& routed, const std::optional<PlannedFeed>& shared, const Rows& x, void* out) {
        STD_TORCH_CHECK(dtype_ != DType::Float16, "a router's logits are float32 or bfloat16");
        const int64_t tokens = x.count;
        char* logits = logits_.hold(program_, tokens * routed.experts * size_);
        multiply(x, routed.router, 0, false, nullptr, logits);
        const Routes routes = add_router(
            program_, {dtype_, logits, tokens, routed.experts, routed.chosen, routed.is_normalized});
        if (!shared) return add_pairs(routed.feed, routes, x, out);
        char* sums = sums_.hold(program_, tokens * x.width * size_);
        add_pairs(routed.feed, routes, x, sums);
        const Rows residual{sums, tokens, x.width, x.width};
        multiply(add_inner(*shared, x), shared->down, 0, false, &residual, out);
    }

    // What the experts of rows make of them, by their shares.
    void add_pairs(const PlannedFeed& feed, const Routes& routes, const Rows& x, void* out) {
        STD_TORCH_CHECK(dtype_ != DType::Float16, "rows of experts are float32 or bfloat16");
        const int64_t pairs = x.count * routes.chosen;
        char* rows = rows_.hold(program_, 2 * pairs * x.width * size_);
        add_take_rows(program_, x.data, x.stride * size_, routes.order, pairs, x.width * size_, rows);
        const int64_t width = feed.up.outputs / routes.experts / (feed.is_gated ? 2 : 1);
        char* inner = inner_.hold(program_, pairs * width * size_);
        multiply_by_expert(feed, {rows, pairs, x.width, x.width}, true, routes, inner);
        char* found = rows + pairs * x.width * size_;
        multiply_by_expert(feed, {inner, pairs, width, width}, false, routes, found);
        add_combination(program_, routes, dtype_, found, x.width, out);
    }

    Rows add_rows(const Rows& x, const Rows& more) {
        const Rows to = stream(x, nullptr);
        normalize(x, nullptr, &more, const_cast<char*>(to.data));
        return to;
    }

    Rows take_rows(const Rows& x, const int64_t* rows, int64_t count) {
        char* to = static_cast<char*>(program_.take(count * x.width * size_));
        add_take_rows(program_, x.data, x.stride * size_, rows, count, x.width * size_, to);
        return {to, count, x.width, x.width};
    }

    // x with a norm or without, to `out`.
    void finish(const Rows& x, const std::optional<PlannedNorm>& norm, void* out) {
        if (norm) return normalize(x, &*norm, nullptr, out);
        int64_t* rows = static_cast<int64_t*>(program_.take(x.count * sizeof(int64_t)));
        for (int64_t i = 0; i < x.count; ++i) rows[i] = i;
        add_take_rows(program_, x.data, x.stride * size_, rows, x.count, x.width * size_, out);
    }

protected:
    Program& program_;
    const DType dtype_;
    const int64_t size_;
    Buffer inner_;  // what lies between a layer's matmuls

    // The attention of `tokens` whose heads lie side by side, to `out`.
    Rows attend(Attention& a, const Places& places, int64_t tokens, char* out) {
        const int64_t width = a.heads * a.value_dim;
        a.query_strides[1] = a.key_dim;
        a.out = out;
        const AttentionWork& work = work_of(a, places);
        a.partial =
            reinterpret_cast<float*>(partial_.hold(program_, work.num_partial * sizeof(float)));
        aioengine::add_attention(program_, a, work);
        return {out, tokens, width, width};
    }

private:
    // A feed-forward layer up to its last matmul.
    Rows add_inner(const PlannedFeed& feed, const Rows& x) {
        const int64_t width = feed.up.outputs / (feed.is_gated ? 2 : 1);
        char* inner = inner_.hold(program_, x.count * width * size_);
        multiply(x, feed.up, feed.activation, feed.is_gated, nullptr, inner);
        return {inner, x.count, width, width};
    }

    // The first matmul of experts, or the second.
    void multiply_by_expert(
        const PlannedFeed& feed, const Rows& x, bool is_first, const Routes& routes, void* out) {
        Linear a = linear_of_experts(
            (is_first ? feed.up : feed.down).weight(), routes.experts, dtype_, x.count, x.width,
            is_first ? feed.activation : 0, is_first && feed.is_gated);
        a.x = x.data;
        a.out = out;
        if (is_first) set_limits(a, feed.limit, feed.shift);
        add_expert_linear(program_, a, routes.ends, routes.experts, floats_of(a));
    }

    // Where a matmul's input is made floats, if it has to be.
    float* floats_of(const Linear& a) {
        if (!wants_floats(a)) return nullptr;
        return reinterpret_cast<float*>(floats_.hold(program_, a.rows * a.depth * sizeof(float)));
    }

    void write_memory(
        const PlannedCross& cross, const Rows& memory, const Tensor& key_cache, const Tensor& value_cache,
        const Places& places) {
        const int64_t width = cross.kv_heads * cross.head_dim;
        STD_TORCH_CHECK(
            key_cache.size(2) == cross.kv_heads && dim_of(key_cache) == cross.head_dim &&
                dim_of(value_cache) == cross.head_dim,
            "caches do not fit the layer");
        char* both = memory_.hold(program_, memory.count * 2 * width * size_);
        multiply(memory, cross.key_value, 0, false, nullptr, both);
        Heads heads{};
        heads.dtype = dtype_;
        heads.tokens = memory.count;
        heads.kv_heads = cross.kv_heads;
        heads.key_dim = heads.value_dim = cross.head_dim;
        for (int i = 1; i < 3; ++i) {
            heads.x[i] = both + (i - 1) * width * size_;
            heads.strides[i][0] = 2 * width;
            heads.strides[i][1] = cross.head_dim;
        }
        heads.pages = pages_of(key_cache, value_cache);
        heads.pages->blocks = places.slot_blocks;
        heads.pages->offsets = places.slot_offsets;
        add_heads(program_, heads);
    }

    Norm norm_of(const PlannedNorm& norm, int64_t dim) const {
        check_norm(norm.weight, norm.bias, dim, dtype_);
        Norm a{};
        set_weight(a, norm.weight, norm.bias, norm.epsilon);
        return a;
    }

    void normalize(const Rows& x, const PlannedNorm* norm, const Rows* residual, void* out) {
        Norm a = norm ? norm_of(*norm, x.width) : Norm{};
        a.dtype = dtype_;
        a.x = x.data;
        a.strides[0] = x.stride;
        a.heads = 1;
        a.dim = x.width;
        a.out = out;
        if (residual) {
            STD_TORCH_CHECK(
                residual->count == x.count && residual->width == x.width,
                "what is added must be of the shape of x");
            a.residual = residual->data;
            a.residual_stride = residual->stride;
        }
        add_norm(program_, a, x.count);
    }

    Rows normalized(const Rows& x, const std::optional<PlannedNorm>& norm) {
        if (!norm) return x;
        char* to = normed_.hold(program_, x.count * x.width * size_);
        normalize(x, &*norm, nullptr, to);
        return {to, x.count, x.width, x.width};
    }

public:
    // A matmul, with an activation of the outputs or half of them, plus a residual or none.
    void multiply(
        const Rows& x, const PlannedMatmul& matmul, int64_t activation, bool is_gated,
        const Rows* residual, void* out) {
        Linear a = linear_of(matmul.weight(), dtype_, x.count, x.width, activation, is_gated);
        a.x = x.data;
        a.stride = x.stride;
        a.out = out;
        if (residual) {
            STD_TORCH_CHECK(
                residual->stride == a.outputs && residual->count == a.rows && !is_gated,
                "residual must be of the shape of the outputs");
            a.residual = residual->data;
        }
        add_linear(program_, a, floats_of(a));
    }

private:
    // Where what follows x goes: `out`, or the one of two places that x is not at.
    Rows stream(const Rows& x, void* out) {
        char* to = static_cast<char*>(out);
        for (Buffer& buffer : streams_) {
            if (to) break;
            char* place = buffer.hold(program_, x.count * x.width * size_);
            if (place != x.data) to = place;
        }
        return {to, x.count, x.width, x.width};
    }

    // Layers of one KV group share it where they see the same keys.
    const AttentionWork& work_of(const Attention& a, const Places& places) {
        for (const auto& [known, work] : works_)
            if (known.block_table == a.block_table && known.is_causal == a.is_causal &&
                known.seq_lens == a.seq_lens && known.heads == a.heads &&
                known.kv_heads == a.kv_heads && known.window == a.window && known.key_dim == a.key_dim &&
                known.value_dim == a.value_dim)
                return work;
        works_.emplace_back(a, cut_attention(program_, a, places.num_sequences, team_.num_threads()));
        return works_.back().second;
    }

    Team& team_;
    Buffer streams_[2], normed_, found_, floats_, partial_, memory_;
    Buffer logits_, rows_, sums_;  // of experts
    std::deque<std::pair<Attention, AttentionWork>> works_;
};

// A step of all layers: what is known of its tokens.
struct LayerStep {
    std::vector<Angles> angles;
    const std::vector<Tensor>& caches;  // keys and values of each layer
    std::vector<Places> places;         // of each KV group
    const std::vector<int64_t>& blocks_in_window;
    const std::vector<Tensor>& rows;  // that are added behind the first layers
    // Rows that are read of what comes after the last attention, null for all.
    const int64_t* wanted;
    int64_t num_wanted;
    std::optional<Rows> memory;  // of an encoder, where its keys and values are to be written
};

// Adds the layers from `first` on. They end early before a feed-forward part that a module computes, and say
// so. What they have come to: the rows that are wanted, or all.
std::pair<Rows, bool> add_layers(
    Builder& builder, const Plan& plan, const LayerStep& step, int64_t first, Rows x);

}  // namespace aioengine
