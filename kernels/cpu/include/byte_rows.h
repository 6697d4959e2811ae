// Keys and values in 8 bits. A row of `dim` numbers is so many signed bytes, and behind them a scale in bfloat16
// for each group of them: kernels/pool.py has the same in Python.

#pragma once

#include <stdint.h>

namespace aioengine {

constexpr int64_t ROW_GROUP = 32;

constexpr int64_t row_bytes(int64_t dim) {
    return dim + (dim + ROW_GROUP - 1) / ROW_GROUP * 2;
}

// The numbers of a row of so many bytes.
constexpr int64_t numbers_in(int64_t bytes) {
    return bytes - ((bytes - 1) / (ROW_GROUP + 2) + 1) * 2;
}

static_assert(numbers_in(row_bytes(1)) == 1 && numbers_in(row_bytes(32)) == 32);
static_assert(numbers_in(row_bytes(33)) == 33 && numbers_in(row_bytes(128)) == 128);

}  // namespace aioengine
