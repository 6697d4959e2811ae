// What a norm is given, and the tables of functions that compute it.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

struct Norm {
    DType dtype;  // of x, residual and out
    const void* x;  // [rows, heads, dim]: a row and a head `strides` numbers apart
    int64_t strides[2];
    int64_t heads;
    const void* weight;    // [dim], or null: then nothing is normalized
    const void* bias;      // [dim], or null; where there is one, rows are centred before they are scaled
    bool has_float_weight;  // weight and bias are of float32, not of the dtype of x
    const void* residual;  // [rows, heads * dim], or null: is added to what was rounded
    int64_t residual_stride;
    void* out;  // [rows, heads, dim], contiguous
    int64_t dim;
    float epsilon;
};

// Rows [first, last).
using NormKernel = void (*)(const Norm&, int64_t first, int64_t last);

extern const NormKernel norm_generic;
#if defined(__x86_64__)
extern const NormKernel norm_avx2;
extern const NormKernel norm_avx512;
extern const NormKernel norm_avx512_bf16;
#elif defined(__aarch64__)
extern const NormKernel norm_neon;
extern const NormKernel norm_neon_bf16;
#endif

}  // namespace aioengine
