// A matmul whose rows are made ready first, in a thread's scratch, once for all panels that they meet. What is
// done to rows, and how they are multiplied, is the kernel's (`Kernel`). See vector.h for why all of this is static.

#pragma once

#include "outputs.h"

namespace {

// A kernel has
//   BLOCK_ROWS, whose sums are in the first cache until they are written,
//   PIECE_BYTES of inputs of INPUT_BYTES each, which stay in the second cache meanwhile,
//   OWN_FLOATS of the scratch, IS_NARROW where it writes 16 bits only,
//   row_bytes(groups), of a row that is ready: a multiple of LINE,
//   make_ready(a, first_row, last_row, char* to),
//   add_up(a, rows, count, panel, own, sums), biases and scales included.
template <class Kernel>
struct ReadyRows {
    // The scratch: the first row that is ready, plus one; sums of a block of rows, and of another panel where there
    // are gates; the kernel's own; rows; what is to be written of them.
    static constexpr int64_t SUMS_AT = LINE / sizeof(float);
    static constexpr int64_t OTHERS_AT = SUMS_AT + Kernel::BLOCK_ROWS * aioengine::PANEL;
    static constexpr int64_t OWN_AT = OTHERS_AT + Kernel::BLOCK_ROWS * aioengine::PANEL;
    static constexpr int64_t ROWS_AT = OWN_AT + Kernel::OWN_FLOATS;

    static int64_t max_rows(int64_t depth) {
        const int64_t blocks = Kernel::PIECE_BYTES / (depth * Kernel::INPUT_BYTES) / Kernel::BLOCK_ROWS;
        return (blocks ? blocks : 1) * Kernel::BLOCK_ROWS;
    }

    static int64_t most_rows(const aioengine::Linear& a) { return lesser(a.rows, max_rows(a.depth)); }

    static int64_t results_at(const aioengine::Linear& a) {
        return ROWS_AT + most_rows(a) * Kernel::row_bytes(a.groups) / (int64_t)sizeof(float);
    }

    static int64_t scratch_floats(const aioengine::Linear& a) {
        return results_at(a) + most_rows(a) * aioengine::PANEL;
    }

    static void multiply(const aioengine::Linear& a, const aioengine::LinearPiece& p, float* scratch) {
        using aioengine::DType;
        float *sums = scratch + SUMS_AT, *others = scratch + OTHERS_AT, *own = scratch + OWN_AT;
        char *rows = (char*)(scratch + ROWS_AT), *results = (char*)(scratch + results_at(a));
        int64_t ready;
        memcpy(&ready, scratch, sizeof ready);
        if (ready != p.first_row + 1) Kernel::make_ready(a, p.first_row, p.last_row, rows);
        ready = p.first_row + 1;
        memcpy(scratch, &ready, sizeof ready);
        const int64_t size = a.dtype == DType::Float32 ? sizeof(float) : sizeof(BFloat16);
        for (int64_t first = p.first_row; first < p.last_row; first += Kernel::BLOCK_ROWS) {
            const int64_t count = lesser(Kernel::BLOCK_ROWS, p.last_row - first), done = first - p.first_row;
            const char* x = rows + done * Kernel::row_bytes(a.groups);
            Kernel::add_up(a, x, count, p.panel, own, sums);
            activate<Kernel::IS_NARROW>(a, count * aioengine::PANEL, sums);
            if (a.gate_panels) {
                Kernel::add_up(a, x, count, p.panel + a.gate_panels, own, others);
                gate(a, count * aioengine::PANEL, others, sums);
            }
            char* to = results + done * aioengine::PANEL * size;
            round_sums(a, {p.panel, first, first + count, false}, sums, to);
        }
    }

    static void write(const aioengine::Linear& a, const aioengine::LinearPiece& p, const float* scratch) {
        write_results(a, p, scratch + results_at(a));
    }

    // `unit_rows` are multiplied at a time.
    static constexpr aioengine::LinearKernels table(int64_t unit_rows) {
        return {unit_rows, max_rows, scratch_floats, nullptr, multiply, write};
    }
};

}  // namespace
