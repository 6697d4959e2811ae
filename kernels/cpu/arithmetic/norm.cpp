// RMS norms (Zhang and Sennrich, 2019), a row at a time: sums in float32, one rounding at the end. What is
// added to a row after that rounds once more.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "norm.h"

#include <math.h>

#include "vector.h"

namespace {

using aioengine::Norm;
using aioengine::DType;

// The root of the mean square of a row, inverted; 1 where nothing is normalized.
template <class T>
static inline float factor_of(const Norm& a, const T* x) {
    if (!a.weight) return 1;
    const int64_t whole = a.dim / WIDTH * WIDTH;
    // Of several sums none waits for the one before, and each is of fewer numbers.
    constexpr int SUMS = 4;
    Floats squares[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS * WIDTH <= whole; i += SUMS * WIDTH)
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; ++s) {
            const Floats each = load(x + i + s * WIDTH);
            squares[s] += each * each;
        }
    for (; i < whole; i += WIDTH) squares[0] += load(x + i) * load(x + i);
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (i = whole; i < a.dim; ++i) total += to_float(x[i]) * to_float(x[i]);
    return 1 / sqrtf(total / (float)a.dim + a.epsilon);
}

template <class T, class W>
static inline void scale(const T* x, float factor, const W* weight, int64_t dim, T* out) {
    const int64_t whole = dim / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) store(out + i, load(x + i) * factor * load(weight + i));
    for (int64_t i = whole; i < dim; ++i)
        from_float(to_float(x[i]) * factor * to_float(weight[i]), out + i);
}

template <class T>
static inline void add(const T* x, const T* residual, int64_t dim, T* out) {
    const int64_t whole = dim / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) store(out + i, load(x + i) + load(residual + i));
    for (int64_t i = whole; i < dim; ++i) from_float(to_float(x[i]) + to_float(residual[i]), out + i);
}

template <class T>
static void normalize_as(const Norm& a, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
        for (int64_t h = 0; h < a.heads; ++h) {
            const T* x = (const T*)a.x + r * a.strides[0] + h * a.strides[1];
            T* out = (T*)a.out + (r * a.heads + h) * a.dim;
            const float factor = factor_of(a, x);
            if (a.weight && a.has_float_weight) scale(x, factor, (const float*)a.weight, a.dim, out);
            if (a.weight && !a.has_float_weight) scale(x, factor, (const T*)a.weight, a.dim, out);
            const T* residual = (const T*)a.residual;
            if (residual) add(a.weight ? out : x, residual + r * a.residual_stride + h * a.dim, a.dim, out);
        }
    }
}

static void normalize(const Norm& a, int64_t first, int64_t last) {
    switch (a.dtype) {
        case DType::Float32:
            normalize_as<float>(a, first, last);
            break;
        case DType::BFloat16:
            normalize_as<BFloat16>(a, first, last);
            break;
        case DType::Float16:
#if defined(__F16C__)
            normalize_as<Float16>(a, first, last);
#endif
            break;
    }
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(norm_, name)

namespace aioengine {
extern const NormKernel AIOENGINE_TABLE(AIOENGINE_KERNELS) = normalize;
}
