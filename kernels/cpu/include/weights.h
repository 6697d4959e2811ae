// What a token is drawn by, and the tables of functions that compute it.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

// e to the (x - largest) / temperature, of `count` numbers.
using WeightsKernel = void (*)(DType, const void* x, int64_t count, float temperature, float* weights);

extern const WeightsKernel weights_generic;
#if defined(__x86_64__)
extern const WeightsKernel weights_avx2;
extern const WeightsKernel weights_avx512;
#elif defined(__aarch64__)
extern const WeightsKernel weights_neon;
#endif

}  // namespace aioengine
