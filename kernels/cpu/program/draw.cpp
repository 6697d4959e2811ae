#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "operators.h"

namespace aioengine {

namespace {

constexpr int64_t BLOCK = 128;  // weights that are added up by themselves
// Tokens that are looked at first for top-p: they nearly always hold enough.
constexpr int64_t HEAD = 256;

double sum_of(const float* weights, int64_t count) {
    double sums[4] = {};
    for (int64_t i = 0; i + 4 <= count; i += 4)
        for (int lane = 0; lane < 4; ++lane) sums[lane] += weights[i + lane];
    for (int64_t i = count / 4 * 4; i < count; ++i) sums[0] += weights[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

double total_of(const float* weights, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i += BLOCK) total += sum_of(weights + i, std::min(BLOCK, count - i));
    return total;
}

// The `count` largest of `all` numbers come first, in descending order.
void sort_head(float* numbers, int64_t all, int64_t count) {
    if (count < all) std::nth_element(numbers, numbers + count - 1, numbers + all, std::greater<float>());
    std::sort(numbers, numbers + count, std::greater<float>());
}

// The least weight of the smallest set that reaches the share `top_p` of `total`, of the largest weights in
// descending order; where they do not reach it, the last of them that counts.
float least_of(const float* head, int64_t count, double top_p, double total) {
    const double share = top_p * total;
    double before = 0;
    float least = head[0];
    for (int64_t i = 0; i < count && before < share && head[i] > 0; ++i) {
        least = head[i];
        before += head[i];
    }
    return least;
}

// The least weight that top-k and top-p leave. Tokens that are as probable as the last one are left too.
float threshold(const float* weights, int64_t count, const Choice& choice, float* spare) {
    const int64_t top_k = static_cast<int64_t>(choice.top_k);
    const bool has_k = 0 < top_k && top_k < count;
    if (!has_k && choice.top_p >= 1) return 0;
    std::memcpy(spare, weights, count * sizeof(float));
    if (has_k) {
        sort_head(spare, count, top_k);
        double total = 0;
        for (int64_t i = 0; i < top_k; ++i) total += spare[i];
        return least_of(spare, top_k, choice.top_p, total);
    }
    const double total = total_of(weights, count);
    const int64_t head = std::min(HEAD, count);
    sort_head(spare, count, head);
    const float least = least_of(spare, head, choice.top_p, total);
    // The head holds the set where its last token is not needed.
    if (head == count || spare[head - 1] < least) return least;
    std::sort(spare, spare + count, std::greater<float>());
    return least_of(spare, count, choice.top_p, total);
}

struct Choose {
    Choices a;

    void commit(const Part& part) const {
        const int64_t row = part.index;
        char* x = a.x + row * a.stride;
        if (a.banned)
            for (int64_t i = 0; i < a.num_banned[row]; ++i) {
                const int32_t token = a.banned[row][i];
                if (a.dtype == DType::Float32)
                    reinterpret_cast<float*>(x)[token] = -std::numeric_limits<float>::infinity();
                else
                    reinterpret_cast<uint16_t*>(x)[token] = a.dtype == DType::BFloat16 ? 0xff80 : 0xfc00;
            }
        if (a.choices && a.choices[row].temperature > 0)
            a.to[row] = draw(a.dtype, x, a.width, a.choices[row], part.scratch, part.scratch + a.width);
        else
            a.to[row] = (*dispatch_table().argmax)(a.dtype, x, a.width);
    }
};

// Some numbers of a row.
struct Cap {
    static constexpr int64_t NUMBERS = 1 << 14;

    DType dtype;
    const char* x;
    char* to;
    int64_t width, x_stride, to_stride, size, parts_a_row;
    float cap;

    void commit(const Part& part) const {
        const int64_t row = part.index / parts_a_row, first = part.index % parts_a_row * NUMBERS;
        dispatch_table().weights->cap(
            dtype, x + row * x_stride + first * size, std::min(NUMBERS, width - first), cap,
            to + row * to_stride + first * size);
    }
};

}  // namespace

void add_cap(
    Program& program, DType dtype, const void* x, int64_t x_stride, int64_t rows, int64_t width, float cap,
    void* to, int64_t to_stride) {
    const int64_t parts = (width + Cap::NUMBERS - 1) / Cap::NUMBERS;
    program.add(
        Cap{dtype, static_cast<const char*>(x), static_cast<char*>(to), width, x_stride, to_stride, size_of(dtype),
            parts, cap},
        rows * parts);
}

int64_t draw(
    DType dtype, const void* x, int64_t count, const Choice& choice, float* weights, float* spare) {
    dispatch_table().weights->weights(dtype, x, count, static_cast<float>(choice.temperature), weights);
    // Logits that are not numbers leave no weight at all: any token will do.
    if (!(total_of(weights, count) > 0)) return count - 1;
    const float floor = std::max(static_cast<float>(choice.min_p), threshold(weights, count, choice, spare));
    if (floor > 0)
        for (int64_t i = 0; i < count; ++i)
            if (weights[i] < floor) weights[i] = 0;
    // Inverse transform sampling. Rounding must not reach the total: past it lie only tokens without a chance.
    const double total = total_of(weights, count);
    const double target = std::min(choice.pick * total, std::nextafter(total, 0.0));
    double before = 0;
    int64_t last = count - 1;
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t size = std::min(BLOCK, count - first);
        const double after = before + sum_of(weights + first, size);
        if (after > target) {
            double sum = before;
            for (int64_t i = first; i < first + size; ++i) {
                sum += weights[i];
                if (weights[i] > 0) last = i;
                if (sum > target) break;
            }
            return last;
        }
        before = after;
    }
    return last;
}

void add_choices(Program& program, const Choices& choices) {
    program.add(Choose{choices}, choices.rows, choices.choices ? 2 * choices.width : 0);
}

}  // namespace aioengine
