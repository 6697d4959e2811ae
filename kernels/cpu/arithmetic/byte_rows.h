// Rows of bytes (include/byte_rows.h) from numbers, and numbers from them.

#pragma once

#include "../include/byte_rows.h"

#include "vector.h"

namespace {

using aioengine::ROW_GROUP;

// A byte of a row.
struct ByteRow {
    int8_t bits;
};

typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

// GCC takes conversions between vectors of other lengths apart, number by number.
static inline Floats load(const ByteRow* at) {
#if AIOENGINE_WIDTH == 16
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#elif AIOENGINE_WIDTH == 8
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#elif defined(__aarch64__)
    int32_t four;
    memcpy(&four, at, sizeof four);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(four));
    return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#else
    Bytes x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
#endif
}

// Of integers from -127 to 127.
static inline void store_bytes(int8_t* at, Ints x) {
#if AIOENGINE_WIDTH == 16
    _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8((__m512i)x));
#elif AIOENGINE_WIDTH == 8
    const __m256i y = (__m256i)x;
    const __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    _mm_storel_epi64((__m128i*)at, _mm_packs_epi16(both, both));
#else
    const Bytes y = __builtin_convertvector(x, Bytes);
    memcpy(at, &y, sizeof y);
#endif
}

static inline float scale_at(const ByteRow* at) {
    BFloat16 scale;
    memcpy(&scale, at, sizeof scale);
    return to_float(scale);
}

// A whole group.
template <class T>
static inline void unpack_group(const ByteRow* from, float scale, T* to) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < ROW_GROUP; i += WIDTH) store(to + i, load(from + i) * scale);
}

#if defined(__AVX512BF16__)
static inline void unpack_group(const ByteRow* from, float scale, BFloat16* to) {
    const Floats low = load(from) * scale, high = load(from + WIDTH) * scale;
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

// A row of `dim` numbers.
template <class T>
static inline void unpack_row(const ByteRow* row, int64_t dim, T* to) {
    const ByteRow* scales = row + dim;
    for (int64_t d = 0; d < dim; scales += 2) {
        const float scale = scale_at(scales);
        if (d + ROW_GROUP <= dim) {
            unpack_group(row + d, scale, to + d);
            d += ROW_GROUP;
            continue;
        }
        for (; d + WIDTH <= dim; d += WIDTH) store(to + d, load(row + d) * scale);
        for (; d < dim; ++d) from_float((float)row[d].bits * scale, to + d);
    }
}

// Rows of bytes become floats, padded to whole vectors, as other rows do.
static inline void widen(const ByteRow* from, int64_t dim, float* to) {
    if (dim % WIDTH) store(to + dim / WIDTH * WIDTH, Floats{});
    unpack_row(from, dim, to);
}

// The scale of a group: its largest number is 127 of it. A number that is none, or infinite, makes it none, and
// so all that is read of the group.
static inline BFloat16 scale_of_group(const float* x) {
    Floats top = {}, fault = {};
    for (int64_t i = 0; i < ROW_GROUP; i += WIDTH) {
        const Floats y = load(x + i);
        fault += y - y;
        top = larger(choose(y < Floats{}, -y, y), top);
    }
    const float most = largest(top);
    BFloat16 scale;
    from_float(most < 1e-30f ? 0.0f : most / 127, &scale);
    const float faults = sum(fault);
    if (faults != faults) scale.bits = 0x7fc0;
    return scale;
}

template <class T>
static inline void pack_row(const T* from, int64_t dim, ByteRow* row) {
    ByteRow* scales = row + dim;
    for (int64_t d = 0; d < dim; d += ROW_GROUP, scales += 2) {
        const int64_t count = lesser(ROW_GROUP, dim - d);
        float x[ROW_GROUP] = {};
        int64_t n = 0;
        for (; n + WIDTH <= count; n += WIDTH) store(x + n, load(from + d + n));
        for (; n < count; ++n) x[n] = to_float(from[d + n]);
        const BFloat16 scale = scale_of_group(x);
        memcpy(scales, &scale, sizeof scale);
        const float step = to_float(scale);
        const float inverse = step > 0 ? 1 / step : 0;
        int8_t bytes[ROW_GROUP];
        for (int64_t i = 0; i < ROW_GROUP; i += WIDTH) {
            const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
            const Floats turns = load(x + i) * inverse + shift;
            store_bytes(bytes + i, (Ints)turns - (Ints)shift);
        }
        memcpy(row + d, bytes, count);
    }
}

template <class T>
static void pack_rows_of(const void* from, int64_t stride, int64_t count, int64_t dim, void* to) {
    for (int64_t i = 0; i < count; ++i)
        pack_row((const T*)from + i * stride, dim, (ByteRow*)to + i * aioengine::row_bytes(dim));
}

}  // namespace
