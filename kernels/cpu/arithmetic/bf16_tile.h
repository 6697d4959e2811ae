// One tile of keys in bfloat16, for few rows and for many.

#pragma once

#include "attention_tile.h"
#include "bf16_amx.h"
#include "bf16_avx512.h"

#if defined(__AVX512BF16__)

namespace {

static_assert(TILE_KEYS == KEYS);

// Where each 16 rows of a tile lie in a cache; where these do not lie in one block, or some are not
// the piece's, copies at `copies`, with one that is in the place of each that is not.
static void find_tile_rows(
    const Attention& a, const Piece& p, const void* cache, const int64_t* strides, int64_t dim,
    int64_t begin, int64_t skipped, int64_t count, BFloat16* copies, TileRows* found) {
    const int32_t* blocks = a.block_table + p.sequence * a.table_width;
    const BFloat16* rows = (const BFloat16*)cache + p.kv_head * strides[2];
    for (int64_t first = 0; first < count; first += TILE, ++found) {
        const int64_t offset = (begin + first) % a.block_size;
        if (offset + TILE <= a.block_size && first >= skipped) {
            const int64_t block = blocks[(begin + first) / a.block_size];
            *found = {rows + block * strides[0] + offset * strides[1], strides[1]};
            continue;
        }
        *found = {copies, dim};
        for (int64_t n = first; n < first + TILE; ++n, copies += dim) {
            const int64_t key = begin + lesser(greater(n, skipped), count - 1);
            const int64_t block = blocks[key / a.block_size], offset = key % a.block_size;
            memcpy(copies, rows + block * strides[0] + offset * strides[1], dim * sizeof(BFloat16));
        }
    }
}

// The same of rows of bytes, which become numbers at `copies`; `next`: those of the piece's next tile, or null.
static void unpack_tile_rows(
    const ByteRow* const* rows, const ByteRow* const* next, int64_t count, int64_t dim, BFloat16* copies,
    TileRows* found) {
    for (int64_t n = 0; n < count; ++n) {
        if (next) prefetch_ahead(next[n], aioengine::row_bytes(dim));
        unpack_row(rows[n], dim, copies + n * dim);
    }
    for (int64_t n = count; n % TILE; ++n)
        memcpy(copies + n * dim, copies + (count - 1) * dim, dim * sizeof(BFloat16));
    for (int64_t n = 0; n < count; n += TILE) *found++ = {copies + n * dim, dim};
}

// Adds rows of a cache to `coming`, those that are read after the tile that begins at `begin`: the piece's
// next ones, or, after its last, the first ones of the next head or sequence, which this thread is likely to get.
static void add_coming(
    const Attention& a, const Piece& p, const void* cache, const int64_t* strides, int64_t dim,
    int64_t begin, Coming& coming) {
    const bool is_last = begin + KEYS >= p.key_end;
    int64_t sequence = p.sequence, head = p.kv_head + is_last, end = p.key_end;
    int64_t first = is_last ? p.key_begin / TILE * TILE : begin + KEYS;
    if (head == a.kv_heads) {
        head = 0;
        if (++sequence >= a.num_sequences) return;
        end = a.seq_lens[sequence];
        const int64_t num_new = a.query_start[sequence + 1] - a.query_start[sequence];
        first = a.window ? greater(0, end - num_new - a.window + 1) / TILE * TILE : 0;
    }
    if (first >= end || a.block_size % TILE) return;
    const int32_t* blocks = a.block_table + sequence * a.table_width;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int64_t i = 0; i < KEYS / TILE; ++i) {
        const int64_t at = blocks[block] * strides[0] + offset * strides[1] + head * strides[2];
        coming.rows[coming.count / TILE + i] = {(const BFloat16*)cache + at, strides[1]};
        if (first + (i + 1) * TILE >= end) continue;  // what there is no more of, again
        offset += TILE;
        if (offset == a.block_size) offset = 0, ++block;
    }
    coming.bytes[coming.count / KEYS] = dim * (int64_t)sizeof(BFloat16);
    coming.count += KEYS;
}

// Room for a tile of keys, behind copies of those that do not lie side by side.
static BFloat16* key_memory(const Attention& a, const Scratch& s) {
    return (BFloat16*)s.keys + KEYS * a.key_dim;
}

// What the rows of a block see by order and window, of the keys [begin, begin + count): of the first
// `most` of them, if of any.
struct BlockSeen {
    int32_t first[BLOCK], last[BLOCK];
    int64_t most;
    bool is_all, is_any;
};

static BlockSeen seen_by_block(
    const Attention& a, const Piece& p, int64_t first_row, int64_t rows, int64_t begin,
    int64_t skipped, int64_t count) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_new = a.query_start[p.sequence + 1] - a.query_start[p.sequence];
    const int64_t start = a.seq_lens[p.sequence] - num_new + p.first_token;
    int64_t position = start + first_row / group, head = first_row % group;
    BlockSeen found = {};
    found.is_all = true;
    for (int64_t i = 0; i < BLOCK; ++i) {
        const Range seen = seen_in_order(a, position, begin, count);
        const int64_t first = greater(seen.first, skipped);
        found.first[i] = (int32_t)first;
        found.last[i] = (int32_t)seen.last;
        found.is_all = found.is_all && first == 0 && seen.last == KEYS;
        found.is_any = found.is_any || first < seen.last;
        found.most = greater(found.most, seen.last);
        if (first_row + i + 1 < rows && ++head == group) {
            head = 0;
            ++position;
        }
    }
    return found;
}

// One tile of keys for many rows, whose running sums of values are in `Scratch::transposed` meanwhile.
static void attend_to_columns(
    const Attention& a, const Piece& p, const Scratch& s, const TileRows* keys,
    const TileRows* values, int64_t begin, int64_t skipped, int64_t count) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const bool has_own_rules = is_decorated(a) || (a.block_ids && a.is_causal);
    BFloat16* transposed_values = (BFloat16*)s.values;
    transpose_values(values, count, a.value_dim, transposed_values);
    Coming nothing;
    const auto* transposed_keys = transpose_keys(keys, a.key_dim, count, nothing, key_memory(a, s));
    for (int64_t first = 0; first < rows; first += BLOCK) {
        float* out = s.transposed + first * a.value_dim;
        const BlockSeen seen = seen_by_block(a, p, first, rows, begin, skipped, count);
        if (!has_own_rules && !seen.is_any) continue;
        const int64_t most = has_own_rules ? count : seen.most;
        dot_columns(s.columns + first * a.key_dim, a.key_dim, transposed_keys, most, s.scores);
        if (has_own_rules) {
            columns_to_rows(s.scores, KEYS, KEYS, s.some_rows);
            for (int64_t r = 0; r < lesser(BLOCK, rows - first); ++r) {
                float* scores = s.some_rows + r * KEYS;
                hide(decorate(a, p, first + r, begin, skipped, count, scores), scores);
            }
            rows_to_columns(s.some_rows, KEYS, KEYS, s.scores);
        } else if (!seen.is_all) {
            hide_columns(seen.first, seen.last, most, s.scores);
        }
        soften_columns(
            s.scores, most, scale_of(a), s.largest + first, s.total + first, out, a.value_dim,
            s.weights);
        weigh_columns(s.weights, transposed_values, most, a.value_dim, out);
    }
}

// One tile of keys in bfloat16.
static void attend_to_tile_rows(
    const Attention& a, const Piece& p, const Scratch& s, int64_t begin, int64_t skipped,
    int64_t count) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    TileRows keys[KEYS / TILE], values[KEYS / TILE];
    BFloat16* copies = (BFloat16*)s.values + KEYS * a.value_dim;  // behind the arranged values
    if (a.has_byte_rows) {
        Tile<ByteRow> tile, next;
        find_rows(a, p, begin, skipped, count, tile);
        const bool has_next = find_coming(a, p, begin, next);
        unpack_tile_rows(
            tile.keys, has_next ? next.keys : nullptr, count, a.key_dim, (BFloat16*)s.keys, keys);
        unpack_tile_rows(
            tile.values, has_next ? next.values : nullptr, count, a.value_dim, copies, values);
    } else {
        find_tile_rows(
            a, p, a.key_cache, a.key_strides, a.key_dim, begin, skipped, count, (BFloat16*)s.keys, keys);
        find_tile_rows(
            a, p, a.value_cache, a.value_strides, a.value_dim, begin, skipped, count, copies, values);
    }
    if (rows >= MANY_ROWS) {
        attend_to_columns(a, p, s, keys, values, begin, skipped, count);
        return;
    }
    Coming coming;
    if (!a.has_byte_rows) {
        add_coming(a, p, a.key_cache, a.key_strides, a.key_dim, begin, coming);
        add_coming(a, p, a.value_cache, a.value_strides, a.value_dim, begin, coming);
    }
    dot_rows(s.columns, rows, a.key_dim, keys, count, values, coming, key_memory(a, s), s.scores);
    for (int64_t r = 0; r < rows; ++r) {
        float* scores = s.scores + r * KEYS;
        hide(decorate(a, p, r, begin, skipped, count, scores), scores);
        soften_row(
            scores, scale_of(a), s.largest + r, s.total + r, s.out + r * a.value_dim, a.value_dim);
    }
    weigh_rows(
        s.scores, rows, values, count, a.value_dim, coming, (BFloat16*)s.values, s.out);
}

}  // namespace

#endif
