// What a rotation of queries or keys is given, and the tables of functions that compute it.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

struct Rotary {
    DType dtype;       // of all but angles
    const void* x;       // [tokens, heads, dim], of any strides but the last
    int64_t strides[2];  // of a token and a head, in numbers
    int64_t heads, dim;  // dim is even
    const void *cos, *sin;  // [tokens, dim], or half of it
    int64_t cos_stride, sin_stride;
    bool has_wide_angles;  // float32 whatever the dtype
    void* out;  // [tokens, heads, dim], contiguous
    bool is_halved;  // angles are [tokens, dim / 2] and rotate both halves
    bool in_pairs;   // of x, numbers that are rotated against each other lie side by side; out has halves
};

// Tokens [first, last).
using RotaryKernel = void (*)(const Rotary&, int64_t first, int64_t last);

extern const RotaryKernel rotary_generic;
#if defined(__x86_64__)
extern const RotaryKernel rotary_avx2;
extern const RotaryKernel rotary_avx512;
extern const RotaryKernel rotary_avx512_bf16;
#elif defined(__aarch64__)
extern const RotaryKernel rotary_neon;
extern const RotaryKernel rotary_neon_bf16;
#endif

}  // namespace aioengine
