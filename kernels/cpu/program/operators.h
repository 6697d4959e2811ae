// What programs are made of: the operators of a decoder layer over memory, as raw addresses.

#pragma once

#include <cstdint>
#include <optional>

#include "dispatch.h"
#include "team.h"

namespace aioengine {

int64_t size_of(DType dtype);

// Whether the kernels of a matmul want its input as floats, which it is not.
bool wants_floats(const Linear& a);

// The matmul that `a` says. Where its kernels want their input as floats, it is made at `floats` [rows,
// depth], or in memory of the program for null.
void add_linear(Program& program, Linear a, float* floats = nullptr);

// Of what it consists, for other matmuls: its kernels; its input made floats, if the kernels want them and it is
// not; how many panels parts have; and the rows of a piece: all pieces but the last are equal and a multiple of the
// kernels' unit, and as few as may be.
const LinearKernels& kernels_of(const Linear& a);
void add_widening(Program& program, Linear& a, const LinearKernels& kernels, float* floats);
int64_t panels_of(const Linear& a);
int64_t rows_a_piece(const LinearKernels& kernels, int64_t depth, int64_t rows);

// The norm of so many rows.
void add_norm(Program& program, const Norm& a, int64_t rows);

// Pages that new rows of keys and values go to; strides are in numbers, or in bytes where rows are of bytes.
struct Pages {
    void *keys, *values;
    int64_t key_strides[3], value_strides[3];
    bool has_byte_rows;
    const int32_t *blocks, *offsets;  // of each row's slot
};

// What becomes of the heads of a step's queries, keys and values between their matmul and attention: norms
// and a rotation of queries and keys, the new ones' way into their pages.
struct Heads {
    DType dtype;
    // Queries, keys, values, [tokens, heads, dim]: a token and a head `strides` numbers apart.
    const void* x[3];
    int64_t strides[3][2];
    int64_t tokens, heads, kv_heads, key_dim, value_dim;
    std::optional<Norm> norms[2];  // what they say of weights, of queries and of keys
    std::optional<Rotary> angles;  // what it says of cosines and sines
    // Where queries and keys go, [tokens, heads, key_dim], contiguous; null: nowhere.
    void *query, *key;
    std::optional<Pages> pages;  // and where keys and values go, if anywhere
};

void add_heads(Program& program, const Heads& heads);

// A step's attention: pieces of work, the longest first, and what has to be merged afterwards.
struct AttentionWork {
    const Piece* pieces;
    const Parts* parts;
    int64_t num_pieces, num_parts, num_partial, scratch_floats, partial_floats;
};

// Cuts the work of so many sequences for `num_threads`; what it says lies in memory of the program.
AttentionWork cut_attention(
    Program& program, const Attention& a, int64_t num_sequences, int64_t num_threads);

// `a.partial` has work.num_partial floats.
void add_attention(Program& program, const Attention& a, const AttentionWork& work);

// Copies `rows` [count] of x, `bytes` each and `stride` apart, to `to`, one behind the other.
void add_take_rows(
    Program& program, const void* x, int64_t stride, const int64_t* rows, int64_t count, int64_t bytes,
    void* to);

}  // namespace aioengine
