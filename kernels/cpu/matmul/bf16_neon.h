// Products in bfloat16 on 64-bit ARM, for bf16_gemm.cpp: two and their sum in each of four lanes. One row is
// multiplied as many are, so BFMMLA, which wants two, is not used. See vector.h for why all of this is static.

#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#include "linear.h"
#include "prefetch.h"
#include "vector.h"

namespace {

// Inputs between two times of asking, which are four pairs.
constexpr int64_t ASKING_DEPTH = 8;
constexpr int COLUMNS = aioengine::PANEL / WIDTH;

static inline bfloat16x8_t load_eight(const BFloat16* at) {
    return vreinterpretq_bf16_u16(vld1q_u16(&at->bits));
}

// sums[row][column] += the pair of inputs number `LANE` times weights of four outputs, pair after pair.
template <int ROWS, int LANE>
static inline void add_pairs(const bfloat16x8_t* inputs, const BFloat16* weights, float32x4_t s[][COLUMNS]) {
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
        const bfloat16x8_t w = load_eight(weights + 2 * (LANE * aioengine::PANEL + c * WIDTH));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) s[r][c] = vbfdotq_laneq_f32(s[r][c], w, inputs[r], LANE);
    }
    if constexpr (2 * (LANE + 1) < ASKING_DEPTH) add_pairs<ROWS, LANE + 1>(inputs, weights, s);
}

// sums [ROWS, PANEL] = x times weights, plus what they were unless these inputs are the first.
template <int ROWS>
static void add_up_rows(
    const BFloat16* x, int64_t stride, const BFloat16* weights, int64_t depth, bool is_first,
    Prefetch& next, float* sums) {
    float32x4_t s[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
            const float* before = sums + r * aioengine::PANEL + c * WIDTH;
            s[r][c] = is_first ? vdupq_n_f32(0) : vld1q_f32(before);
        }
    for (int64_t k = 0; k < depth; k += ASKING_DEPTH) {
        next.prefetch_next();
        bfloat16x8_t inputs[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) inputs[r] = load_eight(x + r * stride + k);
        add_pairs<ROWS, 0>(inputs, weights + k * aioengine::PANEL, s);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) vst1q_f32(sums + r * aioengine::PANEL + c * WIDTH, s[r][c]);
}

}  // namespace

#endif
