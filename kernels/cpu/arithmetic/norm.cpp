// RMS norms (Zhang and Sennrich, 2019) and layer norms (Ba et al., 2016), a row at a time: sums in float32,
// one rounding at the end. What is added to a row after that rounds once more.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "norm.h"

#include <math.h>

#include "vector.h"

namespace {

using aioengine::Norm;
using aioengine::DType;

// Of several sums none waits for the one before, and each is of fewer numbers.
constexpr int SUMS = 4;

// The sum of a row's numbers less `mean`, or of the squares of these.
template <bool IS_SQUARED, class T>
static inline float sum_of(const T* x, int64_t dim, float mean) {
    const auto term = [&](auto each) {
        const auto rest = each - mean;
        return IS_SQUARED ? rest * rest : rest;
    };
    const int64_t whole = dim / WIDTH * WIDTH;
    Floats sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS * WIDTH <= whole; i += SUMS * WIDTH)
#pragma GCC unroll 4
        for (int s = 0; s < SUMS; ++s) sums[s] += term(load(x + i + s * WIDTH));
    for (; i < whole; i += WIDTH) sums[0] += term(load(x + i));
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (i = whole; i < dim; ++i) total += term(to_float(x[i]));
    return total;
}

// One over the root of the mean square of a row less its `mean`; 1 where nothing is normalized.
template <class T>
static inline float factor_of(const Norm& a, const T* x, float mean) {
    if (!a.weight) return 1;
    return 1 / sqrtf(sum_of<true>(x, a.dim, mean) / (float)a.dim + a.epsilon);
}

template <class T, class W>
static inline void scale_and_shift(
    const T* x, float mean, float factor, const W* weight, const W* bias, int64_t dim, T* out) {
    const int64_t whole = dim / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH)
        store(out + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
    for (int64_t i = whole; i < dim; ++i)
        from_float((to_float(x[i]) - mean) * factor * to_float(weight[i]) + to_float(bias[i]), out + i);
}

template <class T, class W>
static inline void scale(const T* x, float factor, const W* weight, int64_t dim, T* out) {
    const int64_t whole = dim / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) store(out + i, load(x + i) * factor * load(weight + i));
    for (int64_t i = whole; i < dim; ++i)
        from_float(to_float(x[i]) * factor * to_float(weight[i]), out + i);
}

template <class T, class W>
static inline void apply(
    const Norm& a, const T* x, float mean, float factor, const W* weight, const W* bias, T* out) {
    if (bias)
        scale_and_shift(x, mean, factor, weight, bias, a.dim, out);
    else
        scale(x, factor, weight, a.dim, out);
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
            const float mean = a.bias ? sum_of<false>(x, a.dim, 0) / (float)a.dim : 0;
            const float factor = factor_of(a, x, mean);
            if (a.weight && a.has_float_weight)
                apply(a, x, mean, factor, (const float*)a.weight, (const float*)a.bias, out);
            if (a.weight && !a.has_float_weight)
                apply(a, x, mean, factor, (const T*)a.weight, (const T*)a.bias, out);
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
#if AIOENGINE_FLOAT16
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
