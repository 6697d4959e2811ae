// Rotary position embeddings (Su et al., 2021) of queries and keys whose halves are rotated against
// each other: in float32, with one rounding at the end.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "rotary.h"

#include "vector.h"

namespace {

using aioengine::DType;
using aioengine::Rotary;

// The numbers of a head that are rotated against each other, WIDTH of each half.
struct Rotated {
    Floats low, high;
};

template <class T>
static inline Rotated load_halves_of(const T* x, int64_t half, int64_t i) {
    return {load(x + i), load(x + half + i)};
}

// Those that take turns: two of them are an integer, whose upper bits are a float's.
static inline Rotated load_pairs_of(const BFloat16* x, int64_t i) {
    Ints pairs;
    memcpy(&pairs, x + 2 * i, sizeof pairs);
    return {(Floats)(pairs << 16), (Floats)(pairs & (int32_t)0xffff0000)};
}

template <class T>
static inline Rotated load_pairs_of(const T* x, int64_t i) {
    Rotated found;
    for (int64_t j = 0; j < WIDTH; ++j) {
        found.low[j] = to_float(x[2 * (i + j)]);
        found.high[j] = to_float(x[2 * (i + j) + 1]);
    }
    return found;
}

// `A`: of angles.
template <class T, class A>
static void rotate_as(const Rotary& a, int64_t first, int64_t last) {
    const int64_t half = a.dim / 2, whole = half / WIDTH * WIDTH;
    const int64_t other = a.is_halved ? 0 : half;  // where the second half's angles are
    const int64_t step = a.in_pairs ? 2 : 1, partner = a.in_pairs ? 1 : half;
    for (int64_t t = first; t < last; ++t) {
        const A* cos = (const A*)a.cos + t * a.cos_stride;
        const A* sin = (const A*)a.sin + t * a.sin_stride;
        for (int64_t h = 0; h < a.heads; ++h) {
            const T* x = (const T*)a.x + t * a.strides[0] + h * a.strides[1];
            T* out = (T*)a.out + (t * a.heads + h) * a.dim;
            for (int64_t i = 0; i < whole; i += WIDTH) {
                const auto [low, high] = a.in_pairs ? load_pairs_of(x, i) : load_halves_of(x, half, i);
                store(out + i, low * load(cos + i) - high * load(sin + i));
                store(out + half + i, high * load(cos + other + i) + low * load(sin + other + i));
            }
            for (int64_t i = whole; i < half; ++i) {
                const int64_t j = other + i;
                const float low = to_float(x[step * i]), high = to_float(x[step * i + partner]);
                from_float(low * to_float(cos[i]) - high * to_float(sin[i]), out + i);
                from_float(high * to_float(cos[j]) + low * to_float(sin[j]), out + half + i);
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
