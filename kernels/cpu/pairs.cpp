// Products of bfloat16 by the instructions that a CPU has for them: two products and their sum in
// each of 16 lanes (AVX512-BF16), or tiles of 16 rows by 16 outputs and 32 inputs (AMX). A weight
// lies in panels as in linear.cpp, but inputs lie two by two: [panels, depth / 2, PANEL, 2], which
// is what both of them read.
//
// A plain weight, whose rows lie where PyTorch has them, can be the other side of the product: its rows
// are a tile's rows then, and rows of x its columns.
//
// Compiled once for each of the two.

#include "linear.h"

#include "ahead.h"
#include "outputs.h"
#include "tiles.h"
#include "vector.h"

namespace {

using aioengine::Linear;
using aioengine::LinearPiece;
using aioengine::PAIRED_DEPTH;
using aioengine::PANEL;

constexpr int64_t BLOCK_ROWS = 32;  // whose sums are in the first cache until they are written
constexpr int64_t PIECE_BYTES = 1 << 20;  // of x, which stay in the second cache meanwhile

static const BFloat16* rows_of(const Linear& a, int64_t row) {
    return (const BFloat16*)a.x + row * a.stride;
}

static const BFloat16* panel_of(const Linear& a, int64_t panel) {
    return (const BFloat16*)a.packed + panel * a.depth * PANEL;
}

#if defined(__AMX_BF16__)

constexpr bool READS_PLAIN = true;

// Inputs further on that are asked for: a tile's load waits for each of its lines.
constexpr int64_t AHEAD = PAIRED_DEPTH;

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights; 0, 1 and 4 are of the upper 16 rows.
static void shape_for(int64_t rows) {
    TileShapes shapes = whole_tiles();
    const uint8_t upper = (uint8_t)(rows < TILE ? rows : TILE);
    const uint8_t lower = (uint8_t)(rows > TILE ? rows - TILE : TILE);
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
    shape_tiles(shapes);
}

// Rows of x as the tiles are loaded, one after the other: [blocks of rows, steps, BLOCK_ROWS, 32]. A
// tile's 16 rows lie side by side then, and not as far apart as would make them compete for a few
// places in the first cache.
static void arrange(const Linear& a, int64_t first_row, int64_t last_row, BFloat16* to) {
    if (a.is_plain) {
        const auto row_at = [&](int64_t r) { return rows_of(a, first_row + r); };
        arrange_query(row_at, last_row - first_row, a.depth, to);
        return;
    }
    for (int64_t first = first_row; first < last_row; first += BLOCK_ROWS) {
        const int64_t left = last_row - first, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const BFloat16* x = rows_of(a, first);
        for (int64_t k = 0; k < a.depth; k += PAIRED_DEPTH, to += BLOCK_ROWS * PAIRED_DEPTH)
            for (int64_t r = 0; r < rows; ++r)
                memcpy(to + r * PAIRED_DEPTH, x + r * a.stride + k, LINE);
    }
}

// sums [rows, PANEL] of a block of rows, for which the tiles have been shaped. `IS_NEAR`: the weights
// were asked for or read before and are in the second cache.
template <bool HAS_LOWER, bool IS_NEAR>
static void add_up_tiles(
    const BFloat16* x, const BFloat16* weights, int64_t depth, Ahead next, float* sums) {
    constexpr int64_t pair_bytes = 2 * PANEL * sizeof(BFloat16);
    constexpr int64_t sum_bytes = PANEL * sizeof(float);
    settle(x);
    _tile_zero(0);
    _tile_zero(1);
    if (HAS_LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += PAIRED_DEPTH) {
        const BFloat16 *w = weights + k * PANEL, *upper = x + k * BLOCK_ROWS;
        for (int64_t i = 0; i < PAIRED_DEPTH; ++i) {
            if (!IS_NEAR) __builtin_prefetch(w + (AHEAD + i) * PANEL);
            if (HAS_LOWER || i < TILE)
                __builtin_prefetch(upper + AHEAD * BLOCK_ROWS + i * PAIRED_DEPTH);
        }
        next.ask();
        _tile_loadd(6, w, pair_bytes);
        _tile_loadd(4, upper, LINE);
        _tile_loadd(7, w + PANEL, pair_bytes);
        if (HAS_LOWER) _tile_loadd(5, upper + TILE * PAIRED_DEPTH, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (HAS_LOWER) {
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

// The same of plain weights [PANEL, depth], with a block of rows as `arrange_query` leaves it. To the same
// bits, as a tile adds up its products by pairs of inputs either way.
static void add_up_plain(
    const BFloat16* x, int64_t rows, const BFloat16* weights, int64_t depth, Ahead next, float* sums) {
    const int64_t bytes = depth * (int64_t)sizeof(BFloat16);
    for (int64_t first = 0; first < rows; first += TILE, x += TILE * depth) {
        settle(x);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < depth; k += PAIRED_DEPTH) {
            if (first == 0) next.ask();
            _tile_loadd(6, weights + k, bytes);
            _tile_loadd(4, x + k * TILE, LINE);
            _tile_loadd(7, weights + TILE * depth + k, bytes);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
        }
        float columns[PANEL * TILE] __attribute__((aligned(64)));
        _tile_stored(0, columns, LINE);
        _tile_stored(1, columns + TILE * TILE, LINE);
        for (int64_t half = 0; half < PANEL; half += TILE) {
            __m512i rows_of_sums[TILE];
            memcpy(rows_of_sums, columns + half * TILE, sizeof rows_of_sums);
            transpose(rows_of_sums);
            for (int64_t r = 0; r < TILE; ++r)
                memcpy(sums + (first + r) * PANEL + half, &rows_of_sums[r], LINE);
        }
    }
}

static void add_up(
    const Linear& a, int64_t, const BFloat16* x, int64_t rows, const BFloat16* weights, bool is_near,
    Ahead next, float* sums) {
    if (a.is_plain)
        add_up_plain(x, rows, weights, a.depth, next, sums);
    else if (rows <= TILE && is_near)
        add_up_tiles<false, true>(x, weights, a.depth, next, sums);
    else if (rows <= TILE)
        add_up_tiles<false, false>(x, weights, a.depth, next, sums);
    else if (is_near)
        add_up_tiles<true, true>(x, weights, a.depth, next, sums);
    else
        add_up_tiles<true, false>(x, weights, a.depth, next, sums);
}

#else

constexpr bool READS_PLAIN = false;

// sums [ROWS, PANEL]
template <int ROWS>
static void add_up_rows(
    const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth, Ahead& next, float* sums) {
    __m512 s[ROWS][2];
    for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    for (int64_t first = 0; first < depth; first += PAIRED_DEPTH) {
        next.ask();
        for (int64_t k = first; k < first + PAIRED_DEPTH; k += 2) {
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
    }
    for (int r = 0; r < ROWS; ++r) memcpy(sums + r * PANEL, s[r], sizeof s[r]);
}

static void shape_for(int64_t) {}

static void arrange(const Linear&, int64_t, int64_t, BFloat16*) {}

static void add_up(
    const Linear& a, int64_t first_row, const BFloat16*, int64_t rows, const BFloat16* weights, bool,
    Ahead next, float* sums) {
    const BFloat16* x = rows_of(a, first_row);
    while (rows) {
        int64_t done;
        // So many rows that their sums fill the registers; of 16, two times eight.
        if (rows >= 12 && rows != 16)
            add_up_rows<12>(x, a.stride, weights, a.depth, next, sums), done = 12;
        else if (rows >= 8)
            add_up_rows<8>(x, a.stride, weights, a.depth, next, sums), done = 8;
        else if (rows >= 4)
            add_up_rows<4>(x, a.stride, weights, a.depth, next, sums), done = 4;
        else if (rows >= 2)
            add_up_rows<2>(x, a.stride, weights, a.depth, next, sums), done = 2;
        else
            add_up_rows<1>(x, a.stride, weights, a.depth, next, sums), done = 1;
        rows -= done;
        x += done * a.stride;
        sums += done * PANEL;
    }
}

#endif

static int64_t max_rows(int64_t depth) {
    const int64_t blocks = PIECE_BYTES / (depth * (int64_t)sizeof(BFloat16)) / BLOCK_ROWS;
    return (blocks ? blocks : 1) * BLOCK_ROWS;
}

// What block `index` of `count` asks for meanwhile: its share of the panel that comes after `panel`.
static Ahead next_share(
    const Linear& a, const LinearPiece& p, int64_t panel, int64_t index, int64_t count) {
    if (!p.has_next) return {};
    return share_ahead(
        panel_of(a, panel + 1), a.depth * PANEL * (int64_t)sizeof(BFloat16), a.depth / PAIRED_DEPTH,
        index, count);
}

// A thread's scratch: the first row that it has arranged, plus one, and the panel that it has asked for, plus
// one; sums of a block of rows, and of another
// panel where there are gates; the rows.
constexpr int64_t SUMS_AT = LINE / sizeof(float), OTHERS_AT = SUMS_AT + BLOCK_ROWS * PANEL;
constexpr int64_t ROWS_AT = OTHERS_AT + BLOCK_ROWS * PANEL;

static int64_t whole_blocks(int64_t rows) {
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

static int64_t scratch_floats(const Linear& a) {
    const int64_t most = max_rows(a.depth), rows = a.rows < most ? a.rows : most;
    return ROWS_AT + (whole_blocks(rows) + (a.is_plain ? PANEL : 0)) * a.depth / 2;
}

// One panel of plain weights; of the last one, which may have fewer rows, a copy at `copy`.
static const BFloat16* plain_panel(const Linear& a, int64_t panel, BFloat16* copy) {
    const BFloat16* weights = panel_of(a, panel);
    const int64_t left = a.outputs - panel * PANEL;
    if (left >= PANEL) return weights;
    memcpy(copy, weights, left * a.depth * sizeof(BFloat16));
    memset(copy + left * a.depth, 0, (PANEL - left) * a.depth * sizeof(BFloat16));
    return copy;
}

static void multiply(const Linear& a, const LinearPiece& p, float* scratch) {
    float *sums = scratch + SUMS_AT, *others = scratch + OTHERS_AT;
    BFloat16* arranged = (BFloat16*)(scratch + ROWS_AT);
    const int64_t count = (p.last_row - p.first_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t known[2], shaped = 0;
    memcpy(known, scratch, sizeof known);
    if (known[0] != p.first_row + 1) arrange(a, p.first_row, p.last_row, arranged);
    const bool was_asked = known[1] == p.panel + 1;
    known[0] = p.first_row + 1;
    known[1] = p.has_next ? p.panel + 2 : 0;
    memcpy(scratch, known, sizeof known);
    const BFloat16* weights = panel_of(a, p.panel);
    if (a.is_plain)
        weights = plain_panel(a, p.panel, arranged + whole_blocks(p.last_row - p.first_row) * a.depth);
    for (int64_t index = 0; index < count; ++index) {
        const int64_t first = p.first_row + index * BLOCK_ROWS, left = p.last_row - first;
        const int64_t rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const BFloat16* x = arranged + index * BLOCK_ROWS * a.depth;
        const int64_t shape = a.is_plain ? BLOCK_ROWS : rows;
        if (shape != shaped) shape_for(shaped = shape);
        const bool is_near = was_asked || index > 0;
        add_up(a, first, x, rows, weights, is_near, next_share(a, p, p.panel, index, count), sums);
        scale_and_shift(a, p.panel, rows, sums);
        activate(a.activation, rows * PANEL, sums);
        if (a.gate_panels) {
            const int64_t panel = p.panel + a.gate_panels;
            add_up(
                a, first, x, rows, panel_of(a, panel), is_near,
                next_share(a, p, panel, index, count), others);
            scale_and_shift(a, panel, rows, others);
            gate(rows * PANEL, others, sums);
        }
        write(a, {p.panel, first, first + rows, false}, sums);
    }
    finish_writing();
#if defined(__AMX_BF16__)
    _tile_release();
#endif
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_DOOR(name) AIOENGINE_JOIN(pairs_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_DOOR(AIOENGINE_KERNELS) = {
    READS_PLAIN, max_rows, scratch_floats, nullptr, multiply};
}
