// How numbers of a weight in groups (grouped.h) are read, and what a number of 0 stands for, as floats. See vector.h
// for why all of this is static.

#pragma once

#include "grouped.h"
#include "vector.h"

namespace {

// Numbers are bytes, halves of them, or halves that are places in a list of bytes.
enum class Stored { Bytes, Halves, Levels };

// Of four inputs of a panel.
static constexpr int64_t quad_bytes(Stored stored) {
    return stored == Stored::Bytes ? 2 * LINE : LINE;
}

// Numbers of 8 bits without a sign.
static inline Floats load_bytes(const uint8_t* at) {
#if AIOENGINE_WIDTH == 16
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif AIOENGINE_WIDTH == 8
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#elif defined(__aarch64__)
    uint32_t four;
    memcpy(&four, at, sizeof four);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return (Floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
#else
    Floats x;
    for (int i = 0; i < WIDTH; ++i) x[i] = at[i];
    return x;
#endif
}

// Of a group's outputs from `first` on, whose scales are these; nothing for the middle.
template <aioengine::Lowest LOWEST>
static inline Floats load_lowest(const uint8_t* lowest, int64_t first, Floats scale) {
    using aioengine::Lowest;
    if (LOWEST == Lowest::Leasts) return load_halves(lowest + first * 2);
    if (LOWEST == Lowest::Zeros) return load_bytes(lowest + first) * (scale * -aioengine::ZERO_STEP);
    return Floats{};
}

}  // namespace
