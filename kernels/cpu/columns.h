// Attention of 16 rows to one tile of keys by AMX, with rows in the lanes of vectors: scores are
// [keys, 16], sums of values [dim, 16]. What is done to the scores of a key is then done for all rows at
// once, and a row's maximum and sum come of vectors, not of what is in one. Every row comes to the same
// bits as by tiles.h, where a row's keys are in the lanes.

#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int64_t BLOCK = TILE;  // rows

// Scores [TILE_KEYS, BLOCK] of the first `count` keys, of a block of a query as `arrange_query` leaves
// it; of what comes after those keys nothing is known.
static inline void dot_columns(
    const BFloat16* query, int64_t dim, const TileRows* keys, int64_t count, float* scores) {
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

// Scores before `first` and from `last` on become minus infinity, row by row.
static inline void hide_columns(const int32_t* first, const int32_t* last, float* scores) {
    const __m512i from = _mm512_loadu_si512(first), to = _mm512_loadu_si512(last);
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    for (int32_t n = 0; n < TILE_KEYS; ++n) {
        const __m512i key = _mm512_set1_epi32(n);
        const __mmask16 is_seen = _mm512_cmple_epi32_mask(from, key) & _mm512_cmplt_epi32_mask(key, to);
        const __m512 x = _mm512_loadu_ps(scores + n * BLOCK);
        _mm512_storeu_ps(scores + n * BLOCK, _mm512_mask_blend_ps(is_seen, nothing, x));
    }
}

// Turns scores, times `scale`, into weights relative to each row's new maximum, in bfloat16 and two
// keys side by side: [TILE_KEYS / 2, BLOCK, 2]. Brings the rows' running sums to that maximum.
static inline void soften_columns(
    const float* scores, float scale, float* largest, float* total, float* out, int64_t dim,
    BFloat16* weights) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY), to_powers = _mm512_set1_ps(scale * LOG2_E);
    __m512 tops[4];
    for (int i = 0; i < 4; ++i) tops[i] = _mm512_loadu_ps(scores + i * BLOCK);
    for (int64_t n = 4; n < TILE_KEYS; n += 4)
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
    const __m512i in_turn = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    // As in a row of four vectors: first what is in the same lane, then lanes 8, 4, 2 and 1 apart.
    __m512 sums[TILE];
#pragma GCC unroll 1
    for (int lane = 0; lane < TILE; lane += 2) {
#pragma GCC unroll 4
        for (int i = 0; i < TILE_KEYS / TILE; ++i) {
            const float* at = scores + (i * TILE + lane) * BLOCK;
            const __m512 x = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at), to_powers, top));
            const __m512 y =
                power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at + BLOCK), to_powers, top));
            sums[lane] = i ? _mm512_add_ps(sums[lane], x) : x;
            sums[lane + 1] = i ? _mm512_add_ps(sums[lane + 1], y) : y;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
            _mm512_storeu_si512(
                weights + (i * TILE + lane) * BLOCK, _mm512_permutexvar_epi16(in_turn, both));
        }
    }
#pragma GCC unroll 4
    for (int apart = TILE / 2; apart; apart /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < apart; ++lane)
            sums[lane] = _mm512_add_ps(sums[lane], sums[lane + apart]);
    _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), factor, sums[0]));
}

// Values [count, dim] as tiles of [halves of the keys, dim / 16, 16 numbers, 32 keys] at `to`, with zeros
// to whole tiles.
static inline void turn_values(const TileRows* values, int64_t count, int64_t dim, BFloat16* to) {
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
