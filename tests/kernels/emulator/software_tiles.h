// AMX's tiles in software, for CPUs without them: included before all else (-include), it makes tiles.sh's
// build of the kernels take this for the instructions. As Intel's manual has TDPBF16PS: the even and the
// odd numbers of a row add up by themselves and then both to the sum, by fused operations that take
// what is too small to be normal for zero.

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace {

struct SoftwareTile {
    int rows, bytes;
    char data[16][64];
};
static thread_local SoftwareTile software_tiles[8];

static inline void load_software_tiles(const void* shapes) {
    const char* at = (const char*)shapes;
    for (int i = 0; i < 8; ++i) {
        uint16_t bytes;
        memcpy(&bytes, at + 16 + 2 * i, sizeof bytes);
        software_tiles[i] = {at[48 + i], bytes, {}};
    }
}

static inline void zero_software_tile(int index) {
    memset(software_tiles[index].data, 0, sizeof software_tiles[index].data);
}

static inline void load_software_tile(int index, const void* from, int64_t stride) {
    SoftwareTile& tile = software_tiles[index];
    zero_software_tile(index);
    for (int r = 0; r < tile.rows; ++r)
        memcpy(tile.data[r], (const char*)from + r * stride, tile.bytes);
}

static inline void store_software_tile(int index, void* to, int64_t stride) {
    const SoftwareTile& tile = software_tiles[index];
    for (int r = 0; r < tile.rows; ++r) memcpy((char*)to + r * stride, tile.data[r], tile.bytes);
}

static inline float no_subnormal(float x) {
    return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x;
}

static inline float narrow_number(const char* at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return no_subnormal(x);
}

static inline void multiply_software_tiles(int out, int a, int b) {
    SoftwareTile& tile = software_tiles[out];
    const int columns = tile.bytes / 4, pairs = software_tiles[a].bytes / 4;
    for (int r = 0; r < tile.rows; ++r) {
        float sums[2][16] = {};
        for (int k = 0; k < pairs; ++k)
            for (int c = 0; c < columns; ++c)
                for (int odd = 0; odd < 2; ++odd) {
                    const float x = narrow_number(software_tiles[a].data[r] + 4 * k + 2 * odd);
                    const float y = narrow_number(software_tiles[b].data[k] + 4 * c + 2 * odd);
                    sums[odd][c] = no_subnormal(fmaf(x, y, sums[odd][c]));
                }
        for (int c = 0; c < columns; ++c) {
            float sum;
            memcpy(&sum, tile.data[r] + 4 * c, sizeof sum);
            sum = no_subnormal(sum + no_subnormal(sums[0][c] + sums[1][c]));
            memcpy(tile.data[r] + 4 * c, &sum, sizeof sum);
        }
    }
}

}  // namespace

#define _tile_loadconfig(shapes) load_software_tiles(shapes)
#define _tile_release() ((void)0)
#define _tile_zero(index) zero_software_tile(index)
#define _tile_loadd(index, from, stride) load_software_tile(index, from, stride)
#define _tile_stored(index, to, stride) store_software_tile(index, to, stride)
#define _tile_dpbf16ps(out, a, b) multiply_software_tiles(out, a, b)
