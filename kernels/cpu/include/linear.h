// What one matmul with a packed weight is given, and the tables of functions that compute it. See
// kernels/cpu/linear.py for the layout.

#pragma once

#include <stdint.h>

#include "dtype.h"
#include "grouped.h"

namespace aioengine {

constexpr int64_t PANEL = 32;  // outputs whose weights lie side by side

enum class Weights { Float32, BFloat16, Float16, Grouped };

// What a depth must be a multiple of for bfloat16 to lie in pairs of inputs, which some CPUs multiply.
constexpr int64_t PAIRED_DEPTH = 32;

// What becomes of an output: x times the logistic function of something, or (Gelu) times the share
// of a normal distribution that is below x.
enum class Activation { None, SiLU, GeluTanh, QuickGelu, Gelu };

struct Linear {
    DType dtype;        // of x and out
    Weights weights;
    const void* x;        // [rows, depth], rows `stride` numbers apart
    int64_t stride;
    const float* input;   // the same as floats, rows `input_stride` apart
    int64_t input_stride;
    const void* packed;   // [panels, depth, PANEL], or in pairs [panels, depth / 2, PANEL, 2]
    bool is_paired;       // it lies in pairs
    Groups groups;        // of a weight of 4 or 8 bits
    const float* scales;  // [outputs], or null: multiplies what an output adds up to
    const float* bias;    // [outputs], or null
    void* out;            // [rows, outputs], contiguous; [rows, outputs / 2] where gated
    const void* residual; // of the shape of out, or null: is added to what was rounded
    int64_t rows, depth, outputs;
    Activation activation;
    // 0, or how many panels there are of gates: each is activated and multiplied by an output of
    // the panel that comes so many after it.
    int64_t gate_panels;
    // 0, or what gates are at most before they are activated; an output that they multiply is held between this
    // and its negative, and the shift is added to it.
    float limit, shift;
    int64_t places_at_once;  // that weights are prefetched from, a power of two
};

// Rows [first_row, last_row) of one panel's outputs, and of its partner's where there are gates.
struct LinearPiece {
    int64_t panel, first_row, last_row;
    bool has_next;  // the same rows of the next panel come after it, in the same thread
};

struct LinearKernels {
    int64_t unit_rows;  // that are multiplied at a time: what a piece's rows should be a multiple of
    int64_t (*max_rows)(int64_t depth);  // of a piece
    int64_t (*scratch_floats)(const Linear&);  // that `multiply` wants
    // Where `multiply` reads a.input: makes it of x.
    void (*widen)(const Linear&, int64_t first_row, int64_t last_row, float* input);
    // Leaves a piece's outputs in the scratch, as they are to be written, and `write` puts them into a.out.
    // `scratch` is a thread's own for all of its pieces, and begins with 64 bytes of zeros.
    void (*multiply)(const Linear&, const LinearPiece&, float* scratch);
    void (*write)(const Linear&, const LinearPiece&, const float* scratch);
};

extern const LinearKernels linear_generic;
// Of weights in groups and inputs of 8 bits.
extern const LinearKernels int8_gemm_generic;
#if defined(__x86_64__)
extern const LinearKernels linear_avx2;
extern const LinearKernels linear_avx512;
extern const LinearKernels linear_avx512_bf16;
extern const LinearKernels int8_gemm_avx2;
extern const LinearKernels int8_gemm_avx512_vnni;
// Of weights in pairs.
extern const LinearKernels bf16_gemm_avx512_bf16;
extern const LinearKernels bf16_gemm_amx_bf16;
// Of weights in groups and inputs of bfloat16 that stay what they are.
extern const LinearKernels grouped_bf16_avx512_bf16;
#elif defined(__aarch64__)
extern const LinearKernels linear_neon;
extern const LinearKernels linear_neon_bf16;
extern const LinearKernels int8_gemm_neon;
extern const LinearKernels int8_gemm_neon_dotprod;
extern const LinearKernels int8_gemm_neon_i8mm;
extern const LinearKernels bf16_gemm_neon_bf16;
#endif

}  // namespace aioengine
