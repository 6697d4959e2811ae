// Weights that are prefetched while others are multiplied: several parts of them at once where that is
// faster (see `places_at_once` in dispatch.h), a few lines of each at a time.

#pragma once

#include "vector.h"

namespace {

// Bytes of a chunk: what is prefetched must stay in the second cache until it is read.
constexpr int64_t CHUNK_BYTES = 1 << 17;

// Rows up to which a core that reads one place after the other is ahead of the arithmetic by itself, and
// faster: its window is not full of sums. Not measured on vectors of 16 bytes.
constexpr int64_t EASY_ROWS = WIDTH == 16 ? 8 : WIDTH == 8 ? 3 : 0;

struct Prefetch {
    const char* at;
    int64_t parts, part_bytes;
    int64_t left;   // lines of each part
    int64_t lines;  // of each part at a time

    void prefetch_next() {
        for (int64_t i = 0; i < lines && left; ++i, --left, at += LINE)
            for (int64_t part = 0; part < parts; ++part)
                __builtin_prefetch(at + part * part_bytes, 0, 2);  // the first cache is in use
    }
};

// A panel of weights, which is read chunk by chunk: each prefetches the next one, the last one for the
// first of the panel that comes after it.
struct Panel {
    const void* weights;
    int64_t depth;     // inputs
    int64_t bytes;     // for each of them
    bool has_next;     // which lies behind it and is multiplied after it
    int64_t index, count;  // of those that read this panel one after the other and share in prefetching
    int64_t most_parts;    // that are prefetched at once
    int64_t rows;          // that this one multiplies

    // Inputs of a chunk, a multiple of `step` unless there is but one.
    int64_t chunk(int64_t step) const {
        const int64_t chunks = (depth * bytes - 1) / CHUNK_BYTES + 1;
        return (depth + chunks * step - 1) / (chunks * step) * step;
    }

    // For the code that multiplies inputs [first, last), a chunk, and prefetches `times`.
    Prefetch after(int64_t first, int64_t last, int64_t times) const {
        if (most_parts == 1 && count == 1 && rows <= EASY_ROWS) return {};
        const bool is_within = last < depth;
        if (is_within ? index > 0 : !has_next) return {};
        const int64_t size = last - first, left = is_within ? depth - last : depth;
        const int64_t share = is_within ? 0 : index, shares = is_within ? 1 : count;
        // Who has much time prefetches less at a time.
        const int64_t all = lesser(left, size) * bytes / LINE, slots = times * shares;
        int64_t parts = most_parts;
        while (parts > 1 && parts / 2 * slots >= all) parts /= 2;
        const int64_t part_lines = all / parts, lines = (part_lines + slots - 1) / slots;
        const int64_t begin = lines * times * share;
        if (begin >= part_lines) return {};
        return {
            (const char*)weights + last * bytes + begin * LINE, parts, part_lines * LINE,
            part_lines - begin, lines};
    }
};

}  // namespace
