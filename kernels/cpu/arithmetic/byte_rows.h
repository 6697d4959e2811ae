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

static inline Floats load(const ByteRow* at) {
    Bytes x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
}

static inline float scale_at(const ByteRow* at) {
    BFloat16 scale;
    memcpy(&scale, at, sizeof scale);
    return to_float(scale);
}

// A row of `dim` numbers.
template <class T>
static inline void unpack_row(const ByteRow* row, int64_t dim, T* to) {
    const ByteRow* scales = row + dim;
    for (int64_t d = 0; d < dim; scales += 2) {
        const float scale = scale_at(scales);
        const int64_t end = lesser(d + ROW_GROUP, dim);
        for (; d + WIDTH <= end; d += WIDTH) store(to + d, load(row + d) * scale);
        for (; d < end; ++d) from_float((float)row[d].bits * scale, to + d);
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
        for (int64_t i = 0; i < count; ++i) x[i] = to_float(from[d + i]);
        const BFloat16 scale = scale_of_group(x);
        memcpy(scales, &scale, sizeof scale);
        const float step = to_float(scale);
        const float inverse = step > 0 ? 1 / step : 0;
        int8_t bytes[ROW_GROUP];
        for (int64_t i = 0; i < ROW_GROUP; i += WIDTH) {
            const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
            const Floats turns = load(x + i) * inverse + shift;
            const Bytes y = __builtin_convertvector((Ints)turns - (Ints)shift, Bytes);
            memcpy(bytes + i, &y, sizeof y);
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
