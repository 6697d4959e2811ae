// Matmuls with weights that take 32 to 4 bits in memory and are multiplied as floats, whether or not the CPU
// multiplies the narrower ones itself. Few rows are bound by the memory that the weights
// are read from; for many, a piece of a panel is converted to floats once and stays in the first
// cache (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
//
// Compiled once for each instruction set, as attention.cpp is.

#include "linear.h"

#include "grouped_numbers.h"
#include "outputs.h"
#include "prefetch.h"
#include "vector.h"

namespace {

using aioengine::Linear;
using aioengine::LinearPiece;
using aioengine::DType;
using aioengine::GroupAt;
using aioengine::Groups;
using aioengine::Lowest;
using aioengine::MIDDLE;
using aioengine::PANEL;
using aioengine::QUAD;
using aioengine::Weights;

// Of a panel's piece that is converted to floats at a time, and that is added up by itself: a sum of
// few numbers is more exact, and the pieces are few again (Higham, "The accuracy of floating point
// summation", 1993).
constexpr int64_t DEPTH = 128;
constexpr int64_t FEW_ROWS = 3;  // for which the conversion does not pay
constexpr int64_t STEPS = 16;    // from asking for weights to asking for more
constexpr int COLUMNS = PANEL / WIDTH;
constexpr int64_t LINEAR_ROWS = 96;  // of one piece, at most
// Behind the sums in the scratch: a second panel's sums, and later what is to be written.
constexpr int64_t RESULTS_AT = LINEAR_ROWS * PANEL;

// So many rows that their sums fill the registers, but for a weight and an input.
#if AIOENGINE_WIDTH == 16
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 3;
#endif

// sums[r][c] += input[r][k] * weights[k][c] over `depth`, for ROWS rows and one panel.
template <int ROWS, class T>
static inline void multiply_tile(
    const float* input, int64_t stride, const T* weights, int64_t depth, Prefetch& next,
    float* sums) {
    // Unrolled, or the sums go through memory before and behind the loop.
    Floats s[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) s[r][c] = Floats{};
    for (int64_t first = 0; first < depth; first += STEPS) {
        next.prefetch_next();
        for (int64_t k = first; k < lesser(first + STEPS, depth); ++k) {
            Floats x[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) x[r] = splat(input[r * stride + k]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) {
                const Floats w = load(weights + k * PANEL + c * WIDTH);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) s[r][c] += x[r] * w;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
            float* sum = sums + r * PANEL + c * WIDTH;
            store(sum, load(sum) + s[r][c]);
        }
}

template <class T>
static void multiply_rows(
    const float* input, int64_t stride, int64_t rows, const T* weights, int64_t depth, Prefetch& next,
    float* sums) {
    // A single row has too few sums to keep the CPU busy: instead of three and one, two and two.
    const bool is_even = TILE_ROWS == 3 && rows > 3 && rows % 3 == 1;
    const int64_t in_tiles = is_even ? rows - 4 : rows;
    for (int64_t r = 0; r < rows;) {
        const float* x = input + r * stride;
        float* s = sums + r * PANEL;
        if (r + TILE_ROWS <= in_tiles) {
            multiply_tile<TILE_ROWS>(x, stride, weights, depth, next, s);
            r += TILE_ROWS;
        } else if (TILE_ROWS > 4 && r + 4 <= rows) {
            multiply_tile<4>(x, stride, weights, depth, next, s);
            r += 4;
        } else if (r + 2 <= rows) {
            multiply_tile<2>(x, stride, weights, depth, next, s);
            r += 2;
        } else {
            multiply_tile<1>(x, stride, weights, depth, next, s);
            r += 1;
        }
    }
}

// sums [rows, PANEL] = the piece's rows times one panel.
template <class T>
static void add_up(
    const Linear& a, const LinearPiece& p, int64_t panel, float* wide, float* sums) {
    const int64_t rows = p.last_row - p.first_row;
    const float* input = a.input + p.first_row * a.input_stride;
    const T* weights = (const T*)a.packed + panel * a.depth * PANEL;
    const Panel all = {
        weights, a.depth, PANEL * sizeof(T), p.has_next, 0, 1, a.places_at_once, rows};
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, chunk = all.chunk(DEPTH);
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t first = 0; first < a.depth; first += chunk) {
        const int64_t last = lesser(first + chunk, a.depth);
        Prefetch next = all.after(first, last, (last - first + STEPS - 1) / STEPS * tiles);
        for (int64_t k = first; k < last; k += DEPTH) {
            const int64_t depth = lesser(DEPTH, last - k);
            const T* piece = weights + k * PANEL;
            if (sizeof(T) == sizeof(float) || rows <= FEW_ROWS) {
                multiply_rows(input + k, a.input_stride, rows, piece, depth, next, sums);
                continue;
            }
            for (int64_t i = 0; i < depth * PANEL; i += WIDTH) store(wide + i, load(piece + i));
            multiply_rows(input + k, a.input_stride, rows, (const float*)wide, depth, next, sums);
        }
    }
    scale_and_shift(a, panel, rows, sums);
}

static inline Floats lowest_of(const Groups& g, const GroupAt& at, int64_t first, Floats scale) {
    if (g.lowest == Lowest::Leasts || g.lowest == Lowest::E4m3)
        return load_lowest<Lowest::Leasts>(at.lowest, first, scale);
    if (g.lowest == Lowest::Zeros) return load_lowest<Lowest::Zeros>(at.lowest, first, scale);
    return scale * (g.bits == 4 && !g.levels ? (float)-MIDDLE : 0.0f);
}

// The e4m3 floats whose codes are the lowest bytes. No float on the way is subnormal, as a host may flush those to 0.
static inline Floats floats_of_e4m3(Ints codes) {
    const Floats size = (Floats)(((codes & 0x7f) << 20) + (120 << 23));
    const Floats small = (size - 0x1p-7f) * 2.0f;  // whose exponent is 0: without a leading 1
    const Floats found = choose(size < splat(0x1p-6f), small, size);
    return (Floats)((Ints)found | ((codes & 0x80) << 24));
}

// Inputs [first, last) of a panel in groups, as floats [inputs, PANEL]. Both lie at quads.
static void widen_groups(const Groups& g, int64_t panel, int64_t first, int64_t last, float* to) {
    constexpr int HALF = COLUMNS / 2;
    for (int64_t k = first; k < last; k += QUAD) {
        const GroupAt at(g, g.panel(panel), k / g.group);
        const uint8_t* quad = at.numbers + k % g.group / QUAD * g.quad_bytes();
        for (int c = 0; c < COLUMNS; ++c) {
            Floats scale = load_halves(at.scales + c * WIDTH * 2);
            const Floats lowest = lowest_of(g, at, c * WIDTH, scale);
            if (g.lowest == Lowest::E4m3) scale += lowest;
            Ints bytes;
            memcpy(&bytes, quad + (g.bits == 4 ? c % HALF : c) * sizeof bytes, sizeof bytes);
            for (int j = 0; j < QUAD; ++j) {
                if (g.lowest == Lowest::E4m3) {
                    store(to + j * PANEL + c * WIDTH, floats_of_e4m3(bytes >> (8 * j)) * scale);
                    continue;
                }
                Ints number =
                    g.bits == 4 ? (bytes >> (8 * j + (c < HALF ? 0 : 4))) & 15 : (bytes << (24 - 8 * j)) >> 24;
                if (g.levels)
                    for (int i = 0; i < WIDTH; ++i) number[i] = g.levels[number[i]];
                store(to + j * PANEL + c * WIDTH, __builtin_convertvector(number, Floats) * scale + lowest);
            }
        }
        to += QUAD * PANEL;
    }
}

// The same as `add_up` of weights in groups.
static void add_up_groups(const Linear& a, const LinearPiece& p, int64_t panel, float* wide, float* sums) {
    const int64_t rows = p.last_row - p.first_row;
    const float* input = a.input + p.first_row * a.input_stride;
    Prefetch nothing{};
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < a.depth; k += DEPTH) {
        const int64_t depth = lesser(DEPTH, a.depth - k);
        widen_groups(a.groups, panel, k, k + (depth + QUAD - 1) / QUAD * QUAD, wide);
        multiply_rows(input + k, a.input_stride, rows, (const float*)wide, depth, nothing, sums);
    }
    scale_and_shift(a, panel, rows, sums);
}

static void multiply_groups(const Linear& a, const LinearPiece& p, float* scratch) {
    float *sums = scratch, *others = scratch + RESULTS_AT, *wide = others + LINEAR_ROWS * PANEL;
    const int64_t num_sums = (p.last_row - p.first_row) * PANEL;
    add_up_groups(a, p, p.panel, wide, sums);
    activate<false>(a, num_sums, sums);
    if (a.gate_panels) {
        add_up_groups(a, p, p.panel + a.gate_panels, wide, others);
        gate(a, num_sums, others, sums);
    }
    round_sums(a, p, sums, scratch + RESULTS_AT);
}

template <class T>
static void multiply_as(const Linear& a, const LinearPiece& p, float* scratch) {
    float* sums = scratch;
    float* others = scratch + RESULTS_AT;
    float* wide = others + LINEAR_ROWS * PANEL;
    const int64_t num_sums = (p.last_row - p.first_row) * PANEL;
    add_up<T>(a, p, p.panel, wide, sums);
    activate<false>(a, num_sums, sums);
    if (a.gate_panels) {
        add_up<T>(a, p, p.panel + a.gate_panels, wide, others);
        gate(a, num_sums, others, sums);
    }
    round_sums(a, p, sums, scratch + RESULTS_AT);
}

static void write(const Linear& a, const LinearPiece& p, const float* scratch) {
    write_results(a, p, scratch + RESULTS_AT);
}

static void multiply(const Linear& a, const LinearPiece& p, float* scratch) {
    switch (a.weights) {
        case Weights::Float32:
            multiply_as<float>(a, p, scratch);
            break;
        case Weights::BFloat16:
            multiply_as<BFloat16>(a, p, scratch);
            break;
        case Weights::Grouped:
            multiply_groups(a, p, scratch);
            break;
        case Weights::Float16:
#if AIOENGINE_FLOAT16
            multiply_as<Float16>(a, p, scratch);
#endif
            break;
    }
}

template <class T>
static void widen_as(const Linear& a, int64_t first, int64_t last, float* input) {
    for (int64_t r = first; r < last; ++r) {
        const T* from = (const T*)a.x + r * a.stride;
        float* to = input + r * a.depth;
        int64_t k = 0;
        for (; k + WIDTH <= a.depth; k += WIDTH) store(to + k, load(from + k));
        for (; k < a.depth; ++k) to[k] = to_float(from[k]);
    }
}

// Rows of x to contiguous floats.
static void widen(const Linear& a, int64_t first, int64_t last, float* input) {
    switch (a.dtype) {
        case DType::Float32:
            widen_as<float>(a, first, last, input);
            break;
        case DType::BFloat16:
            widen_as<BFloat16>(a, first, last, input);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            widen_as<Float16>(a, first, last, input);
#endif
            break;
    }
}

static int64_t max_rows(int64_t) {
    return LINEAR_ROWS;
}

static int64_t scratch_floats(const Linear&) {
    return 2 * LINEAR_ROWS * PANEL + DEPTH * PANEL;
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(linear_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = {
    TILE_ROWS, max_rows, scratch_floats, widen, multiply, write};
}
