// Products with weights that take 32, 16 or 8 bits in memory and are multiplied as floats, whether or
// not the CPU multiplies the narrower ones itself. Few rows are bound by the memory that the weights
// are read from; for many, a piece of a panel is turned into floats once and stays in the first
// cache (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
//
// Compiled once for each instruction set, as attention.cpp is.

#include "linear.h"

#include "vector.h"

namespace {

using aioengine::Linear;
using aioengine::LINEAR_ROWS;
using aioengine::LinearPiece;
using aioengine::Number;
using aioengine::PANEL;
using aioengine::Weights;

constexpr int64_t DEPTH = 128;   // of a panel's piece that is turned into floats at a time
constexpr int64_t FEW_ROWS = 3;  // for which that does not pay
constexpr int COLUMNS = PANEL / WIDTH;

// So many rows that their sums fill the registers, but for a weight and an input.
#if AIOENGINE_WIDTH == 16
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 3;
#endif

// sums[r][c] += input[r][k] * weights[k][c] over `depth`, for ROWS rows and one panel.
template <int ROWS, class T>
static inline void multiply_tile(
    const float* input, int64_t stride, const T* weights, int64_t depth, float* sums) {
    Floats s[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) s[r][c] = load(sums + r * PANEL + c * WIDTH);
    for (int64_t k = 0; k < depth; ++k) {
        Floats x[ROWS];
        for (int r = 0; r < ROWS; ++r) x[r] = splat(input[r * stride + k]);
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats w = load(weights + k * PANEL + c * WIDTH);
            for (int r = 0; r < ROWS; ++r) s[r][c] += x[r] * w;
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store(sums + r * PANEL + c * WIDTH, s[r][c]);
}

template <class T>
static void multiply_rows(
    const float* input, int64_t stride, int64_t rows, const T* weights, int64_t depth,
    float* sums) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        multiply_tile<TILE_ROWS>(input + r * stride, stride, weights, depth, sums + r * PANEL);
    for (; r + 2 <= rows; r += 2)
        multiply_tile<2>(input + r * stride, stride, weights, depth, sums + r * PANEL);
    for (; r < rows; ++r)
        multiply_tile<1>(input + r * stride, stride, weights, depth, sums + r * PANEL);
}

template <class T>
static void multiply_as(const Linear& a, const LinearPiece& p, float* scratch) {
    const int64_t rows = p.last_row - p.first_row;
    const float* input = a.input + p.first_row * a.depth;
    const T* weights = (const T*)a.packed + p.panel * a.depth * PANEL;
    float* sums = scratch;
    float* wide = scratch + LINEAR_ROWS * PANEL;
    memset(sums, 0, rows * PANEL * sizeof(float));
    if (rows <= FEW_ROWS) {
        multiply_rows(input, a.depth, rows, weights, a.depth, sums);
    } else {
        for (int64_t k = 0; k < a.depth; k += DEPTH) {
            const int64_t depth = a.depth - k < DEPTH ? a.depth - k : DEPTH;
            const float* piece = wide;
            if constexpr (sizeof(T) == sizeof(float)) {
                piece = weights + k * PANEL;
            } else {
                for (int64_t i = 0; i < depth * PANEL; i += WIDTH)
                    store(wide + i, load(weights + k * PANEL + i));
            }
            multiply_rows(input + k, a.depth, rows, piece, depth, sums);
        }
    }
    const int64_t first = p.panel * PANEL;
    const int64_t count = a.outputs - first < PANEL ? a.outputs - first : PANEL;
    for (int64_t r = 0; r < rows; ++r) {
        float* row = sums + r * PANEL;
        if (a.scales)
            for (int64_t c = 0; c < count; ++c) row[c] *= a.scales[first + c];
        if (a.bias)
            for (int64_t c = 0; c < count; ++c) row[c] += a.bias[first + c];
        const int64_t at = (p.first_row + r) * a.outputs + first;
        switch (a.number) {
            case Number::Float32:
                memcpy((float*)a.out + at, row, count * sizeof(float));
                break;
            case Number::BFloat16:
                for (int64_t c = 0; c < count; ++c) from_float(row[c], (BFloat16*)a.out + at + c);
                break;
            case Number::Float16:
#if defined(__F16C__)
                for (int64_t c = 0; c < count; ++c) from_float(row[c], (Float16*)a.out + at + c);
#endif
                break;
        }
    }
}

static void multiply(const Linear& a, const LinearPiece& p, float* scratch) {
    switch (a.weights) {
        case Weights::Float32:
            multiply_as<float>(a, p, scratch);
            break;
        case Weights::BFloat16:
            multiply_as<BFloat16>(a, p, scratch);
            break;
        case Weights::Int8:
            multiply_as<int8_t>(a, p, scratch);
            break;
        case Weights::Float16:
#if defined(__F16C__)
            multiply_as<Float16>(a, p, scratch);
#endif
            break;
    }
}

template <class T>
static void widen_as(const Linear& a, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        const T* from = (const T*)a.x + r * a.stride;
        float* to = a.input + r * a.depth;
        int64_t k = 0;
        for (; k + WIDTH <= a.depth; k += WIDTH) store(to + k, load(from + k));
        for (; k < a.depth; ++k) to[k] = to_float(from[k]);
    }
}

static void widen(const Linear& a, int64_t first, int64_t last) {
    switch (a.number) {
        case Number::Float32:
            widen_as<float>(a, first, last);
            break;
        case Number::BFloat16:
            widen_as<BFloat16>(a, first, last);
            break;
        case Number::Float16:
#if defined(__F16C__)
            widen_as<Float16>(a, first, last);
#endif
            break;
    }
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_DOOR(name) AIOENGINE_JOIN(linear_, name)

namespace aioengine {
extern const LinearKernels AIOENGINE_DOOR(AIOENGINE_KERNELS) = {
    LINEAR_ROWS * PANEL + DEPTH * PANEL, widen, multiply};
}
