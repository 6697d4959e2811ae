// Paged attention: new keys and values written into their pages, and what attention is told of a step.

#include <algorithm>
#include <utility>
#include <vector>

#include "byte_rows.h"
#include "memory.h"
#include "ops.h"

namespace aioengine {

namespace {

// Nothing is read beyond what the tensors hold; which blocks a table names is its maker's to know.
void check_sizes(const Attention& a, int64_t num_sequences, int64_t num_tokens) {
    const int64_t room = a.table_width * a.block_size;
    for (int64_t i = 0; i < num_sequences; ++i) {
        const int64_t tokens = a.query_start[i + 1] - a.query_start[i];
        STD_TORCH_CHECK(
            tokens >= 0 && a.seq_lens[i] >= 0 && a.seq_lens[i] <= room &&
                (!a.is_causal || tokens <= a.seq_lens[i]),
            "a sequence is longer than its row of block_table, or shorter than its tokens");
    }
    STD_TORCH_CHECK(
        a.query_start[0] >= 0 && a.query_start[num_sequences] <= num_tokens,
        "query must have a row for each token");
}

bool has_byte_rows(const Tensor& cache) {
    return cache.scalar_type() == ScalarType::Byte;
}

}  // namespace

int64_t dim_of(const Tensor& cache) {
    const int64_t size = cache.size(3);
    if (!has_byte_rows(cache)) return size;
    const int64_t dim = numbers_in(size);
    STD_TORCH_CHECK(size > 2 && row_bytes(dim) == size, "no row of bytes is so long");
    return dim;
}

Pages pages_of(const Tensor& key_cache, const Tensor& value_cache) {
    check_close(key_cache, 4, "key_cache");
    check_close(value_cache, 4, "value_cache");
    STD_TORCH_CHECK(
        value_cache.scalar_type() == key_cache.scalar_type() && value_cache.size(0) == key_cache.size(0) &&
            value_cache.size(1) == key_cache.size(1) && value_cache.size(2) == key_cache.size(2),
        "key_cache and value_cache do not fit each other");
    Pages pages{};
    pages.keys = const_cast<void*>(key_cache.const_data_ptr());
    pages.values = const_cast<void*>(value_cache.const_data_ptr());
    copy_strides(key_cache, 3, pages.key_strides);
    copy_strides(value_cache, 3, pages.value_strides);
    pages.has_byte_rows = has_byte_rows(key_cache);
    return pages;
}

Places places_of(
    Program& program, const Tensor& slot_blocks, const Tensor& slot_offsets, const Tensor& query_start,
    const Tensor& seq_lens, const Tensor& block_table, const std::optional<Tensor>& block_ids) {
    const auto copied = [&](const Tensor& tensor, const char* name) {
        return tensor.numel() ? program.copy(read_ints(tensor, name), tensor.numel()) : nullptr;
    };
    STD_TORCH_CHECK(block_table.dim() == 2, "block_table must have 2 dimensions");
    STD_TORCH_CHECK(
        query_start.numel() == seq_lens.numel() + 1, "query_start must have S + 1 entries");
    STD_TORCH_CHECK(
        block_table.size(0) == seq_lens.numel(), "block_table must have a row for each sequence");
    STD_TORCH_CHECK(
        slot_blocks.numel() == slot_offsets.numel(), "there must be an offset for each slot's block");
    Places places{};
    places.slot_blocks = copied(slot_blocks, "slot_blocks");
    places.slot_offsets = copied(slot_offsets, "slot_offsets");
    places.query_start = copied(query_start, "query_start");
    places.seq_lens = copied(seq_lens, "seq_lens");
    places.block_table = copied(block_table, "block_table");
    places.block_ids = block_ids ? copied(*block_ids, "block_ids") : nullptr;
    places.num_ids = block_ids ? block_ids->numel() : 0;
    places.num_slots = slot_blocks.numel();
    places.num_sequences = seq_lens.numel();
    places.table_width = block_table.size(1);
    return places;
}

Attention attention_of(
    const Tensor& key_cache, const Tensor& value_cache, const Places& places, DType dtype,
    int64_t num_tokens, int64_t heads, const std::optional<Tensor>& sinks, int64_t window,
    bool is_causal) {
    const Pages pages = pages_of(key_cache, value_cache);
    Attention a{};
    a.dtype = dtype;
    a.has_byte_rows = pages.has_byte_rows;
    STD_TORCH_CHECK(
        a.has_byte_rows || dtype_of(key_cache, *dispatch_table().attention) == dtype,
        "query and caches must be of one dtype, or caches of bytes");
    a.key_cache = pages.keys;
    a.value_cache = pages.values;
    std::copy_n(pages.key_strides, 3, a.key_strides);
    std::copy_n(pages.value_strides, 3, a.value_strides);
    a.heads = heads;
    a.kv_heads = key_cache.size(2);
    a.key_dim = dim_of(key_cache);
    a.value_dim = dim_of(value_cache);
    a.block_size = key_cache.size(1);
    STD_TORCH_CHECK(
        a.kv_heads > 0 && a.heads % a.kv_heads == 0, "query and key_cache do not fit each other");
    a.num_sequences = places.num_sequences;
    a.query_start = places.query_start;
    a.seq_lens = places.seq_lens;
    a.block_table = places.block_table;
    a.table_width = places.table_width;
    a.block_ids = places.block_ids;
    a.sinks = read_floats(sinks, 1, "sinks");
    a.window = window;
    a.is_causal = is_causal;
    STD_TORCH_CHECK(
        !a.block_ids || places.num_ids == num_tokens, "block_ids must have an entry for each token");
    STD_TORCH_CHECK(!sinks || sinks->numel() == heads, "sinks must have an entry for each head");
    STD_TORCH_CHECK(a.window >= 0, "window must not be negative");
    check_sizes(a, places.num_sequences, num_tokens);
    return a;
}

namespace {

// New rows of keys and values, and the pages that they go to.
Heads new_rows(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
    const int32_t* blocks, const int32_t* offsets) {
    check_close(key, 3, "key");
    check_close(value, 3, "value");
    const auto fits = [](const Tensor& rows, const Tensor& cache) {
        return (has_byte_rows(cache) || rows.scalar_type() == cache.scalar_type()) &&
               cache.size(2) == rows.size(1) && dim_of(cache) == rows.size(2);
    };
    Heads heads{};
    heads.pages = pages_of(key_cache, value_cache);
    heads.pages->blocks = blocks;
    heads.pages->offsets = offsets;
    STD_TORCH_CHECK(fits(key, key_cache), "key must be of its cache's dtype and shape");
    STD_TORCH_CHECK(fits(value, value_cache), "value must be of its cache's dtype and shape");
    STD_TORCH_CHECK(
        value.scalar_type() == key.scalar_type() && value.size(0) == key.size(0),
        "key and value must be of one dtype and length");
    heads.dtype = dtype_of(key, *dispatch_table().attention);
    heads.x[1] = key.const_data_ptr();
    heads.x[2] = value.const_data_ptr();
    copy_strides(key, 2, heads.strides[1]);
    copy_strides(value, 2, heads.strides[2]);
    heads.tokens = key.size(0);
    heads.kv_heads = key.size(1);
    heads.key_dim = key.size(2);
    heads.value_dim = value.size(2);
    return heads;
}

}  // namespace

void write_kv(
    const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& slot_blocks, const Tensor& slot_offsets) {
    for (const Tensor* slots : {&slot_blocks, &slot_offsets})
        STD_TORCH_CHECK(
            slots->numel() == key.size(0) && slots->numel() == value.size(0),
            "there must be a slot for each row");
    run_between(key.size(0), [&](Program& program) {
        add_heads(
            program, new_rows(
                         key, value, key_cache, value_cache, read_ints(slot_blocks, "slot_blocks"),
                         read_ints(slot_offsets, "slot_offsets")));
    });
}

Tensor attend(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    Tensor& key_cache, Tensor& value_cache, const Tensor& slot_blocks, const Tensor& slot_offsets,
    const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_table,
    const std::optional<Tensor>& block_ids, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& distance_bias, double scale, double softcap, int64_t window,
    bool is_causal, bool blocks_in_window) {
    check_close(query, 3, "query");
    Tensor out = new_output(query, {query.size(0), query.size(1), dim_of(value_cache)});
    Team& team = own_team();
    Program& program = team.begin();
    const Places places = places_of(
        program, slot_blocks, slot_offsets, query_start, seq_lens, block_table, block_ids);
    Attention a = attention_of(
        key_cache, value_cache, places, dtype_of(query, *dispatch_table().attention), query.size(0),
        query.size(1), sinks, window, is_causal);
    STD_TORCH_CHECK(a.key_dim == query.size(2), "query and key_cache do not fit each other");
    a.query = query.const_data_ptr();
    copy_strides(query, 2, a.query_strides);
    a.distance_bias = read_floats(distance_bias, 2, "distance_bias");
    a.num_distances = distance_bias ? distance_bias->size(1) : 0;
    STD_TORCH_CHECK(
        !distance_bias || (distance_bias->size(0) == a.heads && a.num_distances > 0),
        "distance_bias must have a row for each head");
    a.scale = static_cast<float>(scale);
    a.softcap = static_cast<float>(softcap);
    a.blocks_in_window = blocks_in_window;
    a.out = out.mutable_data_ptr();
    if (key && value) {
        STD_TORCH_CHECK(
            places.num_slots == key->size(0) && places.num_slots == value->size(0),
            "there must be a slot for each row");
        const Heads rows =
            new_rows(*key, *value, key_cache, value_cache, places.slot_blocks, places.slot_offsets);
        STD_TORCH_CHECK(rows.dtype == a.dtype, "query, key and value must be of one dtype");
        add_heads(program, rows);
    }
    const AttentionWork work =
        cut_attention(program, a, places.num_sequences, team.num_threads());
    a.partial = static_cast<float*>(program.take(work.num_partial * sizeof(float)));
    keep(program, {query, key_cache, value_cache, sinks.value_or(query), distance_bias.value_or(query)});
    add_attention(program, a, work);
    run_between(team, program, query.size(0));
    return out;
}

}  // namespace aioengine
