#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"

namespace aioengine {

namespace {

// Numbers that a part of an operator on rows reads, about.
constexpr int64_t GRAIN = 4096;

int64_t rows_a_part(int64_t numbers_a_row, int64_t rows) {
    return std::clamp<int64_t>(GRAIN / std::max<int64_t>(1, numbers_a_row), 1, rows);
}

template <class T>
T* take(Program& program, int64_t count) {
    return static_cast<T*>(program.take(count * sizeof(T)));
}

// The experts of rows, and their shares.
struct Choose {
    Router r;
    int32_t* experts;  // [rows, chosen]
    float* shares;
    int64_t grain;

    int64_t first(const Part& part) const { return part.index * grain; }
    int64_t count(const Part& part) const { return std::min(grain, r.rows - first(part)); }
    float* own_shares(const Part& part) const { return part.scratch; }
    int32_t* own_experts(const Part& part) const {
        return reinterpret_cast<int32_t*>(part.scratch + grain * r.chosen);
    }

    template <class T>
    void choose(const T* logits, float* best, int32_t* which) const {
        constexpr float LEAST = -std::numeric_limits<float>::infinity();
        int64_t num_found = 0;
        bool has_nan = false;
        for (int64_t e = 0; e < r.experts; ++e) {
            const float logit = read_number(logits[e]);
            has_nan = has_nan || std::isnan(logit);
            const float value = std::isnan(logit) ? LEAST : logit;
            if (num_found == r.chosen && !(value > best[r.chosen - 1])) continue;
            int64_t at = num_found < r.chosen ? num_found++ : r.chosen - 1;
            for (; at > 0 && value > best[at - 1]; --at) {
                best[at] = best[at - 1];
                which[at] = which[at - 1];
            }
            best[at] = value;
            which[at] = static_cast<int32_t>(e);
        }
        const float largest = best[0];
        float total = 0;
        if (!r.is_normalized)
            for (int64_t e = 0; e < r.experts; ++e) total += std::exp(read_number(logits[e]) - largest);
        for (int64_t i = 0; i < r.chosen; ++i) {
            best[i] = has_nan ? std::numeric_limits<float>::quiet_NaN() : std::exp(best[i] - largest);
            if (r.is_normalized) total += best[i];
        }
        for (int64_t i = 0; i < r.chosen; ++i) best[i] /= total;
    }

    void compute(const Part& part) const {
        for (int64_t i = 0; i < count(part); ++i)
            with_numbers(r.dtype, r.logits, [&](const auto* logits) {
                choose(
                    logits + (first(part) + i) * r.experts, own_shares(part) + i * r.chosen,
                    own_experts(part) + i * r.chosen);
            });
    }

    void commit(const Part& part) const {
        const int64_t at = first(part) * r.chosen, pairs = count(part) * r.chosen;
        std::copy_n(own_shares(part), pairs, shares + at);
        std::copy_n(own_experts(part), pairs, experts + at);
    }
};

// The pairs' places. One part: there are few numbers, and none is computed.
struct Sort {
    const int32_t* experts_of;
    int64_t rows, experts, chosen;
    int64_t *places, *order, *ends;

    void commit(const Part&) const {
        std::fill_n(ends, experts, 0);
        const int64_t pairs = rows * chosen;
        for (int64_t i = 0; i < pairs; ++i) ++ends[experts_of[i]];
        int64_t before = 0;
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t count = ends[e];
            ends[e] = before;  // for now where the expert's places begin
            before += count;
        }
        for (int64_t i = 0; i < pairs; ++i) {
            places[i] = ends[experts_of[i]]++;
            order[places[i]] = i / chosen;
        }
    }
};

// Rows [first, last) of one expert, in a matmul.
struct ExpertRows {
    int64_t expert, first, last;
};

// The pieces of a matmul's rows: each expert's for itself, and in the end empty ones.
struct Cut {
    const int64_t* ends;
    int64_t experts, depth;
    const LinearKernels* kernels;
    ExpertRows* pieces;
    int64_t num_pieces;

    void commit(const Part&) const {
        int64_t count = 0;
        for (int64_t expert = 0, first = 0; expert < experts; first = ends[expert++]) {
            const int64_t last = ends[expert], rows = rows_a_piece(*kernels, depth, last - first);
            for (int64_t at = first; at < last; at += rows)
                pieces[count++] = {expert, at, std::min(at + rows, last)};
        }
        std::fill(pieces + count, pieces + num_pieces, ExpertRows{});
    }
};

// The weights of one of several experts.
Linear of_expert(Linear a, int64_t expert) {
    const int64_t outputs = expert * a.outputs, panel = outputs / PANEL;
    if (a.weights == Weights::Grouped) {
        a.groups.first = a.groups.panel(panel);
        a.packed = a.groups.first;
    } else {
        const int64_t size = a.weights == Weights::Float32 ? 4 : 2;
        a.packed = static_cast<const char*>(a.packed) + panel * a.depth * PANEL * size;
    }
    if (a.scales) a.scales += outputs;
    if (a.bias) a.bias += outputs;
    return a;
}

// A piece of an expert's rows and one of its panels is a part.
struct MultiplyByExpert {
    Linear a;
    const LinearKernels* kernels;
    int64_t panels;
    const ExpertRows* pieces;

    template <class Work>
    void with_piece(const Part& part, const Work& work) const {
        const ExpertRows& rows = pieces[part.index / panels];
        if (rows.first == rows.last) return;
        const bool has_next = part.has_next && (part.index + 1) % panels != 0;
        work(of_expert(a, rows.expert), LinearPiece{part.index % panels, rows.first, rows.last, has_next});
    }

    void compute(const Part& part) const {
        with_piece(part, [&](const Linear& own, const LinearPiece& piece) {
            kernels->multiply(own, piece, part.scratch);
        });
    }

    void commit(const Part& part) const {
        with_piece(part, [&](const Linear& own, const LinearPiece& piece) {
            kernels->write(own, piece, part.scratch);
        });
    }
};

struct Combine {
    Routes r;
    DType dtype;
    const void* pairs;
    int64_t width;
    char* out;
    int64_t grain;

    int64_t first(const Part& part) const { return part.index * grain; }
    int64_t count(const Part& part) const { return std::min(grain, r.rows - first(part)); }
    // Behind a row's sums.
    float* results(const Part& part) const { return part.scratch + width; }

    template <class T>
    void add_up(const T* from, int64_t row, float* sums, T* to) const {
        for (int64_t i = 0; i < r.chosen; ++i) {
            const float share = r.shares[row * r.chosen + i];
            const T* pair = from + r.places[row * r.chosen + i] * width;
            for (int64_t k = 0; k < width; ++k)
                sums[k] = (i ? sums[k] : 0.0f) + share * read_number(pair[k]);
        }
        for (int64_t k = 0; k < width; ++k) write_number(to[k], sums[k]);
    }

    void compute(const Part& part) const {
        for (int64_t i = 0; i < count(part); ++i)
            with_numbers(dtype, pairs, [&]<class T>(const T* from) {
                add_up(from, first(part) + i, part.scratch, reinterpret_cast<T*>(results(part)) + i * width);
            });
    }

    void commit(const Part& part) const {
        const int64_t bytes = width * size_of(dtype);
        std::memcpy(out + first(part) * bytes, results(part), count(part) * bytes);
    }
};

}  // namespace

namespace {

// Adds what sorts pairs. A thread that is late may look at places until the program's end: they are of this operator
// alone, as experts and shares are.
Routes add_sorting(
    Program& program, const int32_t* chosen, const float* shares, int64_t rows, int64_t experts, int64_t count) {
    const int64_t pairs = rows * count;
    int64_t *places = take<int64_t>(program, 2 * pairs + experts), *order = places + pairs;
    int64_t* ends = order + pairs;
    program.add(Sort{chosen, rows, experts, count, places, order, ends}, 1);
    return {rows, experts, count, shares, places, order, ends};
}

}  // namespace

Routes add_router(Program& program, const Router& router) {
    const int64_t rows = router.rows, pairs = rows * router.chosen;
    if (!pairs) return {0, router.experts, router.chosen, nullptr, nullptr, nullptr, nullptr};
    float* shares = take<float>(program, pairs);
    int32_t* chosen = take<int32_t>(program, pairs);
    const int64_t grain = rows_a_part(router.experts, rows);
    program.add(
        Choose{router, chosen, shares, grain}, (rows + grain - 1) / grain, 2 * grain * router.chosen);
    return add_sorting(program, chosen, shares, rows, router.experts, router.chosen);
}

Routes add_routes(
    Program& program, const int64_t* chosen, const float* shares, int64_t rows, int64_t experts, int64_t count) {
    const int64_t pairs = rows * count;
    if (!pairs) return {0, experts, count, nullptr, nullptr, nullptr, nullptr};
    float* parts = take<float>(program, pairs);
    int32_t* which = take<int32_t>(program, pairs);
    std::copy_n(shares, pairs, parts);
    std::copy_n(chosen, pairs, which);
    return add_sorting(program, which, parts, rows, experts, count);
}

void add_expert_linear(
    Program& program, Linear a, const int64_t* ends, int64_t num_experts, float* floats) {
    if (!a.rows) return;
    const LinearKernels& kernels = kernels_of(a);
    add_widening(program, a, kernels, floats);
    // One that is not full for each expert that has rows, at most.
    const int64_t num_pieces = a.rows / kernels.max_rows(a.depth) + std::min(num_experts, a.rows);
    ExpertRows* pieces = take<ExpertRows>(program, num_pieces);
    program.add(Cut{ends, num_experts, a.depth, &kernels, pieces, num_pieces}, 1);
    const int64_t panels = panels_of(a);
    program.add(
        MultiplyByExpert{a, &kernels, panels, pieces}, panels * num_pieces, kernels.scratch_floats(a));
}

void add_combination(
    Program& program, const Routes& routes, DType dtype, const void* pairs, int64_t width, void* out) {
    if (!routes.rows) return;
    const int64_t grain = rows_a_part(width * routes.chosen, routes.rows);
    program.add(
        Combine{routes, dtype, pairs, width, static_cast<char*>(out), grain},
        (routes.rows + grain - 1) / grain, (grain + 1) * width);
}

}  // namespace aioengine
