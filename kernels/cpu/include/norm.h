// What an RMS norm is given, and the tables of functions that compute it.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

struct Norm {
    DType dtype;  // of x, weight and out
    const void* x;  // [rows, dim], rows `stride` numbers apart
    int64_t stride;
    const void* weight;  // [dim]
    void* out;           // [rows, dim], contiguous
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
#endif

}  // namespace aioengine
