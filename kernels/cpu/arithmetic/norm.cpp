// RMS norms (Zhang and Sennrich, 2019), a row at a time: sums in float32, one rounding at the end.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "norm.h"

#include <math.h>

#include "vector.h"

namespace {

using aioengine::Norm;
using aioengine::DType;

template <class T>
static void normalize_as(const Norm& a, int64_t first, int64_t last) {
    const T* weight = (const T*)a.weight;
    const int64_t whole = a.dim / WIDTH * WIDTH;
    for (int64_t r = first; r < last; ++r) {
        const T* x = (const T*)a.x + r * a.stride;
        T* out = (T*)a.out + r * a.dim;
        Floats squares = {};
        for (int64_t i = 0; i < whole; i += WIDTH) squares += load(x + i) * load(x + i);
        float total = sum(squares);
        for (int64_t i = whole; i < a.dim; ++i) total += to_float(x[i]) * to_float(x[i]);
        const float factor = 1 / sqrtf(total / (float)a.dim + a.epsilon);
        for (int64_t i = 0; i < whole; i += WIDTH)
            store(out + i, load(x + i) * factor * load(weight + i));
        for (int64_t i = whole; i < a.dim; ++i)
            from_float(to_float(x[i]) * factor * to_float(weight[i]), out + i);
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
