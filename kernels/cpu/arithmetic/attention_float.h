// Attention in floats: scores of a tile of keys, weights of scores, weighted sums of values.

#pragma once

#include <math.h>

#include "vector.h"

namespace {

constexpr int64_t KEYS = 64;         // in a tile
constexpr float NOTHING = -INFINITY;

// Tiles of registers: so many rows and keys (or vectors of values) at a time. The sums fill most of
// the registers there are, so that multiplications wait for nothing.
#if AIOENGINE_WIDTH == 16 || defined(__aarch64__)  // of 32 registers
constexpr int TILE_ROWS = 4;
#else
constexpr int TILE_ROWS = 3;
#endif
constexpr int TILE_COLUMNS = 4;

static int64_t round_up(int64_t n) {
    return (n + WIDTH - 1) / WIDTH * WIDTH;
}

static int64_t greater(int64_t a, int64_t b) {
    return a > b ? a : b;
}

template <class T>
static void widen(const T* from, int64_t dim, float* to) {
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) store(to + d, load(from + d));
    if (d == dim) return;
    store(to + d, Floats{});
    for (; d < dim; ++d) to[d] = to_float(from[d]);
}

// Sums of each of four vectors' elements.
static inline void sum_four(const Floats* x, float* sums) {
#if AIOENGINE_WIDTH == 8
    const __m256 a = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]);
    const __m256 b = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    const __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
#elif AIOENGINE_WIDTH == 16
    __m256 y[4];
    for (int i = 0; i < 4; ++i) {
        const __m512 z = (__m512)x[i];
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z), 1));
        y[i] = _mm256_add_ps(_mm512_castps512_ps256(z), high);
    }
    const __m256 a = _mm256_hadd_ps(y[0], y[1]);
    const __m256 b = _mm256_hadd_ps(y[2], y[3]);
    const __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
#elif defined(__aarch64__)
    const float32x4_t a = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
    const float32x4_t b = vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
    vst1q_f32(sums, vpaddq_f32(a, b));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(x[i]);
#endif
}

// scores[r][n] = query[r] . keys[n] for ROWS rows and four keys.
template <int ROWS, class T>
static inline void dot_tile(
    const float* query, int64_t stride, const T* const* keys, int64_t dim, float* scores) {
    Floats sums[ROWS][TILE_COLUMNS] = {};
    for (int64_t d = 0; d < dim; d += WIDTH) {
        Floats q[ROWS];
        for (int r = 0; r < ROWS; ++r) q[r] = load(query + r * stride + d);
        for (int n = 0; n < TILE_COLUMNS; ++n) {
            const Floats k = load(keys[n] + d);
            for (int r = 0; r < ROWS; ++r) sums[r][n] += q[r] * k;
        }
    }
    for (int r = 0; r < ROWS; ++r) sum_four(sums[r], scores + r * KEYS);
}

// `keys` has room for four after the last; a tile beyond the end repeats the last key. `next`: as many
// rows that are read after them.
template <class T>
static void dot(
    const float* query, int64_t rows, int64_t dim, const T** keys, int64_t count,
    const T* const* next, float* scores) {
    const int64_t whole = (count + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    for (int64_t n = count; n < whole; ++n) keys[n] = keys[count - 1];
    for (int64_t n = 0; n < whole; n += TILE_COLUMNS) {
        for (int64_t i = n; next && i < n + TILE_COLUMNS && i < count; ++i)
            prefetch_ahead(next[i], dim * sizeof(T));
        int64_t r = 0;
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
            dot_tile<TILE_ROWS>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
        for (; r + 2 <= rows; r += 2)
            dot_tile<2>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
        for (; r < rows; ++r)
            dot_tile<1>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
    }
}

// out[r][d] += sum over n of weights[r][n] * values[n][d] for ROWS rows and COLUMNS vectors.
template <int ROWS, int COLUMNS, class T>
static inline void weigh_tile(
    const float* weights, const T* const* values, int64_t count, const T* const* next, int64_t at,
    float* out, int64_t stride) {
    Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load(out + r * stride + at + c * WIDTH);
    for (int64_t n = 0; n < count; ++n) {
        if (next) prefetch_ahead(next[n] + at, COLUMNS * WIDTH * sizeof(T));
        Floats w[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) w[r] = splat(weights[r * KEYS + n]);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats v = load(values[n] + at + c * WIDTH);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r][c] += w[r] * v;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) store(out + r * stride + at + c * WIDTH, sums[r][c]);
}

template <int ROWS, class T>
static void weigh_rows(
    const float* weights, const T* const* values, int64_t count, const T* const* next, int64_t dim,
    float* out) {
    int64_t at = 0;
    for (; at + TILE_COLUMNS * WIDTH <= dim; at += TILE_COLUMNS * WIDTH)
        weigh_tile<ROWS, TILE_COLUMNS>(weights, values, count, next, at, out, dim);
    for (; at < dim; at += WIDTH) weigh_tile<ROWS, 1>(weights, values, count, next, at, out, dim);
}

// `next`: [KEYS] keys that are read after the values, or null.
template <class T>
static void weigh(
    const float* weights, int64_t rows, const T* const* values, int64_t count,
    const T* const* next, int64_t dim, float* out) {
    for (int64_t r = 0; r < rows; next = nullptr) {
        const float* row = weights + r * KEYS;
        if (r + TILE_ROWS <= rows)
            weigh_rows<TILE_ROWS>(row, values, count, next, dim, out + r * dim), r += TILE_ROWS;
        else if (r + 2 <= rows)
            weigh_rows<2>(row, values, count, next, dim, out + r * dim), r += 2;
        else
            weigh_rows<1>(row, values, count, next, dim, out + r * dim), r += 1;
    }
}

static void cap(float* scores, float softcap) {
    for (int64_t n = 0; n < KEYS; n += WIDTH) {
        store(scores + n, tanh_of(load(scores + n) * (1 / softcap)) * softcap);
    }
}

// Turns a row's scores of one tile, times `scale`, into weights relative to its new maximum, and
// brings the row's running sums to that maximum.
static inline void soften(
    float* scores, float scale, float* largest_yet, float* total, float* out, int64_t dim) {
    constexpr int VECTORS = KEYS / WIDTH;
    Floats x[VECTORS];
    for (int i = 0; i < VECTORS; ++i) x[i] = load(scores + i * WIDTH) * scale;
    Floats top = x[0];
    for (int i = 1; i < VECTORS; ++i) top = larger(x[i], top);
    const float tile_largest = largest(top);
    const float now = tile_largest > *largest_yet ? tile_largest : *largest_yet;
    Floats added = {};
    if (now == NOTHING) {  // it has seen nothing yet, or what is not a number
        for (int i = 0; i < VECTORS; ++i) {
            const Floats weights = choose(x[i] != x[i], x[i], Floats{});
            store(scores + i * WIDTH, weights);
            added += weights;
        }
        *total += sum(added);
        return;
    }
    if (now != *largest_yet) {
        const Floats factor = exp_negative(splat(*largest_yet - now));
        *total *= factor[0];
        for (int64_t d = 0; d < dim; d += WIDTH) store(out + d, load(out + d) * factor);
        *largest_yet = now;
    }
    for (int i = 0; i < VECTORS; ++i) {
        const Floats weights = exp_negative(x[i] - now);
        store(scores + i * WIDTH, weights);
        added += weights;
    }
    *total += sum(added);
}

}  // namespace
