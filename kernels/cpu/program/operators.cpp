#include "operators.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "byte_rows.h"

namespace aioengine {

namespace {

// Numbers that a part of an operator on rows has, about.
constexpr int64_t ROW_GRAIN = 4096;

int64_t rows_a_part(int64_t width) {
    return std::max<int64_t>(1, ROW_GRAIN / std::max<int64_t>(1, width));
}

int64_t parts_of(int64_t count, int64_t grain) {
    return (count + grain - 1) / grain;
}

char* bytes(void* memory) {
    return static_cast<char*>(memory);
}

const char* bytes(const void* memory) {
    return static_cast<const char*>(memory);
}

struct Widen {
    Linear a;
    const LinearKernels* kernels;
    float* to;
    int64_t grain;

    void commit(const Part& part) const {
        const int64_t first = part.index * grain;
        kernels->widen(a, first, std::min(first + grain, a.rows), to);
    }
};

// Panel by panel within some rows: these stay in a core's cache, and weights are read once.
struct Multiply {
    Linear a;
    const LinearKernels* kernels;
    int64_t panels, rows;

    LinearPiece piece(const Part& part) const {
        const int64_t first = part.index / panels * rows;
        const bool has_next = part.has_next && (part.index + 1) % panels != 0;
        return {part.index % panels, first, std::min(first + rows, a.rows), has_next};
    }

    void compute(const Part& part) const { kernels->multiply(a, piece(part), part.scratch); }
    void commit(const Part& part) const { kernels->write(a, piece(part), part.scratch); }
};

struct Normalize {
    Norm a;
    NormKernel kernel;
    int64_t rows, grain, bytes_a_row;

    int64_t first(const Part& part) const { return part.index * grain; }
    int64_t last(const Part& part) const { return std::min(first(part) + grain, rows); }

    void compute(const Part& part) const {
        Norm own = a;
        own.out = bytes(part.scratch) - first(part) * bytes_a_row;
        kernel(own, first(part), last(part));
    }

    void commit(const Part& part) const {
        std::memcpy(
            bytes(a.out) + first(part) * bytes_a_row, part.scratch,
            (last(part) - first(part)) * bytes_a_row);
    }
};

// Copies the rows [first, last) of x [tokens, heads, width] to their slots.
void write_pages(
    const void* x, const int64_t* strides, int64_t heads, int64_t width, int64_t size, void* cache,
    const int64_t* cache_strides, const Pages& pages, int64_t first, int64_t last) {
    const bool is_whole = heads == 1 || (strides[1] == width && cache_strides[2] == width);
    for (int64_t t = first; t < last; ++t) {
        const char* from = bytes(x) + t * strides[0] * size;
        char* to = bytes(cache) +
                   (pages.blocks[t] * cache_strides[0] + pages.offsets[t] * cache_strides[1]) * size;
        if (is_whole) {
            std::memcpy(to, from, heads * width * size);
            continue;
        }
        for (int64_t h = 0; h < heads; ++h)
            std::memcpy(to + h * cache_strides[2] * size, from + h * strides[1] * size, width * size);
    }
}

struct Prepare {
    Heads h;
    NormKernel normalize;
    RotaryKernel rotate;
    const AttentionKernels* attention;
    int64_t grain, size;

    int64_t first(const Part& part) const { return part.index * grain; }
    int64_t last(const Part& part) const { return std::min(first(part) + grain, h.tokens); }
    int64_t heads(int which) const { return which ? h.kv_heads : h.heads; }
    int64_t dim(int which) const { return which == 2 ? h.value_dim : h.key_dim; }
    bool is_made(int which) const { return which < 2 && (h.norms[which] || h.angles); }
    bool is_wanted(int which) const { return which ? h.key || h.pages : h.query != nullptr; }

    // Of queries (0) or keys (1): where the rows of a part are normalized to, and rotated to after that.
    char* room(const Part& part, int which, bool is_rotated) const {
        const int64_t width = h.key_dim * size * grain;
        const int64_t before = which ? 2 * h.heads + (is_rotated ? h.kv_heads : 0)
                                     : (is_rotated ? h.heads : 0);
        return bytes(part.scratch) + before * width;
    }

    // Where keys (1) or values (2) of a part are made rows of bytes.
    char* byte_room(const Part& part, int which) const {
        const int64_t numbers = 2 * (h.heads + h.kv_heads) * h.key_dim * size;
        const int64_t keys = which == 2 ? h.kv_heads * row_bytes(h.key_dim) : 0;
        return bytes(part.scratch) + (numbers + keys) * grain;
    }

    // Rows of a part as they are attended with, counted from the step's first token.
    struct Source {
        const char* data;
        int64_t strides[2];  // in numbers
    };

    Source source(const Part& part, int which) const {
        if (!is_made(which)) return {bytes(h.x[which]), {h.strides[which][0], h.strides[which][1]}};
        const int64_t width = heads(which) * h.key_dim;
        const char* from = room(part, which, h.angles.has_value()) - first(part) * width * size;
        return {from, {width, h.key_dim}};
    }

    void compute(const Part& part) const {
        make(part);
        for (int which = 1; which < 3 && h.pages && h.pages->has_byte_rows; ++which) {
            const Source from = source(part, which);
            const int64_t width = h.kv_heads * row_bytes(dim(which));
            for (int64_t t = first(part); t < last(part); ++t)
                attention->pack_rows(
                    h.dtype, from.data + t * from.strides[0] * size, from.strides[1], h.kv_heads,
                    dim(which), byte_room(part, which) + (t - first(part)) * width);
        }
    }

    void make(const Part& part) const {
        const int64_t begin = first(part), end = last(part);
        for (int which = 0; which < 2; ++which) {
            if (!is_wanted(which) || !is_made(which)) continue;
            const int64_t width = heads(which) * h.key_dim;
            const void* from = h.x[which];
            int64_t strides[2] = {h.strides[which][0], h.strides[which][1]};
            const auto place = [&](auto& a, bool is_rotated) {
                a.dtype = h.dtype;
                a.x = from;
                a.strides[0] = strides[0];
                a.strides[1] = strides[1];
                a.heads = heads(which);
                a.dim = h.key_dim;
                a.out = room(part, which, is_rotated) - begin * width * size;
            };
            if (h.norms[which]) {
                Norm a = *h.norms[which];
                place(a, false);
                normalize(a, begin, end);
                from = a.out;
                strides[0] = width;
                strides[1] = h.key_dim;
            }
            if (!h.angles) continue;
            Rotary a = *h.angles;
            place(a, true);
            rotate(a, begin, end);
        }
    }

    void commit(const Part& part) const {
        const int64_t begin = first(part), end = last(part);
        for (int which = 0; which < 2; ++which) {
            char* to = bytes(which ? h.key : h.query);
            const Source from = source(part, which);
            const int64_t width = heads(which) * h.key_dim;
            for (int64_t t = begin; t < end && to; ++t)
                for (int64_t i = 0; i < heads(which); ++i)
                    std::memcpy(
                        to + (t * width + i * h.key_dim) * size,
                        from.data + (t * from.strides[0] + i * from.strides[1]) * size, h.key_dim * size);
        }
        if (!h.pages) return;
        write(part, 1, h.pages->keys, h.pages->key_strides);
        write(part, 2, h.pages->values, h.pages->value_strides);
    }

    // Keys (1) or values (2) to their pages.
    void write(const Part& part, int which, void* cache, const int64_t* cache_strides) const {
        const int64_t begin = first(part), end = last(part);
        if (!h.pages->has_byte_rows) {
            const Source from = source(part, which);
            write_pages(
                from.data, from.strides, h.kv_heads, dim(which), size, cache, cache_strides, *h.pages, begin,
                end);
            return;
        }
        const int64_t width = row_bytes(dim(which)), strides[2] = {h.kv_heads * width, width};
        const char* from = byte_room(part, which) - begin * strides[0];
        write_pages(from, strides, h.kv_heads, width, 1, cache, cache_strides, *h.pages, begin, end);
    }
};

struct Attend {
    Attention a;
    const AttentionKernels* kernels;
    const Piece* pieces;
    int64_t partial_at;  // in the scratch

    void compute(const Part& part) const {
        const Piece& piece = pieces[part.index];
        Attention own = a;
        own.partial = part.scratch + partial_at - piece.partial;
        kernels->attend(own, piece, part.scratch);
    }

    void commit(const Part& part) const {
        const Piece& piece = pieces[part.index];
        if (piece.partial < 0) return kernels->write(a, piece, part.scratch);
        const int64_t segments = (piece.key_end - 1) / SEGMENT + 1 - piece.key_begin / SEGMENT;
        const int64_t floats = segments * piece.num_tokens * (a.heads / a.kv_heads) * (2 + a.value_dim);
        std::memcpy(a.partial + piece.partial, part.scratch + partial_at, floats * sizeof(float));
    }
};

struct Merge {
    Attention a;
    const AttentionKernels* kernels;
    const Parts* parts;

    void compute(const Part& part) const { kernels->merge(a, parts[part.index], part.scratch); }
    void commit(const Part& part) const { kernels->write(a, parts[part.index].piece, part.scratch); }
};

struct TakeRows {
    const char* x;
    int64_t stride;
    const int64_t* rows;
    int64_t count, row_bytes, grain;
    char* to;

    void commit(const Part& part) const {
        const int64_t first = part.index * grain, last = std::min(first + grain, count);
        for (int64_t i = first; i < last; ++i)
            std::memcpy(to + i * row_bytes, x + rows[i] * stride, row_bytes);
    }
};

}  // namespace

int64_t size_of(DType dtype) {
    return dtype == DType::Float32 ? 4 : 2;
}

const LinearKernels& kernels_of(const Linear& a) {
    const DispatchTable& table = dispatch_table();
    if (a.weights == Weights::Grouped) {
        if (!a.groups.has_full_inputs) return *table.int8_gemm;
        return *(a.dtype == DType::BFloat16 && table.grouped_bf16 ? table.grouped_bf16 : table.linear);
    }
    return *(a.is_paired ? table.bf16_gemm : table.linear);
}

bool wants_floats(const Linear& a) {
    return a.dtype != DType::Float32 && kernels_of(a).widen;
}

void add_widening(Program& program, Linear& a, const LinearKernels& kernels, float* floats) {
    a.input = static_cast<const float*>(a.x);
    a.input_stride = a.stride;
    if (!wants_floats(a)) return;
    if (!floats) floats = static_cast<float*>(program.take(a.rows * a.depth * sizeof(float)));
    a.input = floats;
    a.input_stride = a.depth;
    const int64_t grain = rows_a_part(a.depth);
    program.add(Widen{a, &kernels, floats, grain}, parts_of(a.rows, grain));
}

int64_t panels_of(const Linear& a) {
    return a.gate_panels ? a.gate_panels : parts_of(a.outputs, PANEL);
}

int64_t rows_a_piece(const LinearKernels& kernels, int64_t depth, int64_t rows) {
    const int64_t max_rows = kernels.max_rows(depth), unit = kernels.unit_rows;
    const int64_t even = rows / (rows / (max_rows + 1) + 1);
    return std::min(max_rows, (even / unit + 1) * unit);
}

void add_linear(Program& program, Linear a, float* floats) {
    const LinearKernels& kernels = kernels_of(a);
    add_widening(program, a, kernels, floats);
    const int64_t panels = panels_of(a), rows = rows_a_piece(kernels, a.depth, a.rows);
    program.add(
        Multiply{a, &kernels, panels, rows}, panels * parts_of(a.rows, rows), kernels.scratch_floats(a));
}

void add_norm(Program& program, const Norm& a, int64_t rows) {
    const int64_t width = a.heads * a.dim, grain = std::min(rows, rows_a_part(width));
    const int64_t bytes_a_row = width * size_of(a.dtype);
    program.add(
        Normalize{a, *dispatch_table().norm, rows, grain, bytes_a_row},
        grain ? parts_of(rows, grain) : 0, (grain * bytes_a_row + 3) / 4);
}

void add_heads(Program& program, const Heads& heads) {
    const int64_t width = (heads.heads + 2 * heads.kv_heads) * heads.key_dim;
    const int64_t grain = std::min(heads.tokens, rows_a_part(width)), size = size_of(heads.dtype);
    const DispatchTable& table = dispatch_table();
    int64_t room = 2 * (heads.heads + heads.kv_heads) * heads.key_dim * grain * size;
    if (heads.pages && heads.pages->has_byte_rows)
        room += heads.kv_heads * (row_bytes(heads.key_dim) + row_bytes(heads.value_dim)) * grain;
    program.add(
        Prepare{heads, *table.norm, *table.rotary, table.attention, grain, size},
        grain ? parts_of(heads.tokens, grain) : 0, (room + 3) / 4);
}

void add_attention(Program& program, const Attention& a, const AttentionWork& work) {
    const AttentionKernels* kernels = dispatch_table().attention;
    program.add(
        Attend{a, kernels, work.pieces, work.scratch_floats}, work.num_pieces,
        work.scratch_floats + work.partial_floats, true);
    program.add(Merge{a, kernels, work.parts}, work.num_parts, work.scratch_floats, true);
}

void add_take_rows(
    Program& program, const void* x, int64_t stride, const int64_t* rows, int64_t count, int64_t row_bytes,
    void* to) {
    const int64_t grain = rows_a_part(row_bytes);
    program.add(
        TakeRows{bytes(x), stride, rows, count, row_bytes, grain, bytes(to)}, parts_of(count, grain));
}

}  // namespace aioengine
