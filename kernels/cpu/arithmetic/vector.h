// Vectors of float as wide as the instruction set that a file is compiled for, and how numbers of
// 16 bits become them. Written on the compiler's own vector types, so that one text serves all.
//
// The files that include this are compiled once for each instruction set and linked into one
// library. What they define must therefore stay inside the file: a function that the linker may
// merge with another file's (an inline one, a template of the standard library) could bring
// instructions to a CPU that has not got them. Hence `static`, and no headers of C++.
//
// Sums that must stay in registers are arrays, and the loops over them have a pragma to unroll: GCC decides
// which arrays are registers before it unrolls of its own accord, and else stores all of them at every step.

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether numbers of float16 are converted by instructions.
#if defined(__F16C__) || defined(__aarch64__)
#define AIOENGINE_FLOAT16 1
#endif

#if defined(__AVX512F__)
#define AIOENGINE_WIDTH 16
#elif defined(__AVX2__)
#define AIOENGINE_WIDTH 8
#else
#define AIOENGINE_WIDTH 4
#endif

namespace {

constexpr int WIDTH = AIOENGINE_WIDTH;
constexpr int64_t LINE = 64;  // bytes that memory is read by

static inline int64_t lesser(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// Prefetches `bytes` of what is read soon. Few lines at a time, between what is computed: a core waits for
// a dozen at once, and then for the first of them.
static inline void prefetch(const void* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char*)at + i);
}

// To the second cache: for what is read after so much else that the first would have lost it.
static inline void prefetch_ahead(const void* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch((const char*)at + i, 0, 2);
}

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// The two formats of 16 bits. Only their size and their conversions matter here.
struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

static inline Floats splat(float x) {
    return x - Floats{};
}

static inline Floats load(const float* at) {
    Floats x;
    memcpy(&x, at, sizeof x);
    return x;
}

static inline Floats load(const BFloat16* at) {
#if defined(__aarch64__)  // of what is below, GCC 12 makes one number after the other there
    return (Floats)vshll_n_u16(vld1_u16(&at->bits), 16);
#else
    Halves x;
    memcpy(&x, at, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

static inline void store(float* at, Floats x) {
    memcpy(at, &x, sizeof x);
}

static inline float to_float(float x) {
    return x;
}

static inline float to_float(BFloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void from_float(float x, float* at) {
    *at = x;
}

// Rounds to the nearest, to even where there are two.
static inline void from_float(float x, BFloat16* at) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    at->bits = is_nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)
static inline Floats load(const Float16* at) {
#if AIOENGINE_WIDTH == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#else
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#endif
}

static inline float to_float(Float16 x) {
    return _cvtsh_ss(x.bits);
}

static inline void from_float(float x, Float16* at) {
    at->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
static inline Floats load(const Float16* at) {
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&at->bits)));
}

static inline float to_float(Float16 x) {
    __fp16 half;
    memcpy(&half, &x, sizeof half);
    return half;
}

static inline void from_float(float x, Float16* at) {
    const __fp16 half = (__fp16)x;
    memcpy(at, &half, sizeof half);
}
#endif

// A vector of float16, on any CPU.
static inline Floats load_halves(const void* at) {
#if AIOENGINE_FLOAT16
    return load((const Float16*)at);
#else
    // Its exponent is moved to where a float's is, and scaled to what that means: infinities and what is no
    // number come to large ones, which nobody writes.
    Halves x;
    memcpy(&x, at, sizeof x);
    const Words wide = __builtin_convertvector(x, Words);
    const Floats size = (Floats)((wide & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112
    return (Floats)((Words)size | (wide & 0x8000) << 16);
#endif
}

#if defined(__AVX512BF16__)
// Two numbers, in each lane.
static inline __m512bh splat_pair(const BFloat16* at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}
#endif

static inline Floats choose(Ints is_first, Floats first, Floats second) {
    return (Floats)((is_first & (Ints)first) | (~is_first & (Ints)second));
}

// A vector of numbers, rounded.
static inline void store(BFloat16* at, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(at, &rounded, sizeof rounded);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    vst1_u16(&at->bits, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)));
#elif defined(__aarch64__)
    const Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Words no_number = Words{} + 0x7fc00000;
    const Words found = (Words)choose(x == x, (Floats)rounded, (Floats)no_number) >> 16;
    vst1_u16(&at->bits, vmovn_u32((uint32x4_t)found));
#else
    for (int i = 0; i < WIDTH; ++i) from_float(x[i], at + i);
#endif
}

#if defined(__F16C__)
static inline void store(Float16* at, Floats x) {
    for (int i = 0; i < WIDTH; ++i) from_float(x[i], at + i);
}
#elif defined(__aarch64__)
static inline void store(Float16* at, Floats x) {
    vst1_u16(&at->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}
#endif

static inline Floats larger(Floats a, Floats b) {
#if AIOENGINE_WIDTH == 16
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);  // b where they are not in order
#else
    return choose(a > b, a, b);
#endif
}

static inline float sum(Floats x) {
#if AIOENGINE_WIDTH == 16
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)x);
#else
    float total = 0;
    for (int i = 0; i < WIDTH; ++i) total += x[i];
    return total;
#endif
}

static inline float largest(Floats x) {
#if AIOENGINE_WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__aarch64__)
    return vmaxnmvq_f32((float32x4_t)x);  // of those that are numbers
#else
    float found = x[0];
    for (int i = 1; i < WIDTH; ++i) found = x[i] > found ? x[i] : found;
    return found;
#endif
}

// e to the x for x <= 0, within two units in the last place; 0 below -87, where floats run out.
// Cody and Waite's reduction by ln 2 in two parts, then the Taylor series to the sixth power on
// [-ln 2 / 2, ln 2 / 2].
static inline Floats exp_negative(Floats x) {
    const Floats lowest = splat(-87.0f);
#if AIOENGINE_WIDTH == 16
    const __mmask16 is_enough = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_NO_EXC);
#else
    const Ints is_tiny = x < lowest;
    x = choose(is_tiny, lowest, x);
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats turns = x * 1.44269504f + shift;
    const Floats n = turns - shift;
#endif
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if AIOENGINE_WIDTH == 16
    return (Floats)_mm512_maskz_scalef_ps(is_enough, (__m512)p, (__m512)n);
#else
    const Ints power = ((Ints)turns - (Ints)shift + 127) << 23;
    return choose(is_tiny, Floats{}, p * (Floats)power);
#endif
}

static inline Floats tanh_of(Floats x) {
    constexpr float SMALL = 0.2f;
    const Ints is_negative = x < Floats{};
    const Floats size = choose(is_negative, -x, x), square = x * x;
    const Floats e = exp_negative(size * -2.0f);
    // Where 1 - e loses digits, by its series.
    const Floats series = size + size * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
    const Floats found = choose(size < splat(SMALL), series, (1.0f - e) / (1.0f + e));
    return choose(is_negative, -found, found);
}

#if AIOENGINE_WIDTH == 16
constexpr float LOG2_E = 1.44269504f;

// 2 to the x, off by less than 2e-7 of itself. The bits are the same wherever it is used, as nothing is
// left to the compiler to contract. The polynomial is fitted to 2^x on [0, 1), with a relative error as
// even as it gets and 1 at 0.
static inline __m512 power_of_two(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x less its floor
    __m512 p = _mm512_set1_ps(0.0018671317f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0090170270f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0557999164f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2401644439f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931512952f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}
#endif

}  // namespace
