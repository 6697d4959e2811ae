// A tile of keys for a piece of work: a thread's memory, where the tile's rows lie, and which keys a
// token sees.

#pragma once

#include "attention.h"
#include "attention_float.h"
#include "bf16_attention.h"
#include "byte_rows.h"

namespace {

using aioengine::Attention;
using aioengine::DType;
using aioengine::Piece;

constexpr int64_t MANY_ROWS = 9;     // for which vectors of rows pay in bfloat16

// One thread's working memory. Rows are padded to whole vectors, with zeros.
struct Scratch {
    float* query;                                  // [rows, key_dim]
    float *out, *largest, *total;                  // of a segment: [rows, value_dim], [rows], [rows]
    float *sum_out, *sum_largest, *sum_total;      // of all segments so far
    float *scores, *keys, *values;                 // [rows, KEYS], [KEYS, key_dim], [KEYS, value_dim]
    BFloat16* columns;                             // the query as bfloat16 is read
    float* transposed;                                 // `out` by blocks of rows: [value_dim, 16] each
    float* some_rows;                              // [16, KEYS]
    BFloat16* weights;                             // [KEYS / 2, 16, 2]
    float* end;
};

static Scratch divide(const Attention& a, int64_t rows, float* memory) {
    rows = (rows + 15) / 16 * 16;  // as many as fill blocks
    const int64_t key_dim = round_up(a.key_dim), value_dim = round_up(a.value_dim);
    Scratch s;
    s.query = memory;
    s.out = s.query + rows * key_dim;
    s.largest = s.out + rows * value_dim;
    s.total = s.largest + round_up(rows);
    s.sum_out = s.total + round_up(rows);
    s.sum_largest = s.sum_out + rows * value_dim;
    s.sum_total = s.sum_largest + round_up(rows);
    s.scores = s.sum_total + round_up(rows);
    s.keys = s.scores + rows * KEYS;
    s.values = s.keys + KEYS * key_dim;
    s.columns = (BFloat16*)(s.values + KEYS * value_dim);
    s.transposed = s.values + KEYS * value_dim + rows * key_dim / 2;
    s.some_rows = s.transposed + rows * value_dim;
    s.weights = (BFloat16*)(s.some_rows + 16 * KEYS);
    s.end = s.some_rows + 16 * KEYS + 8 * KEYS;
    return s;
}

// Which keys of the tile [begin, begin + count) a token at `position` sees, by order and window.
struct Range {
    int64_t first, last;
};

static Range seen_in_order(const Attention& a, int64_t position, int64_t begin, int64_t count) {
    if (!a.is_causal) return {0, count};
    const int64_t oldest = a.window ? position - a.window + 1 : 0;
    const int64_t first = greater(0, oldest - begin);
    return {lesser(first, count), greater(0, lesser(count, position + 1 - begin))};
}

// The same for a token that is in a block: key by key. What it does not see is scored NOTHING.
static void hide_outside_block(
    const Attention& a, const int32_t* ids, int64_t start, int64_t length, int64_t position,
    int64_t begin, int64_t count, float* scores) {
    const int32_t own = ids[position - start];
    for (int64_t n = 0; n < count; ++n) {
        const int64_t key = begin + n;
        const bool is_near = !a.window || key > position - a.window;
        const bool is_block = key >= start && key < length && ids[key - start] == own;
        const bool is_before = key <= position;
        const bool is_seen = a.blocks_in_window ? is_near && (is_before || is_block)
                                                : (is_near && is_before) || is_block;
        if (!is_seen) scores[n] = NOTHING;
    }
}

template <class T>
struct Tile {
    const T* keys[KEYS + TILE_COLUMNS];
    const T* values[KEYS];
};

template <class T>
static void find_rows(
    const Attention& a, const Piece& p, int64_t begin, int64_t skipped, int64_t count,
    Tile<T>& tile) {
    const int32_t* blocks = a.block_table + p.sequence * a.table_width;
    const T* keys = (const T*)a.key_cache + p.kv_head * a.key_strides[2];
    const T* values = (const T*)a.value_cache + p.kv_head * a.value_strides[2];
    const int64_t first = begin + skipped;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int64_t n = skipped; n < count; ++n) {
        tile.keys[n] = keys + blocks[block] * a.key_strides[0] + offset * a.key_strides[1];
        tile.values[n] = values + blocks[block] * a.value_strides[0] + offset * a.value_strides[1];
        if (++offset == a.block_size) {
            offset = 0;
            ++block;
        }
    }
    for (int64_t n = 0; n < skipped; ++n) {
        tile.keys[n] = tile.keys[skipped];
        tile.values[n] = tile.values[skipped];
    }
}

// The same of the piece's tile after the one that begins at `begin`, if there is one. What it has no
// rows for repeats the first.
template <class T>
static bool find_coming(const Attention& a, const Piece& p, int64_t begin, Tile<T>& coming) {
    const int64_t count = lesser(KEYS, p.key_end - (begin + KEYS));
    if (count <= 0) return false;
    find_rows(a, p, begin + KEYS, 0, count, coming);
    for (int64_t n = count; n < KEYS; ++n) {
        coming.keys[n] = coming.keys[0];
        coming.values[n] = coming.values[0];
    }
    return true;
}

// Converts rows to floats at `to`; `from` then says where these are.
template <class T>
static void widen_rows(const T** from, int64_t count, int64_t dim, float* to, const float** at) {
    const int64_t stride = round_up(dim);
    for (int64_t n = 0; n < count; ++n) {
        at[n] = to + n * stride;
        widen(from[n], dim, to + n * stride);
    }
}

// Whether matmuls are in bfloat16 (bf16_amx.h, bf16_avx512.h). So they are then for any number of rows, as the
// same token must come to the same bits with others and alone.
template <class T>
static bool is_narrow(const Attention& a) {
#if defined(__AVX512BF16__)
    return a.dtype == DType::BFloat16 && a.key_dim % TILE_DEPTH == 0 && a.value_dim % TILE == 0;
#else
    return (void)a, false;
#endif
}

// Whether scores are more than scaled before they become weights.
static bool is_decorated(const Attention& a) {
    return a.softcap != 0 || a.distance_bias || !(a.scale > 0);
}

// What is left to multiply them by on the way.
static float scale_of(const Attention& a) {
    return is_decorated(a) ? 1 : a.scale;
}

// Does to a row's scores of one tile what is not left to `soften`: all that `is_decorated` asks for, and
// hides what a token in a block does not see. Which of them are seen then.
static Range decorate(
    const Attention& a, const Piece& p, int64_t row, int64_t begin, int64_t skipped, int64_t count,
    float* scores) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t row_start = a.query_start[p.sequence], length = a.seq_lens[p.sequence];
    const int64_t start = length - (a.query_start[p.sequence + 1] - row_start);
    const int64_t position = start + p.first_token + row / group;
    const int32_t* ids = a.block_ids && a.is_causal ? a.block_ids + row_start : nullptr;
    if (is_decorated(a))
        for (int64_t n = 0; n < count; n += WIDTH) store(scores + n, load(scores + n) * a.scale);
    if (a.softcap != 0) cap(scores, a.softcap);
    if (a.distance_bias) {
        const float* bias = a.distance_bias + (p.kv_head * group + row % group) * a.num_distances;
        for (int64_t n = 0; n < count; ++n) {
            const int64_t distance = greater(0, position - begin - n);
            scores[n] += bias[lesser(distance, a.num_distances - 1)];
        }
    }
    Range seen = {0, count};
    if (ids && ids[position - start] >= 0)
        hide_outside_block(a, ids, start, length, position, begin, count, scores);
    else
        seen = seen_in_order(a, position, begin, count);
    seen.first = greater(seen.first, skipped);
    return seen;
}

static void hide(Range seen, float* scores) {
    for (int64_t n = 0; n < seen.first; ++n) scores[n] = NOTHING;
    for (int64_t n = seen.last; n < KEYS; ++n) scores[n] = NOTHING;
}

}  // namespace
