// Where a row's largest number is, and the tables of functions that find it.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

// The first of the largest of `count` numbers; the first that is not a number, if there is one.
using ArgmaxKernel = int64_t (*)(DType, const void* x, int64_t count);

extern const ArgmaxKernel argmax_generic;
#if defined(__x86_64__)
extern const ArgmaxKernel argmax_avx2;
extern const ArgmaxKernel argmax_avx512;
#elif defined(__aarch64__)
extern const ArgmaxKernel argmax_neon;
#endif

}  // namespace aioengine
