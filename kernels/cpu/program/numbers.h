// Numbers between layers, one by one: float32 or bfloat16.

#pragma once

#include <bit>
#include <cstdint>

#include "dtype.h"

namespace aioengine {

inline float read_number(float at) { return at; }

inline float read_number(uint16_t at) {
    return std::bit_cast<float>(static_cast<uint32_t>(at) << 16);
}

inline void write_number(float& at, float value) { at = value; }

// Rounded to the nearest, of two the even one.
inline void write_number(uint16_t& at, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    at = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Calls work(x) with x as what its numbers are.
template <class Work>
void with_numbers(DType dtype, const void* x, const Work& work) {
    if (dtype == DType::Float32)
        work(static_cast<const float*>(x));
    else
        work(static_cast<const uint16_t*>(x));
}

template <class Work>
void with_numbers(DType dtype, void* x, const Work& work) {
    with_numbers(dtype, static_cast<const void*>(x), [&]<class T>(const T* numbers) { work(const_cast<T*>(numbers)); });
}

}  // namespace aioengine
