// Routed experts as operators of a program. Which rows an expert has is known when they run, not before.

#pragma once

#include <cstdint>

#include "operators.h"

namespace aioengine {

// What chooses the experts of each row.
struct Router {
    DType dtype;         // of logits: Float32 or BFloat16
    const void* logits;  // [rows, experts]
    int64_t rows, experts, chosen;  // chosen: experts of a row
    // Shares are those of a softmax over the experts that were chosen, and add up to 1; else over all experts.
    bool is_normalized;
};

// Pairs of a row and one of its experts, in places sorted by expert; an expert's are in the order of rows.
struct Routes {
    int64_t rows, experts, chosen;
    const float* shares;    // [rows, chosen], the largest first
    const int64_t* places;  // [rows, chosen]: where each pair is
    const int64_t* order;   // [rows * chosen]: the row of each place
    const int64_t* ends;    // [experts]: behind each expert's last place
};

// Of equal logits the first expert's counts as the larger.
Routes add_router(Program& program, const Router& router);

// The same where experts [rows, chosen] and their shares are known.
Routes add_routes(
    Program& program, const int64_t* chosen, const float* shares, int64_t rows, int64_t experts, int64_t count);

// A matmul with weights of several experts, whose panels lie one's behind the other's, as their factors and
// biases do; `a` says what one of them has. Those of expert e multiply the rows up to ends[e] that are behind the
// expert's before it. `floats`: see `add_linear`.
void add_expert_linear(
    Program& program, Linear a, const int64_t* ends, int64_t num_experts, float* floats = nullptr);

// out [rows, width]: what the row's pairs came to, [rows * chosen, width] in their places, times their shares.
void add_combination(
    Program& program, const Routes& routes, DType dtype, const void* pairs, int64_t width, void* out);

}  // namespace aioengine
