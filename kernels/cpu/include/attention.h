// What one call of paged attention is given, and the tables of functions that compute it: one for each
// instruction set. See kernels/attention.py for the meaning of the tensors.

#pragma once

#include <stdint.h>

#include "dtype.h"

namespace aioengine {

// Strides are in elements; the last dimension of every tensor lies close together.
struct Attention {
    DType dtype;           // of query and out, and of caches unless these are of bytes
    const void* query;       // [T, heads, key_dim]
    const void* key_cache;   // [blocks, block_size, kv_heads, key_dim]
    const void* value_cache; // [blocks, block_size, kv_heads, value_dim]
    void* out;               // [T, heads, value_dim], contiguous
    int64_t query_strides[2];
    int64_t key_strides[3];
    int64_t value_strides[3];
    int64_t heads, kv_heads, key_dim, value_dim, block_size;
    int64_t num_sequences;       // S
    const int32_t* query_start;  // [S + 1]
    const int32_t* seq_lens;     // [S]
    const int32_t* block_table;  // [S, table_width]
    int64_t table_width;
    const int32_t* block_ids;    // [T], or null
    const float* sinks;          // [heads], or null
    const float* distance_bias;  // [heads, num_distances], or null
    int64_t num_distances;
    float scale;
    float softcap;   // 0: none
    int64_t window;  // 0: none
    bool is_causal, blocks_in_window;
    bool has_byte_rows;  // keys and values are rows of bytes (byte_rows.h); their strides are in bytes
    float* partial;  // the results of pieces whose keys were split
};

// Keys are attended to in segments, which begin at multiples of this, and the results of segments
// are then added up in order. What a token gets so depends on nothing but itself: not on who else
// is in the step, nor on where its prompt was cut, nor on how many threads shared the work.
constexpr int64_t SEGMENT = 512;

// A piece of work: some tokens of one sequence, all query heads of one key head, and the part
// [key_begin, key_end) of what they see. `partial` is below 0 where that is all they see. Else it
// is where in `Attention::partial` the results of its segments go, one after the other: for each row
// (token by token, head by head) the largest score, the sum of the weights relative to it, and the
// weighted sum of the values, which are 2 + value_dim floats.
struct Piece {
    int64_t sequence, kv_head, first_token, num_tokens, key_begin, key_end;
    int64_t partial;
};

// A piece whose keys were split: the results of `count` segments lie from its own `partial` on.
struct Parts {
    Piece piece;
    int64_t count;
};

struct AttentionKernels {
    bool has_float16;
    // Rows that a piece should have at most: query heads of one key head, over tokens.
    int64_t (*max_rows)(const Attention&);
    // Floats of working memory that `attend` wants, aligned to 64 bytes.
    int64_t (*scratch_floats)(const Attention&, int64_t max_rows);
    // These leave what the piece comes to in the scratch, or where it is split, in a.partial; `write` puts it
    // into a.out.
    void (*attend)(const Attention&, const Piece&, float* scratch);
    void (*merge)(const Attention&, const Parts&, float* scratch);
    void (*write)(const Attention&, const Piece&, float* scratch);
    // Makes `count` rows of bytes, one behind the other, of rows of `dim` numbers, `stride` numbers apart.
    void (*pack_rows)(
        DType dtype, const void* from, int64_t stride, int64_t count, int64_t dim, void* to);
};

extern const AttentionKernels kernels_generic;
#if defined(__x86_64__)
extern const AttentionKernels kernels_avx2;
extern const AttentionKernels kernels_avx512;
extern const AttentionKernels kernels_avx512_bf16;
extern const AttentionKernels kernels_amx_bf16;
#elif defined(__aarch64__)
extern const AttentionKernels kernels_neon;
extern const AttentionKernels kernels_neon_bf16;
#endif

}  // namespace aioengine
