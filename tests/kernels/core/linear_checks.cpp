// Matmuls with weights in panels, beside sums in double precision.

#include <algorithm>

#include "problems.h"

namespace checks {

namespace {

// What it is that an output is, and how far from it rounding may lead.
struct Wanted {
    double value, bound;
};

struct Problem {
    DType dtype;
    bool is_paired, is_gated;
    int64_t rows, depth, stride, outputs;
    Numbers x, weight;  // [rows, stride], [outputs, depth]
    std::vector<float> scales, bias;
    Activation activation;
    float limit, shift;  // of gates

    int64_t width() const { return is_gated ? outputs / 2 : outputs; }
};

Problem draw_problem(DType dtype, DType weights, Random& random) {
    const bool is_gated = random.pick(0, 3) == 0, is_paired = dispatch_table().bf16_gemm && random.coin() &&
                                                             dtype == DType::BFloat16 && weights == DType::BFloat16;
    const int64_t rows = random.one_of<int64_t>({1, 2, 3, 4, 9, 32, 50, 101});
    const int64_t depth = is_paired ? PAIRED_DEPTH * random.one_of<int64_t>({1, 2, 5, 18})
                                    : random.one_of<int64_t>({1, 3, 32, 64, 100, 129, 300});
    const int64_t outputs =
        is_gated ? 2 * PANEL * random.pick(1, 2) : random.one_of<int64_t>({1, 31, 32, 33, 70, 128});
    const int64_t stride = depth + random.one_of<int64_t>({0, 0, 2});
    Problem p{
        dtype, is_paired, is_gated, rows, depth, stride, outputs, Numbers(dtype, rows * stride, random),
        Numbers(weights, outputs * depth, random), {}, {},
        static_cast<Activation>(random.pick(is_gated ? 1 : 0, static_cast<int64_t>(Activation::Gelu))), 0, 0};
    if (is_gated && random.coin()) p.limit = random.one_of<float>({0.5f, 2.0f}), p.shift = random.one_of<float>({0.0f, 1.0f});
    const bool has_scales = random.coin(), has_bias = random.coin();
    for (int64_t i = 0; i < outputs; ++i) {
        if (has_scales) p.scales.push_back(random.number());
        if (has_bias) p.bias.push_back(random.number());
    }
    return p;
}

Numbers pack(const Problem& p) {
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, pair = p.is_paired ? 2 : 1;
    Numbers packed(p.weight.dtype(), panels * p.depth * PANEL);
    for (int64_t i = 0; i < packed.count(); ++i) packed.set(i, 0);
    for (int64_t o = 0; o < p.outputs; ++o)
        for (int64_t k = 0; k < p.depth; ++k)
            packed.set(
                (o / PANEL * p.depth + k / pair * pair) * PANEL + o % PANEL * pair + k % pair,
                p.weight.at(o * p.depth + k));
    return packed;
}

Linear linear_of(const Problem& p, const Numbers& packed, int64_t rows) {
    Linear a{};
    a.dtype = p.dtype;
    a.weights = p.weight.dtype() == DType::Float32
                    ? Weights::Float32
                    : (p.weight.dtype() == DType::BFloat16 ? Weights::BFloat16 : Weights::Float16);
    a.x = p.x.data();
    a.stride = p.stride;
    a.packed = packed.data();
    a.is_paired = p.is_paired;
    a.scales = p.scales.empty() ? nullptr : p.scales.data();
    a.bias = p.bias.empty() ? nullptr : p.bias.data();
    a.rows = rows;
    a.depth = p.depth;
    a.outputs = p.outputs;
    a.activation = p.activation;
    a.gate_panels = p.is_gated ? p.outputs / PANEL / 2 : 0;
    a.limit = p.limit;
    a.shift = p.shift;
    a.places_at_once = places_at_once();
    return a;
}

double activated(Activation activation, double x) {
    const double cubic = 0.7978845608028654 * (x + 0.044715 * x * x * x);
    switch (activation) {
        case Activation::None:
            return x;
        case Activation::SiLU:
            return x / (1 + std::exp(-x));
        case Activation::GeluTanh:
            return 0.5 * x * (1 + std::tanh(cubic));
        case Activation::QuickGelu:
            return x / (1 + std::exp(-1.702 * x));
        case Activation::Gelu:
            return 0.5 * x * std::erfc(-x * 0.7071067811865476);
    }
    return 0;
}

// Floats are added up in groups and products of bfloat16 in pairs, which all is less exact than this allows.
Wanted sum_of(const Problem& p, int64_t row, int64_t output) {
    constexpr double tolerance = 4e-6;
    double sum = 0, size = 0;
    for (int64_t k = 0; k < p.depth; ++k) {
        const double product = static_cast<double>(p.x.at(row * p.stride + k)) * p.weight.at(output * p.depth + k);
        sum += product;
        size += std::abs(product);
    }
    const double scale = p.scales.empty() ? 1 : p.scales[output], bias = p.bias.empty() ? 0 : p.bias[output];
    return {sum * scale + bias, tolerance * (size * std::abs(scale) + std::abs(bias) + 0.1)};
}

Wanted reference(const Problem& p, int64_t row, int64_t output, double residual) {
    Wanted found = sum_of(p, row, output);
    if (p.limit) found.value = std::min<double>(found.value, p.limit);
    found.value = activated(p.activation, found.value);
    if (p.activation != Activation::None) found.bound = 1.2 * found.bound + 1e-6 * std::abs(found.value);
    if (p.is_gated) {
        Wanted other = sum_of(p, row, output + p.outputs / 2);
        if (p.limit) other.value = std::clamp<double>(other.value, -p.limit, p.limit) + p.shift;
        found.bound = found.bound * std::abs(other.value) + other.bound * (std::abs(found.value) + found.bound);
        found.value *= other.value;
    }
    const double whole = found.value + residual;
    found.bound += unit_of(p.dtype, found.value) + unit_of(p.dtype, whole);
    return {whole, found.bound};
}

std::string describe(const Problem& p) {
    return text(
        "matmul of %s with %s%s, %ld rows, %ld deep, %ld outputs%s, activation %d", name_of(p.dtype),
        name_of(p.weight.dtype()), p.is_paired ? " in pairs" : "", (long)p.rows, (long)p.depth, (long)p.outputs,
        p.is_gated ? (p.limit ? " with gates and limits" : " with gates") : "", (int)p.activation);
}

void check_problem(Report& report, const Problem& p, Random& random) {
    const std::string what = describe(p);
    const Numbers packed = pack(p), residual(p.dtype, p.rows * p.width(), random);
    const bool has_residual = random.coin();
    const auto outputs_of = [&](int64_t rows) {
        return compute(report, what, p.dtype, rows * p.width(), [&](Program& program, int64_t, void* to) {
            Linear a = linear_of(p, packed, rows);
            a.out = to;
            a.residual = has_residual ? residual.data() : nullptr;
            add_linear(program, a);
        });
    };
    const Numbers out = outputs_of(p.rows);
    for (int64_t row = 0; row < p.rows; ++row) {
        bool is_right = true;
        for (int64_t o = 0; o < p.width(); ++o) {
            const int64_t at = row * p.width() + o;
            const Wanted wanted = reference(p, row, o, has_residual ? residual.at(at) : 0);
            is_right = is_right && is_near(out.at(at), wanted.value, wanted.bound);
        }
        report.check(is_right, what + ": not the reference");
    }
    for (int64_t rows : {int64_t{1}, int64_t{2}, p.rows / 2, p.rows - 1}) {
        if (rows < 1 || rows >= p.rows) continue;
        report.check(outputs_of(rows).has_same_bits(out, 0, rows * p.width()), what + ": other bits in other company");
    }
}

}  // namespace

void check_linear(Report& report, Random& random) {
    constexpr int problems = 20;
    for (DType dtype : dtypes())
        for (DType weights : dtypes())
            for (int i = 0; i < problems; ++i) check_problem(report, draw_problem(dtype, weights, random), random);
}

}  // namespace checks
