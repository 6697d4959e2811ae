// Products of bfloat16 by the instructions that a CPU has for them: two products and their sum in
// each of 16 lanes (AVX512-BF16), or tiles of 16 rows by 16 outputs and 32 inputs (AMX). A weight
// lies in panels as in linear.cpp, but inputs lie two by two: [panels, depth / 2, PANEL, 2], which
// is what both of them read.
//
// Compiled once for each of the two.

#include "linear.h"

#include "outputs.h"
#include "vector.h"

namespace {

using aioengine::Linear;
using aioengine::LinearPiece;
using aioengine::PAIRED_DEPTH;
using aioengine::PANEL;

constexpr int64_t BLOCK_ROWS = 32;  // whose sums are in the first cache until they are written
constexpr int64_t PIECE_BYTES = 1 << 20;  // of x, which stay in the second cache meanwhile

// Memory that is asked for while something else is computed: the weights of the next piece.
struct Next {
    const char* at;
    int64_t lines;  // for each step of PAIRED_DEPTH inputs
};
constexpr int64_t LINE = 64;

static const BFloat16* rows_of(const Linear& a, int64_t row) {
    return (const BFloat16*)a.x + row * a.stride;
}

static const BFloat16* panel_of(const Linear& a, int64_t panel) {
    return (const BFloat16*)a.packed + panel * a.depth * PANEL;
}

#if defined(__AMX_BF16__)

constexpr int64_t TILE = 16;  // rows of a tile, and its floats in a row
// Inputs further on that are asked for: a tile's load waits for each of its lines.
constexpr int64_t AHEAD = 2 * PAIRED_DEPTH;

// Shapes of the eight tiles: sums 0 to 3, rows of x 4 and 5, weights 6 and 7.
struct __attribute__((packed)) TileShapes {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static void shape_tiles(int64_t rows) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = TILE;
    }
    const uint8_t upper = (uint8_t)(rows < TILE ? rows : TILE);
    const uint8_t lower = (uint8_t)(rows > TILE ? rows - TILE : TILE);
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
    _tile_loadconfig(&shapes);
}

// sums [rows, PANEL] of up to BLOCK_ROWS rows, for which the tiles have been shaped.
template <bool HAS_LOWER>
static void add_up_tiles(
    const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth, Next next,
    float* sums) {
    const int64_t row_bytes = stride * (int64_t)sizeof(BFloat16);
    constexpr int64_t pair_bytes = 2 * PANEL * sizeof(BFloat16);
    constexpr int64_t sum_bytes = PANEL * sizeof(float);
    const BFloat16* lower = x + TILE * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (HAS_LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += PAIRED_DEPTH) {
        const BFloat16* w = weights + k * PANEL;
        for (int64_t r = 0; r < TILE; ++r) __builtin_prefetch(x + r * stride + k + AHEAD);
        if (HAS_LOWER)
            for (int64_t r = 0; r < TILE; ++r) __builtin_prefetch(lower + r * stride + k + AHEAD);
        for (int64_t p = 0; p < PAIRED_DEPTH; ++p) __builtin_prefetch(w + (AHEAD + p) * PANEL);
        for (int64_t i = 0; i < next.lines; ++i, next.at += LINE)
            __builtin_prefetch(next.at, 0, 2);
        _tile_loadd(6, w, pair_bytes);
        _tile_loadd(4, x + k, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + PANEL, pair_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if (HAS_LOWER) {
            _tile_loadd(5, lower + k, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + TILE, sum_bytes);
    if (HAS_LOWER) {
        _tile_stored(2, sums + TILE * PANEL, sum_bytes);
        _tile_stored(3, sums + TILE * PANEL + TILE, sum_bytes);
    }
}

static void add_up(
    const BFloat16* x, int64_t stride, int64_t rows, const BFloat16* weights, int64_t depth,
    Next next, float* sums) {
    if (rows > TILE)
        add_up_tiles<true>(x, stride, weights, depth, next, sums);
    else
        add_up_tiles<false>(x, stride, weights, depth, next, sums);
}

#else

// sums [ROWS, PANEL]
template <int ROWS>
static void add_up_rows(
    const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth, float* sums) {
    __m512 s[ROWS][2];
    for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2) {
        const BFloat16* at = weights + k * PANEL;
        __m512bh w[2];
        memcpy(w, at, sizeof w);
        for (int r = 0; r < ROWS; ++r) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], both, w[0]);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], both, w[1]);
        }
    }
    for (int r = 0; r < ROWS; ++r) memcpy(sums + r * PANEL, s[r], sizeof s[r]);
}

static void shape_tiles(int64_t) {}

static void add_up(
    const BFloat16* x, int64_t stride, int64_t rows, const BFloat16* weights, int64_t depth,
    Next, float* sums) {
    while (rows) {
        int64_t done;
        // So many rows that their sums fill the registers; of 16, two times eight.
        if (rows >= 12 && rows != 16)
            add_up_rows<12>(x, stride, weights, depth, sums), done = 12;
        else if (rows >= 8)
            add_up_rows<8>(x, stride, weights, depth, sums), done = 8;
        else if (rows >= 4)
            add_up_rows<4>(x, stride, weights, depth, sums), done = 4;
        else if (rows >= 2)
            add_up_rows<2>(x, stride, weights, depth, sums), done = 2;
        else
            add_up_rows<1>(x, stride, weights, depth, sums), done = 1;
        rows -= done;
        x += done * stride;
        sums += done * PANEL;
    }
}

#endif

static int64_t max_rows(int64_t depth) {
    const int64_t blocks = PIECE_BYTES / (depth * (int64_t)sizeof(BFloat16)) / BLOCK_ROWS;
    return (blocks ? blocks : 1) * BLOCK_ROWS;
}

// The share of block `index` of `count` in asking for the next piece's panel.
static Next next_share(const Linear& a, int64_t panel, int64_t index, int64_t count) {
    const int64_t next = panel + a.next_panel;
    if (next >= a.panels) return {nullptr, 0};
    const int64_t lines = (PAIRED_DEPTH + count - 1) / count;
    const int64_t first = index * lines * (a.depth / PAIRED_DEPTH);
    return {(const char*)panel_of(a, next) + first * LINE, lines};
}

static void multiply(const Linear& a, const LinearPiece& p, float* sums) {
    float* others = sums + BLOCK_ROWS * PANEL;
    const int64_t count = (p.last_row - p.first_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t shaped = 0;
    for (int64_t first = p.first_row; first < p.last_row; first += BLOCK_ROWS) {
        const int64_t left = p.last_row - first, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const int64_t index = (first - p.first_row) / BLOCK_ROWS;
        const BFloat16* x = rows_of(a, first);
        if (rows != shaped) shape_tiles(shaped = rows);
        Next next = next_share(a, p.panel, index, count);
        add_up(x, a.stride, rows, panel_of(a, p.panel), a.depth, next, sums);
        scale_and_shift(a, p.panel, rows, sums);
        activate(a.activation, rows * PANEL, sums);
        if (a.gate_panels) {
            const int64_t panel = p.panel + a.gate_panels;
            next = next_share(a, panel, index, count);
            add_up(x, a.stride, rows, panel_of(a, panel), a.depth, next, others);
            scale_and_shift(a, panel, rows, others);
            gate(rows * PANEL, others, sums);
        }
        write(a, {p.panel, first, first + rows}, sums);
    }
#if defined(__AMX_BF16__)
    _tile_release();
#endif
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_DOOR(name) AIOENGINE_JOIN(pairs_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_DOOR(AIOENGINE_KERNELS) = {
    2 * BLOCK_ROWS * PANEL, max_rows, nullptr, multiply};
}
