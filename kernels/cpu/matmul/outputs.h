// What becomes of the sums of a matmul before they are written: scales and biases, an activation,
// gates, and the number that they are rounded to. See vector.h for why all of this is static.

#pragma once

#include "linear.h"
#include "vector.h"

namespace {

// sums [rows, PANEL] of one panel's outputs.
static inline void scale_and_shift(
    const aioengine::Linear& a, int64_t panel, int64_t rows, float* sums) {
    const int64_t first = panel * aioengine::PANEL;
    const int64_t left = a.outputs - first;
    const int64_t count = left < aioengine::PANEL ? left : aioengine::PANEL;
    for (int64_t r = 0; r < rows; ++r, sums += aioengine::PANEL) {
        if (a.scales)
            for (int64_t c = 0; c < count; ++c) sums[c] *= a.scales[first + c];
        if (a.bias)
            for (int64_t c = 0; c < count; ++c) sums[c] += a.bias[first + c];
    }
}

// e to the x for x <= 0. IS_NARROW: for what is rounded to 16 bits.
template <bool IS_NARROW>
static inline Floats exp_for(Floats x) {
#if AIOENGINE_WIDTH == 16
    if (IS_NARROW) return (Floats)power_of_two((__m512)(x * LOG2_E));
#endif
    return exp_negative(x);
}

template <bool IS_NARROW>
static inline Floats logistic(Floats x) {
#if AIOENGINE_WIDTH == 16
    // Where x is far below 0, the power is infinite, and one over it 0.
    if (IS_NARROW) return 1.0f / (1.0f + (Floats)power_of_two((__m512)(x * -LOG2_E)));
#endif
    const Floats e = exp_negative(choose(x < Floats{}, x, -x));
    return choose(x < Floats{}, e, splat(1.0f)) / (1.0f + e);
}

// The share of a normal distribution beyond |x|, times |x|. By formula 7.1.26 of Abramowitz and Stegun,
// "Handbook of Mathematical Functions" (1964), whose error is below 1.5e-7.
template <bool IS_NARROW>
static inline Floats normal_tail(Floats x) {
    const Floats end = splat(20.0f), magnitude = choose(x < Floats{}, -x, x);
    const Floats size = choose(magnitude < end, magnitude, end), z = size * 0.70710678f;
    const Floats t = 1.0f / (1.0f + 0.3275911f * z);
    Floats p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return size * 0.5f * p * t * exp_for<IS_NARROW>(-z * z);
}

// The activation of outputs, or of gates.
template <bool IS_NARROW>
static inline void activate(const aioengine::Linear& a, int64_t count, float* sums) {
    using aioengine::Activation;
    const Activation activation = a.activation;
    if (a.limit) {
        const Floats limit = splat(a.limit);
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Floats x = load(sums + i);
            store(sums + i, choose(x > limit, limit, x));
        }
    }
    if (activation == Activation::None) return;
    if (activation == Activation::Gelu) {
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Floats x = load(sums + i);
            store(sums + i, choose(x < Floats{}, Floats{}, x) - normal_tail<IS_NARROW>(x));
        }
        return;
    }
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Floats x = load(sums + i);
        Floats u = x;
        // tanh(t) = 2 logistic(2t) - 1, with t = sqrt(2 / pi) (x + 0.044715 x^3).
        if (activation == Activation::GeluTanh) u = x * (1.59576912f + 0.07135481f * x * x);
        if (activation == Activation::QuickGelu) u = 1.702f * x;
        store(sums + i, x * logistic<IS_NARROW>(u));
    }
}

// sums *= others, within their limits.
static inline void gate(const aioengine::Linear& a, int64_t count, const float* others, float* sums) {
    if (a.limit) {
        const Floats limit = splat(a.limit);
        for (int64_t i = 0; i < count; i += WIDTH) {
            Floats x = load(others + i);
            x = choose(x > limit, limit, x);
            x = choose(x < -limit, -limit, x) + a.shift;
            store(sums + i, load(sums + i) * x);
        }
        return;
    }
    for (int64_t i = 0; i < count; i += WIDTH) store(sums + i, load(sums + i) * load(others + i));
}

// Rounds `count` sums; adds a residual to what was rounded, unless it is null, and rounds that.
template <class T>
static inline void write_row(const float* sums, int64_t count, const T* residual, T* to) {
    int64_t c = 0;
    for (; c + WIDTH <= count; c += WIDTH) {
        store(to + c, load(sums + c));
        if (residual) store(to + c, load(to + c) + load(residual + c));
    }
    for (; c < count; ++c) {
        from_float(sums[c], to + c);
        if (residual) from_float(to_float(to[c]) + to_float(residual[c]), to + c);
    }
}

template <class T>
static inline void round_as(
    const aioengine::Linear& a, const aioengine::LinearPiece& p, int64_t outputs, int64_t count,
    const float* sums, void* results) {
    const T* residual = (const T*)a.residual;
    T* to = (T*)results;
    for (int64_t r = p.first_row; r < p.last_row; ++r) {
        const T* more = residual ? residual + r * outputs + p.panel * aioengine::PANEL : nullptr;
        write_row(sums, count, more, to);
        sums += aioengine::PANEL;
        to += aioengine::PANEL;
    }
}

// Outputs of a panel of `outputs` that are not padding.
static inline int64_t panel_width(const aioengine::LinearPiece& p, int64_t outputs) {
    return lesser(aioengine::PANEL, outputs - p.panel * aioengine::PANEL);
}

static inline int64_t outputs_written(const aioengine::Linear& a) {
    return a.gate_panels ? a.outputs / 2 : a.outputs;
}

// Makes of a piece's sums [rows, PANEL] what is to be written, [rows, PANEL] of the outputs' dtype.
static inline void round_sums(
    const aioengine::Linear& a, const aioengine::LinearPiece& p, const float* sums, void* results) {
    using aioengine::DType;
    const int64_t outputs = outputs_written(a), count = panel_width(p, outputs);
    switch (a.dtype) {
        case DType::Float32:
            round_as<float>(a, p, outputs, count, sums, results);
            break;
        case DType::BFloat16:
            round_as<BFloat16>(a, p, outputs, count, sums, results);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            round_as<Float16>(a, p, outputs, count, sums, results);
#endif
            break;
    }
}

// Writes what `round_sums` has made. Whole lines of bfloat16 go past the caches: a line that is written in
// them is read first, which nothing hides here, as a panel's rows are an output's whole width apart.
static inline void write_results(
    const aioengine::Linear& a, const aioengine::LinearPiece& p, const void* results) {
    const int64_t outputs = outputs_written(a), count = panel_width(p, outputs);
    const int64_t size = a.dtype == aioengine::DType::Float32 ? sizeof(float) : sizeof(BFloat16);
    const char* from = (const char*)results;
    char* to = (char*)a.out + (p.first_row * outputs + p.panel * aioengine::PANEL) * size;
    const int64_t rows = p.last_row - p.first_row;
#if defined(__AVX512BF16__)
    const bool is_aligned = (uintptr_t)to % LINE == 0 && outputs % aioengine::PANEL == 0;
    if (size == sizeof(BFloat16) && is_aligned) {
        for (int64_t r = 0; r < rows; ++r, from += LINE, to += outputs * size)
            _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
        return;
    }
#endif
    for (int64_t r = 0; r < rows; ++r, from += aioengine::PANEL * size, to += outputs * size)
        memcpy(to, from, count * size);
}

}  // namespace
