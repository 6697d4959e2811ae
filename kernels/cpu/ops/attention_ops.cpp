// Paged attention: new keys and values written into their pages, and a step cut into pieces of work.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "memory.h"
#include "ops.h"
#include "parallel.h"

namespace aioengine {

namespace {

// Copies new rows [R, heads, dim] into their slots of a cache.
void write_rows(
    const Tensor& rows, Tensor& cache, const int32_t* blocks, const int32_t* offsets,
    const char* name) {
    check_close(rows, 3, name);
    const int64_t count = rows.size(0), heads = rows.size(1), dim = rows.size(2);
    STD_TORCH_CHECK(
        rows.scalar_type() == cache.scalar_type() && cache.size(2) == heads && cache.size(3) == dim,
        name,
        " must be of its cache's dtype and shape");
    const int64_t size = rows.element_size();
    const char* from = static_cast<const char*>(rows.const_data_ptr());
    char* to = static_cast<char*>(cache.mutable_data_ptr());
    int64_t source[2], target[3];
    copy_strides(rows, 2, source);
    copy_strides(cache, 3, target);
    const bool is_whole = (source[1] == dim && target[2] == dim) || heads == 1;
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, heads * dim * size));
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const char* row = from + i * source[0] * size;
            char* slot = to + (blocks[i] * target[0] + offsets[i] * target[1]) * size;
            if (is_whole) {
                std::memcpy(slot, row, heads * dim * size);
                continue;
            }
            for (int64_t h = 0; h < heads; ++h)
                std::memcpy(slot + h * target[2] * size, row + h * source[1] * size, dim * size);
        }
    });
}

// Which keys the tokens [first, last) of a sequence see between them.
std::pair<int64_t, int64_t> keys_seen(
    const Attention& a, int64_t length, int64_t num_new, int64_t first, int64_t last) {
    if (!a.is_causal) return {0, length};
    const int64_t start = length - num_new;
    int64_t begin = a.window ? std::max<int64_t>(0, start + first - a.window + 1) : 0;
    int64_t end = start + last;
    if (a.block_ids && num_new > 1) {  // all of a block's tokens are in this step
        begin = std::min(begin, start);
        end = length;
    }
    return {begin, end};
}

// A step's work: pieces, the longest first, and what has to be merged afterwards.
struct Work {
    std::vector<Piece> pieces;
    std::vector<Parts> parts;
    int64_t num_partial = 0;  // floats that partial results take
};

Work cut(const Attention& a, int64_t num_sequences, int64_t max_rows) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t max_tokens = std::max<int64_t>(1, max_rows / group);
    Work work;
    int64_t total = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
        const int64_t num_new = a.query_start[s + 1] - a.query_start[s];
        for (int64_t first = 0; first < num_new; first += max_tokens) {
            const int64_t last = std::min(first + max_tokens, num_new);
            const auto [begin, end] = keys_seen(a, a.seq_lens[s], num_new, first, last);
            for (int64_t h = 0; h < a.kv_heads; ++h)
                work.pieces.push_back({s, h, first, last - first, begin, end, -1});
            total += a.kv_heads * (last - first) * (end - begin);
        }
    }
    // A piece that would keep one thread busy while the others wait is split by keys.
    const int64_t num_threads = torch::stable::get_num_threads();
    const int64_t fair = std::max<int64_t>(1, total / std::max<int64_t>(1, 4 * num_threads));
    std::vector<Piece> split;
    if (num_threads > 1 && work.pieces.size() < static_cast<size_t>(4 * num_threads)) {
        for (Piece& piece : work.pieces) {
            const int64_t keys = piece.key_end - piece.key_begin;
            const int64_t first = piece.key_begin / SEGMENT;
            const int64_t segments = (piece.key_end - 1) / SEGMENT + 1 - first;
            const int64_t count = std::min((piece.num_tokens * keys + fair - 1) / fair, segments);
            if (count < 2) {
                split.push_back(piece);
                continue;
            }
            const int64_t size = piece.num_tokens * group * (2 + a.value_dim);
            piece.partial = work.num_partial;
            work.parts.push_back({piece, segments});
            for (int64_t i = 0; i < count; ++i) {
                const int64_t from = segments * i / count, to = segments * (i + 1) / count;
                Piece part = piece;
                part.key_begin = std::max(piece.key_begin, (first + from) * SEGMENT);
                part.key_end = std::min(piece.key_end, (first + to) * SEGMENT);
                part.partial = work.num_partial + from * size;
                split.push_back(part);
            }
            work.num_partial += segments * size;
        }
        work.pieces = std::move(split);
    }
    std::stable_sort(work.pieces.begin(), work.pieces.end(), [](const Piece& x, const Piece& y) {
        return x.num_tokens * (x.key_end - x.key_begin) > y.num_tokens * (y.key_end - y.key_begin);
    });
    return work;
}

// Nothing is read beyond what the tensors hold; which blocks a table names is its maker's to know.
void check_sizes(
    const Attention& a, const Tensor& query, const Tensor& block_table,
    const std::optional<Tensor>& block_ids, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& distance_bias, int64_t num_sequences) {
    STD_TORCH_CHECK(block_table.size(0) == num_sequences, "block_table must have a row for each sequence");
    STD_TORCH_CHECK(
        !block_ids || block_ids->numel() == query.size(0), "block_ids must have an entry for each token");
    STD_TORCH_CHECK(!sinks || sinks->numel() == a.heads, "sinks must have an entry for each head");
    STD_TORCH_CHECK(
        !distance_bias || (distance_bias->size(0) == a.heads && a.num_distances > 0),
        "distance_bias must have a row for each head");
    STD_TORCH_CHECK(a.window >= 0, "window must not be negative");
    const int64_t room = a.table_width * a.block_size;
    for (int64_t i = 0; i < num_sequences; ++i) {
        const int64_t tokens = a.query_start[i + 1] - a.query_start[i];
        STD_TORCH_CHECK(
            tokens >= 0 && a.seq_lens[i] >= 0 && a.seq_lens[i] <= room &&
                (!a.is_causal || tokens <= a.seq_lens[i]),
            "a sequence is longer than its row of block_table, or shorter than its tokens");
    }
    STD_TORCH_CHECK(
        a.query_start[0] >= 0 && a.query_start[num_sequences] <= query.size(0),
        "query must have a row for each token");
}

}  // namespace

void write_kv(
    const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& slot_blocks, const Tensor& slot_offsets) {
    const int32_t* blocks = read_ints(slot_blocks, "slot_blocks");
    const int32_t* offsets = read_ints(slot_offsets, "slot_offsets");
    for (const Tensor* slots : {&slot_blocks, &slot_offsets})
        STD_TORCH_CHECK(
            slots->numel() == key.size(0) && slots->numel() == value.size(0),
            "there must be a slot for each row");
    write_rows(key, key_cache, blocks, offsets, "key");
    write_rows(value, value_cache, blocks, offsets, "value");
}

Tensor attend(
    const Tensor& query, const std::optional<Tensor>& key, const std::optional<Tensor>& value,
    Tensor& key_cache, Tensor& value_cache, const Tensor& slot_blocks, const Tensor& slot_offsets,
    const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_table,
    const std::optional<Tensor>& block_ids, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& distance_bias, double scale, double softcap, int64_t window,
    bool is_causal, bool blocks_in_window) {
    const AttentionKernels& kernels = *dispatch_table().attention;
    check_close(query, 3, "query");
    check_close(key_cache, 4, "key_cache");
    check_close(value_cache, 4, "value_cache");
    STD_TORCH_CHECK(
        key_cache.scalar_type() == query.scalar_type() &&
            value_cache.scalar_type() == query.scalar_type(),
        "query and caches must be of one dtype");
    const int64_t num_sequences = seq_lens.numel();
    STD_TORCH_CHECK(query_start.numel() == num_sequences + 1, "query_start must have S + 1 entries");
    STD_TORCH_CHECK(block_table.dim() == 2, "block_table must have 2 dimensions");
    if (key && value) write_kv(*key, *value, key_cache, value_cache, slot_blocks, slot_offsets);
    Attention a{};
    a.dtype = dtype_of(query, kernels);
    a.query = query.const_data_ptr();
    a.key_cache = key_cache.const_data_ptr();
    a.value_cache = value_cache.const_data_ptr();
    copy_strides(query, 2, a.query_strides);
    copy_strides(key_cache, 3, a.key_strides);
    copy_strides(value_cache, 3, a.value_strides);
    a.heads = query.size(1);
    a.kv_heads = key_cache.size(2);
    a.key_dim = key_cache.size(3);
    a.value_dim = value_cache.size(3);
    a.block_size = key_cache.size(1);
    STD_TORCH_CHECK(
        a.key_dim == query.size(2) && a.kv_heads > 0 && a.heads % a.kv_heads == 0 &&
            value_cache.size(1) == a.block_size && value_cache.size(2) == a.kv_heads,
        "query, key_cache and value_cache do not fit each other");
    a.query_start = read_ints(query_start, "query_start");
    a.seq_lens = read_ints(seq_lens, "seq_lens");
    a.block_table = read_ints(block_table, "block_table");
    a.table_width = block_table.size(1);
    a.block_ids = block_ids ? read_ints(*block_ids, "block_ids") : nullptr;
    a.sinks = read_floats(sinks, 1, "sinks");
    a.distance_bias = read_floats(distance_bias, 2, "distance_bias");
    a.num_distances = distance_bias ? distance_bias->size(1) : 0;
    a.scale = static_cast<float>(scale);
    a.softcap = static_cast<float>(softcap);
    a.window = window;
    a.is_causal = is_causal;
    a.blocks_in_window = blocks_in_window;
    check_sizes(a, query, block_table, block_ids, sinks, distance_bias, num_sequences);
    Tensor out = new_output(query, {query.size(0), a.heads, a.value_dim});
    a.out = out.mutable_data_ptr();
    const int64_t max_rows = kernels.max_rows(a);
    const Work work = cut(a, num_sequences, max_rows);
    const std::unique_ptr<float[]> partial(new float[work.num_partial]);
    a.partial = partial.get();
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_floats = kernels.scratch_floats(a, std::max(max_rows, group));
    share_out(work.pieces.size(), num_floats, [&](int64_t i, bool, float* scratch) {
        kernels.attend(a, work.pieces[i], scratch);
    });
    share_out(work.parts.size(), num_floats, [&](int64_t i, bool, float* scratch) {
        kernels.merge(a, work.parts[i], scratch);
    });
    return out;
}

}  // namespace aioengine
