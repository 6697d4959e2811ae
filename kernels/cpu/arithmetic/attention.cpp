// Attention of one piece of work over pages, by the online softmax of Milakov and Gimelshein (2018)
// as FlashAttention uses it (Dao et al., 2022): tile by tile of keys, with a running maximum, a
// running sum and a running weighted sum of values for each row. A row is one query head of one
// token; the heads that share a key head are rows side by side, so each key is read once for all.
//
// Compiled once for each instruction set: AIOENGINE_KERNELS names the table. See vector.h for what
// this file must not do.

#include "attention.h"

#include "attention_tile.h"
#include "bf16_tile.h"

namespace {

using aioengine::Parts;
using aioengine::SEGMENT;

constexpr int64_t FEW_ROWS = 8;      // for which keys are not worth being converted once
constexpr int64_t PARTIAL_HEAD = 2;  // floats before a partial result's values

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
    return a.dtype == DType::BFloat16 && rows >= MANY_ROWS && has_lines;
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

// One tile of keys, [begin, begin + count), of which the first `skipped` are not the piece's. The
// piece's first one finds where its rows lie; each leaves in `tile` where those of the next one do.
// `Row`: of what rows of keys and values are, of T or of bytes.
template <class T, class Row>
static void attend_to_tile(
    const Attention& a, const Piece& p, const Scratch& s, int64_t begin, int64_t skipped,
    int64_t count, Tile<Row>& tile) {
#if defined(__AVX512BF16__)
    if (is_narrow<T>(a)) {
        attend_to_tile_rows(a, p, s, begin, skipped, count);
        return;
    }
#endif
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const int64_t key_dim = round_up(a.key_dim), value_dim = round_up(a.value_dim);
    const bool is_converted_once =
        sizeof(Row) == 1 || (sizeof(Row) < sizeof(float) && rows > FEW_ROWS);
    if (begin <= p.key_begin) find_rows(a, p, begin, skipped, count, tile);
    Tile<float> wide;
    Tile<Row> coming;
    const Row* const* next = find_coming(a, p, begin, coming) ? coming.keys : nullptr;
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

// The scratch of a piece. Where it is all that its tokens see, and lies in one segment, that segment's
// result is the sum of them.
static Scratch scratch_of(const Attention& a, const Piece& p, float* memory) {
    Scratch s = divide(a, p.num_tokens * (a.heads / a.kv_heads), memory);
    if (p.partial < 0 && p.key_begin / SEGMENT == (p.key_end - 1) / SEGMENT) {
        s.sum_largest = s.largest;
        s.sum_total = s.total;
        s.sum_out = s.out;
    }
    return s;
}

template <class T, class Row>
static void attend_as(const Attention& a, const Piece& p, float* memory) {
    const int64_t rows = p.num_tokens * (a.heads / a.kv_heads);
    const int64_t stride = round_up(a.value_dim), size = PARTIAL_HEAD + a.value_dim;
    const Scratch s = scratch_of(a, p, memory);
    const bool is_whole = p.partial < 0;
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
    Tile<Row> tile;
    float* partial = a.partial + p.partial;
    while (key < p.key_end) {
        const int64_t segment_end = lesser((key / SEGMENT + 1) * SEGMENT, p.key_end);
#if defined(__AVX512BF16__)
        const bool has_columns = is_narrow<T>(a) && rows >= MANY_ROWS;
        const int64_t padded = (rows + BLOCK - 1) / BLOCK * BLOCK;
        clear(
            s.largest, s.total, has_columns ? s.transposed : s.out, has_columns ? padded : rows, stride);
#else
        clear(s.largest, s.total, s.out, rows, stride);
#endif
        while (key < segment_end) {
            // Tiles too lie where they lie for everyone.
            const int64_t skipped = key % KEYS;
            const int64_t count = lesser(KEYS, segment_end - (key - skipped));
            attend_to_tile<T, Row>(a, p, s, key - skipped, skipped, count, tile);
            key += count - skipped;
        }
#if defined(__AVX512BF16__)
        for (int64_t r = 0; r < padded && has_columns; r += BLOCK)
            columns_to_rows(s.transposed + r * stride, stride, stride, s.out + r * stride);
        for (int64_t r = 0; r < rows && is_narrow<T>(a); ++r) s.largest[r] *= scale_of(a);
#endif
        for (int64_t r = 0; r < rows; ++r) {
            const float* out = s.out + r * stride;
            if (is_whole) {
                if (s.sum_out == s.out) break;
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
}

// Divides by the sums of the weights, a sink's included, and writes out.
static void write(const Attention& a, const Piece& p, float* memory) {
    const Scratch s = scratch_of(a, p, memory);
    const int64_t group = a.heads / a.kv_heads, stride = round_up(a.value_dim);
    const int64_t rows = p.num_tokens * group;
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
        switch (a.dtype) {
            case DType::Float32:
                write_row(from, a.value_dim, factor, (float*)a.out + at);
                break;
            case DType::BFloat16:
                if (past_caches)
                    stream_row(from, a.value_dim, factor, (BFloat16*)a.out + at);
                else
                    write_row(from, a.value_dim, factor, (BFloat16*)a.out + at);
                break;
            case DType::Float16:
#if AIOENGINE_FLOAT16
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
}

template <class T>
static void attend_rows(const Attention& a, const Piece& p, float* memory) {
    if (a.has_byte_rows)
        attend_as<T, ByteRow>(a, p, memory);
    else
        attend_as<T, T>(a, p, memory);
}

static void attend(const Attention& a, const Piece& p, float* memory) {
    switch (a.dtype) {
        case DType::Float32:
            attend_rows<float>(a, p, memory);
            break;
        case DType::BFloat16:
            attend_rows<BFloat16>(a, p, memory);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            attend_rows<Float16>(a, p, memory);
#endif
            break;
    }
}

static void pack_rows(
    DType dtype, const void* from, int64_t stride, int64_t count, int64_t dim, void* to) {
    switch (dtype) {
        case DType::Float32:
            pack_rows_of<float>(from, stride, count, dim, to);
            break;
        case DType::BFloat16:
            pack_rows_of<BFloat16>(from, stride, count, dim, to);
            break;
        case DType::Float16:
#if AIOENGINE_FLOAT16
            pack_rows_of<Float16>(from, stride, count, dim, to);
#endif
            break;
    }
}

// What is done once for a tile of keys is shared by more rows where matmuls in bfloat16 leave little else
// to do.
static int64_t max_rows(const Attention& a) {
    return is_narrow<BFloat16>(a) ? 128 : 64;
}

static int64_t scratch_floats(const Attention& a, int64_t max_rows) {
    const Scratch s = divide(a, max_rows, nullptr);
    return (int64_t)((uintptr_t)s.end / sizeof(float));
}

#if AIOENGINE_FLOAT16
constexpr bool HAS_FLOAT16 = true;
#else
constexpr bool HAS_FLOAT16 = false;
#endif

}  // namespace

#define AIOENGINE_JOIN(a, b) a##b
#define AIOENGINE_TABLE(name) AIOENGINE_JOIN(kernels_, name)

namespace aioengine {
extern const AttentionKernels AIOENGINE_TABLE(AIOENGINE_KERNELS) = {
    HAS_FLOAT16, max_rows, scratch_floats, attend, merge, write, pack_rows};
}
