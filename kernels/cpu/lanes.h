// Attention in bfloat16 by vectors that add two products at a time to each of 16 lanes (AVX512-BF16), for
// CPUs without tiles: what tiles.h has for it. A score adds up its products two by two in the order of
// the numbers, and an output its values' two keys at a time, for few rows and for many; so both come to
// the same bits.

#pragma once

#include "narrow.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace {

static inline void begin_attention() {}

static inline void end_attention() {}

static inline __m512bh load_pairs(const BFloat16* at) {
    return (__m512bh)_mm512_loadu_si512(at);
}

// Two numbers, in each lane.
static inline __m512bh splat_pair(const BFloat16* at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// The first `count` keys, and as many more as fill 16, to [dim / 2, TILE_KEYS, 2] at `to`.
static inline const BFloat16* turn_keys(
    const TileRows* keys, int64_t dim, int64_t count, Coming& coming, BFloat16* to) {
    for (int64_t n = 0; n < count; n += TILE) {
        const TileRows& rows = keys[n / TILE];
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            __m512i x[TILE];
#pragma GCC unroll 16
            for (int64_t i = 0; i < TILE; ++i)
                x[i] = _mm512_loadu_si512(rows.at + i * rows.stride + d);
            for (int64_t i = 0; i < 256; i += dim) coming.ask();
            transpose(x);
#pragma GCC unroll 16
            for (int64_t i = 0; i < TILE; ++i)
                _mm512_storeu_si512(to + ((d / 2 + i) * TILE_KEYS + n) * 2, x[i]);
        }
    }
    return to;
}

// Scores [ROWS, TILE_KEYS] of keys as `turn_keys` leaves them.
template <int ROWS>
static inline void dot_some(
    const BFloat16* query, int64_t dim, const BFloat16* keys, Coming& coming, float* scores) {
    constexpr int VECTORS = TILE_KEYS / TILE;
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) sums[r][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 2, query += 2 * TILE, keys += 2 * TILE_KEYS) {
        coming.ask();
        __m512bh q[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) q[r] = splat_pair(query + 2 * r);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) {
            const __m512bh k = load_pairs(keys + i * 2 * TILE);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], q[r], k);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i)
            _mm512_storeu_ps(scores + r * TILE_KEYS + i * TILE, sums[r][i]);
}

// scores [rows, TILE_KEYS] of the first `count` keys, for up to TILE rows as `arrange_query` leaves them.
// `memory`: room for TILE_KEYS keys.
static inline void dot_rows(
    const BFloat16* query, int64_t rows, int64_t dim, const TileRows* keys, int64_t count,
    const TileRows*, Coming& coming, BFloat16* memory, float* scores) {
    turn_keys(keys, dim, count, coming, memory);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        dot_some<4>(query + 2 * r, dim, memory, coming, scores + r * TILE_KEYS);
    for (; r + 2 <= rows; r += 2)
        dot_some<2>(query + 2 * r, dim, memory, coming, scores + r * TILE_KEYS);
    if (r < rows) dot_some<1>(query + 2 * r, dim, memory, coming, scores + r * TILE_KEYS);
}

// Pairs of keys that `arrange_values` has left of `count`.
static inline int64_t pairs_of(int64_t count) {
    return (count > TILE_DEPTH ? TILE_KEYS : TILE_DEPTH) / 2;
}

// ROWS rows and COLUMNS vectors of `weigh_rows`.
template <int ROWS, int COLUMNS>
static inline void weigh_some(
    const float* weights, const BFloat16* values, int64_t pairs, int64_t dim, Coming& coming,
    float* out) {
    __m512 sums[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = _mm512_loadu_ps(out + r * dim + c * TILE);
    for (int64_t n = 0; n < pairs; ++n, values += 2 * dim) {
        coming.ask();
        __m512bh w[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
            w[r] = splat_pair((const BFloat16*)(weights + r * TILE_KEYS) + 2 * n);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            const __m512bh v = load_pairs(values + c * 2 * TILE);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], w[r], v);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_ps(out + r * dim + c * TILE, sums[r][c]);
}

template <int ROWS>
static inline void weigh_some_rows(
    const float* weights, const BFloat16* values, int64_t pairs, int64_t dim, Coming& coming,
    float* out) {
    int64_t d = 0;
    for (; d + 4 * TILE <= dim; d += 4 * TILE)
        weigh_some<ROWS, 4>(weights, values + 2 * d, pairs, dim, coming, out + d);
    for (; d < dim; d += TILE)
        weigh_some<ROWS, 1>(weights, values + 2 * d, pairs, dim, coming, out + d);
}

// out [rows, dim] += weights [rows, TILE_KEYS], which are rounded, times the first `count` values.
// `memory`: room for TILE_KEYS values.
static inline void weigh_rows(
    float* weights, int64_t rows, const TileRows* values, int64_t count, int64_t dim,
    Coming& coming, BFloat16* memory, float* out) {
    const int64_t pairs = pairs_of(count);
    arrange_values(values, count, dim, coming, memory);
    narrow_weights(weights, rows);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        weigh_some_rows<4>(weights + r * TILE_KEYS, memory, pairs, dim, coming, out + r * dim);
    for (; r + 2 <= rows; r += 2)
        weigh_some_rows<2>(weights + r * TILE_KEYS, memory, pairs, dim, coming, out + r * dim);
    if (r < rows)
        weigh_some_rows<1>(weights + r * TILE_KEYS, memory, pairs, dim, coming, out + r * dim);
}

// Scores [TILE_KEYS, BLOCK] of the first `count` keys, of a block of a query as `arrange_query` leaves
// it; of what comes after those keys nothing is known.
static inline void dot_columns(
    const BFloat16* query, int64_t dim, const BFloat16* keys, int64_t count, float* scores) {
    for (int64_t n = 0; n < count; n += TILE) {
        __m512 sums[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) sums[i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 2) {
            const __m512bh q = load_pairs(query + d * BLOCK);
            const BFloat16* key = keys + d * TILE_KEYS + 2 * n;
#pragma GCC unroll 16
            for (int i = 0; i < TILE; ++i)
                sums[i] = _mm512_dpbf16_ps(sums[i], q, splat_pair(key + 2 * i));
        }
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) _mm512_storeu_ps(scores + (n + i) * BLOCK, sums[i]);
    }
}

static inline void turn_values(const TileRows* values, int64_t count, int64_t dim, BFloat16* to) {
    Coming nothing;
    arrange_values(values, count, dim, nothing, to);
}

// out [dim, BLOCK] += values, as `turn_values` has left them, times weights [TILE_KEYS / 2, BLOCK, 2].
static inline void weigh_columns(
    const BFloat16* weights, const BFloat16* values, int64_t count, int64_t dim, float* out) {
    const int64_t pairs = pairs_of(count);
    for (int64_t d = 0; d < dim; d += TILE, values += 2 * TILE, out += TILE * BLOCK) {
        __m512 sums[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) sums[i] = _mm512_loadu_ps(out + i * BLOCK);
        for (int64_t n = 0; n < pairs; ++n) {
            const __m512bh w = load_pairs(weights + n * 2 * BLOCK);
            const BFloat16* value = values + n * 2 * dim;
#pragma GCC unroll 16
            for (int i = 0; i < TILE; ++i)
                sums[i] = _mm512_dpbf16_ps(sums[i], w, splat_pair(value + 2 * i));
        }
#pragma GCC unroll 16
        for (int i = 0; i < TILE; ++i) _mm512_storeu_ps(out + i * BLOCK, sums[i]);
    }
}

}  // namespace

#endif
