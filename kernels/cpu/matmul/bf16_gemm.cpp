// Matmuls in bfloat16 by the instructions that a CPU has for them: two products and their sum in
// each of 16 lanes (AVX512-BF16) or four (ARM's BF16), or tiles of 16 rows by 16 outputs and 32
// inputs (AMX). A weight lies in panels as in linear.cpp, but inputs lie two by two:
// [panels, depth / 2, PANEL, 2], which is what all of them read.
//
// Compiled once for each of them.

#include "linear.h"

#include "prefetch.h"
#include "outputs.h"
#include "bf16_amx.h"
#include "bf16_neon.h"
#include "vector.h"

namespace {

using aioengine::Linear;
using aioengine::LinearPiece;
using aioengine::PAIRED_DEPTH;
using aioengine::PANEL;

// Rows that are multiplied at a time, rows whose sums are in the first cache until they are written, and
// bytes of x that stay in the second cache meanwhile.
#if defined(__AMX_BF16__)
constexpr int64_t UNIT_ROWS = 32, BLOCK_ROWS = 32, PIECE_BYTES = 1 << 20;
#elif defined(__AVX512BF16__)
constexpr int64_t UNIT_ROWS = 12, BLOCK_ROWS = 48, PIECE_BYTES = 5 << 17;
#else
constexpr int64_t UNIT_ROWS = 3, BLOCK_ROWS = 48, PIECE_BYTES = 5 << 17;
#endif

static const BFloat16* rows_of(const Linear& a, int64_t row) {
    return (const BFloat16*)a.x + row * a.stride;
}

static const BFloat16* panel_of(const Linear& a, int64_t panel) {
    return (const BFloat16*)a.packed + panel * a.depth * PANEL;
}

#if defined(__AMX_BF16__)

// Inputs further on that are prefetched: a tile's load waits for each of its lines.
constexpr int64_t DISTANCE = PAIRED_DEPTH;

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
    for (int64_t first = first_row; first < last_row; first += BLOCK_ROWS) {
        const int64_t left = last_row - first, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const BFloat16* x = rows_of(a, first);
        for (int64_t k = 0; k < a.depth; k += PAIRED_DEPTH, to += BLOCK_ROWS * PAIRED_DEPTH)
            for (int64_t r = 0; r < rows; ++r)
                memcpy(to + r * PAIRED_DEPTH, x + r * a.stride + k, LINE);
    }
}

// sums [rows, PANEL] of a block of rows, for which the tiles have been shaped. `is_near`: the weights
// were prefetched or read before and are in the second cache.
template <bool HAS_LOWER>
static void add_up_tiles(const BFloat16* x, const Panel& panel, bool is_near, float* sums) {
    constexpr int64_t pair_bytes = 2 * PANEL * sizeof(BFloat16);
    constexpr int64_t sum_bytes = PANEL * sizeof(float);
    settle(x);
    _tile_zero(0);
    _tile_zero(1);
    if (HAS_LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const int64_t chunk = panel.chunk(PAIRED_DEPTH);
    for (int64_t first = 0; first < panel.depth; first += chunk, is_near = true) {
        const int64_t last = lesser(first + chunk, panel.depth);
        Prefetch next = panel.after(first, last, (last - first) / PAIRED_DEPTH);
        for (int64_t k = first; k < last; k += PAIRED_DEPTH) {
            const BFloat16* w = (const BFloat16*)panel.weights + k * PANEL;
            const BFloat16* upper = x + k * BLOCK_ROWS;
            if (!is_near) prefetch(w + DISTANCE * PANEL, PAIRED_DEPTH * PANEL * sizeof(BFloat16));
            prefetch(upper + DISTANCE * BLOCK_ROWS, (HAS_LOWER ? 2 : 1) * TILE * LINE);
            next.prefetch_next();
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
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + TILE, sum_bytes);
    if (HAS_LOWER) {
        _tile_stored(2, sums + TILE * PANEL, sum_bytes);
        _tile_stored(3, sums + TILE * PANEL + TILE, sum_bytes);
    }
}

template <class Done>
static void add_up(
    const Linear&, int64_t, const BFloat16* x, int64_t rows, const Panel& panel, bool is_near,
    float* sums, const Done& done) {
    if (rows <= TILE)
        add_up_tiles<false>(x, panel, is_near, sums);
    else
        add_up_tiles<true>(x, panel, is_near, sums);
    done(0, rows);
}

#else
#if defined(__AVX512BF16__)

// Inputs between two times of asking: a few lines at a time, or they keep loads waiting.
constexpr int64_t ASKING_DEPTH = 4;

// sums [ROWS, PANEL] = x times weights, plus what they were unless these inputs are the first.
template <int ROWS>
static void add_up_rows(
    const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth, bool is_first,
    Prefetch& next, float* sums) {
    __m512 s[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) s[r][0] = s[r][1] = _mm512_setzero_ps();
    if (!is_first) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            s[r][0] = _mm512_loadu_ps(sums + r * PANEL);
            s[r][1] = _mm512_loadu_ps(sums + r * PANEL + WIDTH);
        }
    }
    for (int64_t first = 0; first < depth; first += ASKING_DEPTH) {
        next.prefetch_next();
        for (int64_t k = first; k < first + ASKING_DEPTH; k += 2) {
            const BFloat16* at = weights + k * PANEL;
            const __m512bh low = (__m512bh)_mm512_loadu_si512(at);
            const __m512bh high = (__m512bh)_mm512_loadu_si512(at + 2 * WIDTH);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const __m512bh both = splat_pair(x + r * stride + k);
                s[r][0] = _mm512_dpbf16_ps(s[r][0], both, low);
                s[r][1] = _mm512_dpbf16_ps(s[r][1], both, high);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
        _mm512_storeu_ps(sums + r * PANEL, s[r][0]);
        _mm512_storeu_ps(sums + r * PANEL + WIDTH, s[r][1]);
    }
}

#endif

static void shape_for(int64_t) {}

static void arrange(const Linear&, int64_t, int64_t, BFloat16*) {}

using AddUp = void(const BFloat16*, int64_t, const BFloat16*, int64_t, bool, Prefetch&, float*);
constexpr AddUp* ADD_UP[] = {
    add_up_rows<1>, add_up_rows<2>, add_up_rows<3>,
#if defined(__AVX512BF16__)
    add_up_rows<4>, add_up_rows<5>, add_up_rows<6>,  add_up_rows<7>,  add_up_rows<8>,
    add_up_rows<9>, add_up_rows<10>, add_up_rows<11>, add_up_rows<12>
#endif
};
static_assert(sizeof ADD_UP / sizeof *ADD_UP == UNIT_ROWS, "one for each number of rows");

template <class Done>
static void add_up(
    const Linear& a, int64_t first_row, const BFloat16*, int64_t rows, const Panel& panel, bool,
    float* sums, const Done& done) {
    // Each time so many rows, nearly the same number, that their sums fit the registers.
    const int64_t times = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int64_t chunk = panel.chunk(PAIRED_DEPTH);
    for (int64_t first = 0; first < a.depth; first += chunk) {
        const int64_t last = lesser(first + chunk, a.depth), depth = last - first;
        const BFloat16* weights = (const BFloat16*)panel.weights + first * PANEL;
        Prefetch next = panel.after(first, last, times * depth / ASKING_DEPTH);
        for (int64_t index = 0; index < times; ++index) {
            const int64_t begin = index * rows / times, count = (index + 1) * rows / times - begin;
            const BFloat16* x = rows_of(a, first_row + begin) + first;
            ADD_UP[count - 1](
                x, a.stride, weights, depth, first == 0, next, sums + begin * PANEL);
            if (last == a.depth) done(begin, count);
        }
    }
}

#endif

static int64_t max_rows(int64_t depth) {
    const int64_t blocks = PIECE_BYTES / (depth * (int64_t)sizeof(BFloat16)) / BLOCK_ROWS;
    return (blocks ? blocks : 1) * BLOCK_ROWS;
}

// A thread's scratch: the first row that it has arranged and the panel that it has prefetched, each plus
// one; sums of a block of rows, and of another panel where there are gates; the rows.
constexpr int64_t SUMS_AT = LINE / sizeof(float), OTHERS_AT = SUMS_AT + BLOCK_ROWS * PANEL;
constexpr int64_t ROWS_AT = OTHERS_AT + BLOCK_ROWS * PANEL;

static int64_t whole_blocks(int64_t rows) {
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

static int64_t most_rows(const Linear& a) {
    return lesser(a.rows, max_rows(a.depth));
}

// Where what is to be written of a piece lies in the scratch, as bfloat16: behind its rows.
static int64_t results_at(const Linear& a) {
    return ROWS_AT + whole_blocks(most_rows(a)) * a.depth / 2;
}

static int64_t scratch_floats(const Linear& a) {
    return results_at(a) + most_rows(a) * PANEL / 2;
}

static void multiply(const Linear& a, const LinearPiece& p, float* scratch) {
    float *sums = scratch + SUMS_AT, *others = scratch + OTHERS_AT;
    BFloat16 *arranged = (BFloat16*)(scratch + ROWS_AT), *results = (BFloat16*)(scratch + results_at(a));
    const int64_t count = (p.last_row - p.first_row + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t known[2], shaped = 0;
    memcpy(known, scratch, sizeof known);
    if (known[0] != p.first_row + 1) arrange(a, p.first_row, p.last_row, arranged);
    const bool was_prefetched = known[1] == p.panel + 1;
    known[0] = p.first_row + 1;
    known[1] = p.has_next ? p.panel + 2 : 0;
    memcpy(scratch, known, sizeof known);
    const BFloat16* weights = panel_of(a, p.panel);
    for (int64_t index = 0; index < count; ++index) {
        const int64_t first = p.first_row + index * BLOCK_ROWS, left = p.last_row - first;
        const int64_t rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const BFloat16* x = arranged + index * BLOCK_ROWS * a.depth;
        if (rows != shaped) shape_for(shaped = rows);
        const bool is_near = was_prefetched || index > 0;
        constexpr int64_t bytes = PANEL * sizeof(BFloat16);
        Panel panel = {weights, a.depth, bytes, p.has_next, index, count, a.places_at_once, rows};
        const auto round_rows = [&](int64_t begin, int64_t count) {
            const int64_t row = first + begin;
            round_sums(
                a, {p.panel, row, row + count, false}, sums + begin * PANEL,
                results + (row - p.first_row) * PANEL);
        };
        add_up(a, first, x, rows, panel, is_near, sums, [&](int64_t begin, int64_t count) {
            float* at = sums + begin * PANEL;
            scale_and_shift(a, p.panel, count, at);
            activate<true>(a, count * PANEL, at);
            if (!a.gate_panels) round_rows(begin, count);
        });
        if (!a.gate_panels) continue;
        panel.weights = panel_of(a, p.panel + a.gate_panels);
        add_up(a, first, x, rows, panel, is_near, others, [&](int64_t begin, int64_t count) {
            float* at = others + begin * PANEL;
            scale_and_shift(a, p.panel + a.gate_panels, count, at);
            gate(a, count * PANEL, at, sums + begin * PANEL);
            round_rows(begin, count);
        });
    }
#if defined(__AMX_BF16__)
    _tile_release();
#endif
}

static void write(const Linear& a, const LinearPiece& p, const float* scratch) {
    write_results(a, p, scratch + results_at(a));
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(bf16_gemm_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = {
    UNIT_ROWS, max_rows, scratch_floats, nullptr, multiply, write};
}
