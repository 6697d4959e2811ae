// The operators, in the terms of the schemas in registration.cpp.

#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace aioengine {

void write_kv(
    const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& slot_blocks, const Tensor& slot_offsets);

Tensor attend(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    Tensor& key_cache, Tensor& value_cache, const Tensor& slot_blocks, const Tensor& slot_offsets,
    const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_table,
    const std::optional<Tensor>& block_ids, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& distance_bias, double scale, double softcap, int64_t window,
    bool is_causal, bool blocks_in_window);

// A weight as `pack_panels` has made it, of which `outputs` are not padding, or where bfloat16 is
// multiplied as such, a plain one [outputs, depth]; and what goes with it.
struct Weight {
    const Tensor& packed;
    const std::optional<Tensor>&scales, &bias;
    int64_t outputs;
};

// x [rows, depth] times a weight. Where it is gated, the first half of the outputs are gates of the
// second, and there are half as many. `residual`: null, or is added to the outputs once rounded.
Tensor multiply(
    const Tensor& x, const Weight& weight, int64_t activation, bool is_gated,
    const Tensor* residual);

// A weight [outputs, depth] as [panels, depth, PANEL]; where the CPU multiplies pairs, one of bfloat16
// as [panels, depth / 2, PANEL, 2].
Tensor pack_panels(const Tensor& weight);

Tensor linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated);

// x [rows, dim] over the root of its rows' mean square plus epsilon, times weight [dim].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon);

// query [T, Hq, D] and key [T, Hkv, D], rotated by cos and sin [T, D].
std::tuple<Tensor, Tensor> rotate(
    const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin);

// A decoder layer up to its attention: x [T, hidden], normalized, times one weight for queries, keys and
// values, the first two rotated. Each [T, heads, D]; values lie where they were written.
std::tuple<Tensor, Tensor, Tensor> project(
    const Tensor& x, const Tensor& norm, double epsilon, const Tensor& packed,
    const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t heads,
    int64_t kv_heads, const Tensor& cos, const Tensor& sin);

// A decoder layer after its attention: x [T, hidden] and what was attended to, times `out`, are the new
// x; that and the feed-forward layer of it, normalized, are the result.
Tensor feed(
    const Tensor& x, const Tensor& attended, const Tensor& out,
    const std::optional<Tensor>& out_scales, const std::optional<Tensor>& out_bias,
    const Tensor& norm, double epsilon, const Tensor& up, const std::optional<Tensor>& up_scales,
    const std::optional<Tensor>& up_bias, int64_t up_outputs, int64_t activation, bool is_gated,
    const Tensor& down, const std::optional<Tensor>& down_scales,
    const std::optional<Tensor>& down_bias);

// Decoder layers one after the other, one for each pair of caches: x [T, hidden], `project`, attention,
// `feed`, and so on. One operator, as a layer of few tokens takes less than a millisecond, and leaves
// nothing of its caller in the caches.
Tensor run_layers(
    const Tensor& x, const Tensor& cos, const Tensor& sin, std::vector<Tensor> tensors,
    std::vector<int64_t> sizes, std::vector<double> numbers, std::vector<Tensor> caches,
    const Tensor& slot_blocks, const Tensor& slot_offsets, const Tensor& query_start,
    const Tensor& seq_lens, const Tensor& block_table, const std::optional<Tensor>& block_ids,
    bool blocks_in_window);

}  // namespace aioengine
