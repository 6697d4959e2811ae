// The operators, in the terms of the schemas in registration.cpp.

#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "operators.h"
#include "parallel.h"
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

// Where a step's tokens lie, of one KV group: kernels/attention.py. In memory of a program.
struct Places {
    const int32_t *slot_blocks, *slot_offsets, *query_start, *seq_lens, *block_table;
    const int32_t* block_ids;  // or null
    int64_t num_slots, num_sequences, num_ids, table_width;
};

Places places_of(
    Program& program, const Tensor& slot_blocks, const Tensor& slot_offsets, const Tensor& query_start,
    const Tensor& seq_lens, const Tensor& block_table, const std::optional<Tensor>& block_ids);

// Numbers of a key or value of a cache. Raises for bytes that are no row.
int64_t dim_of(const Tensor& cache);

// Keys and values of a layer, whose slots are yet to be told.
Pages pages_of(const Tensor& key_cache, const Tensor& value_cache);

// What attention of so many tokens is given; query, out, scale, softcap and what tells blocks and distances
// apart are yet to be told.
Attention attention_of(
    const Tensor& key_cache, const Tensor& value_cache, const Places& places, DType dtype,
    int64_t num_tokens, int64_t heads, const std::optional<Tensor>& sinks, int64_t window,
    bool is_causal);

// A weight as `pack_panels` or `pack_groups` has made it, of which `outputs` are not padding, and what goes with
// it.
struct Weight {
    const Tensor& packed;
    const std::optional<Tensor>&scales, &bias;
    int64_t outputs;
};

// What a matmul of `rows` rows with a weight is given; x and out are yet to be told. Where it is gated, the
// first half of the outputs are gates of the second, and there are half as many.
Linear linear_of(
    const Weight& weight, DType dtype, int64_t rows, int64_t depth, int64_t activation, bool is_gated);

// The same of several experts, whose weights are packed as one; outputs are those of one of them.
Linear linear_of_experts(
    const Weight& weight, int64_t experts, DType dtype, int64_t rows, int64_t depth, int64_t activation,
    bool is_gated);

// Tells a matmul the limit of its gates, 0 for none, and the shift of what they multiply.
void set_limits(Linear& a, double limit, double shift);

// A weight [outputs, depth] as [panels, depth, PANEL]; where the CPU multiplies pairs, one of bfloat16
// as [panels, depth / 2, PANEL, 2].
Tensor pack_panels(const Tensor& weight);

// A weight in groups (grouped.h), int8 [bytes]: `numbers` int8 [outputs, depth] of 4 bits (0 to 15) or 8 (-127
// to 127), `scales` float16 [outputs, groups], and `lowest`, zeros uint8 or leasts float16. `has_full_inputs`:
// inputs are not rounded. `levels` int8 [16]: all numbers are some of these, and take 4 bits.
Tensor pack_groups(
    const Tensor& numbers, const Tensor& scales, const std::optional<Tensor>& lowest, int64_t bits,
    int64_t group, bool has_full_inputs, const std::optional<Tensor>& levels);

// What `pack_groups` has returned. Raises for anything else.
std::pair<Groups, GroupedHead> groups_of(const Tensor& packed);

// The weights of outputs, one by one: embeddings, for instance. Of a packed weight, or a plain one [outputs,
// depth] of float32, bfloat16 or float16.
class WeightRows {
public:
    // `scales`: of outputs, or none. Raises for what is no weight of so many outputs.
    WeightRows(const Tensor& weight, const std::optional<Tensor>& scales, int64_t outputs);

    int64_t outputs() const { return outputs_; }
    int64_t depth() const { return depth_; }
    bool is_grouped() const { return !numbers_; }
    void read(int64_t output, float* to) const;
    // As they are; of a weight that is in no groups.
    void copy(int64_t output, void* to) const;

private:
    int64_t place(int64_t output, int64_t input) const;

    int64_t outputs_, depth_;
    Groups groups_{};
    const float* scales_;
    const char* numbers_ = nullptr;  // of a weight that is in no groups
    ScalarType type_;
    int64_t dims_;
};

// The same of the outputs `rows` [n] int64: float32 [n, depth].
Tensor read_outputs(const Tensor& packed, const std::optional<Tensor>& scales, int64_t outputs, const Tensor& rows);

Tensor linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated);

// The same for experts of so many outputs each, whose weights are packed as one: expert e has the rows of x up to
// ends[e], int64 [experts], that are behind those before it.
Tensor expert_linear(
    const Tensor& x, const Tensor& ends, const Tensor& packed, const std::optional<Tensor>& scales,
    const std::optional<Tensor>& bias, int64_t outputs, int64_t activation, bool is_gated, double limit,
    double shift);

// A routed feed-forward layer: x [T, hidden] -> the same. `tensors`, `sizes`, `numbers`: what of a plan says that there is
// one (layer_plan.h), and, behind that, the shared experts.
Tensor routed_feed(
    const Tensor& x, std::vector<Tensor> tensors, std::vector<int64_t> sizes, std::vector<double> numbers);

// Its experts alone, whose number comes last in `sizes`: each row goes to those that are `chosen`, int64 [T, k], and
// what they make of it is added up by their shares, float32 [T, k].
Tensor expert_feed(
    const Tensor& x, const Tensor& chosen, const Tensor& shares, std::vector<Tensor> tensors,
    std::vector<int64_t> sizes, std::vector<double> numbers);

// x [rows, dim] or [rows, heads, dim] over the root of the mean square of each row (and head) plus epsilon,
// times weight [dim], of the dtype of x or float32. Contiguous.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon);

// Tokens [rows] int64 of logits [rows, vocab], by a choice (see Choice) float64 [rows, 5] each. `banned`: those
// that may not come, of each row so many as `num_banned` says, whose logits become -infinity; null: none.
Tensor draw(
    Tensor& logits, const Tensor& choices, const std::optional<Tensor>& banned,
    const std::optional<Tensor>& num_banned);

// The place [rows] int64 of the largest number of each row of x [rows, width], the first of several; and x
// as float32.
Tensor argmax(const Tensor& x);
// cap * tanh(x / cap) of x [rows, width], of its dtype.
Tensor cap(const Tensor& x, double cap);
Tensor widen(const Tensor& x);

// The same with a bias, of rows that are centred first.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon);

// Raises unless weight and bias are for rows of this width and dtype.
void check_norm(const Tensor& weight, const std::optional<Tensor>& bias, int64_t dim, DType dtype);
void set_weight(Norm& a, const Tensor& weight, const std::optional<Tensor>& bias, double epsilon);

// The rows x [n, dim] at the places `rows` of [count, dim], zeros elsewhere.
Tensor put_rows(const Tensor& x, const Tensor& rows, int64_t count);

// What a rotation by cos and sin [tokens, dim] or [tokens, dim / 2], float32 or of the dtype, is given; x and out are yet to be told.
Rotary angles_of(const Tensor& cos, const Tensor& sin, int64_t tokens, int64_t dim, DType dtype);

// query [T, Hq, D] and key [T, Hkv, D], rotated by cos and sin [T, D] or [T, D / 2].
std::tuple<Tensor, Tensor> rotate(
    const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin, bool in_pairs);

// A plan (layer_plan.h) of layers, in lists of their tensors, sizes and numbers, and of the norm after them,
// with a bias or none and its epsilon: as bytes, which own it. They are the plan only where they lie.
Tensor pack_plan(
    std::vector<Tensor> tensors, std::vector<int64_t> sizes, std::vector<double> numbers,
    const std::optional<Tensor>& norm, const std::optional<Tensor>& bias, double epsilon);

// A layer up to its attention: x [T, hidden] -> query [T, Hq, D], key and value [T, Hkv, D]. `angles`: cos
// and sin [T, D] of one kind after the other.
std::tuple<Tensor, Tensor, Tensor> project(
    const Tensor& plan, int64_t index, const Tensor& x, std::vector<Tensor> angles);

// Of a layer's cross-attention: the queries [T, Hq, D] of x [T, hidden], keys and values [R, Hkv, D] of an
// encoder's rows [R, dim], and x plus the output matmul of what was attended to, [T, Hq * D].
Tensor project_cross(const Tensor& plan, int64_t index, const Tensor& x);
std::tuple<Tensor, Tensor> project_memory(const Tensor& plan, int64_t index, const Tensor& memory);
Tensor add_crossed(const Tensor& plan, int64_t index, const Tensor& x, const Tensor& attended);

// x [T, hidden] plus the layer's output matmul of what was attended to, [T, Hq * D].
Tensor add_attended(const Tensor& plan, int64_t index, const Tensor& x, const Tensor& attended);

// x [T, hidden] plus the feed-forward layer of it.
Tensor add_feed(const Tensor& plan, int64_t index, const Tensor& x);

// x [n, hidden], normalized after the last layer; [tokens, hidden] with zeros elsewhere where the rows are
// those that are `wanted` of so many.
Tensor finish(
    const Tensor& plan, const Tensor& x, const std::optional<Tensor>& wanted, int64_t tokens);

// An encoder's layer, a plan of one: rows x [..., hidden] of sequences of these lengths, each row of which attends
// to all of its sequence. `by_pages`: by our own attention, not PyTorch's.
Tensor encode_layer(
    const Tensor& plan, const Tensor& x, std::vector<Tensor> angles, std::vector<int64_t> lengths,
    bool by_pages);

// All layers of a step from the layer `first` on, and `finish`: x [T, hidden], `project`, attention over
// the pages of its KV group, `add_attended`, `add_feed`, plus `rows` [T, hidden] behind the first layers, and
// so on. One operator, as a layer of few tokens takes less than a millisecond, and leaves nothing of its
// caller in the caches. It ends early before a feed-forward layer that a module computes.
// `caches`: keys and values of each layer; `places`: of each KV group, slot_blocks, slot_offsets,
// query_start, seq_lens, block_table and block_ids (empty for none). `wanted` [n] int64: the rows that are
// computed of what comes after the last attention, none for all. `memory` [R, dim]: rows of an encoder that
// there are slots for.
Tensor run_plan(
    const Tensor& packed, int64_t first, const Tensor& x, std::vector<Tensor> angles,
    std::vector<Tensor> caches, std::vector<Tensor> places, std::vector<int64_t> blocks_in_window,
    std::vector<Tensor> rows, const std::optional<Tensor>& wanted, const std::optional<Tensor>& memory);

// A queue of steps of single tokens (decode.cpp): as bytes, which own it. `plan` of layers; `table` [vocab,
// hidden] of embeddings, or a packed weight with `factors`, which are multiplied by `scale`, and to which a row of `positions` [n, hidden] is
// added, if there are any; the output head as `linear` takes it; `like`: of the layers' dtype; `caches` as above; `is_cross`: of each KV
// group; `angles` [positions, D], cosines and sines of each kind in turns. `steps` int32
// [n, words] and `choices` float64 [n, 5 * m] (see Choice) are written by the host, `results` int64 [n, 2 + m] by `decode`, and so is `last` [m], the tokens
// of the step before. `event`: the file of an event that counts steps.
Tensor pack_decoder(
    const Tensor& plan, const Tensor& table, const std::optional<Tensor>& factors, int64_t vocab,
    double scale, const std::optional<Tensor>& positions, const Tensor& head, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
    int64_t outputs, double cap, const Tensor& like, std::vector<Tensor> caches, std::vector<Tensor> angles, std::vector<int64_t> is_cross,
    const Tensor& steps, const Tensor& choices, const Tensor& results, const Tensor& last, int64_t event);

// Computes what is queued and what is queued meanwhile, until nothing has come for so long or it is to stop.
// Returns how many steps are done since the beginning.
int64_t decode(const Tensor& decoder, int64_t patience_us);

// The logits [count, vocab] of the last step that had so many sequences; none may run.
Tensor decoder_logits(const Tensor& decoder, int64_t count);

}  // namespace aioengine
