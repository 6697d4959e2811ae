// What a token is drawn by, soft caps of logits, and the tables of functions that compute them.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

struct WeightsKernels {
    // e to the (x - largest) / temperature, of `count` numbers.
    void (*weights)(DType, const void* x, int64_t count, float temperature, float* weights);
    // `to`, which may be x: cap * tanh(x / cap), rounded once.
    void (*cap)(DType, const void* x, int64_t count, float cap, void* to);
};

extern const WeightsKernels weights_generic;
#if defined(__x86_64__)
extern const WeightsKernels weights_avx2;
extern const WeightsKernels weights_avx512;
#elif defined(__aarch64__)
extern const WeightsKernels weights_neon;
#endif

}  // namespace aioengine
