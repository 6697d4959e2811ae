// What attention in bfloat16 has in common, whether tiles multiply (bf16_amx.h) or vectors (bf16_avx512.h): how
// a tile of 64 keys is arranged for them, and how scores become weights. Of few rows a row's keys are in
// the lanes of vectors; of many, 16 rows are: scores are [keys, 16] then, sums of values [dim, 16], and
// what is done to the scores of a key is done for all rows at once, a row's maximum and sum coming of
// vectors and not of what is in one. Either way a row comes to the same bits.

#pragma once

#include <math.h>

#include "vector.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t TILE = 16;        // rows of a tile, and its 32-bit columns
constexpr int64_t TILE_DEPTH = 32;  // numbers of bfloat16 in a row of a tile
constexpr int64_t TILE_BYTES = 64;  // in a row of a tile
constexpr int64_t TILE_KEYS = 64;
constexpr int64_t BLOCK = TILE;     // rows, of many

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

// The first 32 numbers of 16 rows, which lie `stride` apart, to [16, width, 2] at `to`, of which 16 columns
// are written. Rows from `count` on are taken for zeros.
static inline void transpose_block(
    const BFloat16* rows, int64_t stride, int64_t count, int64_t width, BFloat16* to) {
    __m512i x[TILE];
#pragma GCC unroll 16
    for (int64_t i = 0; i < TILE; ++i)
        x[i] = _mm512_maskz_loadu_epi16(i < count ? 0xffffffff : 0, rows + i * stride);
    transpose(x);
#pragma GCC unroll 16
    for (int64_t i = 0; i < TILE; ++i) _mm512_storeu_si512(to + 2 * i * width, x[i]);
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

// The tile that is read after this one, which is prefetched meanwhile, a share for each piece of work: a core has
// room for some dozens of lines that are on their way, and what it reads itself then waits with them.
struct Coming {
    TileRows rows[2 * TILE_KEYS / TILE];  // keys, then values
    int64_t bytes[2] = {};                // of a row of either
    int64_t count = 0;                    // of rows: 0 where it is not known which tile that is

    // All will have been prefetched after so many units of work.
    void begin(int64_t work) {
        if (!count) return;
        int64_t strides = 0;
        for (int64_t of_row : bytes) strides += (of_row + STRIDE - 1) / STRIDE * TILE_KEYS;
        share = strides * ONE / work + 1;
        next_group();
    }

    void prefetch_during(int64_t work) {
        for (due += work * share; due >= ONE; due -= ONE) prefetch_next();
    }

private:
    static constexpr int64_t STRIDE = 2 * LINE;  // bytes that are prefetched at a time
    static constexpr int64_t ONE = 1 << 20;

    int64_t share = 0, due = 0;  // of strides, by unit of work and in all: ONE is one
    int64_t group = -1, rows_left = 0, bytes_left = 0;
    const char* row = nullptr;

    void next_group() {
        if (++group == count / TILE) {
            share = due = 0;
            return;
        }
        row = (const char*)rows[group].at;
        rows_left = TILE;
        bytes_left = row_bytes();
    }

    int64_t row_bytes() const { return bytes[group / (TILE_KEYS / TILE)]; }

    void prefetch_next() {
        const char* at = row + row_bytes() - bytes_left;
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + LINE, 0, 2);
        bytes_left -= STRIDE;
        if (bytes_left > 0) return;
        bytes_left = row_bytes();
        row += rows[group].stride * (int64_t)sizeof(BFloat16);
        if (!--rows_left) next_group();
    }
};

// Units of work are multiplications of vectors. What reads a tile from the second cache counts for less than it
// takes: lines that are prefetched meanwhile are in its way.
constexpr int64_t BLOCK_UNITS = 20;        // to transpose a block of keys
constexpr int64_t ARRANGED_PER_UNIT = 8;   // numbers of two values

// Values [count, dim] to [TILE_KEYS / 2, dim, 2] at `to`, with zeros to whole tiles.
static inline void arrange_values(
    const TileRows* values, int64_t count, int64_t dim, Coming& coming, BFloat16* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int64_t whole = count > TILE_DEPTH ? TILE_KEYS : TILE_DEPTH;
    for (int64_t n = 0; n < whole; n += 2) {
        coming.prefetch_during(dim / ARRANGED_PER_UNIT);
        const TileRows& rows = values[n / TILE];
        const BFloat16 *first = rows.at + n % TILE * rows.stride, *second = first + rows.stride;
        const __mmask32 has_first = n < count ? 0xffffffff : 0;
        const __mmask32 has_second = n + 1 < count ? 0xffffffff : 0;
        for (int64_t d = 0; d < dim; d += TILE_DEPTH, to += 2 * TILE_DEPTH) {
            const bool is_whole = dim - d >= TILE_DEPTH;
            const __mmask32 inside = is_whole ? 0xffffffff : 0xffff;
            const __m512i x = _mm512_maskz_loadu_epi16(has_first & inside, first + d);
            const __m512i y = _mm512_maskz_loadu_epi16(has_second & inside, second + d);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, low, y));
            if (is_whole)
                _mm512_storeu_si512(to + TILE_DEPTH, _mm512_permutex2var_epi16(x, high, y));
            else
                to -= TILE_DEPTH;
        }
    }
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

// Makes bfloat16 of the weights of rows [rows, TILE_KEYS], where they lie.
static inline void narrow_weights(float* weights, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
        float* row = weights + r * TILE_KEYS;
        __m512 x[4];
        memcpy(x, row, sizeof x);
        const __m512bh rounded[2] = {
            _mm512_cvtne2ps_pbh(x[1], x[0]), _mm512_cvtne2ps_pbh(x[3], x[2])};
        memcpy(row, rounded, sizeof rounded);
    }
}

// [count, BLOCK] to [BLOCK, stride], or back; `count` is a multiple of 16.
static inline void columns_to_rows(const float* from, int64_t count, int64_t stride, float* to) {
    for (int64_t n = 0; n < count; n += TILE) {
        __m512i x[16];
        memcpy(x, from + n * BLOCK, sizeof x);
        transpose(x);
        for (int64_t r = 0; r < BLOCK; ++r) memcpy(to + r * stride + n, &x[r], TILE_BYTES);
    }
}

static inline void rows_to_columns(const float* from, int64_t count, int64_t stride, float* to) {
    for (int64_t n = 0; n < count; n += TILE) {
        __m512i x[16];
        for (int64_t r = 0; r < BLOCK; ++r) memcpy(&x[r], from + r * stride + n, TILE_BYTES);
        transpose(x);
        memcpy(to + n * BLOCK, x, sizeof x);
    }
}

// Keys in whole vectors, of the first `count`.
static inline int64_t whole_vectors(int64_t count) {
    return (count + TILE - 1) / TILE * TILE;
}

// Scores of the first `count` keys before `first` and from `last` on become minus infinity, row by row; so
// do those behind them that fill a vector.
static inline void hide_columns(
    const int32_t* first, const int32_t* last, int64_t count, float* scores) {
    const __m512i from = _mm512_loadu_si512(first), to = _mm512_loadu_si512(last);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    for (int32_t n = 0; n < whole_vectors(count); ++n) {
        const __m512i key = _mm512_set1_epi32(n);
        const __mmask16 is_seen = _mm512_cmple_epi32_mask(from, key) & _mm512_cmplt_epi32_mask(key, to);
        const __m512 x = _mm512_loadu_ps(scores + n * BLOCK);
        _mm512_storeu_ps(scores + n * BLOCK, _mm512_mask_blend_ps(is_seen, nothing, x));
    }
}

// Weights of scores [VECTORS * TILE, BLOCK] relative to the powers `top`, in bfloat16 and two keys side by
// side; what they add up to in each row.
template <int VECTORS>
static inline __m512 weights_of(
    const float* scores, __m512 to_powers, __m512 top, BFloat16* weights) {
    const __m512i interleaved = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    // As in a row of four vectors: first what is in the same lane, then lanes 8, 4, 2 and 1 apart.
    __m512 sums[TILE];
#pragma GCC unroll 1
    for (int lane = 0; lane < TILE; lane += 2) {
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) {
            const float* at = scores + (i * TILE + lane) * BLOCK;
            const __m512 x = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at), to_powers, top));
            const __m512 y =
                power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at + BLOCK), to_powers, top));
            sums[lane] = i ? _mm512_add_ps(sums[lane], x) : x;
            sums[lane + 1] = i ? _mm512_add_ps(sums[lane + 1], y) : y;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
            _mm512_storeu_si512(
                weights + (i * TILE + lane) * BLOCK, _mm512_permutexvar_epi16(interleaved, both));
        }
    }
#pragma GCC unroll 4
    for (int apart = TILE / 2; apart; apart /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < apart; ++lane)
            sums[lane] = _mm512_add_ps(sums[lane], sums[lane + apart]);
    return sums[0];
}

using WeightsOf = __m512(const float*, __m512, __m512, BFloat16*);

// Turns scores of the first `count` keys, times `scale`, into weights relative to each row's new maximum, in
// bfloat16 and two keys side by side: [TILE_KEYS / 2, BLOCK, 2], of which those of whole tiles are written.
// Brings the rows' running sums to that maximum.
static inline void soften_columns(
    const float* scores, int64_t count, float scale, float* largest, float* total, float* out,
    int64_t dim, BFloat16* weights) {
    const int64_t whole = whole_vectors(count);
    const __m512 nothing = _mm512_set1_ps(-INFINITY), to_powers = _mm512_set1_ps(scale * LOG2_E);
    __m512 tops[4];
    for (int i = 0; i < 4; ++i) tops[i] = _mm512_loadu_ps(scores + i * BLOCK);
    for (int64_t n = 4; n < whole; n += 4)
        for (int i = 0; i < 4; ++i)
            tops[i] = _mm512_max_ps(_mm512_loadu_ps(scores + (n + i) * BLOCK), tops[i]);
    const __m512 before = _mm512_loadu_ps(largest);
    const __m512 now = _mm512_max_ps(
        _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3])), before);
    const __mmask16 has_changed = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ);
    __m512 factor = _mm512_set1_ps(1);
    if (has_changed) {
        const __m512 less = _mm512_mul_ps(_mm512_sub_ps(before, now), to_powers);
        factor = _mm512_mask_mov_ps(factor, has_changed, power_of_two(less));
        for (int64_t d = 0; d < dim; ++d) {
            float* at = out + d * BLOCK;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), factor));
        }
        _mm512_storeu_ps(largest, now);
    }
    // Of rows that have seen nothing yet there is no maximum.
    const __mmask16 has_seen = _mm512_cmp_ps_mask(now, nothing, _CMP_NEQ_UQ);
    const __m512 top = _mm512_maskz_mul_ps(has_seen, now, to_powers);
    constexpr WeightsOf* WEIGHTS_OF[] = {
        weights_of<1>, weights_of<2>, weights_of<3>, weights_of<4>};
    const __m512 sum = WEIGHTS_OF[whole / TILE - 1](scores, to_powers, top, weights);
    if (whole % TILE_DEPTH) memset(weights + whole * BLOCK, 0, TILE * BLOCK * sizeof(BFloat16));
    _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factor, sum));
}

}  // namespace

#endif
