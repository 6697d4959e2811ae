// A decoder's layers as data: the weights and sizes of each, in the order of their use.
//
// kernels/cpu/layer_operators.py makes the lists that one is read from; kernels/layer_plan.py says what
// the parts mean.

#pragma once

#include <optional>
#include <vector>

#include "ops.h"

namespace aioengine {

struct PlannedNorm {
    Tensor weight;
    double epsilon;
    std::optional<Tensor> bias;  // of a layer norm
};

struct PlannedMatmul {
    Tensor packed;
    std::optional<Tensor> scales, bias;
    int64_t outputs;

    Weight weight() const { return {packed, scales, bias, outputs}; }
};

// Attention over what an encoder has made, behind a layer's own.
struct PlannedCross {
    std::optional<PlannedNorm> norm;
    PlannedMatmul query, key_value, out;
    int64_t heads, kv_heads, head_dim, group;
    double scale;
};

struct PlannedFeed {
    PlannedMatmul up, down;
    int64_t activation;
    bool is_gated;
    double limit = 0, shift = 0;  // of gates: see Linear
};

// Experts, some of which each row goes to. Those of the matmuls are packed as one.
struct PlannedExperts {
    PlannedMatmul router;
    PlannedFeed feed;
    int64_t experts, chosen;
    bool is_normalized;
};

struct PlannedLayer {
    std::optional<PlannedNorm> norm, query_norm, key_norm, out_norm, feed_norm, feed_out_norm;
    PlannedMatmul qkv, out;
    std::optional<PlannedCross> cross;
    // What both come to is added up. None of them where a module computes the feed-forward layer.
    std::optional<PlannedFeed> feed;
    std::optional<PlannedExperts> routed;
    std::optional<Tensor> sinks;
    int64_t heads, kv_heads, head_dim;
    int64_t angles;  // which of the step's, -1 for none
    bool stores;
    int64_t window, group;
    double scale, softcap;

    bool has_module() const { return !feed && !routed; }
};

struct Plan {
    const Plan* self;  // a copy of the bytes is no plan
    std::vector<PlannedLayer> layers;
    std::optional<PlannedNorm> norm;  // of the last layer's rows
};

// What `pack_plan` has returned. Raises for anything else.
const Plan& plan_of(const Tensor& packed);

// Raises unless a step brings caches for all layers and their cross-attention, and knows the KV groups.
void check_step(const Plan& plan, size_t num_caches, size_t num_groups);

}  // namespace aioengine
