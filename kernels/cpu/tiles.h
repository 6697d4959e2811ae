// Scores and weighted sums of one tile of keys by AMX, in bfloat16: 16 rows at a time, by 16 keys or
// 16 numbers of the values. Rows are padded to 16; what comes of the padding is not read.

#pragma once

#include <math.h>

#include "vector.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int64_t TILE = 16;       // rows of a tile, and its 32-bit columns
constexpr int64_t TILE_DEPTH = 32;  // numbers of bfloat16 in a row of a tile
constexpr int64_t TILE_BYTES = 64;  // in a row of a tile
constexpr int64_t TILE_KEYS = 64;

// As _tile_loadconfig reads them.
struct __attribute__((packed)) TileShapes {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// What reads memory into tiles does not tell the compiler which: all that was written is written then.
static inline void settle(const void* at) {
    __asm__ volatile("" ::"r"(at) : "memory");
}

static inline TileShapes whole_tiles() {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shapes.row_bytes[i] = TILE_BYTES;
        shapes.rows[i] = TILE;
    }
    return shapes;
}

static inline void shape_tiles(const TileShapes& shapes) {
    settle(&shapes);
    _tile_loadconfig(&shapes);
}

// x[i][j], 32 bits each, becomes x[j][i].
static inline void transpose(__m512i* x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // Now x[4 a + b] has, in its four quarters, columns b, 4 + b, 8 + b and 12 + b of rows 4 a on.
    for (int b = 0; b < 4; ++b) {
        y[b] = _mm512_shuffle_i32x4(x[b], x[4 + b], 0x88);
        y[4 + b] = _mm512_shuffle_i32x4(x[b], x[4 + b], 0xdd);
        y[8 + b] = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0x88);
        y[12 + b] = _mm512_shuffle_i32x4(x[8 + b], x[12 + b], 0xdd);
    }
    for (int b = 0; b < 4; ++b) {
        x[b] = _mm512_shuffle_i32x4(y[b], y[8 + b], 0x88);
        x[8 + b] = _mm512_shuffle_i32x4(y[b], y[8 + b], 0xdd);
        x[4 + b] = _mm512_shuffle_i32x4(y[4 + b], y[12 + b], 0x88);
        x[12 + b] = _mm512_shuffle_i32x4(y[4 + b], y[12 + b], 0xdd);
    }
}

// Rows [rows, dim] of a query, which `row_at` finds, to [blocks of 16 rows, dim / 2, 16, 2] at `to`.
template <class RowAt>
static inline void arrange_query(const RowAt& row_at, int64_t rows, int64_t dim, BFloat16* to) {
    for (int64_t first = 0; first < rows; first += TILE) {
        const int64_t left = rows - first < TILE ? rows - first : TILE;
        const BFloat16* at[TILE];
        for (int64_t i = 0; i < left; ++i) at[i] = row_at(first + i);
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            __m512i x[16] = {};
            for (int64_t i = 0; i < left; ++i) x[i] = _mm512_loadu_si512(at[i] + d);
            transpose(x);
            memcpy(to + first * dim + d * TILE, x, sizeof x);
        }
    }
}

// Where 16 keys, or their values, lie.
struct TileRows {
    const BFloat16* at;
    int64_t stride;  // from one to the next, in numbers
};

// Asks for COUNT lines of each of `num_rows` rows, from number `at` of row `first` on.
template <int COUNT = 1>
static inline void ask_for(const TileRows& rows, int64_t first, int64_t num_rows, int64_t at) {
    const BFloat16* row = rows.at + first * rows.stride + at;
    for (int64_t i = 0; i < num_rows; ++i, row += rows.stride) ask_for(row, COUNT * LINE);
}

// scores [rows, TILE_KEYS] of the first `count` keys. Keys are rows here and the query's rows are
// columns, so that keys are read where they lie. `next`: as many rows that are read after them;
// `columns`: room for 16 by 16 floats.
static inline void dot_tiles(
    const BFloat16* query, int64_t rows, int64_t dim, const TileRows* keys, int64_t count,
    const TileRows* next, float* columns, float* scores) {
    settle(query);
    for (int64_t r = 0; r < rows; r += TILE) {
        const BFloat16* columns_of = query + r * dim;
        const int64_t left = rows - r;
        for (int64_t n = 0; n < count; n += TILE, ++keys) {
            _tile_zero(0);
            for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
                if (r == 0) ask_for(next[n / TILE], 0, TILE, d);
                _tile_loadd(4, keys->at + d, keys->stride * sizeof(BFloat16));
                _tile_loadd(5, columns_of + d * TILE, TILE_BYTES);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, columns, TILE_BYTES);
            float* to = scores + r * TILE_KEYS + n;
            if (left <= 4) {
                for (int64_t i = 0; i < TILE; i += 4) {
                    __m128 x[4];
                    for (int64_t j = 0; j < 4; ++j) x[j] = _mm_load_ps(columns + (i + j) * TILE);
                    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
                    for (int64_t j = 0; j < left; ++j) _mm_storeu_ps(to + j * TILE_KEYS + i, x[j]);
                }
            } else {
                __m512i x[16];
                memcpy(x, columns, sizeof x);
                transpose(x);
                for (int64_t j = 0; j < TILE; ++j) memcpy(to + j * TILE_KEYS, &x[j], TILE_BYTES);
            }
        }
        keys -= (count + TILE - 1) / TILE;
    }
}

// Values [count, dim] to [TILE_KEYS / 2, dim, 2] at `to`, with zeros to whole tiles.
static inline void arrange_values(
    const TileRows* values, int64_t count, int64_t dim, BFloat16* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int64_t whole = count > TILE_DEPTH ? TILE_KEYS : TILE_DEPTH;
    for (int64_t n = 0; n < whole; n += 2) {
        const TileRows& rows = values[n / TILE];
        const BFloat16* first_row = rows.at + n % TILE * rows.stride;
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            const __mmask32 inside = dim - d < TILE_DEPTH ? 0xffff : 0xffffffff;
            __m512i pair[2] = {};
            for (int64_t i = 0; i < 2; ++i)
                if (n + i < count)
                    pair[i] = _mm512_maskz_loadu_epi16(inside, first_row + i * rows.stride + d);
            const __m512i first = _mm512_permutex2var_epi16(pair[0], low, pair[1]);
            memcpy(to + n * dim + 2 * d, &first, TILE_BYTES);
            if (dim - d < TILE_DEPTH) break;
            const __m512i second = _mm512_permutex2var_epi16(pair[0], high, pair[1]);
            memcpy(to + n * dim + 2 * d + TILE_DEPTH, &second, TILE_BYTES);
        }
    }
}

// out [rows, dim] += weights [rows, TILE_KEYS] times values, as `arrange_values` has left them. The
// weights become bfloat16 where they lie.
static inline void weigh_tiles(
    float* weights, int64_t rows, const BFloat16* values, int64_t count, int64_t dim, float* out) {
    for (int64_t r = 0; r < rows; ++r) {
        float* row = weights + r * TILE_KEYS;
        __m512 x[4];
        memcpy(x, row, sizeof x);
        const __m512bh rounded[2] = {
            _mm512_cvtne2ps_pbh(x[1], x[0]), _mm512_cvtne2ps_pbh(x[3], x[2])};
        memcpy(row, rounded, sizeof rounded);
    }
    settle(weights);
    constexpr int64_t weight_bytes = TILE_KEYS * sizeof(float);
    const int64_t out_bytes = dim * (int64_t)sizeof(float), pair_bytes = 2 * dim * (int64_t)2;
    for (int64_t r = 0; r < rows; r += TILE) {
        const BFloat16* row = (const BFloat16*)(weights + r * TILE_KEYS);
        _tile_loadd(4, row, weight_bytes);
        if (count > TILE_DEPTH) _tile_loadd(5, row + TILE_DEPTH, weight_bytes);
        for (int64_t d = 0; d < dim; d += TILE) {
            float* to = out + r * dim + d;
            _tile_loadd(0, to, out_bytes);
            _tile_loadd(6, values + 2 * d, pair_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (count > TILE_DEPTH) {
                _tile_loadd(7, values + TILE_DEPTH * dim + 2 * d, pair_bytes);
                _tile_dpbf16ps(0, 5, 7);
            }
            _tile_stored(0, to, out_bytes);
        }
    }
}

// The same without tiles, for few rows, and to the same bits: a tile adds up the even inputs and the
// odd ones by themselves, and both to the sum (Intel's manual, TDPBF16PS), with numbers too small to
// be normal taken for zeros. 32 times COUNT numbers of the values at a time, from `at` on: of each
// vector those at even places are one vector of floats and those at odd places another.
template <int ROWS, int COUNT>
static inline void weigh_numbers(
    const float* weights, const TileRows* values, int64_t count, const TileRows* next, int64_t dim,
    int64_t at, float* out) {
    const __m512i low = _mm512_set_epi32(
        23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int64_t first = 0; first < count; first += TILE_DEPTH) {
        const int64_t last = first + TILE_DEPTH < count ? first + TILE_DEPTH : count;
        __m512 sums[2][ROWS][COUNT][2];
        for (int odd = 0; odd < 2; ++odd)
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < COUNT; ++c)
                    sums[odd][r][c][0] = sums[odd][r][c][1] = _mm512_setzero_ps();
        for (int64_t n = first; n < last; n += TILE) {
            const TileRows& rows = values[n / TILE];
            const int64_t left = last - n, num_rows = left < TILE ? left : TILE;
            for (int64_t i = 0; i < num_rows; i += 2) {
                if (next) ask_for<COUNT>(next[n / TILE], i, 2, at);
                for (int odd = 0; odd < 2; ++odd) {
                    if (odd && i + 1 == num_rows) break;
                    const BFloat16* value = rows.at + (i + odd) * rows.stride + at;
                    __m512 w[ROWS];
                    for (int r = 0; r < ROWS; ++r)
                        w[r] = _mm512_set1_ps(weights[r * TILE_KEYS + n + i + odd]);
                    for (int c = 0; c < COUNT; ++c) {
                        const __m512i both = _mm512_loadu_si512(value + c * TILE_DEPTH);
                        const __m512 even_places = (__m512)_mm512_slli_epi32(both, 16);
                        const __m512 odd_places = (__m512)_mm512_and_si512(both, upper);
                        for (int r = 0; r < ROWS; ++r) {
                            __m512* s = sums[odd][r][c];
                            s[0] = _mm512_fmadd_ps(w[r], even_places, s[0]);
                            s[1] = _mm512_fmadd_ps(w[r], odd_places, s[1]);
                        }
                    }
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            for (int c = 0; c < COUNT; ++c) {
                const __m512 even_places = sums[0][r][c][0] + sums[1][r][c][0];
                const __m512 odd_places = sums[0][r][c][1] + sums[1][r][c][1];
                float* to = out + r * dim + at + c * TILE_DEPTH;
                const __m512 lower = _mm512_permutex2var_ps(even_places, low, odd_places);
                const __m512 higher = _mm512_permutex2var_ps(even_places, high, odd_places);
                _mm512_storeu_ps(to, _mm512_loadu_ps(to) + lower);
                _mm512_storeu_ps(to + TILE, _mm512_loadu_ps(to + TILE) + higher);
            }
        }
    }
}

// The last 16 numbers of values whose width is no multiple of 32.
template <int ROWS>
static inline void weigh_rest(
    const float* weights, const TileRows* values, int64_t count, int64_t dim, int64_t at,
    float* out) {
    for (int64_t first = 0; first < count; first += TILE_DEPTH) {
        const int64_t last = first + TILE_DEPTH < count ? first + TILE_DEPTH : count;
        Floats sums[2][ROWS] = {};
        for (int64_t n = first; n < last; ++n) {
            const TileRows& rows = values[n / TILE];
            const Floats value = load(rows.at + n % TILE * rows.stride + at);
            for (int r = 0; r < ROWS; ++r)
                sums[n % 2][r] += splat(weights[r * TILE_KEYS + n]) * value;
        }
        for (int r = 0; r < ROWS; ++r) {
            float* to = out + r * dim + at;
            store(to, load(to) + (sums[0][r] + sums[1][r]));
        }
    }
}

template <int ROWS>
static inline void weigh_few(
    const float* weights, const TileRows* values, int64_t count, const TileRows* next, int64_t dim,
    float* out) {
    int64_t at = 0;
    for (; at + 2 * TILE_DEPTH <= dim; at += 2 * TILE_DEPTH)
        weigh_numbers<ROWS, 2>(weights, values, count, next, dim, at, out);
    for (; at + TILE_DEPTH <= dim; at += TILE_DEPTH)
        weigh_numbers<ROWS, 1>(weights, values, count, next, dim, at, out);
    if (at < dim) weigh_rest<ROWS>(weights, values, count, dim, at, out);
}

// Turns a row's scores [TILE_KEYS], times `scale`, into weights relative to its new maximum, and brings
// the row's running sums to that maximum.
static inline void soften_row(
    float* scores, float scale, float* largest, float* total, float* out, int64_t dim) {
    const __m512 to_powers = _mm512_set1_ps(scale * LOG2_E);
    __m512 x[4];
    memcpy(x, scores, sizeof x);
    __m512 top = _mm512_max_ps(x[0], _mm512_set1_ps(-INFINITY));
    for (int i = 1; i < 4; ++i) top = _mm512_max_ps(x[i], top);
    const float highest = _mm512_reduce_max_ps(top);
    const float before = *largest, now = highest > before ? highest : before;
    __m512 factor = _mm512_set1_ps(1);
    if (now != before) {
        const __m512 less = _mm512_sub_ps(_mm512_set1_ps(before), _mm512_set1_ps(now));
        factor = power_of_two(_mm512_mul_ps(less, to_powers));
        for (int64_t d = 0; d < dim; d += TILE)
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), factor));
        *largest = now;
    }
    const __m512 least = now == -INFINITY ? _mm512_setzero_ps()  // it has seen nothing yet
                                          : _mm512_mul_ps(_mm512_set1_ps(now), to_powers);
    for (int i = 0; i < 4; ++i) x[i] = power_of_two(_mm512_fmsub_ps(x[i], to_powers, least));
    memcpy(scores, x, sizeof x);
    const __m512 sums = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]), x[3]);
    const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(sums));
    *total = _mm512_cvtss_f32(_mm512_fmadd_ps(_mm512_set1_ps(*total), factor, sum));
}

// Rounds weights [rows, TILE_KEYS] to bfloat16 and leaves them floats.
static inline void round_weights(float* weights, int64_t rows) {
    for (int64_t i = 0; i < rows * TILE_KEYS; i += WIDTH) {
        BFloat16 narrow[WIDTH];
        store(narrow, load(weights + i));
        store(weights + i, load(narrow));
    }
}

}  // namespace

#endif
