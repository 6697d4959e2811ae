// Attention in bfloat16 by vectors that add two products at a time to each of 16 lanes (AVX512-BF16), for
// CPUs without tiles: what bf16_amx.h has for it. A score adds up its products two by two in the order of
// the numbers, and an output its values' two keys at a time, for few rows and for many; so both come to
// the same bits.

#pragma once

#include "bf16_attention.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace {

static inline void begin_attention() {}

static inline void end_attention() {}

static inline __m512bh load_pairs(const BFloat16* at) {
    return (__m512bh)_mm512_loadu_si512(at);
}

// The first `count` keys, and as many more as fill 16, to [dim / 2, TILE_KEYS, 2] at `to`.
static inline const BFloat16* transpose_keys(
    const TileRows* keys, int64_t dim, int64_t count, Coming& coming, BFloat16* to) {
    for (int64_t n = 0; n < count; n += TILE) {
        const TileRows& rows = keys[n / TILE];
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            coming.prefetch_during(BLOCK_UNITS);
            transpose_block(rows.at + d, rows.stride, TILE, TILE_KEYS, to + d * TILE_KEYS + 2 * n);
        }
    }
    return to;
}

// Pairs of numbers: those of a row `row` numbers after those of the row before it, those of a step
// `step` numbers after those of the step before it.
struct Pairs {
    const BFloat16* at;
    int64_t row, step;
};

// sums [ROWS, COLUMNS vectors], rows `stride` apart, += a pair of each row times vectors of pairs, whose steps
// are `right_step` apart, over `count` steps.
template <int ROWS, int COLUMNS>
static inline void add_some(
    const Pairs& left, const BFloat16* right, int64_t right_step, int64_t count, Coming& coming,
    float* to, int64_t stride) {
    __m512 sums[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = _mm512_loadu_ps(to + r * stride + c * TILE);
    for (int64_t n = 0; n < count; ++n, right += right_step) {
        coming.prefetch_during(ROWS * COLUMNS);
        __m512bh x[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) x[r] = splat_pair(left.at + r * left.row + n * left.step);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            const __m512bh y = load_pairs(right + c * 2 * TILE);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], x[r], y);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_ps(to + r * stride + c * TILE, sums[r][c]);
}

// The same for any number of rows.
template <int COLUMNS>
static inline void add_rows(
    Pairs left, int64_t rows, const BFloat16* right, int64_t right_step, int64_t count,
    Coming& coming, float* to, int64_t stride) {
    while (rows) {
        int64_t done;
        if (rows >= 4)
            add_some<4, COLUMNS>(left, right, right_step, count, coming, to, stride), done = 4;
        else if (rows == 3)
            add_some<3, COLUMNS>(left, right, right_step, count, coming, to, stride), done = 3;
        else if (rows == 2)
            add_some<2, COLUMNS>(left, right, right_step, count, coming, to, stride), done = 2;
        else
            add_some<1, COLUMNS>(left, right, right_step, count, coming, to, stride), done = 1;
        rows -= done;
        left.at += done * left.row;
        to += done * stride;
    }
}

// Units of work of a tile, from its keys to its weighted values.
static inline int64_t units_of(int64_t rows, int64_t key_dim, int64_t value_dim) {
    const int64_t blocks = TILE_KEYS / TILE * key_dim / TILE_DEPTH, pairs = TILE_KEYS / 2;
    const int64_t multiplied = rows * (key_dim / 2 * TILE_KEYS + pairs * value_dim) / TILE;
    return blocks * BLOCK_UNITS + pairs * value_dim / ARRANGED_PER_UNIT + multiplied;
}

// scores [rows, TILE_KEYS] of the first `count` keys, for up to TILE rows as `arrange_query` leaves them.
// `memory`: room for TILE_KEYS keys.
static inline void dot_rows(
    const BFloat16* query, int64_t rows, int64_t dim, const TileRows* keys, int64_t count,
    const TileRows*, Coming& coming, BFloat16* memory, float* scores) {
    const int64_t value_dim = coming.bytes[1] / (int64_t)sizeof(BFloat16);
    coming.begin(units_of(rows, dim, value_dim));
    transpose_keys(keys, dim, count, coming, memory);
    memset(scores, 0, rows * TILE_KEYS * sizeof(float));
    add_rows<TILE_KEYS / TILE>(
        {query, 2, 2 * TILE}, rows, memory, 2 * TILE_KEYS, dim / 2, coming, scores, TILE_KEYS);
}

// Pairs of keys that `arrange_values` has left of `count`.
static inline int64_t pairs_of(int64_t count) {
    return (count > TILE_DEPTH ? TILE_KEYS : TILE_DEPTH) / 2;
}

// out [rows, dim] += weights [rows, TILE_KEYS], which are rounded, times the first `count` values.
// `memory`: room for TILE_KEYS values.
static inline void weigh_rows(
    float* weights, int64_t rows, const TileRows* values, int64_t count, int64_t dim,
    Coming& coming, BFloat16* memory, float* out) {
    const int64_t pairs = pairs_of(count);
    arrange_values(values, count, dim, coming, memory);
    narrow_weights(weights, rows);
    const Pairs left = {(const BFloat16*)weights, 2 * TILE_KEYS, 2};
    int64_t d = 0;
    for (; d + 4 * TILE <= dim; d += 4 * TILE)
        add_rows<4>(left, rows, memory + 2 * d, 2 * dim, pairs, coming, out + d, dim);
    for (; d < dim; d += TILE)
        add_rows<1>(left, rows, memory + 2 * d, 2 * dim, pairs, coming, out + d, dim);
}

// sums [TILE, BLOCK] += pairs of `right`, TILE side by side, times vectors of pairs `left`, one behind the
// other, over `count` steps.
static inline void add_columns(
    const BFloat16* left, const BFloat16* right, int64_t right_step, int64_t count, float* to) {
    __m512 sums[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; ++i) sums[i] = _mm512_loadu_ps(to + i * BLOCK);
    for (int64_t n = 0; n < count; ++n, left += 2 * BLOCK, right += right_step) {
        const __m512bh x = load_pairs(left);
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i)
            sums[i] = _mm512_dpbf16_ps(sums[i], x, splat_pair(right + 2 * i));
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE; ++i) _mm512_storeu_ps(to + i * BLOCK, sums[i]);
}

// Scores [TILE_KEYS, BLOCK] of the first `count` keys, of a block of a query as `arrange_query` leaves
// it; of what comes after those keys nothing is known.
static inline void dot_columns(
    const BFloat16* query, int64_t dim, const BFloat16* keys, int64_t count, float* scores) {
    memset(scores, 0, whole_vectors(count) * BLOCK * sizeof(float));
    for (int64_t n = 0; n < count; n += TILE)
        add_columns(query, keys + 2 * n, 2 * TILE_KEYS, dim / 2, scores + n * BLOCK);
}

static inline void transpose_values(const TileRows* values, int64_t count, int64_t dim, BFloat16* to) {
    Coming nothing;
    arrange_values(values, count, dim, nothing, to);
}

// out [dim, BLOCK] += values, as `turn_values` has left them, times weights [TILE_KEYS / 2, BLOCK, 2].
static inline void weigh_columns(
    const BFloat16* weights, const BFloat16* values, int64_t count, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += TILE)
        add_columns(weights, values + 2 * d, 2 * dim, pairs_of(count), out + d * BLOCK);
}

}  // namespace

#endif
