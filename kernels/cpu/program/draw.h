// The choice of a token: the largest logit, or one that is drawn.

#pragma once

#include <cstdint>

#include "dispatch.h"
#include "team.h"

namespace aioengine {

// A temperature of 0 stands for the largest logit. `top_k` of 0 and `top_p` of 1 leave all tokens; `min_p`: of
// the largest weight. `pick`: the number in [0, 1) that draws.
struct Choice {
    double temperature, top_k, top_p, min_p, pick;
};

// Which of x [count] is drawn. `weights` and `spare` have room for as many numbers each.
int64_t draw(DType dtype, const void* x, int64_t count, const Choice& choice, float* weights, float* spare);

// The tokens [rows] of logits x [rows, width], `stride` bytes apart; of largest ones alone where `choices` is
// null. `banned`: of each row, the tokens that get no chance, of which there are num_banned[row]; null for none.
struct Choices {
    DType dtype;
    char* x;
    int64_t rows, width, stride;
    const Choice* choices;
    const int32_t* const* banned;
    const int64_t* num_banned;
    int64_t* to;
};

// cap * tanh(x / cap) of x [rows, width] at `to`, which may be x; rows are so many bytes apart.
void add_cap(
    Program& program, DType dtype, const void* x, int64_t x_stride, int64_t rows, int64_t width, float cap,
    void* to, int64_t to_stride);

void add_choices(Program& program, const Choices& choices);

}  // namespace aioengine
