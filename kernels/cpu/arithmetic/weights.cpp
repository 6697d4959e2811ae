// Weights of tokens to be drawn: a softmax that is not divided by its sum. And soft caps of logits.
//
// Compiled once for each instruction set, as attention.cpp is.

#include "weights.h"

#include "vector.h"

namespace {

using aioengine::DType;

template <class T>
static void weights_of(const T* x, int64_t count, float temperature, float* weights) {
    const int64_t whole = count / WIDTH * WIDTH;
    Floats highest = splat(-__builtin_inff());
    for (int64_t i = 0; i < whole; i += WIDTH) highest = larger(load(x + i), highest);
    float top = largest(highest);
    for (int64_t i = whole; i < count; ++i) top = to_float(x[i]) > top ? to_float(x[i]) : top;
    for (int64_t i = 0; i < whole; i += WIDTH)
        store(weights + i, exp_negative((load(x + i) - top) / temperature));
    // The rest is computed as all others are.
    float last[WIDTH] = {};
    for (int64_t i = whole; i < count; ++i) last[i - whole] = (to_float(x[i]) - top) / temperature;
    store(last, exp_negative(load(last)));
    for (int64_t i = whole; i < count; ++i) weights[i] = last[i - whole];
}

static void weights(DType dtype, const void* x, int64_t count, float temperature, float* to) {
    switch (dtype) {
        case DType::Float32:
            weights_of((const float*)x, count, temperature, to);
            break;
        case DType::BFloat16:
            weights_of((const BFloat16*)x, count, temperature, to);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            weights_of((const Float16*)x, count, temperature, to);
#endif
            break;
    }
}

static inline Floats capped(Floats x, float cap) {
    return tanh_of(x / cap) * cap;
}

template <class T>
static void cap_as(const T* x, int64_t count, float cap, T* to) {
    const int64_t whole = count / WIDTH * WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) store(to + i, capped(load(x + i), cap));
    float last[WIDTH] = {};
    for (int64_t i = whole; i < count; ++i) last[i - whole] = to_float(x[i]);
    store(last, capped(load(last), cap));
    for (int64_t i = whole; i < count; ++i) from_float(last[i - whole], to + i);
}

static void cap(DType dtype, const void* x, int64_t count, float cap, void* to) {
    switch (dtype) {
        case DType::Float32:
            cap_as((const float*)x, count, cap, (float*)to);
            break;
        case DType::BFloat16:
            cap_as((const BFloat16*)x, count, cap, (BFloat16*)to);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            cap_as((const Float16*)x, count, cap, (Float16*)to);
#endif
            break;
    }
}

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(weights_, name)

namespace aioengine {
extern const WeightsKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = {weights, cap};
}
