// The place of a row's largest number: block by block the largest, then the place within the best block.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "argmax.h"

#include "vector.h"

namespace {

using aioengine::DType;

constexpr int64_t BLOCK_NUMBERS = 64 * WIDTH;

template <class T>
static int64_t argmax_of(const T* x, int64_t count) {
    const float none = -__builtin_inff();
    int64_t best = 0;
    float top = none;
    for (int64_t first = 0; first < count; first += BLOCK_NUMBERS) {
        const int64_t last = lesser(first + BLOCK_NUMBERS, count);
        const int64_t whole = first + (last - first) / WIDTH * WIDTH;
        // Of what is not a number no comparison says so: it is marked apart.
        Floats highest = splat(none), odd = {};
        for (int64_t i = first; i < whole; i += WIDTH) {
            const Floats each = load(x + i);
            highest = larger(each, highest);
            odd = choose(each == each, odd, splat(1));
        }
        float high = largest(highest);
        bool is_odd = sum(odd) != 0;
        for (int64_t i = whole; i < last; ++i) {
            const float each = to_float(x[i]);
            if (each > high) high = each;
            is_odd = is_odd || each != each;
        }
        if (is_odd) {
            for (int64_t i = first; i < last; ++i)
                if (to_float(x[i]) != to_float(x[i])) return i;
        }
        if (high > top) {
            top = high;
            best = first;
        }
    }
    for (int64_t i = best; i < count; ++i)
        if (to_float(x[i]) == top) return i;
    return 0;
}

static int64_t argmax(DType dtype, const void* x, int64_t count) {
    switch (dtype) {
        case DType::Float32:
            return argmax_of((const float*)x, count);
        case DType::BFloat16:
            return argmax_of((const BFloat16*)x, count);
        case DType::Float16:
#if AIOENGINE_FLOAT16
            return argmax_of((const Float16*)x, count);
#endif
            break;
    }
    return 0;
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(argmax_, name)

namespace aioengine {
extern const ArgmaxKernel AIOENGINE_TABLE(AIOENGINE_KERNELS) = argmax;
}
