// Attention of one piece of work over pages, by the online softmax of Milakov and Gimelshein (2018)
// as FlashAttention uses it (Dao et al., 2022): tile by tile of keys, with a running maximum, a
// running sum and a running weighted sum of values for each row. A row is one query head of one
// token; the heads that share a key head are rows side by side, so each key is read once for all.
//
// Compiled once for each instruction set: AIOENGINE_KERNELS names the door. See vector.h for what
// this file must not do.

#include "attention.h"

#include <math.h>

#include "lanes.h"
#include "tiles.h"
#include "vector.h"

namespace {

using aioengine::Attention;
using aioengine::Number;
using aioengine::Parts;
using aioengine::Piece;
using aioengine::SEGMENT;

constexpr int64_t KEYS = 64;         // in a tile
constexpr int64_t FEW_ROWS = 8;      // for which keys are not worth being converted once
constexpr int64_t MANY_ROWS = 9;     // for which vectors of rows pay in bfloat16
constexpr int64_t PARTIAL_HEAD = 2;  // floats before a partial result's values
constexpr float NOTHING = -INFINITY;

// Tiles of registers: so many rows and keys (or vectors of values) at a time. The sums fill most of
// the registers there are, so that multiplications wait for nothing.
#if AIOENGINE_WIDTH == 16
constexpr int TILE_ROWS = 4;
#else
constexpr int TILE_ROWS = 3;
#endif
constexpr int TILE_COLUMNS = 4;

static int64_t round_up(int64_t n) {
    return (n + WIDTH - 1) / WIDTH * WIDTH;
}

static int64_t greater(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// One thread's working memory. Rows are padded to whole vectors, with zeros.
struct Scratch {
    float* query;                                  // [rows, key_dim]
    float *out, *largest, *total;                  // of a segment: [rows, value_dim], [rows], [rows]
    float *sum_out, *sum_largest, *sum_total;      // of all segments so far
    float *scores, *keys, *values;                 // [rows, KEYS], [KEYS, key_dim], [KEYS, value_dim]
    BFloat16* columns;                             // the query as bfloat16 is read
    float* turned;                                 // `out` by blocks of rows: [value_dim, 16] each
    float* some_rows;                              // [16, KEYS]
    BFloat16* weights;                             // [KEYS / 2, 16, 2]
    float* end;
};

static Scratch divide(const Attention& a, int64_t rows, float* memory) {
    rows = (rows + 15) / 16 * 16;  // as many as fill blocks
    const int64_t key_dim = round_up(a.key_dim), value_dim = round_up(a.value_dim);
    Scratch s;
    s.query = memory;
    s.out = s.query + rows * key_dim;
    s.largest = s.out + rows * value_dim;
    s.total = s.largest + round_up(rows);
    s.sum_out = s.total + round_up(rows);
    s.sum_largest = s.sum_out + rows * value_dim;
    s.sum_total = s.sum_largest + round_up(rows);
    s.scores = s.sum_total + round_up(rows);
    s.keys = s.scores + rows * KEYS;
    s.values = s.keys + KEYS * key_dim;
    s.columns = (BFloat16*)(s.values + KEYS * value_dim);
    s.turned = s.values + KEYS * value_dim + rows * key_dim / 2;
    s.some_rows = s.turned + rows * value_dim;
    s.weights = (BFloat16*)(s.some_rows + 16 * KEYS);
    s.end = s.some_rows + 16 * KEYS + 8 * KEYS;
    return s;
}

template <class T>
static void widen(const T* from, int64_t dim, float* to) {
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) store(to + d, load(from + d));
    if (d == dim) return;
    store(to + d, Floats{});
    for (; d < dim; ++d) to[d] = to_float(from[d]);
}

// Sums of each of four vectors' elements.
static inline void sum_four(const Floats* x, float* sums) {
#if AIOENGINE_WIDTH == 8
    const __m256 a = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]);
    const __m256 b = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    const __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
#elif AIOENGINE_WIDTH == 16
    __m256 y[4];
    for (int i = 0; i < 4; ++i) {
        const __m512 z = (__m512)x[i];
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z), 1));
        y[i] = _mm256_add_ps(_mm512_castps512_ps256(z), high);
    }
    const __m256 a = _mm256_hadd_ps(y[0], y[1]);
    const __m256 b = _mm256_hadd_ps(y[2], y[3]);
    const __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
#else
    for (int i = 0; i < 4; ++i) sums[i] = sum(x[i]);
#endif
}

// scores[r][n] = query[r] . keys[n] for ROWS rows and four keys.
template <int ROWS, class T>
static inline void dot_tile(
    const float* query, int64_t stride, const T* const* keys, int64_t dim, float* scores) {
    Floats sums[ROWS][TILE_COLUMNS] = {};
    for (int64_t d = 0; d < dim; d += WIDTH) {
        Floats q[ROWS];
        for (int r = 0; r < ROWS; ++r) q[r] = load(query + r * stride + d);
        for (int n = 0; n < TILE_COLUMNS; ++n) {
            const Floats k = load(keys[n] + d);
            for (int r = 0; r < ROWS; ++r) sums[r][n] += q[r] * k;
        }
    }
    for (int r = 0; r < ROWS; ++r) sum_four(sums[r], scores + r * KEYS);
}

// `keys` has room for four after the last; a tile beyond the end repeats the last key. `next`: as many
// rows that are read after them.
template <class T>
static void dot(
    const float* query, int64_t rows, int64_t dim, const T** keys, int64_t count,
    const T* const* next, float* scores) {
    const int64_t whole = (count + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    for (int64_t n = count; n < whole; ++n) keys[n] = keys[count - 1];
    for (int64_t n = 0; n < whole; n += TILE_COLUMNS) {
        for (int64_t i = n; next && i < n + TILE_COLUMNS && i < count; ++i)
            ask_for(next[i], dim * sizeof(T));
        int64_t r = 0;
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
            dot_tile<TILE_ROWS>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
        for (; r + 2 <= rows; r += 2)
            dot_tile<2>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
        for (; r < rows; ++r)
            dot_tile<1>(query + r * dim, dim, keys + n, dim, scores + r * KEYS + n);
    }
}

// out[r][d] += sum over n of weights[r][n] * values[n][d] for ROWS rows and COLUMNS vectors.
template <int ROWS, int COLUMNS, class T>
static inline void weigh_tile(
    const float* weights, const T* const* values, int64_t count, const T* const* next, int64_t at,
    float* out, int64_t stride) {
    Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load(out + r * stride + at + c * WIDTH);
    for (int64_t n = 0; n < count; ++n) {
        if (next) ask_for(next[n] + at, COLUMNS * WIDTH * sizeof(T));
        Floats w[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) w[r] = splat(weights[r * KEYS + n]);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            const Floats v = load(values[n] + at + c * WIDTH);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r][c] += w[r] * v;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) store(out + r * stride + at + c * WIDTH, sums[r][c]);
}

template <int ROWS, class T>
static void weigh_rows(
    const float* weights, const T* const* values, int64_t count, const T* const* next, int64_t dim,
    float* out) {
    int64_t at = 0;
    for (; at + TILE_COLUMNS * WIDTH <= dim; at += TILE_COLUMNS * WIDTH)
        weigh_tile<ROWS, TILE_COLUMNS>(weights, values, count, next, at, out, dim);
    for (; at < dim; at += WIDTH) weigh_tile<ROWS, 1>(weights, values, count, next, at, out, dim);
}

// `next`: [KEYS] keys that are read after the values, or null.
template <class T>
static void weigh(
    const float* weights, int64_t rows, const T* const* values, int64_t count,
    const T* const* next, int64_t dim, float* out) {
    for (int64_t r = 0; r < rows; next = nullptr) {
        const float* row = weights + r * KEYS;
        if (r + TILE_ROWS <= rows)
            weigh_rows<TILE_ROWS>(row, values, count, next, dim, out + r * dim), r += TILE_ROWS;
        else if (r + 2 <= rows)
            weigh_rows<2>(row, values, count, next, dim, out + r * dim), r += 2;
        else
            weigh_rows<1>(row, values, count, next, dim, out + r * dim), r += 1;
    }
}

// Which keys of the tile [begin, begin + count) a token at `position` sees, by order and window.
struct Range {
    int64_t first, last;
};

static Range seen_in_order(const Attention& a, int64_t position, int64_t begin, int64_t count) {
    if (!a.is_causal) return {0, count};
    const int64_t oldest = a.window ? position - a.window + 1 : 0;
    const int64_t first = greater(0, oldest - begin);
    return {lesser(first, count), greater(0, lesser(count, position + 1 - begin))};
}

// The same for a token that is in a block: key by key. What it does not see is scored NOTHING.
static void hide_outside_block(
    const Attention& a, const int32_t* ids, int64_t start, int64_t length, int64_t position,
    int64_t begin, int64_t count, float* scores) {
    const int32_t own = ids[position - start];
    for (int64_t n = 0; n < count; ++n) {
        const int64_t key = begin + n;
        const bool is_near = !a.window || key > position - a.window;
        const bool is_block = key >= start && key < length && ids[key - start] == own;
        const bool is_before = key <= position;
        const bool is_seen = a.blocks_in_window ? is_near && (is_before || is_block)
                                                : (is_near && is_before) || is_block;
        if (!is_seen) scores[n] = NOTHING;
    }
}

static void cap(float* scores, float softcap) {
    for (int64_t n = 0; n < KEYS; n += WIDTH) {
        const Floats x = load(scores + n) * (1 / softcap);
        // tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|)
        const Ints is_negative = x < Floats{};
        const Floats e = exp_negative(choose(is_negative, x, -x) * 2.0f);
        const Floats y = (1.0f - e) / (1.0f + e) * softcap;
        store(scores + n, choose(is_negative, -y, y));
    }
}

// Turns a row's scores of one tile, times `scale`, into weights relative to its new maximum, and
// brings the row's running sums to that maximum.
static inline void soften(
    float* scores, float scale, float* largest_yet, float* total, float* out, int64_t dim) {
    constexpr int VECTORS = KEYS / WIDTH;
    Floats x[VECTORS];
    for (int i = 0; i < VECTORS; ++i) x[i] = load(scores + i * WIDTH) * scale;
    Floats top = x[0];
    for (int i = 1; i < VECTORS; ++i) top = larger(x[i], top);
    const float tile_largest = largest(top);
    const float now = tile_largest > *largest_yet ? tile_largest : *largest_yet;
    Floats added = {};
    if (now == NOTHING) {  // it has seen nothing yet, or what is not a number
        for (int i = 0; i < VECTORS; ++i) {
            const Floats weights = choose(x[i] != x[i], x[i], Floats{});
            store(scores + i * WIDTH, weights);
            added += weights;
        }
        *total += sum(added);
        return;
    }
    if (now != *largest_yet) {
        const Floats factor = exp_negative(splat(*largest_yet - now));
        *total *= factor[0];
        for (int64_t d = 0; d < dim; d += WIDTH) store(out + d, load(out + d) * factor);
        *largest_yet = now;
    }
    for (int i = 0; i < VECTORS; ++i) {
        const Floats weights = exp_negative(x[i] - now);
        store(scores + i * WIDTH, weights);
        added += weights;
    }
    *total += sum(added);
}

template <class T>
struct Tile {
    const T* keys[KEYS + TILE_COLUMNS];
    const T* values[KEYS];
};

template <class T>
static void find_rows(
    const Attention& a, const Piece& p, int64_t begin, int64_t skipped, int64_t count,
    Tile<T>& tile) {
    const int32_t* blocks = a.block_table + p.sequence * a.table_width;
    const T* keys = (const T*)a.key_cache + p.kv_head * a.key_strides[2];
    const T* values = (const T*)a.value_cache + p.kv_head * a.value_strides[2];
    const int64_t first = begin + skipped;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int64_t n = skipped; n < count; ++n) {
        tile.keys[n] = keys + blocks[block] * a.key_strides[0] + offset * a.key_strides[1];
        tile.values[n] = values + blocks[block] * a.value_strides[0] + offset * a.value_strides[1];
        if (++offset == a.block_size) {
            offset = 0;
            ++block;
        }
    }
    for (int64_t n = 0; n < skipped; ++n) {
        tile.keys[n] = tile.keys[skipped];
        tile.values[n] = tile.values[skipped];
    }
}

// The same of the piece's tile after the one that begins at `begin`, if there is one. What it has no
// rows for repeats the first.
template <class T>
static bool find_coming(const Attention& a, const Piece& p, int64_t begin, Tile<T>& coming) {
    const int64_t count = lesser(KEYS, p.key_end - (begin + KEYS));
    if (count <= 0) return false;
    find_rows(a, p, begin + KEYS, 0, count, coming);
    for (int64_t n = count; n < KEYS; ++n) coming.keys[n] = coming.keys[0];
    return true;
}

// Converts rows to floats at `to`; `from` then says where these are.
template <class T>
static void widen_rows(const T** from, int64_t count, int64_t dim, float* to, const float** at) {
    const int64_t stride = round_up(dim);
    for (int64_t n = 0; n < count; ++n) {
        at[n] = to + n * stride;
        widen(from[n], dim, to + n * stride);
    }
}

template <class T>
static void write_row(const float* from, int64_t dim, float factor, T* to) {
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) store(to + d, load(from + d) * factor);
    for (; d < dim; ++d) from_float(from[d] * factor, to + d);
}

// Whether rows of this many heads' outputs are written past the caches, by whole lines: they are all heads
// apart, and to write a part of a line is to read it first. Of few tokens the caches keep them.
static bool is_streamed(const Attention& a, int64_t rows) {
#if defined(__AVX512BF16__)
    const bool has_lines = a.value_dim % TILE_DEPTH == 0 && (uintptr_t)a.out % 64 == 0;
    return a.number == Number::BFloat16 && rows >= MANY_ROWS && has_lines;
#else
    return (void)a, (void)rows, false;
#endif
}

static void stream_row(const float* from, int64_t dim, float factor, BFloat16* to) {
#if defined(__AVX512BF16__)
    for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
        const Floats low = load(from + d) * factor, high = load(from + d + WIDTH) * factor;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        _mm512_stream_si512((__m512i*)(to + d), both);
    }
#else
    write_row(from, dim, factor, to);
#endif
}

// Whether products are of bfloat16 (tiles.h, lanes.h). So they are then for any number of rows, as the
// same token must come to the same bits with others and alone.
template <class T>
static bool is_narrow(const Attention& a) {
#if defined(__AVX512BF16__)
    return a.number == Number::BFloat16 && a.key_dim % TILE_DEPTH == 0 && a.value_dim % TILE == 0;
#else
    return (void)a, false;
#endif
}

#if defined(__AVX512BF16__)
static_assert(TILE_KEYS == KEYS);

// Where each 16 rows of a tile lie in a cache; where these do not lie in one block, or some are not
// the piece's, copies at `copies`, with one that is in the place of each that is not.
static void find_tile_rows(
    const Attention& a, const Piece& p, const void* cache, const int64_t* strides, int64_t dim,
    int64_t begin, int64_t skipped, int64_t count, BFloat16* copies, TileRows* found) {
    const int32_t* blocks = a.block_table + p.sequence * a.table_width;
    const BFloat16* rows = (const BFloat16*)cache + p.kv_head * strides[2];
    for (int64_t first = 0; first < count; first += TILE, ++found) {
        const int64_t offset = (begin + first) % a.block_size;
        if (offset + TILE <= a.block_size && first >= skipped) {
            const int64_t block = blocks[(begin + first) / a.block_size];
            *found = {rows + block * strides[0] + offset * strides[1], strides[1]};
            continue;
        }
        *found = {copies, dim};
        for (int64_t n = first; n < first + TILE; ++n, copies += dim) {
            const int64_t key = begin + lesser(greater(n, skipped), count - 1);
            const int64_t block = blocks[key / a.block_size], offset = key % a.block_size;
            memcpy(copies, rows + block * strides[0] + offset * strides[1], dim * sizeof(BFloat16));
        }
    }
}

// Adds rows of a cache to `coming`, those that are read after the tile that begins at `begin`: the piece's
// next ones, or, after its last, the first ones of the next head, which this thread is likely to get.
static void add_coming(
    const Attention& a, const Piece& p, const void* cache, const int64_t* strides, int64_t dim,
    int64_t begin, Coming& coming) {
    const bool is_last = begin + KEYS >= p.key_end;
    const int64_t head = p.kv_head + is_last;
    if (head == a.kv_heads || a.block_size % TILE) return;
    const int32_t* blocks = a.block_table + p.sequence * a.table_width;
    const int64_t first = is_last ? p.key_begin / TILE * TILE : begin + KEYS;
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int64_t i = 0; i < KEYS / TILE; ++i) {
        const int64_t at = blocks[block] * strides[0] + offset * strides[1] + head * strides[2];
        coming.rows[coming.count / TILE + i] = {(const BFloat16*)cache + at, strides[1]};
        if (first + (i + 1) * TILE >= p.key_end) continue;  // what there is no more of, again
        offset += TILE;
        if (offset == a.block_size) offset = 0, ++block;
    }
    coming.bytes[coming.count / KEYS] = dim * (int64_t)sizeof(BFloat16);
    coming.count += KEYS;
}
#endif

// Whether scores are more than scaled before they become weights.
static bool is_decorated(const Attention& a) {
    return a.softcap != 0 || a.distance_bias || !(a.scale > 0);
}

// What is left to multiply them by on the way.
static float scale_of(const Attention& a) {
    return is_decorated(a) ? 1 : a.scale;
}

// Does to a row's scores of one tile what is not left to `soften`: all that `is_decorated` asks for, and
// hides what a token in a block does not see. Which of them are seen then.
static Range decorate(
    const Attention& a, const Piece& p, int64_t row, int64_t begin, int64_t skipped, int64_t count,
    float* scores) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t row_start = a.query_start[p.sequence], length = a.seq_lens[p.sequence];
    const int64_t start = length - (a.query_start[p.sequence + 1] - row_start);
    const int64_t position = start + p.first_token + row / group;
    const int32_t* ids = a.block_ids && a.is_causal ? a.block_ids + row_start : nullptr;
    if (is_decorated(a))
        for (int64_t n = 0; n < count; n += WIDTH) store(scores + n, load(scores + n) * a.scale);
    if (a.softcap != 0) cap(scores, a.softcap);
    if (a.distance_bias) {
        const float* bias = a.distance_bias + (p.kv_head * group + row % group) * a.num_distances;
        for (int64_t n = 0; n < count; ++n) {
            const int64_t distance = greater(0, position - begin - n);
            scores[n] += bias[lesser(distance, a.num_distances - 1)];
        }
    }
    Range seen = {0, count};
    if (ids && ids[position - start] >= 0)
        hide_outside_block(a, ids, start, length, position, begin, count, scores);
    else
        seen = seen_in_order(a, position, begin, count);
    seen.first = greater(seen.first, skipped);
    return seen;
}

static void hide(Range seen, float* scores) {
    for (int64_t n = 0; n < seen.first; ++n) scores[n] = NOTHING;
    for (int64_t n = seen.last; n < KEYS; ++n) scores[n] = NOTHING;
}

#if defined(__AVX512BF16__)
// Room for a tile of keys, behind copies of those that do not lie side by side.
static BFloat16* key_memory(const Attention& a, const Scratch& s) {
    return (BFloat16*)s.keys + KEYS * a.key_dim;
}

// What the rows of a block see by order and window, of the keys [begin, begin + count): of the first
// `most` of them, if of any.
struct BlockSeen {
    int32_t first[BLOCK], last[BLOCK];
    int64_t most;
    bool is_all, is_any;
};

static BlockSeen seen_by_block(
    const Attention& a, const Piece& p, int64_t first_row, int64_t rows, int64_t begin,
    int64_t skipped, int64_t count) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t num_new = a.query_start[p.sequence + 1] - a.query_start[p.sequence];
    const int64_t start = a.seq_lens[p.sequence] - num_new + p.first_token;
    int64_t position = start + first_row / group, head = first_row % group;
    BlockSeen found = {};
    found.is_all = true;
    for (int64_t i = 0; i < BLOCK; ++i) {
        const Range seen = seen_in_order(a, position, begin, count);
        const int64_t first = greater(seen.first, skipped);
        found.first[i] = (int32_t)first;
        found.last[i] = (int32_t)seen.last;
        found.is_all = found.is_all && first == 0 && seen.last == KEYS;
        found.is_any = found.is_any || first < seen.last;
        found.most = greater(found.most, seen.last);
        if (first_row + i + 1 < rows && ++head == group) {
            head = 0;
            ++position;
        }
    }
    return found;
}

// One tile of keys for many rows, whose running sums of values are in `Scratch::turned` meanwhile.
static void attend_to_columns(
    const Attention& a, const Piece& p, const Scratch& s, const TileRows* keys,
    const TileRows* values, int64_t begin, int64_t skipped, int64_t count) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const bool has_own_rules = is_decorated(a) || (a.block_ids && a.is_causal);
    BFloat16* turned_values = (BFloat16*)s.values;
    turn_values(values, count, a.value_dim, turned_values);
    Coming nothing;
    const auto* turned_keys = turn_keys(keys, a.key_dim, count, nothing, key_memory(a, s));
    for (int64_t first = 0; first < rows; first += BLOCK) {
        float* out = s.turned + first * a.value_dim;
        const BlockSeen seen = seen_by_block(a, p, first, rows, begin, skipped, count);
        if (!has_own_rules && !seen.is_any) continue;
        const int64_t most = has_own_rules ? count : seen.most;
        dot_columns(s.columns + first * a.key_dim, a.key_dim, turned_keys, most, s.scores);
        if (has_own_rules) {
            columns_to_rows(s.scores, KEYS, KEYS, s.some_rows);
            for (int64_t r = 0; r < lesser(BLOCK, rows - first); ++r) {
                float* scores = s.some_rows + r * KEYS;
                hide(decorate(a, p, first + r, begin, skipped, count, scores), scores);
            }
            rows_to_columns(s.some_rows, KEYS, KEYS, s.scores);
        } else if (!seen.is_all) {
            hide_columns(seen.first, seen.last, most, s.scores);
        }
        soften_columns(
            s.scores, most, scale_of(a), s.largest + first, s.total + first, out, a.value_dim,
            s.weights);
        weigh_columns(s.weights, turned_values, most, a.value_dim, out);
    }
}

// One tile of keys in bfloat16.
static void attend_to_tile_rows(
    const Attention& a, const Piece& p, const Scratch& s, int64_t begin, int64_t skipped,
    int64_t count) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    TileRows keys[KEYS / TILE], values[KEYS / TILE];
    BFloat16* copies = (BFloat16*)s.values + KEYS * a.value_dim;  // behind the arranged values
    find_tile_rows(
        a, p, a.key_cache, a.key_strides, a.key_dim, begin, skipped, count, (BFloat16*)s.keys, keys);
    find_tile_rows(
        a, p, a.value_cache, a.value_strides, a.value_dim, begin, skipped, count, copies, values);
    if (rows >= MANY_ROWS) {
        attend_to_columns(a, p, s, keys, values, begin, skipped, count);
        return;
    }
    Coming coming;
    add_coming(a, p, a.key_cache, a.key_strides, a.key_dim, begin, coming);
    add_coming(a, p, a.value_cache, a.value_strides, a.value_dim, begin, coming);
    dot_rows(s.columns, rows, a.key_dim, keys, count, values, coming, key_memory(a, s), s.scores);
    for (int64_t r = 0; r < rows; ++r) {
        float* scores = s.scores + r * KEYS;
        hide(decorate(a, p, r, begin, skipped, count, scores), scores);
        soften_row(
            scores, scale_of(a), s.largest + r, s.total + r, s.out + r * a.value_dim, a.value_dim);
    }
    weigh_rows(
        s.scores, rows, values, count, a.value_dim, coming, (BFloat16*)s.values, s.out);
}
#endif

// One tile of keys, [begin, begin + count), of which the first `skipped` are not the piece's. The
// piece's first one finds where its rows lie; each leaves in `tile` where those of the next one do.
template <class T>
static void attend_to_tile(
    const Attention& a, const Piece& p, const Scratch& s, int64_t begin, int64_t skipped,
    int64_t count, Tile<T>& tile) {
#if defined(__AVX512BF16__)
    if (is_narrow<T>(a)) {
        attend_to_tile_rows(a, p, s, begin, skipped, count);
        return;
    }
#endif
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const int64_t key_dim = round_up(a.key_dim), value_dim = round_up(a.value_dim);
    const bool is_converted_once = sizeof(T) < sizeof(float) && rows > FEW_ROWS;
    if (begin <= p.key_begin) find_rows(a, p, begin, skipped, count, tile);
    Tile<float> wide;
    Tile<T> coming;
    const T* const* next = find_coming(a, p, begin, coming) ? coming.keys : nullptr;
    if (key_dim == a.key_dim && !is_converted_once) {
        dot(s.query, rows, key_dim, tile.keys, count, tile.values, s.scores);
    } else {
        widen_rows(tile.keys, count, a.key_dim, s.keys, wide.keys);
        dot(s.query, rows, key_dim, wide.keys, count, (const float* const*)nullptr, s.scores);
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* scores = s.scores + r * KEYS;
        hide(decorate(a, p, r, begin, skipped, count, scores), scores);
        soften(
            scores, scale_of(a), s.largest + r, s.total + r, s.out + r * value_dim, value_dim);
    }
    if (value_dim == a.value_dim && !is_converted_once) {
        weigh(s.scores, rows, tile.values, count, next, value_dim, s.out);
    } else {
        widen_rows(tile.values, count, a.value_dim, s.values, wide.values);
        weigh(s.scores, rows, wide.values, count, (const float* const*)nullptr, value_dim, s.out);
    }
    if (next) tile = coming;
}

static void clear(float* largest, float* total, float* out, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; ++r) {
        largest[r] = NOTHING;
        total[r] = 0;
    }
    memset(out, 0, rows * dim * sizeof(float));
}

// Adds a segment's result for one row to the sum of those before it.
static void add_segment(
    const Scratch& s, int64_t r, int64_t dim, float largest, float total, const float* out) {
    float* sum = s.sum_out + r * round_up(dim);
    if (largest == NOTHING && total == 0) return;
    const float top = largest > s.sum_largest[r] ? largest : s.sum_largest[r];
    // Of what is not a number there is no largest.
    const float old_factor = s.sum_total[r] == 0 ? 0 : expf(s.sum_largest[r] - top);
    const float new_factor = top == NOTHING ? 1 : expf(largest - top);
    s.sum_largest[r] = top;
    s.sum_total[r] = s.sum_total[r] * old_factor + total * new_factor;
    for (int64_t d = 0; d < dim; ++d) sum[d] = sum[d] * old_factor + out[d] * new_factor;
}

template <class T>
static const T* query_row(const Attention& a, const Piece& p, int64_t row) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t token = a.query_start[p.sequence] + p.first_token + row / group;
    const int64_t head = p.kv_head * group + row % group;
    return (const T*)a.query + token * a.query_strides[0] + head * a.query_strides[1];
}

template <class T>
static void read_query(const Attention& a, const Piece& p, const Scratch& s) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads), key_dim = round_up(a.key_dim);
#if defined(__AVX512BF16__)
    if (is_narrow<T>(a)) {
        const auto row_at = [&](int64_t r) { return query_row<BFloat16>(a, p, r); };
        arrange_query(row_at, rows, a.key_dim, s.columns);
        return;
    }
#endif
    for (int64_t r = 0; r < rows; ++r) {
        const T* query = query_row<T>(a, p, r);
        widen(query, a.key_dim, s.query + r * key_dim);
    }
}

static void write_out(const Attention& a, const Piece& p, const Scratch& s, int64_t rows);

template <class T>
static void attend_as(const Attention& a, const Piece& p, float* memory) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const int64_t stride = round_up(a.value_dim), size = PARTIAL_HEAD + a.value_dim;
    Scratch s = divide(a, rows, memory);
    const bool is_whole = p.partial < 0;
    const bool has_one_segment = p.key_begin / SEGMENT == (p.key_end - 1) / SEGMENT;
    if (is_whole && has_one_segment) {  // which is the sum of them then
        s.sum_largest = s.largest;
        s.sum_total = s.total;
        s.sum_out = s.out;
    }
    read_query<T>(a, p, s);
#if defined(__AVX512BF16__)
    const unsigned rounding = _mm_getcsr();
    if (is_narrow<T>(a)) {
        begin_attention();
        _mm_setcsr(rounding | 0x8040);  // as tiles do: what is too small to be normal is zero
    }
#endif
    clear(s.sum_largest, s.sum_total, s.sum_out, rows, stride);
    int64_t key = p.key_begin;
    Tile<T> tile;
    float* partial = a.partial + p.partial;
    while (key < p.key_end) {
        const int64_t segment_end = lesser((key / SEGMENT + 1) * SEGMENT, p.key_end);
#if defined(__AVX512BF16__)
        const bool has_columns = is_narrow<T>(a) && rows >= MANY_ROWS;
        const int64_t padded = (rows + BLOCK - 1) / BLOCK * BLOCK;
        clear(
            s.largest, s.total, has_columns ? s.turned : s.out, has_columns ? padded : rows, stride);
#else
        clear(s.largest, s.total, s.out, rows, stride);
#endif
        while (key < segment_end) {
            // Tiles too lie where they lie for everyone.
            const int64_t skipped = key % KEYS;
            const int64_t count = lesser(KEYS, segment_end - (key - skipped));
            attend_to_tile<T>(a, p, s, key - skipped, skipped, count, tile);
            key += count - skipped;
        }
#if defined(__AVX512BF16__)
        for (int64_t r = 0; r < padded && has_columns; r += BLOCK)
            columns_to_rows(s.turned + r * stride, stride, stride, s.out + r * stride);
        for (int64_t r = 0; r < rows && is_narrow<T>(a); ++r) s.largest[r] *= scale_of(a);
#endif
        for (int64_t r = 0; r < rows; ++r) {
            const float* out = s.out + r * stride;
            if (is_whole) {
                if (has_one_segment) break;
                add_segment(s, r, a.value_dim, s.largest[r], s.total[r], out);
                continue;
            }
            partial[0] = s.largest[r];
            partial[1] = s.total[r];
            memcpy(partial + PARTIAL_HEAD, out, a.value_dim * sizeof(float));
            partial += size;
        }
    }
#if defined(__AVX512BF16__)
    if (is_narrow<T>(a)) {
        _mm_setcsr(rounding);
        end_attention();
    }
#endif
    if (is_whole) write_out(a, p, s, rows);
}

// Divides by the sums of the weights, a sink's included, and writes out.
static void write_out(const Attention& a, const Piece& p, const Scratch& s, int64_t rows) {
    const int64_t group = a.heads / a.kv_heads, stride = round_up(a.value_dim);
    const bool past_caches = is_streamed(a, rows);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = a.query_start[p.sequence] + p.first_token + r / group;
        const int64_t head = p.kv_head * group + r % group;
        float total = s.sum_total[r], factor = 1;
        if (a.sinks) {
            const float sink = a.sinks[head];
            const float top = sink > s.sum_largest[r] ? sink : s.sum_largest[r];
            factor = expf(s.sum_largest[r] - top);
            total = total * factor + expf(sink - top);
        }
        // A token that sees nothing gets zeros.
        factor = total > 0 ? factor / total : (total == 0 ? 0 : total);
        const int64_t at = (token * a.heads + head) * a.value_dim;
        const float* from = s.sum_out + r * stride;
        switch (a.number) {
            case Number::Float32:
                write_row(from, a.value_dim, factor, (float*)a.out + at);
                break;
            case Number::BFloat16:
                if (past_caches)
                    stream_row(from, a.value_dim, factor, (BFloat16*)a.out + at);
                else
                    write_row(from, a.value_dim, factor, (BFloat16*)a.out + at);
                break;
            case Number::Float16:
#if defined(__F16C__)
                write_row(from, a.value_dim, factor, (Float16*)a.out + at);
#endif
                break;
        }
    }
}

static void merge(const Attention& a, const Parts& parts, float* memory) {
    const int64_t rows = parts.piece.num_tokens * (a.heads / a.kv_heads);
    const int64_t size = PARTIAL_HEAD + a.value_dim;
    const Scratch s = divide(a, rows, memory);
    clear(s.sum_largest, s.sum_total, s.sum_out, rows, round_up(a.value_dim));
    const float* partial = a.partial + parts.piece.partial;
    for (int64_t i = 0; i < parts.count; ++i) {
        for (int64_t r = 0; r < rows; ++r) {
            add_segment(s, r, a.value_dim, partial[0], partial[1], partial + PARTIAL_HEAD);
            partial += size;
        }
    }
    write_out(a, parts.piece, s, rows);
}

static void attend(const Attention& a, const Piece& p, float* memory) {
    switch (a.number) {
        case Number::Float32:
            attend_as<float>(a, p, memory);
            break;
        case Number::BFloat16:
            attend_as<BFloat16>(a, p, memory);
            break;
        case Number::Float16:
#if defined(__F16C__)
            attend_as<Float16>(a, p, memory);
#endif
            break;
    }
}

// What is done once for a tile of keys is shared by more rows where products of bfloat16 leave little else
// to do.
static int64_t max_rows(const Attention& a) {
    return is_narrow<BFloat16>(a) ? 128 : 64;
}

static int64_t scratch_floats(const Attention& a, int64_t max_rows) {
    const Scratch s = divide(a, max_rows, nullptr);
    return s.end - (float*)nullptr;
}

#if defined(__F16C__)
constexpr bool HAS_FLOAT16 = true;
#else
constexpr bool HAS_FLOAT16 = false;
#endif

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_DOOR(name) AIOENGINE_JOIN(kernels_, name)

namespace aioengine {
extern const Kernels AIOENGINE_DOOR(AIOENGINE_KERNELS) = {
    HAS_FLOAT16, max_rows, scratch_floats, attend, merge};
}
