// Routers: which experts rows go to, where their pairs lie, and what these are added up to.

#include <algorithm>
#include <limits>
#include <numeric>

#include "experts.h"
#include "problems.h"

namespace checks {

namespace {

struct RouterProblem {
    DType dtype;
    int64_t rows, experts, chosen, width;
    bool is_normalized;
    Numbers logits, values;  // values [rows * chosen, width]: what pairs came to, by row and rank

    Router router(int64_t first_row, int64_t count) const {
        return {dtype, logits.data() + first_row * experts * size_of(dtype), count, experts, chosen, is_normalized};
    }
};

RouterProblem draw_router(DType dtype, Random& random) {
    const int64_t rows = random.one_of<int64_t>({1, 2, 17, 70}), experts = random.one_of<int64_t>({1, 2, 8, 33, 128});
    const int64_t chosen = random.pick(1, std::min<int64_t>(experts, 8)), width = random.one_of<int64_t>({1, 48, 65});
    RouterProblem p{
        dtype, rows, experts, chosen, width, random.coin(), Numbers(dtype, rows * experts, random),
        Numbers(dtype, rows * chosen * width, random)};
    // Some are equal, or no numbers.
    for (int64_t i = 0; i < rows * experts; ++i)
        if (random.pick(0, 5) == 0) p.logits.set(i, random.one_of({0.5f, -0.25f}));
    if (random.pick(0, 3) == 0)
        p.logits.set(random.pick(0, rows * experts - 1), std::numeric_limits<float>::quiet_NaN());
    return p;
}

struct Result {
    Numbers shares;   // float32 [rows, chosen]
    Numbers experts;  // float32 [rows, chosen]
    Numbers sums;     // [rows, width]
};

// All of a step's, in the operators' own order; a pair's value is found by its row and its rank there.
Result route(Report& report, const std::string& what, const RouterProblem& p, int64_t first_row, int64_t count) {
    const int64_t pairs = count * p.chosen, size = size_of(p.dtype);
    struct Gather {
        Routes routes;
        const char* values;
        int64_t row_bytes;
        char* to;
        void commit(const Part&) const {
            for (int64_t i = 0; i < routes.rows * routes.chosen; ++i)
                std::memcpy(to + routes.places[i] * row_bytes, values + i * row_bytes, row_bytes);
        }
    };
    struct Note {
        Routes routes;
        float *shares, *experts;
        void commit(const Part&) const {
            for (int64_t i = 0; i < routes.rows * routes.chosen; ++i) {
                if (shares) shares[i] = routes.shares[i];
                const int64_t place = routes.places[i];
                const bool is_own = routes.order[place] == i / routes.chosen;
                if (experts)
                    experts[i] = is_own ? static_cast<float>(std::upper_bound(routes.ends, routes.ends + routes.experts, place) - routes.ends)
                                        : -1;
            }
        }
    };
    const auto noted = [&](bool is_share) {
        return compute(report, what, DType::Float32, pairs, [&](Program& program, int64_t, void* to) {
            const Routes routes = add_router(program, p.router(first_row, count));
            float* at = static_cast<float*>(to);
            program.add(Note{routes, is_share ? at : nullptr, is_share ? nullptr : at}, 1);
        });
    };
    Numbers sums = compute(report, what, p.dtype, count * p.width, [&](Program& program, int64_t, void* to) {
        const Routes routes = add_router(program, p.router(first_row, count));
        char* placed = static_cast<char*>(program.take(pairs * p.width * size));
        const char* values = p.values.data() + first_row * p.chosen * p.width * size;
        program.add(Gather{routes, values, p.width * size, placed}, 1);
        add_combination(program, routes, p.dtype, placed, p.width, to);
    });
    return {noted(true), noted(false), std::move(sums)};
}

void check_router(Report& report, DType dtype, Random& random) {
    const RouterProblem p = draw_router(dtype, random);
    const std::string what = text(
        "%ld of %ld experts of %ld rows of %s", (long)p.chosen, (long)p.experts, (long)p.rows, name_of(dtype));
    const Result found = route(report, what, p, 0, p.rows);
    bool is_chosen = true, is_shared = true, is_added = true;
    for (int64_t r = 0; r < p.rows; ++r) {
        const auto logit = [&](int64_t e) { return p.logits.at(r * p.experts + e); };
        std::vector<int64_t> order(p.experts);
        std::iota(order.begin(), order.end(), 0);
        const auto rank = [&](int64_t e) { return std::isnan(logit(e)) ? -1e9f : logit(e); };
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rank(a) > rank(b); });
        double total = 0;
        for (int64_t i = 0; i < p.experts; ++i)
            if (i < p.chosen || !p.is_normalized) total += std::exp(double{logit(order[i])});
        if (std::any_of(order.begin(), order.end(), [&](int64_t e) { return std::isnan(logit(e)); })) total = NAN;
        for (int64_t i = 0; i < p.chosen; ++i) {
            is_chosen &= found.experts.at(r * p.chosen + i) == static_cast<float>(order[i]);
            const double share = std::exp(double{logit(order[i])}) / total;
            is_shared &= is_near(found.shares.at(r * p.chosen + i), share, 1e-6);
        }
        for (int64_t k = 0; k < p.width; ++k) {
            double sum = 0;
            for (int64_t i = 0; i < p.chosen; ++i)
                sum += double{found.shares.at(r * p.chosen + i)} * p.values.at((r * p.chosen + i) * p.width + k);
            is_added &= is_near(found.sums.at(r * p.width + k), sum, 1e-5 + unit_of(dtype, sum));
        }
    }
    report.check(is_chosen, what + ": other experts");
    report.check(is_shared, what + ": other shares");
    report.check(is_added, what + ": other sums");
    const int64_t row = random.pick(0, p.rows - 1);
    const Result alone = route(report, what, p, row, 1);
    bool is_same = true;
    for (int64_t i = 0; i < p.chosen; ++i)
        is_same &= bits_of(alone.shares.at(i)) == bits_of(found.shares.at(row * p.chosen + i)) &&
                   alone.experts.at(i) == found.experts.at(row * p.chosen + i);
    const int64_t size = size_of(dtype);
    is_same &= std::memcmp(alone.sums.data(), found.sums.data() + row * p.width * size, p.width * size) == 0;
    report.check(is_same, what + ": other bits in other company");
}

}  // namespace

void check_experts(Report& report, Random& random) {
    constexpr int rounds = 30;
    for (int i = 0; i < rounds; ++i)
        for (DType dtype : {DType::Float32, DType::BFloat16}) check_router(report, dtype, random);
}

}  // namespace checks
