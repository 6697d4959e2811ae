// Rotary position embeddings (Su et al., 2021) of queries and keys whose halves are rotated against
// each other: in float32, with one rounding at the end.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "rotary.h"

#include "vector.h"

namespace {

using aioengine::DType;
using aioengine::Rotary;

// `A`: of angles.
template <class T, class A>
static void rotate_as(const Rotary& a, int64_t first, int64_t last) {
    const int64_t half = a.dim / 2, whole = half / WIDTH * WIDTH;
    for (int64_t t = first; t < last; ++t) {
        const A* cos = (const A*)a.cos + t * a.cos_stride;
        const A* sin = (const A*)a.sin + t * a.sin_stride;
        for (int64_t h = 0; h < a.heads; ++h) {
            const T* x = (const T*)a.x + t * a.strides[0] + h * a.strides[1];
            T* out = (T*)a.out + (t * a.heads + h) * a.dim;
            for (int64_t i = 0; i < whole; i += WIDTH) {
                const Floats low = load(x + i), high = load(x + half + i);
                store(out + i, low * load(cos + i) - high * load(sin + i));
                store(out + half + i, high * load(cos + half + i) + low * load(sin + half + i));
            }
            for (int64_t i = whole; i < half; ++i) {
                const int64_t j = half + i;
                const float low = to_float(x[i]), high = to_float(x[j]);
                from_float(low * to_float(cos[i]) - high * to_float(sin[i]), out + i);
                from_float(high * to_float(cos[j]) + low * to_float(sin[j]), out + j);
            }
        }
    }
}

template <class T>
static void rotate_tokens(const Rotary& a, int64_t first, int64_t last) {
    if (a.has_wide_angles)
        rotate_as<T, float>(a, first, last);
    else
        rotate_as<T, T>(a, first, last);
}

static void rotate(const Rotary& a, int64_t first, int64_t last) {
    switch (a.dtype) {
        case DType::Float32:
            rotate_tokens<float>(a, first, last);
            break;
        case DType::BFloat16:
            rotate_tokens<BFloat16>(a, first, last);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            rotate_tokens<Float16>(a, first, last);
#endif
            break;
    }
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(rotary_, name)

namespace aioengine {
extern const RotaryKernel AIOENGINE_TABLE(AIOENGINE_KERNELS) = rotate;
}
