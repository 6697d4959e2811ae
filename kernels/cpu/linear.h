// What one product with a packed weight is given, and the doors to its arithmetic. See
// kernels/cpu/linear.py for the layout.

#pragma once

#include <stdint.h>

#include "number.h"

namespace aioengine {

constexpr int64_t PANEL = 32;  // outputs whose weights lie side by side

enum class Weights { Float32, BFloat16, Float16, Int8 };

struct Linear {
    Number number;        // of x and out
    Weights weights;
    const void* x;        // [rows, depth], rows `stride` numbers apart
    int64_t stride;
    float* input;         // the same as floats, contiguous, once `widen` has run
    const void* packed;   // [panels, depth, PANEL]
    const float* scales;  // [outputs], or null: multiplies what an output adds up to
    const float* bias;    // [outputs], or null
    void* out;            // [rows, outputs], contiguous
    int64_t rows, depth, outputs;
};

// Rows [first_row, last_row) of one panel's outputs.
struct LinearPiece {
    int64_t panel, first_row, last_row;
};

struct LinearKernels {
    int64_t scratch_floats;  // that `multiply` wants for up to LINEAR_ROWS rows
    void (*widen)(const Linear&, int64_t first_row, int64_t last_row);
    void (*multiply)(const Linear&, const LinearPiece&, float* scratch);
};

constexpr int64_t LINEAR_ROWS = 96;  // of one piece, at most

extern const LinearKernels linear_generic;
#if defined(__x86_64__)
extern const LinearKernels linear_avx2;
extern const LinearKernels linear_avx512;
extern const LinearKernels linear_avx512_bf16;
#endif

}  // namespace aioengine
