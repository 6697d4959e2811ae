// Products of bytes on 64-bit ARM, for int8_gemm.cpp: by the matmuls of I8MM, the dot products that most CPUs have
// since 2018, or the plain multiplications of all. All add up the same integers, which are exact. See vector.h for
// why all of this is static.

#pragma once

#if defined(__aarch64__)

#include "grouped_numbers.h"
#include "vector.h"

namespace {

constexpr int BLOCK_QUADS = 4;  // 16 inputs, of which all groups are multiples

// Of a quad: numbers of the four outputs at `at`, and of those 16 outputs further on.
template <Stored STORED>
static inline void load_quad(const uint8_t* at, int8x16_t levels, int8x16_t quad[2]) {
    const uint8x16_t low = vld1q_u8(at);
    if (STORED == Stored::Bytes) {
        quad[0] = vreinterpretq_s8_u8(low);
        quad[1] = vreinterpretq_s8_u8(vld1q_u8(at + LINE));
        return;
    }
    const uint8x16_t halves[2] = {vandq_u8(low, vdupq_n_u8(15)), vshrq_n_u8(low, 4)};
    for (int h = 0; h < 2; ++h)
        quad[h] = STORED == Stored::Levels ? vqtbl1q_s8(levels, halves[h]) : vreinterpretq_s8_u8(halves[h]);
}

// sum[output] += products of its four numbers with the quad of inputs number `LANE`.
template <int LANE>
static inline int32x4_t add_quad(int32x4_t sum, int8x16_t numbers, int8x16_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sum, numbers, inputs, LANE);
#else
    // Two products of 128 * 127 fit in 16 bits.
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs), LANE));
    const int16x8_t low = vmull_s8(vget_low_s8(numbers), vget_low_s8(four));
    return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(numbers, four)));
#endif
}

// The same of ROWS rows, quad after quad of a block.
template <Stored STORED, int ROWS, int LANE>
static inline void add_block(
    const int8x16_t* inputs, const uint8_t* numbers, int8x16_t levels, int32x4_t sums[][2]) {
    int8x16_t quad[2];
    load_quad<STORED>(numbers + LANE * quad_bytes(STORED), levels, quad);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        sums[r][0] = add_quad<LANE>(sums[r][0], quad[0], inputs[r]);
        sums[r][1] = add_quad<LANE>(sums[r][1], quad[1], inputs[r]);
    }
    if constexpr (LANE + 1 < BLOCK_QUADS)
        add_block<STORED, ROWS, LANE + 1>(inputs, numbers, levels, sums);
}

template <Stored STORED, int ROWS>
static inline void add_rows(
    const int8_t* x, int64_t stride, const uint8_t* numbers, int8x16_t levels, int64_t count,
    Ints sums[][2]) {
    int32x4_t s[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) s[r][0] = (int32x4_t)sums[r][0], s[r][1] = (int32x4_t)sums[r][1];
    for (int64_t k = 0; k < count; k += BLOCK_QUADS * aioengine::QUAD) {
        int8x16_t inputs[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) inputs[r] = vld1q_s8(x + r * stride + k);
        add_block<STORED, ROWS, 0>(inputs, numbers, levels, s);
        numbers += BLOCK_QUADS * quad_bytes(STORED);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r][0] = (Ints)s[r][0], sums[r][1] = (Ints)s[r][1];
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two rows with two outputs at a time, eight inputs of each: of two quads these lie where an instruction wants
// them once their words are interleaved.
template <Stored STORED, int PAIRS>
static inline void add_pairs(
    const int8_t* x, int64_t stride, const uint8_t* numbers, int8x16_t levels, int64_t count,
    Ints sums[][2]) {
    constexpr int64_t line = quad_bytes(STORED);
    int32x4_t s[PAIRS][2][2] = {};  // of outputs 0 and 1, and of 2 and 3: a row's, then the other's
    for (int64_t k = 0; k < count; k += 2 * aioengine::QUAD, numbers += 2 * line) {
        int8x16_t first[2], second[2];
        load_quad<STORED>(numbers, levels, first);
        load_quad<STORED>(numbers + line, levels, second);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const int32x4_t a = vreinterpretq_s32_s8(first[h]), b = vreinterpretq_s32_s8(second[h]);
            const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 4
            for (int p = 0; p < PAIRS; ++p) {
                const int8_t* at = x + 2 * p * stride + k;
                const int8x16_t inputs = vcombine_s8(vld1_s8(at), vld1_s8(at + stride));
                s[p][h][0] = vmmlaq_s32(s[p][h][0], inputs, low);
                s[p][h][1] = vmmlaq_s32(s[p][h][1], inputs, high);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const int64x2_t low = vreinterpretq_s64_s32(s[p][h][0]), high = vreinterpretq_s64_s32(s[p][h][1]);
            sums[2 * p][h] += (Ints)vzip1q_s64(low, high);
            sums[2 * p + 1][h] += (Ints)vzip2q_s64(low, high);
        }
}

#endif

// As in int8_gemm.cpp.
template <Stored STORED, int ROWS>
static inline void add_products(
    const int8_t* x, int64_t stride, const uint8_t* numbers, const int8_t* levels, int v, int64_t count,
    Ints sums[][2]) {
    const int8x16_t list = STORED == Stored::Levels ? vld1q_s8(levels) : vdupq_n_s8(0);
    numbers += v * 4 * WIDTH;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    constexpr int IN_PAIRS = ROWS / 2 * 2;
    if constexpr (IN_PAIRS > 0) add_pairs<STORED, IN_PAIRS / 2>(x, stride, numbers, list, count, sums);
    if constexpr (IN_PAIRS < ROWS)
        add_rows<STORED, 1>(x + IN_PAIRS * stride, stride, numbers, list, count, sums + IN_PAIRS);
#else
    add_rows<STORED, ROWS>(x, stride, numbers, list, count, sums);
#endif
}

}  // namespace

#endif
