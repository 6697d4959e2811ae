// Matmuls in bfloat16 by tiles (AMX): 16 rows at a time, by 16 outputs, keys or numbers of values. Rows
// are padded to 16; what comes of the padding is not read. bf16_avx512.h has what is here for attention by
// vectors.

#pragma once

#include "bf16_attention.h"

#if defined(__AMX_BF16__)

namespace {

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

static inline void begin_attention() {
    shape_tiles(whole_tiles());
}

static inline void end_attention() {
    _tile_release();
}

// Prefetches COUNT lines of each of `num_rows` rows, from number `at` of row `first` on.
template <int COUNT = 1>
static inline void prefetch(const TileRows& rows, int64_t first, int64_t num_rows, int64_t at) {
    const BFloat16* row = rows.at + first * rows.stride + at;
    for (int64_t i = 0; i < num_rows; ++i, row += rows.stride) prefetch(row, COUNT * LINE);
}

// scores [rows, TILE_KEYS] of the first `count` keys. Keys are rows here and the query's rows are
// columns, so that keys are read where they lie. `values`, which are read after them, are prefetched;
// `memory`: room for TILE_KEYS keys.
static inline void dot_rows(
    const BFloat16* query, int64_t rows, int64_t dim, const TileRows* keys, int64_t count,
    const TileRows* values, Coming&, BFloat16* memory, float* scores) {
    float* columns = (float*)memory;
    settle(query);
    for (int64_t r = 0; r < rows; r += TILE) {
        const BFloat16* columns_of = query + r * dim;
        const int64_t left = rows - r;
        for (int64_t n = 0; n < count; n += TILE, ++keys) {
            _tile_zero(0);
            for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
                if (r == 0) prefetch(values[n / TILE], 0, TILE, d);
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

// out [rows, dim] += weights [rows, TILE_KEYS] times values, as `arrange_values` has left them. The
// weights become bfloat16 where they lie.
static inline void weigh_tiles(
    float* weights, int64_t rows, const BFloat16* values, int64_t count, int64_t dim, float* out) {
    narrow_weights(weights, rows);
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
                if (next) prefetch<COUNT>(next[n / TILE], i, 2, at);
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

// Rounds weights [rows, TILE_KEYS] to bfloat16 and leaves them floats.
static inline void round_weights(float* weights, int64_t rows) {
    for (int64_t i = 0; i < rows * TILE_KEYS; i += WIDTH) {
        BFloat16 narrow[WIDTH];
        store(narrow, load(weights + i));
        store(weights + i, load(narrow));
    }
}


// out [rows, dim] += weights [rows, TILE_KEYS], which are rounded, times the first `count` values.
// `memory`: room for TILE_KEYS values.
static inline void weigh_rows(
    float* weights, int64_t rows, const TileRows* values, int64_t count, int64_t dim,
    Coming& coming, BFloat16* memory, float* out) {
    if (rows > 2) {
        arrange_values(values, count, dim, coming, memory);
        weigh_tiles(weights, rows, memory, count, dim, out);
        return;
    }
    round_weights(weights, rows);
    const TileRows* next = coming.count ? coming.rows : nullptr;
    if (rows == 2)
        weigh_few<2>(weights, values, count, next, dim, out);
    else
        weigh_few<1>(weights, values, count, next, dim, out);
}

// Keys as `dot_columns` reads them: where they lie.
static inline const TileRows* transpose_keys(
    const TileRows* keys, int64_t, int64_t, Coming&, BFloat16*) {
    return keys;
}

// Scores [TILE_KEYS, BLOCK] of the first `count` keys, of a block of a query as `arrange_query` leaves
// it; of what comes after those keys nothing is known.
static inline void dot_columns(
    const BFloat16* query, int64_t dim, const TileRows* keys, int64_t count, float* scores) {
    settle(query);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
        const auto bytes = [&](int64_t n) { return keys[n].stride * (int64_t)sizeof(BFloat16); };
        _tile_loadd(7, query + d * TILE, TILE_BYTES);
        _tile_loadd(4, keys[0].at + d, bytes(0));
        if (count > TILE) _tile_loadd(5, keys[1].at + d, bytes(1));
        _tile_dpbf16ps(0, 4, 7);
        if (count > 2 * TILE) _tile_loadd(6, keys[2].at + d, bytes(2));
        if (count > TILE) _tile_dpbf16ps(1, 5, 7);
        if (count > 3 * TILE) _tile_loadd(4, keys[3].at + d, bytes(3));
        if (count > 2 * TILE) _tile_dpbf16ps(2, 6, 7);
        if (count > 3 * TILE) _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, TILE_BYTES);
    _tile_stored(1, scores + TILE * BLOCK, TILE_BYTES);
    _tile_stored(2, scores + 2 * TILE * BLOCK, TILE_BYTES);
    _tile_stored(3, scores + 3 * TILE * BLOCK, TILE_BYTES);
}

// Values [count, dim] as tiles of [halves of the keys, dim / 16, 16 numbers, 32 keys] at `to`, with zeros
// to whole tiles.
static inline void transpose_values(const TileRows* values, int64_t count, int64_t dim, BFloat16* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t half = 0; half < count; half += TILE_DEPTH) {
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            const bool is_whole = dim - d >= TILE_DEPTH;
            const __mmask32 inside = is_whole ? 0xffffffff : 0xffff;
            __m512i lower[16], upper[16];
            for (int64_t i = 0; i < 16; ++i) {
                __m512i pair[2] = {};
                for (int64_t j = 0; j < 2; ++j) {
                    const int64_t n = half + 2 * i + j;
                    const TileRows& rows = values[n / TILE];
                    if (n < count)
                        pair[j] =
                            _mm512_maskz_loadu_epi16(inside, rows.at + n % TILE * rows.stride + d);
                }
                lower[i] = _mm512_permutex2var_epi16(pair[0], low, pair[1]);
                upper[i] = _mm512_permutex2var_epi16(pair[0], high, pair[1]);
            }
            BFloat16* tile = to + half * dim + d * TILE_DEPTH;
            transpose(lower);
            memcpy(tile, lower, sizeof lower);
            if (!is_whole) break;
            transpose(upper);
            memcpy(tile + TILE * TILE_DEPTH, upper, sizeof upper);
        }
    }
}

// out [dim, BLOCK] += values, as `turn_values` has left them, times weights [TILE_KEYS / 2, BLOCK, 2].
static inline void weigh_columns(
    const BFloat16* weights, const BFloat16* values, int64_t count, int64_t dim, float* out) {
    constexpr int64_t size = TILE * TILE_DEPTH;
    const bool has_two = count > TILE_DEPTH;
    const BFloat16* others = values + TILE_DEPTH * dim;
    settle(weights);
    _tile_loadd(6, weights, TILE_BYTES);
    if (has_two) _tile_loadd(7, weights + size, TILE_BYTES);
    int64_t d = 0;
    for (; d + 2 * TILE <= dim; d += 2 * TILE) {
        float* to = out + d * BLOCK;
        const BFloat16* at = values + d * TILE_DEPTH;
        _tile_loadd(0, to, TILE_BYTES);
        _tile_loadd(2, at, TILE_BYTES);
        _tile_loadd(1, to + TILE * BLOCK, TILE_BYTES);
        _tile_loadd(3, at + size, TILE_BYTES);
        _tile_dpbf16ps(0, 2, 6);
        _tile_dpbf16ps(1, 3, 6);
        if (has_two) {
            _tile_loadd(4, others + d * TILE_DEPTH, TILE_BYTES);
            _tile_loadd(5, others + d * TILE_DEPTH + size, TILE_BYTES);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, to, TILE_BYTES);
        _tile_stored(1, to + TILE * BLOCK, TILE_BYTES);
    }
    if (d < dim) {
        float* to = out + d * BLOCK;
        _tile_loadd(0, to, TILE_BYTES);
        _tile_loadd(2, values + d * TILE_DEPTH, TILE_BYTES);
        _tile_dpbf16ps(0, 2, 6);
        if (has_two) {
            _tile_loadd(3, others + d * TILE_DEPTH, TILE_BYTES);
            _tile_dpbf16ps(0, 3, 7);
        }
        _tile_stored(0, to, TILE_BYTES);
    }
}

}  // namespace

#endif
