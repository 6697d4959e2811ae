// Memory that is asked for while something else is computed.

#pragma once

#include "vector.h"

namespace {

// Eight parts of it at once, a few lines of each at a time: what fetches ahead by itself (the second
// cache does, within pages) then has eight ends to go on from, and memory gives 1.35 times as much
// as where the lines are asked for one after the other.
constexpr int64_t PARTS_AHEAD = 8;

struct Ahead {
    const char* at;
    int64_t part_bytes;
    int64_t left;   // lines of each part
    int64_t lines;  // of each part at a time

    void ask() {
        for (int64_t i = 0; i < lines && left; ++i, --left, at += LINE)
            for (int64_t part = 0; part < PARTS_AHEAD; ++part)
                __builtin_prefetch(at + part * part_bytes);
    }
};

// Share `index` of `count` of `bytes`, a multiple of 512, for who asks `times` in turn.
static inline Ahead share_ahead(
    const void* at, int64_t bytes, int64_t times, int64_t index, int64_t count) {
    const int64_t part_bytes = bytes / PARTS_AHEAD, whole = part_bytes / LINE;
    const int64_t lines = (whole + times * count - 1) / (times * count);
    const int64_t first = lines * times * index, left = whole - first;
    if (left <= 0) return {};
    return {(const char*)at + first * LINE, part_bytes, left, lines};
}

}  // namespace
