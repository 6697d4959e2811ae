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

template <bool IS_NARROW>
static inline void activate(aioengine::Activation activation, int64_t count, float* sums) {
    using aioengine::Activation;
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

// sums *= others
static inline void gate(int64_t count, const float* others, float* sums) {
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

#if defined(__AVX512BF16__)
static inline __m512 as_floats(__m256i rounded) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
}

// The same of whole lines, past the caches. A line that is written in them is read first, which nothing
// hides here: a panel's rows are an output's whole width apart.
static inline void stream_rows(
    const float* sums, int64_t rows, int64_t stride, const BFloat16* residual, BFloat16* to) {
    static_assert(aioengine::PANEL == 2 * WIDTH);
    for (int64_t r = 0; r < rows; ++r, sums += aioengine::PANEL, to += stride) {
        const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + WIDTH);
        __m512i line = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        if (residual) {
            const __m512i more = _mm512_loadu_si512(residual + r * stride);
            const __m512 first = _mm512_add_ps(
                as_floats(_mm512_castsi512_si256(line)), as_floats(_mm512_castsi512_si256(more)));
            const __m512 second = _mm512_add_ps(
                as_floats(_mm512_extracti64x4_epi64(line, 1)),
                as_floats(_mm512_extracti64x4_epi64(more, 1)));
            line = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        }
        _mm512_stream_si512((__m512i*)to, line);
    }
}
#endif

template <class T>
static inline void write_row_of(
    const aioengine::Linear& a, const float* sums, int64_t count, int64_t at) {
    const T* residual = (const T*)a.residual;
    write_row(sums, count, residual ? residual + at : nullptr, (T*)a.out + at);
}

static inline void write(
    const aioengine::Linear& a, const aioengine::LinearPiece& p, const float* sums) {
    using aioengine::DType;
    const int64_t outputs = a.gate_panels ? a.outputs / 2 : a.outputs;
    const int64_t first = p.panel * aioengine::PANEL;
    const int64_t left = outputs - first;
    const int64_t count = left < aioengine::PANEL ? left : aioengine::PANEL;
#if defined(__AVX512BF16__)
    BFloat16* to = (BFloat16*)a.out + p.first_row * outputs + first;
    const bool is_aligned = (uintptr_t)to % 64 == 0 && outputs % aioengine::PANEL == 0;
    if (a.dtype == DType::BFloat16 && is_aligned) {
        const BFloat16* residual = (const BFloat16*)a.residual;
        if (residual) residual += p.first_row * outputs + first;
        stream_rows(sums, p.last_row - p.first_row, outputs, residual, to);
        return;
    }
#endif
    for (int64_t r = p.first_row; r < p.last_row; ++r, sums += aioengine::PANEL) {
        const int64_t at = r * outputs + first;
        switch (a.dtype) {
            case DType::Float32:
                write_row_of<float>(a, sums, count, at);
                break;
            case DType::BFloat16:
                write_row_of<BFloat16>(a, sums, count, at);
                break;
            case DType::Float16:
#if defined(__F16C__)
                write_row_of<Float16>(a, sums, count, at);
#endif
                break;
        }
    }
}

}  // namespace
