// Scores and weighted sums of one tile of keys by AMX, in bfloat16: 16 rows at a time, by 16 keys or
// 16 numbers of the values. Rows are padded to 16; what comes of the padding is not read.

#pragma once

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

// Keys [count, dim] to [dim / 2, TILE_KEYS, 2] at `to`; as many keys as fill tiles are written.
static inline void arrange_keys(const BFloat16* const* keys, int64_t count, int64_t dim, BFloat16* to) {
    for (int64_t first = 0; first < count; first += TILE) {
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            __m512i x[16];
            for (int64_t i = 0; i < TILE; ++i)
                x[i] = _mm512_loadu_si512(keys[first + i < count ? first + i : count - 1] + d);
            transpose(x);
            BFloat16* at = to + d * TILE_KEYS + 2 * first;
            for (int64_t i = 0; i < TILE; ++i) memcpy(at + i * 2 * TILE_KEYS, &x[i], TILE_BYTES);
        }
    }
}

// scores [rows, TILE_KEYS] = query [rows, dim] . keys, as `arrange_keys` has left them.
static inline void dot_tiles(
    const BFloat16* query, int64_t rows, int64_t dim, const BFloat16* keys, int64_t count,
    float* scores) {
    constexpr int64_t pair_bytes = 2 * TILE_KEYS * sizeof(BFloat16);
    constexpr int64_t score_bytes = TILE_KEYS * sizeof(float);
    settle(keys);
    for (int64_t r = 0; r < rows; r += TILE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
            const BFloat16* at = keys + d * TILE_KEYS;
            _tile_loadd(4, query + r * dim + d, dim * (int64_t)sizeof(BFloat16));
            _tile_loadd(5, at, pair_bytes);
            _tile_dpbf16ps(0, 4, 5);
            if (count > TILE) {
                _tile_loadd(6, at + 2 * TILE, pair_bytes);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (count > 2 * TILE) {
                _tile_loadd(5, at + 4 * TILE, pair_bytes);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, at + 6 * TILE, pair_bytes);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        float* to = scores + r * TILE_KEYS;
        _tile_stored(0, to, score_bytes);
        _tile_stored(1, to + TILE, score_bytes);
        _tile_stored(2, to + 2 * TILE, score_bytes);
        _tile_stored(3, to + 3 * TILE, score_bytes);
    }
}

// Values [count, dim] to [TILE_KEYS / 2, dim, 2] at `to`, with zeros to whole tiles.
static inline void arrange_values(
    const BFloat16* const* values, int64_t count, int64_t dim, BFloat16* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const int64_t whole = count > TILE_DEPTH ? TILE_KEYS : TILE_DEPTH;
    for (int64_t n = 0; n < whole; n += 2) {
        for (int64_t d = 0; d < dim; d += TILE) {
            __m256i pair[2] = {};
            for (int64_t i = 0; i < 2; ++i)
                if (n + i < count) memcpy(&pair[i], values[n + i] + d, sizeof pair[i]);
            const __m512i both = _mm512_permutex2var_epi16(
                _mm512_castsi256_si512(pair[0]), low, _mm512_castsi256_si512(pair[1]));
            memcpy(to + n * dim + 2 * d, &both, TILE_BYTES);
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

}  // namespace

#endif
