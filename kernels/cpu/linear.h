// What one product with a packed weight is given, and the doors to its arithmetic. See
// kernels/cpu/linear.py for the layout.

#pragma once

#include <stdint.h>

#include "number.h"

namespace aioengine {

constexpr int64_t PANEL = 32;  // outputs whose weights lie side by side

enum class Weights { Float32, BFloat16, Float16, Int8 };

// What becomes of an output: all of these are x times the logistic function of something.
enum class Activation { None, SiLU, GeluTanh, QuickGelu };

struct Linear {
    Number number;        // of x and out
    Weights weights;
    const void* x;        // [rows, depth], rows `stride` numbers apart
    int64_t stride;
    const float* input;   // the same as floats, rows `input_stride` apart
    int64_t input_stride;
    const void* packed;   // [panels, depth, PANEL]
    const float* scales;  // [outputs], or null: multiplies what an output adds up to
    const float* bias;    // [outputs], or null
    void* out;            // [rows, outputs], contiguous; [rows, outputs / 2] where gated
    int64_t rows, depth, outputs;
    Activation activation;
    // 0, or how many panels there are of gates: each is activated and multiplied by an output of
    // the panel that comes so many after it.
    int64_t gate_panels;
};

// Rows [first_row, last_row) of one panel's outputs, and of its partner's where there are gates.
struct LinearPiece {
    int64_t panel, first_row, last_row;
};

struct LinearKernels {
    int64_t scratch_floats;  // that `multiply` wants for up to LINEAR_ROWS rows
    void (*widen)(const Linear&, int64_t first_row, int64_t last_row, float* input);
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
